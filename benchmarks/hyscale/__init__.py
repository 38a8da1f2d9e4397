"""Hybrid training on CPU and accelerator (HyScale), its performance model and its resource manager."""
