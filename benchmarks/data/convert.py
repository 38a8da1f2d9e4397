"""``lgnn convert`` on a graph larger than its memory budget: seconds, and peak memory.

Nodes have ids that differ from row numbers, a label and eight features. Edges are random, so that joining them with the
ids and sorting them by target cannot exploit an existing order. Tables are Parquet files. The memory is the peak of the
whole process, including Python, torch and mapped files.

The core of the conversion alone (replacing ids by row numbers and sorting edges by target) is measured for comparison:
in DuckDB, on which ``lgnn convert`` is based, and in Polars' streaming engine if it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, measure, parse, publish

SIZES = {"edges": (200_000_000, 20_000), "nodes": (10_000_000, 1_000)}
BUDGETS = ("1GB", "3GB")
FEATURES = 8
ENGINES = {
    "DuckDB": """
import duckdb, sys
folder, out = sys.argv[1:]
with duckdb.connect() as database:
    database.execute(f"SET memory_limit = '3GB'; SET temp_directory = '{out}.spill'")
    database.execute("SET preserve_insertion_order = false")
    nodes = f"read_parquet('{folder}/nodes.parquet', file_row_number = true)"
    database.execute(f"CREATE TABLE ids AS SELECT id, file_row_number AS n FROM {nodes}")
    ends = "JOIN ids a ON a.id = e.source JOIN ids b ON b.id = e.target"
    edges = f"SELECT a.n AS s, b.n AS t FROM '{folder}/edges.parquet' e {ends} ORDER BY t, s"
    database.execute(f"COPY ({edges}) TO '{out}'")
""",
    "Polars": """
import polars, sys
folder, out = sys.argv[1:]
ids = polars.scan_parquet(f"{folder}/nodes.parquet").select("id").with_row_index("n")
edges = polars.scan_parquet(f"{folder}/edges.parquet")
for end, number in (("source", "s"), ("target", "t")):
    edges = edges.join(ids.rename({"id": end, "n": number}), on=end)
edges.select("s", "t").sort("t", "s").sink_parquet(out, engine="streaming")
""",
}
"""Programs whose arguments are the folder of tables and the file to write."""


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
    """Runs a command on the tables and records its peak memory, in GB."""

    def __init__(self, command: Sequence[str], out: Path) -> None:
        self.command, self.out, self.peak = [sys.executable, *command], out, 0.0

    def __call__(self) -> float:
        """Run the command and return its seconds."""
        start = time.perf_counter()
        process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(self.command[1:3])} ended with {process.returncode}")
        self.peak = max(self.peak, usage.ru_maxrss * 1024 / 1e9)
        shutil.rmtree(self.out) if self.out.is_dir() else self.out.unlink()
        return time.perf_counter() - start


def converted(folder: Path, budget: str) -> Contestant:
    """Return the ``lgnn convert`` contestant for a memory budget."""
    out = folder / f"graph {budget}"
    command = ["-m", "lightning_gnn", "convert", f"source={folder}/edges.parquet", f"nodes={folder}/nodes.parquet"]
    return Contestant([*command, f"out={out}", f"memory={budget}"], out)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("convert", __doc__, SIZES, argv, runs=1, paths={"folder": "where tables and graphs lie meanwhile"})
    described = machine()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        draw(folder, args.edges, args.nodes)
        made: dict[str, Contestant | None] = {f"ours, memory={budget}": converted(folder, budget) for budget in BUDGETS}
        for engine, program in ENGINES.items():
            found = importlib.util.find_spec(engine.lower())
            command = ["-c", program, str(folder), str(folder / engine)]
            made[f"{engine}, ids and order alone"] = Contestant(command, folder / engine) if found else None
        made = {key: contestant for key, contestant in made.items() if args.only in key}
        contestants: dict[str, Callable[[], float] | None] = {**made}
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
            "peak memory, GB": {key: round(each.peak, 2) for key, each in made.items() if each},
            "tables, GB": round(tables, 2),
        },
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
