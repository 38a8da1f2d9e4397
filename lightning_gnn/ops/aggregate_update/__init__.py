"""A layer's aggregation and its matrix product in one pass over a mini-batch's edges (HyScale-GNN, section III).

Reading order: ``edge_order`` (edges by target and by source), ``reference``, ``definition``, then ``numba`` and
``triton``.
"""
