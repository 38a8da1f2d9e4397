"""Training on a partitioned graph, one or more parts per rank, with the mini-batches of a single machine.

Reading order: ``folder.py``, ``shard.py``, ``exchange.py``, ``flight.py``, ``remote.py``, ``sampler.py``,
``datamodule.py``.
"""

from lightning_gnn.partitioned.assign import assign_nodes
from lightning_gnn.partitioned.datamodule import PartitionedDataModule, PartitionedLinkDataModule
from lightning_gnn.partitioned.partition import Summary, partition_graph

__all__ = ["PartitionedDataModule", "PartitionedLinkDataModule", "Summary", "assign_nodes", "partition_graph"]
