"""The sample of a mini-batch: ``definition`` (arguments, checks, choice of backend), then one file per backend.

Reading order: ``relation`` (what backends are given), ``reference`` (the definition in plain Python), ``definition``,
``hetero`` (the same by type), ``numba`` (CPU, made of ``picks``, over ``lanes``, ``weighted_picks``, ``labor_picks``,
and ``relabel``), ``triton`` (GPU, over ``triton_kernels/sample.py`` and
``triton_kernels/sample_relations.py``).
"""
