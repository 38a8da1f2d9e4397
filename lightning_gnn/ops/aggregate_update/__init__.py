"""A layer's aggregation and its matrix product in one pass over a mini-batch's edges (HyScale-GNN, section III).

Reading order: ``reference``, ``definition``, then ``numba`` and ``triton``.
"""
