"""Benchmarks against PyG on the same machine, in the same run: ``make bench`` and ``make bench-gpu``."""
