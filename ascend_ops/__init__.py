"""Ascend C kernels of the full-graph path, their CPU twin and their host binding."""
