"""Sums, means and maxima over the neighbours in a compressed graph, and what every operator over such a graph shares.

Reading order: ``reference`` (the backend that defines the operators), ``definition`` (what users call), ``derivatives``
over ``graph_operators`` (of any order, for autograd, ``torch.func`` and ``torch.compile``), ``backends`` (who executes
them, by which plan), then ``numba`` (with ``numba_rows`` and ``numba_kernels``), ``triton``, ``npu`` and
``ascend_twin``.
"""
