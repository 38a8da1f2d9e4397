"""The sample of a mini-batch: ``definition`` (arguments, checks, choice of backend), then one file per backend.

Reading order: ``reference`` (the definition in plain Python), ``definition``, ``numba`` (CPU, made of ``picks``, over
``lanes``, and ``relabel``), ``triton`` (GPU, over ``triton_kernels/sample.py``).
"""
