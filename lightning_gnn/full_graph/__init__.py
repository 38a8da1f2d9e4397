"""NeutronAscend: full-graph training by tensor-data hybrid parallelism.

Source: "NeutronAscend: Optimizing GNN Training with Ascend AI Processors". Feature columns are sharded across groups of
ranks, and the rows of the graph across the members of a group; ranks exchange rows and slices. On an NPU, groups of
cores do the same with chunks of the rows.

Reading order: ``compressed/graph.py`` (the graph), ``full_graph/plan.py`` (grouping of the ranks, ownership of rows),
``full_graph/cut.py`` (a rank's range), ``full_graph/shard.py`` and ``full_graph/exchange.py`` (an aggregation over
several ranks), ``ops/aggregate/definition.py`` (one operator for all devices; on an NPU ``compressed/builder.py``,
``compressed/hybrid_plan.py``, ``ops/aggregate/chip.py`` and ``ascend_ops/binding.py``), ``full_graph/strategy.py`` and
``full_graph/datamodule.py`` (the Lightning plugins).
"""

from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.full_graph.plan import plan_devices
from lightning_gnn.full_graph.strategy import AscendHybridParallelStrategy

__all__ = ["AscendHybridParallelStrategy", "FullGraphDataModule", "plan_devices"]
