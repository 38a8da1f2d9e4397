"""Sampling on a GPU: persistent against hop by hop, fused, without the queue, and against the CPU with a transfer.

After PGSampler's evaluation: graphs with the sizes and approximate degree skew of its table II, 2 and 3 hops, fanouts
10, 15 and 20, batches of 2048 to 10240 seeds. For each: complete samples by the wall clock (its figure 9), kernels by
events (figure 8), and a check that all contestants give the same sample; for one: the split of its table I, random
reads against a measured ceiling, caches for pinned memory, and launches of every shape (warps, programs per
multiprocessor, fetch size); ``--launches`` measures only these. The JSON file is written after every cell.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent.parent / "results"
GRAPHS = {  # nodes, edges, exponent: hubs similar to the real ones within the generator's limit of sqrt(edges)
    "ogbn-products": (2_449_029, 61_859_140, 3.0),
    "Reddit": (232_965, 114_615_892, 3.0),
    "Yelp": (716_847, 13_954_819, 3.0),
    "ogbn-arxiv": (169_343, 1_166_243, 2.2),
    "Flickr": (89_250, 899_759, 2.4),
    "Coauthor-physics": (34_493, 495_924, 3.8),
}
TARGET_CELL = (3, 10, 2048)
CPU = "CPU and transfer"


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.persistent", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two graphs, fanout 10, two batch sizes")
    parser.add_argument("--interpret", action="store_true", help="a tiny grid under TRITON_INTERPRET=1: no real times")
    parser.add_argument("--runs", type=int, help="mini-batches that count (default: 10)")
    parser.add_argument("--launches", action="store_true", help="only the launches, on the first graph")
    parser.add_argument("--modes", help="only these, separated by commas (default: all)")
    parser.add_argument("--limit", type=float, default=330.0, help="start no further cell after this many seconds")
    parser.add_argument("--out", type=Path, help="the JSON file; by default only the whole grid writes one")
    args = parser.parse_args(argv)
    if args.out is None and not args.quick and not args.interpret:
        args.out = RESULTS / ("gpu_launches.json" if args.launches else "gpu_persistent.json")
    args.runs = args.runs or (2 if args.interpret else 10)
    args.graphs = GRAPHS
    grid: tuple[tuple[int, ...], ...] = ((2, 3), (10, 15, 20), (2048, 4096, 8192, 10240))
    if args.quick:
        args.graphs = {name: GRAPHS[name] for name in ("ogbn-products", "ogbn-arxiv")}
        grid = (2, 3), (10,), (2048, 10240)
    if args.interpret:
        args.graphs, grid = {"tiny": (60, 300, 2.5)}, ((2,), (3,), (4, 8))
    args.target = TARGET_CELL if not args.interpret else (2, 3, 4)
    # Kernels of a fanout are compiled for the first cell that uses them, so the cell with a target comes first.
    cells = itertools.product(*grid)
    if args.launches:
        args.graphs, grid = dict([*args.graphs.items()][:1]), tuple((size,) for size in args.target)
        cells = itertools.product(*grid)
    args.cells = sorted(cells, key=lambda cell: (cell != args.target, cell[1], -cell[0], cell[2]))
    return args


def comparisons(result: dict[str, Any], target: tuple[int, int, int], default: str) -> list[dict[str, Any]]:
    """Compare the medians so far with the targets."""
    found: list[dict[str, Any]] = []
    where = "{} hops, fanout {}, batch {}".format(*target)

    def add(what: str, cell: dict, ours: str, peer: str, us: tuple[float, float], aim: float | None) -> None:
        found.append({"what": f"{what}, {cell['graph']}, {cell['hops']} hops, fanout {cell['fanout']}, batch "
                      f"{cell['batch_size']}", "target": aim, "ours": ours, "peer": peer,
                      "medians": [round(u, 1) for u in us], "ratio": float(f"{us[1] / us[0]:.4g}")})  # fmt: skip

    def median(cell: dict, mode: str, kind: str = "whole_us") -> Any:
        return cell[kind].get(mode, {}).get("median")

    for cell in result["cells"]:
        if (cell["hops"], cell["fanout"], cell["batch_size"]) != target:
            continue
        ours, baseline, cpu = (median(cell, mode) for mode in (default, "hop_by_hop", CPU))
        if ours and baseline:
            add("Whole samples, against hop by hop with the host", cell, default, "hop_by_hop", (ours, baseline), 2.3)
        if ours and cpu:
            add("Whole samples, against the CPU", cell, default, CPU, (ours, cpu), None)
    other = "persistent" if default == "fused" else "fused"
    for kind, what, aim in (("whole_us", "Whole samples", 0.95), ("kernel_us", "Kernels", None)):
        pairs = [(median(cell, default, kind), median(cell, other, kind), cell) for cell in result["cells"]]
        known = sorted((pair for pair in pairs if pair[0] and pair[1]), key=lambda pair: pair[1] / pair[0])
        for word, some in (("worst", known[:1]), ("best", known[-1:])):
            for ours, theirs, cell in some:
                add(f"{what}, the {word} cell of the default", cell, default, other, (ours, theirs), aim)
        result[f"{other}_wins_{kind}"] = [
            {key: cell[key] for key in ("graph", "hops", "fanout", "batch_size", "sampled_edges")}
            | {"times_as_fast": round(ours / theirs, 3)}
            for ours, theirs, cell in known
            if theirs < ours
        ]
    if not found:
        found.append({"what": f"Sampling on a GPU, {where}", "target": None, "missing": "not run"})
    return found


def line(cell: dict[str, Any]) -> str:
    """Describe a cell in one line."""
    parts = []
    for mode, figures in cell["whole_us"].items():
        kernel = cell["kernel_us"].get(mode)
        parts.append(f"{mode} {figures['median']:.0f}" + (f" ({kernel['median']:.0f})" if kernel else ""))
    parts += [f"{mode} {what}" for mode, what in cell["failed"].items()]
    return "  ".join([f"{cell['graph']:<17}{cell['hops']} x {cell['fanout']}, {cell['batch_size']:>5}:", *parts])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = options(argv)
    if not args.interpret and not torch.cuda.is_available():
        print("persistent: no CUDA device found (torch.cuda.is_available() is False), so there is nothing to measure.")
        return {}
    # Imported here, so that a machine without a GPU or Triton gets the message above, not an ImportError.
    import triton

    from benchmarks.device_clock import failure
    from benchmarks.gpu.persistent_cells import Bench, caches, launches, random_reads, rounded
    from benchmarks.harness import machine
    from lightning_gnn.triton_kernels.sample import INTERPRETED, TritonNeighborSampler

    if args.interpret != INTERPRETED:
        raise SystemExit(
            "--interpret and the variable go together: TRITON_INTERPRET=1 python -m benchmarks.gpu.persistent"
        )
    device = torch.device("cpu") if args.interpret else torch.device("cuda", torch.cuda.current_device())
    default = inspect.signature(TritonNeighborSampler).parameters["mode"].default
    result: dict[str, Any] = {
        "benchmark": "gpu_persistent",
        "title": "Sampling on a GPU",
        "unit": "us per sample",
        "times_mean_something": not args.interpret,
        "settings": {"runs": args.runs, "default": default, "quick": args.quick},
        "machine": {**machine(), "triton": triton.__version__},
        "rows": [], "comparisons": [], "graphs": {}, "cells": [], "skipped": [],
    }  # fmt: skip

    def write() -> None:
        result["comparisons"] = comparisons(result, args.target, default)
        if args.out is None:
            return
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rounded(result), indent=1) + "\n")

    print("Whole samples in us, kernels in brackets. Kernels are compiled first: up to a minute for each fanout.")
    start = time.perf_counter()
    for name, (nodes, edges, exponent) in args.graphs.items():
        try:
            bench = Bench(args, name, device, CPU)
            described = {"nodes": nodes, "edges": edges, "exponent": exponent, "seconds": time.perf_counter() - start}
            result["graphs"][name] = described | {"largest_in_degree": int(bench.host.in_degrees.max())}
            result["graphs"][name]["ceiling"] = random_reads(bench)
        except Exception as error:
            result["skipped"].append({"graph": name, "why": failure(error)})
            print(f"{name}: {failure(error)}", flush=True)
            continue
        for cell in args.cells:
            if time.perf_counter() - start > args.limit:
                result["skipped"].append({"graph": name, "cell": cell, "why": "the time was up"})
                continue
            began = time.perf_counter()
            try:
                figures = bench.measure(cell)
                ceiling = result["graphs"][name]["ceiling"]["gb_per_s"]
                for seen in figures["kernel_us"].values():
                    seen["random_gb_per_s"] = figures["random_accesses"] * 32 / seen["median"] / 1e3
                    seen["share_of_ceiling"] = seen["random_gb_per_s"] / ceiling
                if cell == args.target:
                    figures["split"] = bench.split(cell)
                result["cells"].append(figures)
                print(line(figures), f" [{time.perf_counter() - began:.0f} s]", flush=True)
            except Exception as error:
                result["skipped"].append({"graph": name, "cell": cell, "why": failure(error)})
                print(f"{name} {cell}: {failure(error)}", flush=True)
            write()
        if name == next(iter(args.graphs)):
            for what, measure in (("launches", launches), ("caches", caches))[: 1 if args.launches else 2]:
                try:
                    result[what] = measure(bench, args.target)
                except Exception as error:
                    result[what] = {"failed": failure(error)}
                print(f"{what}: {rounded(result[what])}", flush=True)
                write()
        del bench
    write()
    for comparison in result["comparisons"]:
        print(json.dumps(comparison))
    for key in (key for key in result if "_wins_" in key):
        print(f"{key}: {len(result[key])} of {len(result['cells'])} cells: {json.dumps(result[key][:8])}")
    if result["skipped"]:
        print(f"skipped: {json.dumps(result['skipped'])}")
    if any("WRONG" in what for cell in result["cells"] for what in cell["failed"].values()):
        raise SystemExit("persistent: samples differ; see WRONG above")
    if not result["cells"]:
        raise SystemExit("persistent: no cell could be measured")
    return result


if __name__ == "__main__":
    main()
