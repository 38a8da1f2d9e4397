"""A GraphSAGE layer on a mini-batch: our fused aggregation and update against PyG's layer.

Each target has as many random in-neighbors as the fanout; mean aggregation, root weight, and bias. The figure is
milliseconds per layer: forward and backward for features and parameters, as in later layers; for parameters only, as in
the first layer; and forward only. Both sides use the same number of threads. Each contestant has its own process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch_geometric.nn import SAGEConv

from benchmarks.harness import Gate, compare, machine, measure_isolated, parse, publish
from lightning_gnn.ops.aggregate_update.definition import aggregate_update

SIZES = {"sources": (60_000, 600), "targets": (10_000, 100), "fanout": (15, 5), "features": (256, 32),
         "out_features": (256, 32)}  # fmt: skip
WHAT = ("forward and backward", "forward and backward, first layer", "forward")


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Run one layer per round."""
    torch.set_num_threads(spec["threads"])
    device, cuda = spec["device"], spec["device"] == "cuda"
    generator = torch.Generator().manual_seed(0)
    num_targets, forward_only = spec["targets"], spec["what"] == "forward"
    source = torch.randint(spec["sources"], (num_targets * spec["fanout"],), generator=generator)
    target = torch.arange(num_targets).repeat_interleave(spec["fanout"])
    edge_index = torch.stack([source, target]).to(device)
    x = torch.randn(spec["sources"], spec["features"], generator=generator).to(device)
    x.requires_grad_(spec["what"] == WHAT[0])
    grad = torch.randn(num_targets, spec["out_features"], generator=generator).to(device)
    layer = SAGEConv(spec["features"], spec["out_features"]).to(device).requires_grad_(not forward_only)

    def ours() -> torch.Tensor:
        left, right = layer.lin_l, layer.lin_r
        return aggregate_update(x, edge_index, left.weight, right.weight, left.bias, num_targets, "mean")

    def pyg() -> torch.Tensor:
        return layer((x, x[:num_targets]), edge_index)

    run = ours if spec["library"] == "ours" else pyg
    for _ in range(gate.rounds):
        gate.wait()
        x.grad = None
        layer.zero_grad()
        start = time.perf_counter()
        out = run()
        if not forward_only:
            out.backward(grad)
        if cuda:
            torch.cuda.synchronize()
        gate.report((time.perf_counter() - start) * 1e3)
        del out


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("aggregate_update", __doc__, SIZES, argv, runs=9)
    described = machine()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cores = described["cores"]
    counts = (1,) if device == "cuda" else (1, 2) if cores == 2 else (1, 2, cores) if cores > 2 else (1,)
    specs: dict[str, dict[str, Any] | None] = {}
    pairs = []
    for what in WHAT:
        for threads in counts:
            suffix = what if device == "cuda" else f"{what}, {threads} thread{'s' if threads > 1 else ''}"
            for library in ("ours", "PyG"):
                spec = {**args.sizes, "device": device, "threads": threads, "what": what, "library": library}
                specs[f"{library}, {suffix}"] = spec
            pairs.append(suffix)
    rows = measure_isolated(contestant, {n: s for n, s in specs.items() if args.only in n}, args.runs)
    result = {
        "benchmark": "aggregate_update",
        "title": f"GraphSAGE layer, {args.sources:,} sources, {args.targets:,} targets, fanout {args.fanout}, "
        f"{args.features} to {args.out_features} columns",
        "unit": "ms per layer",
        "settings": {**args.sizes, "device": device, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [
            compare(
                rows,
                f"Aggregate and update against PyG's SAGEConv, {args.features} columns, {suffix}",
                [f"ours, {suffix}"],
                [f"PyG, {suffix}"],
                False,
                2.0 if device == "cpu" and suffix.startswith(f"{WHAT[0]}, ") and WHAT[1] not in suffix else None,
            )
            for suffix in pairs
        ],
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
