"""``lgnn runs``: list earlier runs with their settings and results."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_gnn.report.metrics import format_seconds, shown
from lightning_gnn.report.runs import Run, find_runs

FOLDERS = ("outputs", "multirun")
_STYLES = {"failed": "red", "unfinished": "yellow", "plan": "dim"}


def main(arguments: Sequence[str] | None = None) -> int:
    """List runs, the latest first; return 1 if none was found."""
    parser = argparse.ArgumentParser("lgnn runs", description="List earlier runs, the latest first.")
    parser.add_argument("folders", nargs="*", help="folders to search; by default outputs and multirun")
    parser.add_argument("-n", "--number", type=int, default=20, help="largest number of runs, 20 by default; 0: all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    folders = chosen.folders or FOLDERS
    for folder in chosen.folders:
        if not Path(folder).is_dir():
            parser.error(f"{folder} is not a folder")
    if chosen.number < 0:
        parser.error(f"--number={chosen.number} must not be negative")
    runs = find_runs(folders)
    latest = runs[: chosen.number] if chosen.number else runs
    if chosen.json:
        print(json.dumps([_plain(run) for run in latest], indent=2))
    elif runs:
        _print(latest, len(runs))
    else:
        print(f"There are no runs in {' or '.join(folders)}; `lgnn` makes one, `lgnn runs FOLDER` searches elsewhere.")
    return int(not runs)


def _print(runs: Sequence[Run], total: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("started", "folder", "settings", "scores", "time", ""):
        table.add_column(name, overflow="fold", justify="right" if name == "time" else "left")
    for run in runs:
        scores = "\n".join(f"{name} {shown(name, value)}" for name, value in run.scores.items())
        state = "" if run.state == "done" else run.state
        cells = [f"{run.started:%Y-%m-%d %H:%M}", str(run.folder), " ".join(run.overrides), scores]
        table.add_row(*map(escape, [*cells, format_seconds(run.seconds), state]), style=_STYLES.get(run.state))
    console.print(table)
    if len(runs) < total:
        console.print(f"{len(runs)} of {total} runs; list all by lgnn runs -n 0", markup=False)
    console.print("Show one by lgnn report FOLDER", markup=False)


def _plain(run: Run) -> dict[str, object]:
    found = {"folder": str(run.folder), "started": run.started.isoformat(), "state": run.state}
    return {**found, "overrides": run.overrides, "scores": run.scores, "seconds": run.seconds, "command": run.command}
