"""One operator per hot path; the backend follows the device."""

from lightning_gnn.ops import gather_triton  # noqa: F401  registers the backend
from lightning_gnn.ops.gather import gather_rows
from lightning_gnn.ops.hashing import batch_key
from lightning_gnn.ops.sample import NeighborSample, sample_neighbors

__all__ = ["NeighborSample", "batch_key", "gather_rows", "sample_neighbors"]
