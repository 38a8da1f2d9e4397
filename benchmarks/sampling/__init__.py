"""Neighbor sampling and mini-batch loading on the CPU."""
