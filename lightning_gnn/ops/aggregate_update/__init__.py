"""A layer's aggregation and its matrix product in one pass over a mini-batch's edges (HyScale-GNN, section III).

Of a graph with types all relations are aggregated and multiplied in one pass; a layer without types is one relation.

Reading order: ``edge_order`` (edges by target, relation and source), ``reference``, ``definition``, then ``numba`` and
``triton``.
"""
