"""Graph topology in CSC format (``csc.py``), heterogeneous graphs (``hetero.py``), times and weights of edges
(``edge_attributes.py``), and CSR matrices with their transposes for full graphs (``csr.py``).
"""

from lightning_gnn.runtime import kernels  # noqa: F401  sets numba's cache folder

# isort: split
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph

__all__ = ["CSCGraph", "HeteroCSCGraph"]
