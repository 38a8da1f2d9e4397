"""Collective batching, on a GPU or with simulated (sleeping) stages, and its planner."""
