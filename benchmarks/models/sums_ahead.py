"""Epochs with the first layer's sums computed by the thread that prepares mini-batches (``sums_ahead=True``).

GraphSAGE and GCN of ``benchmarks.models.epoch``, in float32 and bf16-mixed, with one worker and one torch thread: one
core prepares, and one trains. Both contestants of a pair have their own process and take turns. The figure is seconds
per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Isolated, Rows, compare, machine, measure, parse, publish
from benchmarks.models.epoch import PRECISIONS, SIZES, contestant

AHEAD = ", sums ahead"
ONE_EACH = {"num_workers": 1, "torch_threads": 1}


def run(sizes: dict[str, int], runs: int, only: str) -> Rows:
    """Measure both contestants of each pair with ``only`` in its name, in turns."""
    rows: Rows = []
    for name, spec in pairs(only).items():
        processes = {}
        try:
            for suffix, options in (("", {}), (AHEAD, {"sums_ahead": True})):
                process = processes[name + suffix] = Isolated(contestant, {**sizes, **spec, **options}, runs + 1)
                process({**ONE_EACH, "rounds": runs + 2})  # a process that ends would disturb the other's turn
            rows += measure(dict(processes), runs)
        finally:
            for process in processes.values():
                process.close()
    return rows


def pairs(only: str = "") -> dict[str, dict[str, Any]]:
    """Return the specifications without sums ahead, by name."""
    found = {
        f"ours, {model}{suffix}": {"library": "ours", "model": model, "device": "cpu", **options}
        for model in ("SAGE", "GCN")
        for suffix, options in PRECISIONS.items()
    }
    return {name: spec for name, spec in found.items() if only in name}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("sums_ahead", __doc__, SIZES, argv)
    described = machine()
    rows = run(args.sizes, args.runs, args.only)
    compared = [
        compare(rows, f"Training epoch, {name[6:]}, sums ahead against without", [name + AHEAD], [name], False)
        for name in pairs(args.only)
    ]
    result = {
        "benchmark": "sums_ahead",
        "title": f"Training epoch with one worker and one torch thread, {args.nodes:,} nodes, {args.edges:,} edges",
        "unit": "s per epoch",
        "settings": {**args.sizes, **ONE_EACH, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": compared,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
