"""Lightning strategies, registered by name on ``import lightning_gnn``."""
