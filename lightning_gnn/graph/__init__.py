"""Topology: in-edges by target, of homogeneous and heterogeneous graphs, with times and weights.

Reading order: ``graph/csc.py`` (in-edges), ``graph/hetero.py`` (one such topology per edge type),
``graph/edge_attributes.py`` (times and weights), ``graph/csr.py`` (both directions, for full graphs),
``graph/stores.py`` (PyG's stores), ``graph/prefetch_lists.py`` (topologies that stay on disk).
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
