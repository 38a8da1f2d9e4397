"""``lgnn report``: what came out of a run or a sweep, on the screen and in the browser."""

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lightning_gnn.cli.commands.runs import FOLDERS
from lightning_gnn.report.comparison import (
    compare,
    compare_runs,
    print_comparison,
    write_comparison_page,
    write_sweep_page,
)
from lightning_gnn.report.metrics import print_table
from lightning_gnn.report.pages import write_plan_page, write_run_page
from lightning_gnn.report.runs import find_runs, is_run, read_run

COMPARISON = "comparison.html"  # the page of runs that no sweep has started, in the folder where it is asked for


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a report, and make its page where there is none; returns 1 where there is no run."""
    parser = argparse.ArgumentParser("lgnn report", description="What came out of runs and sweeps.")
    said = f"of a run or a sweep, by default that of the latest run; the runs of several are compared, in {COMPARISON}"
    parser.add_argument("folders", nargs="*", metavar="folder", help=said)
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    chosen = parser.parse_args(arguments)
    # Find the folders, and name the first one that is none of a run.
    folders = [_folder(given) for given in chosen.folders] or [_latest()]
    for given, folder in zip(chosen.folders or ["here"], folders, strict=True):
        if folder is None:
            what = f"{given} is not the folder of a run or a sweep" if chosen.folders else "There are no runs here"
            print(f"{what}; `lgnn runs` lists those in {' and '.join(FOLDERS)}.", file=sys.stderr)
            return 1
    # Several folders are compared; a single one is a run or a sweep.
    found = [folder for folder in folders if folder is not None]
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    path = _page_of(found)
    try:
        if len(found) > 1:
            path = _several(found, path)
        else:
            path = _run(found[0], console, path) if is_run(found[0]) else _sweep(found[0], path)
        console.print(str(path), soft_wrap=True, markup=False)
    except OSError as error:
        print(f"{path} cannot be made: {error}", file=sys.stderr)
    # Open the page even if this call could not renew it.
    if chosen.open and path.is_file():
        webbrowser.open(path.resolve().as_uri())
    return 0


def _latest() -> Path | None:
    runs = [run for run in find_runs(FOLDERS) if run.state != "plan"]
    return runs[0].folder if runs else None


def _folder(given: str) -> Path | None:
    folder = Path(given)
    folder = folder.parent if folder.is_file() else folder
    return folder if is_run(folder) or (folder / "multirun.yaml").is_file() else None


def _page_of(folders: Sequence[Path]) -> Path:
    if len(folders) > 1:
        return Path(COMPARISON)
    plan = is_run(folders[0]) and read_run(folders[0]).state == "plan"
    return folders[0] / ("plan.html" if plan else "report.html")


def _several(folders: Sequence[Path], path: Path) -> Path:
    """Compare the runs in all folders, the first first."""
    found = [run for run in reversed(find_runs(folders)) if run.state != "plan"]
    above = Path(os.path.commonpath([run.folder.absolute().parent for run in found])) if found else Path()
    runs = {str(run.folder.absolute().relative_to(above)): run for run in found}
    rows = compare_runs(runs)
    print_comparison(rows, path)
    return write_comparison_page(path, rows, runs)


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
    return path if path.is_file() else write_sweep_page(folder, rows)
