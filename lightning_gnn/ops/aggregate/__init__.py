"""Sums, means and maxima over the neighbours in a whole graph, and what every operator over such a graph shares.

Reading order: ``matrix`` (a direction of a graph), ``reference`` (what is computed), ``definition`` (what users call),
``derivatives`` (the operators, for autograd and ``torch.compile``), ``backends`` (who executes them), then ``numba``
(with ``numba_rows`` and ``numba_kernels``), ``triton``, and ``chip`` over ``npu`` and ``ascend_twin``.
"""
