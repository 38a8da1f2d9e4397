"""Attention, aggregation and update of a mini-batch's edges in one pass: what GAT, GATv2, RGAT and HGT stand on.

Reading order: ``definition`` (what it computes, its derivatives), ``reference`` (the same in torch's own operators),
``numba`` (tiles and threads), ``numba_kernels`` (a tile's targets, or sources), ``head_loops`` (their inner loops).
"""
