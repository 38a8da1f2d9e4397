"""All GPU benchmarks: the most important figures in the first ten minutes, on one page, then everything else.

First ``benchmarks.gpu.first``: samples (fused, bulks, queue, hop by hop), reads of host memory by the GPU and by the
CPU, mini-batches and training steps through the DataModules against PyG, cuGraph-PyG and GraphBolt, and with several
GPUs also sharded tables. After each part, the page benchmarks/results/gpu.md is rewritten, with the roofline and the
verdicts.

Then the contestants of ``benchmarks.sampling.minibatch`` and ``benchmarks.models.epoch``, with pinned memory, against
PyG's loaders. For bare loaders, PyG's PrefetchLoader overlaps copies to the GPU with preparation, on both sides; in the
epoch benchmark, Lightning copies from pinned memory. Then sampling on the GPU, the aggregation, full-graph epochs,
hybrid training and collective batching. Requires CUDA.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import machine, parse


def first_page(args: argparse.Namespace, described: dict[str, Any]) -> dict[str, Any]:
    """Measure the most important figures, and write the page after each part; without a file, print it."""
    from benchmarks import peers
    from benchmarks.gpu.contestants import First
    from benchmarks.gpu.first import run
    from benchmarks.gpu.model import Batch
    from benchmarks.gpu.page import page

    small = {"nodes": args.nodes, "edges": args.edges, "batches": 16, "runs": args.runs}
    first = First(torch.device("cuda", torch.cuda.current_device()), **(small if args.quick else {}))
    what = (
        f"{first.nodes:,} nodes, {first.edges:,} edges, {first.features} features, fanouts "
        f"{', '.join(map(str, first.fanouts))}, {first.batch_size:,} seeds; {first.runs} rounds."
    )
    out = first._by_cpu(0)
    batch = Batch(tuple(out[4]), tuple(out[5]))
    packages = {"cuGraph-PyG": "cugraph_pyg", "GraphBolt": "dgl.graphbolt", "pyg-lib": "pyg_lib"}
    missing = [name for name, package in packages.items() if not peers.importable(package)]

    def write(parts: dict[str, Any]) -> None:
        text = page(described, what, batch, parts, missing)
        if args.out is None:
            print(text, flush=True)
            return
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".md").write_text(text)
        found = {"benchmark": "gpu_first", "machine": described, "parts": parts}
        args.out.with_name(f"{args.out.stem}_first.json").write_text(json.dumps(found, indent=1) + "\n")

    write({})
    return {"benchmark": "gpu_first", "parts": run(first, write, torch.cuda.device_count())}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        print("bench-gpu: no CUDA device found (torch.cuda.is_available() is False), so there is nothing to measure.")
        return []
    from benchmarks.harness import publish
    from benchmarks.models import epoch
    from benchmarks.sampling import minibatch

    sizes = {**minibatch.SIZES, "hidden": epoch.SIZES["hidden"], "train_nodes": epoch.SIZES["train_nodes"]}
    args = parse("gpu", __doc__, sizes, argv, runs=3)
    described = machine()
    results = [first_page(args, described)]
    batches = minibatch.run(args.sizes, args.runs, args.only, device="cuda")
    epochs = epoch.run(args.sizes, args.runs, args.only, device="cuda", models=tuple(epoch.MODELS))
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
    from benchmarks.collective import epochs as collective
    from benchmarks.full_graph import epochs as full_graph
    from benchmarks.gpu import persistent
    from benchmarks.hyscale import epochs as hyscale
    from benchmarks.ops import aggregate

    # These benchmarks detect the GPU themselves.
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
