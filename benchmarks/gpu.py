"""What exists for CUDA today: mini-batches copied to the GPU while the next ones are made, and a training epoch there.

The contestants of ``benchmarks.minibatch`` and ``benchmarks.epoch``, with pinned memory, against PyG's loaders. Around
bare loaders PyG's PrefetchLoader overlaps the copies to the GPU with the preparation, on both sides; in the epoch
Lightning copies, from pinned memory. Then sampling on the GPU, the aggregation, full-graph epochs, hybrid training and
collective batching. Without CUDA there is nothing to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import parse


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        print("bench-gpu: no CUDA device found (torch.cuda.is_available() is False), so there is nothing to measure.")
        return []
    from benchmarks import epoch, minibatch
    from benchmarks.harness import publish
    from benchmarks.machine import machine

    sizes = {**minibatch.SIZES, "hidden": epoch.SIZES["hidden"], "train_nodes": epoch.SIZES["train_nodes"]}
    args = parse("gpu", __doc__, sizes, argv, runs=3)
    described = machine()
    batches = minibatch.run(args.sizes, args.runs, args.only, device="cuda")
    epochs = epoch.run(args.sizes, args.runs, args.only, device="cuda", models=tuple(epoch.MODELS))
    results = []
    for part, rows, unit, compared in (
        ("minibatch", batches, "ms per mini-batch", minibatch.comparisons(batches, "Mini-batches on a GPU", None)),
        ("epoch", epochs, "s per epoch", epoch.comparisons(epochs, "Training epoch on a GPU", False)),
    ):
        result = {
            "benchmark": f"gpu_{part}",
            "title": f"GPU: {part}, {args.nodes:,} nodes, {args.edges:,} edges, {args.features} features",
            "unit": unit,
            "settings": {**args.sizes, "runs": args.runs},
            "machine": described,
            "rows": rows,
            "comparisons": compared,
        }
        out = args.out and args.out.with_name(f"{args.out.stem}_{part}.json")
        results.append(publish(result, out))
    from benchmarks import aggregate, collective, full_graph, hyscale, persistent

    # They find the GPU by themselves.
    others = {
        "persistent": persistent,
        "aggregate": aggregate,
        "full_graph": full_graph,
        "hyscale": hyscale,
        "collective": collective,
    }
    for name, benchmark in others.items():
        out = args.out and args.out.with_name(f"{args.out.stem}_{name}.json")
        results.append(benchmark.main([*["--quick"] * args.quick, *(["--out", str(out)] if out else [])]))
    return results


if __name__ == "__main__":
    main()
