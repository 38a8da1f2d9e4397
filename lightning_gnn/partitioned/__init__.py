"""Training on a graph in parts, of which each rank has its own: the mini-batches are those of one machine.

Reading order: ``folder.py``, ``shard.py``, ``exchange.py``, ``remote.py``, ``sampler.py``, ``datamodule.py``.
"""

from lightning_gnn.partitioned.datamodule import PartitionedDataModule, PartitionedLinkDataModule
from lightning_gnn.partitioned.partition import Summary, partition_graph

__all__ = ["PartitionedDataModule", "PartitionedLinkDataModule", "Summary", "partition_graph"]
