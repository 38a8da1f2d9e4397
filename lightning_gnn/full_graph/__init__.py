"""NeutronAscend: full-graph training by tensor-data hybrid parallelism.

Source: "NeutronAscend: Optimizing GNN Training with Ascend AI Processors". The graph is compressed into chunks; groups
of workers share out the feature columns, the members of a group the chunks; ranks exchange rows and slices.

Reading order: ``graph/compress.py`` (the graph in chunks), ``graph/hybrid_plan.py`` (who computes what),
``full_graph/plan.py`` (the same for ranks, and who owns which rows), ``full_graph/shard.py`` and
``full_graph/exchange.py`` (an aggregation over several ranks), ``ops/aggregate/definition.py`` (one operator for all
plans; on an NPU ``ops/aggregate/npu.py`` and ``ascend_ops/binding.py``), ``full_graph/strategy.py`` and
``full_graph/datamodule.py`` (the plug-ins).
"""

from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.full_graph.plan import plan_devices
from lightning_gnn.full_graph.strategy import AscendHybridParallelStrategy

__all__ = [
    "AscendHybridParallelStrategy",
    "FullGraphDataModule",
    "plan_devices",
]
