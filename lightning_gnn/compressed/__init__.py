"""The graph that full-graph training aggregates over, and its chunks on NPUs (NeutronAscend).

Reading order: ``compressed/graph.py`` (both directions as plain rows), ``compressed/builder.py`` and
``compressed/chunks.py`` (the chunks of an NPU), ``compressed/locality_partition.py`` (the order of their rows,
algorithm 2), ``compressed/hybrid_plan.py`` (who computes which, algorithm 1), ``compressed/self_loops.py``.
"""

from lightning_gnn.compressed.chunks import Chunks
from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.locality_partition import locality_aware_partition

__all__ = ["Chunks", "CompressedGraph", "locality_aware_partition"]
