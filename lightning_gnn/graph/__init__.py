"""Graph topology in CSC format (``csc.py``), heterogeneous graphs (``hetero.py``), times and weights of edges
(``edge_attributes.py``), and CSR matrices with their transposes for full graphs (``csr.py``).
"""

from typing import TYPE_CHECKING

from lightning_gnn.runtime import kernels  # noqa: F401  sets numba's cache folder

# isort: split
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.runtime.moved_names import find_moved

__all__ = ["CSCGraph", "HeteroCSCGraph"]


if not TYPE_CHECKING:  # otherwise a type checker would accept any name
    __getattr__ = find_moved(__name__)
