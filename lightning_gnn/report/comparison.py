"""Compare runs, and the Hydra callback that compares the runs of a sweep at its end."""

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_gnn.report.console import warn
from lightning_gnn.report.metrics import SPEEDS, Metrics, reporting, shown
from lightning_gnn.report.pages import Name, run_name, write_runs_page
from lightning_gnn.report.runs import Run, find_runs, write_csv
from lightning_gnn.runtime.files import write_whole

_SCORES = ("acc", "auc", "f1", "mae", "mrr")  # the default checkpoint metrics, shown first
_SWEEP_FILE = "multirun.yaml"  # holds the command line; its presence identifies the folder of a sweep


class ComparisonTable(Callback):
    """Compares the runs of a sweep by their ``metrics.json``: one row per run, with mean and deviation over seeds.

    Writes ``comparison.csv`` and ``report.html``; the command exits with code 1 if a run failed. Workers that share the
    folder of a sweep, each with its own ``hydra.sweep.subdir``, are compared together; their last one has all runs.
    """

    def __init__(self) -> None:
        self._returned: dict[int | None, float] = {}

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Called by Hydra after a run, in the process that ran it."""
        in_sweep = not OmegaConf.is_missing(config.hydra.job, "num")
        if in_sweep and job_return.status == JobStatus.COMPLETED and isinstance(job_return.return_value, float):
            self._returned[int(config.hydra.job.num)] = job_return.return_value

    def on_multirun_end(self, config: DictConfig, **kwargs: object) -> None:
        """Called by Hydra after all runs."""
        directory = Path(config.hydra.sweep.dir)
        sweep: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
        rows: list[Metrics] = []
        with reporting("the comparison", warn):
            found = runs_of_sweep(directory)
            own = {name for name, run in found.items() if run.subdir == sweep["subdir"]}
            runs = {name: run for name, run in found.items() if run.metrics or name in own}
            returned = {name: self._returned[runs[name].job] for name in own if runs[name].job in self._returned}
            rows = compare_runs(runs, returned)
        if not rows:
            return
        with reporting("the comparison's table", warn):
            print_comparison(rows, directory / "comparison.csv")
        if not (directory / _SWEEP_FILE).exists():  # not all of Hydra's sweepers write it
            with reporting(directory / _SWEEP_FILE, warn):
                write_whole(directory / _SWEEP_FILE, OmegaConf.to_yaml(config))
        with reporting(directory / "comparison.csv", warn):
            write_csv(rows, directory / "comparison.csv", _columns(rows))
        with reporting(directory / "report.html", warn):
            write_comparison_page(directory / "report.html", rows, runs, "Sweep")
        if any(row["status"] != "ok" and row["job"] in own for row in rows):
            sys.exit(1)


def runs_of_sweep(directory: str | Path) -> dict[Any, Run]:
    """Return the runs below a sweep's directory by their job numbers; if workers share these, by folder, by start."""
    found = [run for run in reversed(find_runs([directory])) if run.job is not None]
    numbered = {run.job: run for run in found if run.job is not None}
    if len(numbered) == len(found):
        return dict(sorted(numbered.items()))
    return {run.folder.relative_to(directory).as_posix(): run for run in found}


