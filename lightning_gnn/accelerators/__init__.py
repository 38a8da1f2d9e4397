"""Lightning accelerators, registered by name on ``import lightning_gnn``."""
