"""Memory of 1, 2 and 4 ranks that train on one machine, with one copy of graph and features and with one per rank.

Each rank is a process that Lightning starts by running the script again, and generates the graph itself. The figure is
the memory of all ranks together during training, with each page divided by the number of processes that map it (the
kernel's proportional set size), in units of 10^6 bytes. It includes Python and its libraries; ``extra`` reports the
memory of ranks before they load a graph.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, measure, parse, publish

SIZES = {"nodes": (1_000_000, 20_000), "edges": (10_000_000, 400_000), "features": (100, 100), "most_ranks": (4, 2)}
KINDS = {"NeighborDataModule, ddp": "ddp", "FullGraphDataModule, ascend_hybrid": "ascend_hybrid"}


def train(spec: dict[str, Any]) -> dict[str, float]:
    """Train with the number of ranks in ``spec``; return their measurements."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "benchmarks.data.shared_memory_rank", json.dumps(spec), str(out)]
        done = subprocess.run(
            command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{spec} failed:\n{done.stderr}")
        found: dict[str, float] = json.loads(out.read_text())
        return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("shared_memory", __doc__, SIZES, argv, runs=1)
    described = machine()
    found: dict[str, list[dict[str, float]]] = {}

    def contestant(name: str, spec: dict[str, Any]) -> float:
        found.setdefault(name, []).append(train(spec))
        return found[name][-1]["megabytes"]

    contestants = {}
    for kind, strategy in KINDS.items():
        for ranks in (ranks for ranks in (1, 2, 4) if ranks <= args.most_ranks):
            for shared in (True, False) if ranks > 1 else (True,):
                how = "" if ranks == 1 else ", one copy" if shared else ", a copy each"
                name = f"ours, {kind}, {ranks} rank{'s'[: ranks > 1]}{how}"
                spec = {**args.sizes, "strategy": strategy, "ranks": ranks, "shared": shared}
                if args.only in name:
                    contestants[name] = lambda name=name, spec=spec: contestant(name, spec)
    rows = measure(contestants, args.runs, warmup=0)
    result = {
        "benchmark": "shared_memory",
        "title": f"Memory of all ranks, {args.nodes:,} nodes, {args.edges:,} edges, {args.features} features",
        "unit": "MB",
        "settings": {**args.sizes, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [],
        "extra": {
            name: {
                "MB of the user's graph": round(figures[0]["arrays"]),
                "MB of all ranks without a graph": round(figures[0]["empty"]),
                "seconds of setup": round(figures[0]["setup_s"], 3),
                "seconds of a step": round(figures[0]["step_s"], 4),
            }
            for name, figures in found.items()
        },
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