def compare_runs(runs: Mapping[Name, Run], returned: Mapping[Name, float] = MappingProxyType({})) -> list[Metrics]:
    """Return one row per run, in the order of ``runs``; one without ``metrics.json`` or with NaN returned has failed.

    A row has ``job``, ``status`` (``ok`` or ``failed``), the overrides that differ, the scores and speeds, ``error``,
    and ``<score>_mean``, ``<score>_std`` and ``runs`` over the runs that differ only in their seeds.
    """
    keys = dict.fromkeys(item.lstrip("+").partition("=")[0] for run in runs.values() for item in run.overrides)
    all_settings = [run.settings(keys) for run in runs.values()]
    varied = [key for key in keys if len({settings[key] for settings in all_settings}) > 1]
    rows: list[Metrics] = []
    groups: dict[tuple[str, ...], list[Metrics]] = {}
    for (name, run), settings in zip(runs.items(), all_settings, strict=True):
        metrics: Metrics = run.metrics or {"error": "the run has written no metrics.json"}
        error, figures = metrics.get("error") or "", (*scores_of(metrics), *SPEEDS)
        succeeded = not math.isnan(returned.get(name, math.nan))
        row: Metrics = {"job": name, "status": "failed" if error and not succeeded else "ok"}
        row |= {key: settings[key] for key in varied}
        row |= {name: metrics[name] for name in figures if isinstance(metrics.get(name), (int, float))}
        rows.append(row | {"error": error})
        if row["status"] == "ok":
            groups.setdefault(tuple(settings[key] for key in varied if key != "seed"), []).append(rows[-1])
    for group in groups.values():
        for score in scores_of(name for row in group for name in row):
            values = [row[score] for row in group if score in row]
            std = statistics.stdev(values) if len(values) > 1 else 0.0
            for row in group:
                row |= {f"{score}_mean": statistics.fmean(values), f"{score}_std": std, "runs": len(group)}
    return rows


def scores_of(figures: Iterable[str]) -> list[str]:
    """Select the validation and test scores from names, in the order in which they are shown."""
    first = [f"{stage}_{score}" for score in _SCORES for stage in ("test", "val")]
    scores = [name for name in figures if name.startswith(("test_", "val_"))]
    scores = [name for name in scores if not name.endswith(("_loss", "_mean", "_std"))]
    return sorted(dict.fromkeys(scores), key=lambda name: first.index(name) if name in first else len(first))


def _columns(rows: Sequence[Metrics]) -> list[str]:
    return [*dict.fromkeys(column for row in rows for column in row if column != "error"), "error"]


def _setting_columns(rows: Sequence[Metrics]) -> list[str]:
    """Return the columns of :func:`compare_runs` that hold settings."""
    others = {*SPEEDS, "runs", "job", "status", "error"}
    return [key for key in _columns(rows) if key not in others and not key.startswith(("test_", "val_"))]


def write_comparison_page(
    path: Path, rows: Sequence[Metrics], runs: Mapping[Name, Run], what: str = "Comparison"
) -> Path:
    """Write the page of several runs; ``runs`` maps the names in ``rows`` to them. Return its path."""
    scores = sorted(scores_of(_columns(rows)), key=lambda name: not name.startswith("test_"))
    return write_runs_page(path, rows, runs, _setting_columns(rows), scores, what)


def print_comparison(rows: list[Metrics], path: Path) -> None:
    """Print the rows of :func:`compare_runs` as a table, with ``path`` as its caption."""
    scores, settings = scores_of(_columns(rows)), _setting_columns(rows)
    score = next((name for name in scores if name.startswith("test_")), next(iter(scores), "test_acc"))
    figures = [name for name in (*scores, *SPEEDS) if any(name in row for row in rows)]
    table = Table(title="Comparison", caption=str(path), box=box.ROUNDED, title_justify="left", title_style="bold")
    for name in ["job", *settings]:
        table.add_column(name, style="cyan", no_wrap=name == "job")
    for name in [*figures, f"{score}: mean ± std"]:
        table.add_column(name, justify="right", no_wrap=name in figures)
    groups = [tuple(row[key] for key in settings if key != "seed") for row in rows]
    repeated = any(row.get("runs", 1) > 1 for row in rows)
    for i, row in enumerate(rows):
        if repeated and i and groups[i] != groups[i - 1]:
            table.add_section()
        cells = [shown(name, row.get(name)) for name in figures]
        cells = [*cells, _format_spread(row, score)] if row["status"] == "ok" else ["[red]failed[/red]"]
        table.add_row(str(row["job"]), *(str(row[key]) for key in settings), *cells)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for row in rows:
        if row["error"]:
            heading = run_name(row["job"]) + (" failed" if row["status"] != "ok" else "")
            console.print(f"{heading}: {row['error']}", style="red", markup=False, highlight=False)


def _format_spread(row: Metrics, score: str) -> str:
    mean, std = (shown(score, row.get(f"{score}_{what}")) for what in ("mean", "std"))
    return f"{mean} ± {std} ({row['runs']})" if row.get("runs", 1) > 1 else ""
