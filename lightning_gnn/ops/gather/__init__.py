"""Rows of a table by index, from host memory or a device cache.

Reading order: ``definition`` (arguments and checks), ``reference`` (torch's own operators), ``numba`` (CPU), ``triton``
(GPU, over ``triton_kernels/gather.py``), ``npu`` (over ``ascend_ops``).
"""
