"""Training beyond one machine: a graph in parts, of which each rank has its own, and the mini-batches of one machine.

Reading order: ``assign.py`` (which node goes where), ``folder.py`` (parts on disk), ``shard.py`` (what a rank answers),
``exchange.py`` (how ranks ask each other), ``remote.py`` (lists and rows wherever they are), ``sampler.py``,
``future.py`` (which rows to keep) and ``datamodule.py``.
"""

from lightning_gnn.partitioned.datamodule import PartitionedDataModule, PartitionedLinkDataModule
from lightning_gnn.partitioned.partition import Summary, partition_graph

__all__ = ["PartitionedDataModule", "PartitionedLinkDataModule", "Summary", "partition_graph"]
