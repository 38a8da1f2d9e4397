"""Attention over the edges of all relations of a mini-batch in one pass: what RGAT and HGT layers stand on.

Reading order: ``definition`` (what it computes, its derivatives), ``reference`` (the same in torch's own operators, and
how rows lie), ``numba`` (threads and products), ``numba_kernels`` (the loops over targets, or sources).
"""
