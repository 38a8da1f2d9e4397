"""Hybrid training beside an accelerator, its performance model and its resource manager."""
