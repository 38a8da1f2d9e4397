"""Attention weights: a softmax over the in-edges of every target of a compressed graph.

Reading order: ``reference`` (the backend that defines the operators), ``definition`` (what users call, and its
derivatives), ``numba`` (CPU). On a GPU and an NPU it stands on what is prepared for aggregation, and is in
``aggregate/triton.py`` and ``aggregate/ascend_twin.py``.
"""
