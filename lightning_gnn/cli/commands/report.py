"""``lgnn report``: show the results of a run or a sweep in the terminal and in the browser."""

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lightning_gnn.cli.commands.runs import FOLDERS
from lightning_gnn.report.comparison import compare_runs, print_comparison, runs_of_sweep, write_comparison_page
from lightning_gnn.report.metrics import print_table
from lightning_gnn.report.pages import write_run_page
from lightning_gnn.report.runs import find_runs, is_run, read_run

COMPARISON = "comparison.html"  # page that compares runs outside of a sweep, in the current folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a report and write its page; return 1 if a folder holds no run."""
    parser = argparse.ArgumentParser("lgnn report", description="Show the results of runs and sweeps.")
    text = f"folder of a run or a sweep, by default of the latest run; several are compared in {COMPARISON}"
    parser.add_argument("folders", nargs="*", metavar="folder", help=text)
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    chosen = parser.parse_args(arguments)
    given = [Path(folder).parent if Path(folder).is_file() else Path(folder) for folder in chosen.folders]
    folders = given or [run.folder for run in find_runs(FOLDERS) if run.state != "plan"][:1]
    unknown = [folder for folder in folders if not is_run(folder) and not (folder / "multirun.yaml").is_file()]
    if unknown or not folders:
        problem = f"{unknown[0]} is not the folder of a run or a sweep" if unknown else "There are no runs here"
        print(f"{problem}; `lgnn runs` lists those in {' and '.join(FOLDERS)}.", file=sys.stderr)
        return 1
    path = Path(COMPARISON) if len(folders) > 1 else folders[0] / "report.html"
    try:
        if len(folders) > 1:
            _compare(folders, path)
        elif is_run(folders[0]):
            _report_run(folders[0], path)
        else:
            runs = runs_of_sweep(folders[0])
            rows = compare_runs(runs)
            print_comparison(rows, folders[0] / "comparison.csv")
            if not path.is_file():
                write_comparison_page(path, rows, runs, "Sweep")
        print(path)
    except OSError as error:
        print(f"{path} cannot be written: {error}", file=sys.stderr)
    # Open the page even if this call could not update it.
    if chosen.open and path.is_file():
        webbrowser.open(path.resolve().as_uri())
    return 0


def _compare(folders: Sequence[Path], path: Path) -> None:
    """Compare the runs in all folders, the oldest first."""
    found = [run for run in reversed(find_runs(folders)) if run.state != "plan"]
    parent = Path(os.path.commonpath([run.folder.absolute().parent for run in found])) if found else Path()
    runs = {str(run.folder.absolute().relative_to(parent)): run for run in found}
    rows = compare_runs(runs)
    print_comparison(rows, path)
    write_comparison_page(path, rows, runs)


def _report_run(folder: Path, path: Path) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    run = read_run(folder)
    title = str(run.metrics.get("title") or run.folder)
    if run.metrics.get("error"):
        console.print(f"failed: {run.metrics['error']}", style="red", markup=False, soft_wrap=True)
    elif run.metrics.get("time_split"):
        print_table(run.metrics, title, console)
    else:
        console.print(f"{title}: {run.state}", markup=False, soft_wrap=True)
    console.print(run.command, markup=False, soft_wrap=True)
    if not path.is_file():
        write_run_page(folder)
