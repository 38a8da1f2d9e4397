"""Sums, means and maxima over the neighbours in a compressed graph.

Reading order: ``reference`` (the backend that defines the operators), ``definition`` (what users call),
``graph_operators`` and ``derivatives`` (derivatives of any order), ``backends`` (choice by device and plan), then
``numba``, ``triton``, ``npu`` and ``ascend_twin``.
"""
