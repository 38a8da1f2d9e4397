"""Fused aggregate and update of a mini-batch layer (HyScale-GNN, section III), homogeneous or heterogeneous."""
