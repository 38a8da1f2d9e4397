"""One operator per hot path; the backend follows the device.

Each folder is an operator: ``definition`` holds the public function, ``reference`` defines the result with torch's own
operators (or in plain Python), and the other modules are backends.
"""

from lightning_gnn.runtime import kernels  # noqa: F401  sets Numba's cache folder

# isort: split
from lightning_gnn.ops.aggregate.backends import default_backend
from lightning_gnn.ops.aggregate.definition import aggregate, hybrid_plan
from lightning_gnn.ops.aggregate.edge_softmax import edge_softmax
from lightning_gnn.ops.aggregate_update.definition import aggregate_update
from lightning_gnn.ops.gather import npu as gather_npu  # noqa: F401  registers the backends
from lightning_gnn.ops.gather import numba as gather_numba  # noqa: F401  registers the backends
from lightning_gnn.ops.gather import triton as gather_triton  # noqa: F401  registers the backends
from lightning_gnn.ops.gather.definition import gather_rows
from lightning_gnn.ops.hashing import batch_key
from lightning_gnn.ops.sample import numba as sample_numba  # noqa: F401  registers the backends
from lightning_gnn.ops.sample.definition import NeighborSample, sample_neighbors
from lightning_gnn.ops.sample.hetero import HeteroNeighborSample, sample_hetero_neighbors
from lightning_gnn.ops.sample.relation import Labor

__all__ = [
    "HeteroNeighborSample",
    "Labor",
    "NeighborSample",
    "aggregate",
    "aggregate_update",
    "batch_key",
    "default_backend",
    "edge_softmax",
    "gather_rows",
    "hybrid_plan",
    "sample_hetero_neighbors",
    "sample_neighbors",
]
