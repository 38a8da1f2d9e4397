"""The ground of all systems: topology, features, what a device keeps of them, compressed graphs, data sets.

Reading order: ``graph/csc.py`` (the topology), ``graph/hetero.py`` (with types), ``graph/edge_attributes.py`` (times
and weights), ``graph/features.py`` (one row per node), ``graph/cache.py`` (what a device keeps of both),
``graph/compress.py`` (the graph that full-graph training aggregates over) and ``graph/csr.py`` (one direction of it),
for NPUs ``graph/build.py`` and ``graph/chunks.py`` (its chunks), ``graph/partition.py`` (the order of their rows,
algorithm 2 of NeutronAscend) and ``graph/hybrid_plan.py`` (who computes which, algorithm 1), ``graph/folder.py`` and
``graph/hetero_folder.py`` (graphs on disk), ``graph/topology_files.py`` (their topologies), ``graph/tables.py`` (a
database as a graph), ``graph/convert.py`` (tables in files that are larger than memory, by way of
``graph/table_files.py`` and ``graph/text_files.py``), ``graph/disk_features.py`` (features that stay on disk),
``graph/list_reads.py`` (topologies that do).
"""

from typing import TYPE_CHECKING

from lightning_gnn.runtime import kernels  # noqa: F401  finds a folder for what numba compiles

# isort: split
from lightning_gnn.graph.cache import CachedAdjacency, RowCache, hottest
from lightning_gnn.graph.chunks import Chunks
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.convert import convert_tables
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.disk_features import DiskFeatures
from lightning_gnn.graph.features import FeatureTable
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.graph.hetero_folder import load_hetero_folder, save_hetero_folder
from lightning_gnn.graph.partition import locality_aware_partition
from lightning_gnn.graph.tables import from_tables
from lightning_gnn.runtime.messages import refuse_removed

__all__ = [
    "CSCGraph",
    "CachedAdjacency",
    "Chunks",
    "CompressedGraph",
    "DiskFeatures",
    "FeatureTable",
    "HeteroCSCGraph",
    "RowCache",
    "convert_tables",
    "from_tables",
    "hottest",
    "load_hetero_folder",
    "locality_aware_partition",
    "save_hetero_folder",
]


if not TYPE_CHECKING:  # with it, a type checker would take any name for one that is here
    __getattr__ = refuse_removed(__name__)
