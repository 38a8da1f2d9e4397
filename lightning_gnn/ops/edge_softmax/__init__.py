"""Attention weights: a softmax over the in-edges of every target of a whole graph.

Reading order: ``reference`` (what is computed), ``definition`` (what users call), ``numba`` (CPU). The derivative is in
``aggregate/derivatives.py``; a GPU and an NPU do it in ``aggregate/triton.py`` and ``aggregate/chip.py``.
"""
