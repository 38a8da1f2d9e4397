"""Topology: in-edges by target (``graph/csc.py``), one such topology per edge type (``graph/hetero.py``),
times and weights (``graph/edge_attributes.py``), both directions for full graphs (``graph/csr.py``).
"""

from typing import TYPE_CHECKING

from lightning_gnn.runtime import kernels  # noqa: F401  finds a folder for what numba compiles

# isort: split
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.runtime.moved_names import find_moved

__all__ = ["CSCGraph", "HeteroCSCGraph"]


if not TYPE_CHECKING:  # with it, a type checker would take any name for one that is here
    __getattr__ = find_moved(__name__)
