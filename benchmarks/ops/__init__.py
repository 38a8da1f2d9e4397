"""Single operators: aggregations, layers, and the cycles of kernels."""
