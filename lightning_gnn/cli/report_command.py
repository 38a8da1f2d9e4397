"""``lgnn report``: what came out of a run or a sweep, on the screen and in the browser."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lightning_gnn.cli.runs_command import FOLDERS
from lightning_gnn.report.comparison import compare, print_comparison, told_differently
from lightning_gnn.report.metrics import print_table
from lightning_gnn.report.plan_page import write_plan_page
from lightning_gnn.report.run_page import write_run_page
from lightning_gnn.report.runs import find_runs, is_run, read_run
from lightning_gnn.report.sweep_page import write_sweep_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a report, and make its page where there is none; returns 1 where there is no run."""
    parser = argparse.ArgumentParser("lgnn report", description="What came out of a run or of a sweep.")
    parser.add_argument("folder", nargs="?", help="of a run or a sweep; by default that of the latest run")
    parser.add_argument("--open", action="store_true", help="open its page in the browser")
    chosen = parser.parse_args(arguments)
    folder = _folder(chosen.folder)
    if folder is None:
        what = f"{chosen.folder} is not the folder of a run or a sweep" if chosen.folder else "There are no runs here"
        print(f"{what}; `lgnn runs` lists those in {' and '.join(FOLDERS)}.", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    path = folder / ("plan.html" if is_run(folder) and read_run(folder).state == "plan" else "report.html")
    try:
        path = _run(folder, console, path) if is_run(folder) else _sweep(folder, path)
        console.print(str(path), soft_wrap=True, markup=False)
    except OSError as error:
        print(f"{path} cannot be made: {error}", file=sys.stderr)
    if chosen.open and path.is_file():
        webbrowser.open(path.resolve().as_uri())
    return 0


def _folder(given: str | None) -> Path | None:
    if given is None:
        runs = [run for run in find_runs(FOLDERS) if run.state != "plan"]
        return runs[0].folder if runs else None
    folder = Path(given)
    folder = folder.parent if folder.is_file() else folder
    return folder if is_run(folder) or (folder / "multirun.yaml").is_file() else None


def _run(folder: Path, console: Console, path: Path) -> Path:
    run = read_run(folder)
    title = str(run.metrics.get("title") or run.folder)
    if run.metrics.get("error"):
        console.print(f"failed: {run.metrics['error']}", style="red", markup=False, soft_wrap=True)
    elif run.metrics.get("time_split"):
        print_table(run.metrics, title, console)
    else:
        console.print(f"{title}: {run.state}", markup=False, soft_wrap=True)
    console.print(run.command, markup=False, soft_wrap=True)
    if path.is_file():
        return path
    return write_plan_page(folder) if run.state == "plan" else write_run_page(folder)


def _sweep(folder: Path, path: Path) -> Path:
    rows = compare(folder)
    print_comparison(rows, folder / "comparison.csv")
    return path if path.is_file() else write_sweep_page(folder, rows, told_differently(rows))
