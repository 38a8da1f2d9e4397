"""``lgnn convert`` on a graph that is larger than the memory it may use: seconds, and the most memory it took.

Nodes have ids that are no numbers of rows, a label and eight features; edges are drawn at random, so that joining them
with the ids and sorting them by target has no order to lean on. Tables are Parquet files. The memory is the peak of the
whole process, with Python, torch and what it has mapped; what is below the budget by less than that is missed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import measure, parse, publish
from benchmarks.machine import machine

SIZES = {"edges": (200_000_000, 20_000), "nodes": (10_000_000, 1_000)}
BUDGETS = ("1GB", "4GB")
FEATURES = 8


def draw(folder: Path, edges: int, nodes: int) -> None:
    """Write the tables."""
    import duckdb

    with duckdb.connect() as database:
        database.execute(f"SET temp_directory = '{folder}/spill'")
        features = ", ".join(
            f"(hash({column} + 7 * range) % 1000 / 1000)::FLOAT AS f{column}" for column in range(FEATURES)
        )
        database.execute(
            f"COPY (SELECT 1000003 * range AS id, range % 16 AS label, {features} FROM range({nodes})) "
            f"TO '{folder}/nodes.parquet'"
        )
        ends = ", ".join(
            f"1000003 * (hash(2 * range + {side}) % {nodes})::BIGINT AS {name}"
            for side, name in enumerate(("source", "target"))
        )
        database.execute(f"COPY (SELECT {ends} FROM range({edges})) TO '{folder}/edges.parquet'")


class Contestant:
    """Converts the tables with a budget; keeps the most memory that it took, in GB."""

    def __init__(self, folder: Path, budget: str) -> None:
        self.folder, self.budget, self.peak = folder, budget, 0.0

    def __call__(self) -> float:
        """Return the seconds that it took."""
        out = self.folder / f"graph {self.budget}"
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "lightning_gnn", "convert", f"source={self.folder}/edges.parquet"]
        command += [f"nodes={self.folder}/nodes.parquet", f"out={out}", f"memory={self.budget}"]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"lgnn convert ended with {process.returncode}")
        self.peak = max(self.peak, usage.ru_maxrss * 1024 / 1e9)
        shutil.rmtree(out)
        return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("convert", __doc__, SIZES, argv, runs=1, paths={"folder": "where tables and graphs lie meanwhile"})
    described = machine()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        draw(folder, args.edges, args.nodes)
        made = {f"ours, memory={budget}": Contestant(folder, budget) for budget in BUDGETS}
        contestants: dict[str, Callable[[], float] | None] = {key: c for key, c in made.items() if args.only in key}
        rows = measure(contestants, args.runs, warmup=0)
        tables = sum(path.stat().st_size for path in folder.glob("*.parquet")) / 1e9
    result = {
        "benchmark": "convert",
        "title": f"Converting {args.edges} edges and {args.nodes} nodes of Parquet files to a folder",
        "unit": "s",
        "settings": {**args.sizes, "runs": args.runs, "features": FEATURES},
        "machine": described,
        "rows": rows,
        "comparisons": [],
        "extra": {
            "peak memory, GB": {key: round(made[key].peak, 2) for key in contestants},
            "tables, GB": round(tables, 2),
        },
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
