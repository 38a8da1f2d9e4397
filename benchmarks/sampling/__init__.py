"""Sampled neighbourhoods and the mini-batches made of them, on the CPU."""
