"""Triton kernels, one file per family; imported lazily by ``lightning_gnn.ops``, as Triton exists on Linux only."""
