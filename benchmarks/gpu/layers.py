"""Layers of a sampled mini-batch: forward and backward of models with one layer per hop, ours against PyG's.

PyG's models trim to the rows that each layer needs, as ours do. Both have the same sizes and no dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch_geometric.nn import models as pyg

from lightning_gnn import nn

if TYPE_CHECKING:
    from benchmarks.gpu.one_graph import OneGraph

HIDDEN, CLASSES, HEADS = 256, 47, 8
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "GraphSAGE": (nn.GraphSAGE, pyg.GraphSAGE, {}),
    "GCN": (nn.GCN, pyg.GCN, {}),
    "GIN": (nn.GIN, pyg.GIN, {"norm": None}),
    "GAT": (nn.GAT, pyg.GAT, {"heads": HEADS}),
    "GATv2": (nn.GAT, pyg.GAT, {"heads": HEADS, "v2": True}),
}
"""Our class, PyG's, and their options."""
PRECISIONS = ("float32", "TF32", "bf16-mixed")


def contestants(graph: OneGraph) -> dict[str, Callable[[int], float]]:
    """Return the ms of a forward and backward pass on one mini-batch, for each model, precision and library."""
    node, edge_index, *_, num_nodes, num_edges = graph.by_cpu(0)[:6]
    x = torch.randn(node.numel(), graph.features, device=graph.device)
    y = torch.randint(CLASSES, (graph.batch_size,), device=graph.device)
    sizes = graph.features, HIDDEN, len(graph.fanouts), CLASSES
    hops = {"num_sampled_nodes_per_hop": [*num_nodes], "num_sampled_edges_per_hop": [*num_edges]}

    def measure(model: Any, precision: str, turn: int) -> float:
        torch.set_float32_matmul_precision("high" if precision == "TF32" else "highest")
        is_narrow = precision == "bf16-mixed"
        rows = x.bfloat16() if is_narrow else x

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast(graph.device.type, torch.bfloat16, enabled=is_narrow):
                out = model(rows, edge_index, **hops)
            F.cross_entropy(out[: y.numel()].float(), y).backward()

        try:
            return graph.clock.wall(step) / 1e3
        finally:
            torch.set_float32_matmul_precision("highest")

    made = {}
    for name, (ours, theirs, options) in MODELS.items():
        for precision in PRECISIONS:
            for library, kind in (("ours", ours), ("PyG", theirs)):
                model = kind(*sizes, **options).to(graph.device)
                made[f"{name}, {precision}, {library}"] = partial(measure, model, precision)
    return made
