"""A layer of a graph with types in one pass over all relations: aggregation by relation, and products.

Reading order: ``edge_order`` (the edges of all relations by target and relation), ``reference``, ``definition``, then
``numba`` and ``triton``.
"""
