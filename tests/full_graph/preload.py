"""Imports of the ranks, run before they are forked; see launch.py."""

import tests.conftest  # noqa: F401, I001  one torch thread, no output from Lightning
import lightning_gnn
import lightning_gnn.full_graph.strategy
import lightning_gnn.hyscale.strategy
import lightning_gnn.ops.aggregate.numba  # noqa: F401

from numba.core.registry import cpu_target

from lightning_gnn.nn import GCN, GraphSAGE

# These would take half a second in every rank: numba's types, and PyG's layer templates.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
for model in (GCN, GraphSAGE):
    model(1, 1, 1)
