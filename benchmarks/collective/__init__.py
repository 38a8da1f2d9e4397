"""Collective batching, on a GPU or with stages that sleep, and its planner."""
