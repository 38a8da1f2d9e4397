"""The dynamic resource manager of HyScale-GNN (section IV): who does how much, and when that changes."""
