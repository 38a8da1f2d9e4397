"""The dynamic resource manager of HyScale-GNN (section IV): assigns work and threads, and rebalances them."""
