"""Mini-batches on an Ascend chip, in simulated cycles: a layer in one kernel beside its parts; the order of the plan.

GraphSAGE with two layers, forward and backward, on mini-batches of a drawn graph, by the kernels on their twin with 24
cores. The figure is thousands of cycles of all kernels of a mini-batch, each round another one; L2 is empty when a
kernel starts. No second is measured, and no chip: what is known of its times is in ``ascend_ops/twin/RULES.md``.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.harness import compare, measure, parse, publish
from benchmarks.machine import machine
from lightning_gnn.ascend_ops.tiling import up, update_tiling
from lightning_gnn.graph.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE
from lightning_gnn.ops import default_backend
from lightning_gnn.ops.aggregate.ascend_twin import launch, record_launches
from lightning_gnn.ops.aggregate_update import ascend, definition
from lightning_gnn.sampling import NeighborDataModule

SIZES = {
    "nodes": (20_000, 300),
    "edges": (400_000, 3_000),
    "features": (128, 16),
    "hidden": (256, 16),
    "classes": (40, 4),
    "batch_size": (256, 16),
    "fanout": (8, 4),
    "cores": (24, 2),
}
OURS = "ours, one kernel, the plan's order"


class Apart(ascend.Chip):
    """Sums in one kernel, then the product in another."""

    def _fused(
        self,
        edges: list[Tensor],
        table: ascend.Half,
        values: Tensor | None,
        laid: ascend.Half | None,
        sizes: tuple[int, int],
        own_rows: int,
        mean: bool,
        transpose_b: bool,
    ) -> tuple[Tensor, Tensor]:
        (k, n), rows = sizes, edges[0].numel() - 1
        sums, _ = super()._fused(edges, table, values, None, (k, 0), 0, mean, transpose_b)
        y = torch.zeros(rows, n)
        if laid is not None and n:
            parts = laid.values.chunk(2, 1) if own_rows else [laid.values]
            y += self._multiplied(sums, parts[0], k, n, transpose_b)
            if own_rows:
                y[:own_rows] += self._multiplied(table.values[:own_rows], parts[1], k, n, transpose_b)
        return sums, y

    def _multiplied(self, a: Tensor, b: Tensor, k: int, n: int, transpose_b: bool) -> Tensor:
        y, b = torch.empty(a.size(0), up(n)), b.contiguous()
        tiling = update_tiling(a.size(0), k, n, a.size(1), b.size(1), transpose_b=transpose_b, float_out=True)
        inputs = [a.contiguous(), b, a.new_zeros(1), ascend._constants(a.device)]
        self.launch("update", min(self.cores, -(-a.size(0) // 128)), inputs, [y], tiling)
        return y[:, :n]


class Contestant:
    """Computes with one more mini-batch at each call.

    Args:
        batches: All of them.
        model: The model.
        chip: What executes its layers.
        aggregate_first: The order, or None for that of the plan.
    """

    def __init__(
        self, batches: list[Any], model: torch.nn.Module, chip: ascend.Chip, aggregate_first: bool | None = None
    ) -> None:
        self.batches, self.model, self.chip, self.aggregate_first, self.turn = batches, model, chip, aggregate_first, 0

    def __call__(self) -> float:
        """Return thousands of cycles."""
        batch = self.batches[self.turn % len(self.batches)]
        self.turn += 1
        plan, first = ascend.plan_update, self.aggregate_first
        with (
            default_backend("ascend_twin"),
            record_launches() as launches,
            patch.object(definition, "chip_of", lambda device: self.chip),
            patch.object(
                ascend,
                "plan_update",
                plan if first is None else lambda *sizes: replace(plan(*sizes), aggregate_first=first),
            ),
        ):
            hops = batch.num_sampled_nodes, batch.num_sampled_edges
            out = self.model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=hops[0],
                             num_sampled_edges_per_hop=hops[1])  # fmt: skip
            torch.nn.functional.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size]).backward()
        return sum(result.makespan for result in launches) / 1000


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("ascend_minibatch", __doc__, SIZES, argv, runs=3)
    warnings.filterwarnings("ignore")
    described = machine()
    torch.manual_seed(0)
    data = planted_power_law(args.nodes, args.edges, args.classes, args.features, split=(0.5, 0.1, 0.4))
    datamodule = NeighborDataModule(data, num_neighbors=[args.fanout] * 2, batch_size=args.batch_size)
    epochs = itertools.chain.from_iterable(itertools.repeat(datamodule.train_dataloader()))
    batches = list(itertools.islice(epochs, args.runs + 1))
    model = GraphSAGE(args.features, args.hidden, 2, args.classes)
    one, apart = ascend.Chip(launch, args.cores), Apart(launch, args.cores)
    contestants = {
        OURS: Contestant(batches, model, one),
        "one kernel, aggregates first": Contestant(batches, model, one, True),
        "one kernel, multiplies first": Contestant(batches, model, one, False),
        "sums, then the product, the plan's order": Contestant(batches, model, apart),
    }
    calls: dict[str, Callable[[], float] | None] = {
        name: contestant for name, contestant in contestants.items() if args.only in name
    }
    rows = measure(calls, args.runs)
    result = {
        "benchmark": "ascend_minibatch",
        "title": f"GraphSAGE on {args.batch_size} seeds, fanouts {[args.fanout] * 2}, {args.cores} simulated cores",
        "unit": "thousands of cycles",
        "settings": {**args.sizes, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [
            compare(rows, f"The plan's order in one kernel against {name}", [OURS], [name], False, by_rounds=True)
            for name in contestants
            if name != OURS
        ],
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
