"""CSR graph for full-graph training (``graph.py``), and its chunks for NPUs (NeutronAscend): ``builder.py``,
``chunks.py``, ``locality_partition.py`` (algorithm 2), ``hybrid_plan.py`` (algorithm 1).
"""

from lightning_gnn.compressed.chunks import Chunks
from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.locality_partition import locality_aware_partition

__all__ = ["Chunks", "CompressedGraph", "locality_aware_partition"]
