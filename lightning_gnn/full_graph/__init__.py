"""NeutronAscend: full-graph training by tensor-data hybrid parallelism.

Source: "NeutronAscend: Optimizing GNN Training with Ascend AI Processors". The graph is compressed into chunks; groups
of workers share out the feature columns, the members of a group the chunks; ranks exchange rows and slices.

Reading order: ``graph/compress.py`` (the graph in chunks), ``graph/hybrid_plan.py`` (who computes what),
``ops/aggregate/definition.py`` (one operator for all plans), ``full_graph/row_shard.py`` and
``full_graph/exchange.py`` (several ranks), ``full_graph/strategy.py``, ``full_graph/datamodule.py``; on an NPU
``ascend_ops/binding.py``.
"""

from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.full_graph.devices import plan_devices
from lightning_gnn.full_graph.strategy import AscendHybridParallelStrategy

__all__ = [
    "AscendHybridParallelStrategy",
    "FullGraphDataModule",
    "plan_devices",
]
