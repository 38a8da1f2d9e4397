"""A mini-batch layer's aggregation and products in one pass (HyScale-GNN, section III), with types or without."""
