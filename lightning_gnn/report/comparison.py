"""The comparison of runs, and the Hydra callback that ends a sweep with one."""

from __future__ import annotations

import csv
import io
import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_gnn.report.console import warn
from lightning_gnn.report.metrics import reporting
from lightning_gnn.report.runs import Run, find_runs
from lightning_gnn.report.sweep_page import write_sweep_page
from lightning_gnn.runtime.files import write_whole

_SCORES = ("acc", "auc", "f1", "mae", "mrr")
"""Those that pick checkpoints by default, which stand first."""
_SWEEP = "multirun.yaml"
"""What was typed, by which a sweep is known."""
_SPEEDS = ("epoch_time_s", "sampled_edges_per_s", "mteps")


class ComparisonTable(Callback):
    """Compares the runs of a sweep: one row each, with mean and standard deviation over the seeds beside them.

    It reads the ``metrics.json`` that each run has left in its directory, so it works with every launcher, and writes
    ``comparison.csv`` and ``report.html`` beside them. The command fails (exit code 1) if a run has failed; that a file
    of the comparison could not be written or read is a warning.
    """

    def __init__(self) -> None:
        self._returned: dict[int, float] = {}

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Called by Hydra when a run has ended, in this process or in the one that ran it."""
        numbered = not OmegaConf.is_missing(config.hydra.job, "num")  # it is a run of a sweep
        if numbered and job_return.status == JobStatus.COMPLETED and isinstance(job_return.return_value, float):
            self._returned[int(config.hydra.job.num)] = job_return.return_value

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra when all runs have ended."""
        directory = Path(config.hydra.sweep.dir)
        rows: list[dict[str, Any]] = []
        with reporting("the comparison", warn):
            rows = compare(directory, self._returned)
        if not rows:
            return
        with reporting("the comparison's table", warn):
            print_comparison(rows, directory / "comparison.csv")
        if not (directory / _SWEEP).exists():  # of Hydra's sweepers not all leave it
            with reporting(directory / _SWEEP, warn):
                write_whole(directory / _SWEEP, OmegaConf.to_yaml(config))
        with reporting(directory / "comparison.csv", warn):
            _write(rows, directory / "comparison.csv")
        with reporting(directory / "report.html", warn):
            write_sweep_page(directory, rows, told_differently(rows))
        if any(row["status"] != "ok" for row in rows):
            sys.exit(1)


def compare(directory: str | Path, returned: Mapping[int, float] = MappingProxyType({})) -> list[dict[str, Any]]:
    """Read the runs below a sweep's directory.

    Args:
        returned: What runs of this process have returned, by number; NaN is a failure. Others count as failed where
            they have left no ``metrics.json``.
    """
    runs = {run.job: run for run in find_runs([directory]) if run.job is not None}
    return compare_runs(dict(sorted(runs.items())), returned)


def compare_runs(
    runs: Mapping[int, Run] | Mapping[str, Run], returned: Mapping[int, float] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Put runs beside one another.

    Returns:
        One row per run, in order: ``job`` (its name), ``status`` (``ok`` or ``failed``), what was typed for one of the
        runs and is not the same in all, its figures, ``<score>_mean``, ``<score>_std`` and ``runs`` over all runs that
        differ in the seed only, and ``error``.
    """
    keys = dict.fromkeys(item.lstrip("+").partition("=")[0] for run in runs.values() for item in run.overrides)
    told = [run.settings(keys) for run in runs.values()]
    varied = [key for key in keys if len({given[key] for given in told}) > 1]
    rows = []
    for (name, run), given in zip(runs.items(), told, strict=True):
        metrics = run.metrics or {"error": "the run has left no metrics.json"}
        error = metrics.get("error")
        figures = (*_scores(metrics), *_SPEEDS)
        succeeded = isinstance(name, int) and not math.isnan(returned.get(name, math.nan))
        rows.append(
            {
                "job": name,
                "status": "failed" if error and not succeeded else "ok",
                **{key: given[key] for key in varied},
                **{name: metrics[name] for name in figures if isinstance(metrics.get(name), (int, float))},
                "error": error or "",
            }
        )
    _add_statistics(rows, [key for key in varied if key != "seed"])
    return rows


def _scores(figures: Iterable[str]) -> list[str]:
    """Return which of these are scores of validation and test, in the order in which they are shown."""
    known = [f"{stage}_{score}" for score in _SCORES for stage in ("test", "val")]
    found = [name for name in figures if name.startswith(("test_", "val_"))]
    found = [name for name in found if not name.endswith(("_loss", "_mean", "_std"))]
    return sorted(dict.fromkeys(found), key=lambda name: known.index(name) if name in known else len(known))


def _add_statistics(rows: list[dict[str, Any]], keys: list[str]) -> None:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok":
            groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    for group in groups.values():
        for score in _scores(name for row in group for name in row):
            values = [row[score] for row in group if score in row]
            if not values:
                continue
            for row in group:
                row[f"{score}_mean"] = statistics.fmean(values)
                row[f"{score}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
                row["runs"] = len(group)


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "error"))
    return [*columns, "error"]


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _columns(rows), restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def told_differently(rows: list[dict[str, Any]]) -> list[str]:
    """Return the columns of :func:`compare_runs` that hold what the runs were told."""
    others = {*_SPEEDS, "runs", "job", "status", "error"}
    return [key for key in _columns(rows) if key not in others and not key.startswith(("test_", "val_"))]


def print_comparison(rows: list[dict[str, Any]], path: Path) -> None:
    """Print the rows of :func:`compare_runs` as a table; ``path`` stands below it."""
    scores = _scores(_columns(rows))
    score = next((name for name in scores if name.startswith("test_")), next(iter(scores), "test_acc"))
    told = told_differently(rows)
    figures = [name for name in (*scores, *_SPEEDS) if any(name in row for row in rows)]
    table = Table(
        title="Comparison",
        title_justify="left",
        title_style="bold",
        box=box.ROUNDED,
        caption=str(path),
        caption_justify="left",
    )
    for name in ["job", *told]:
        table.add_column(name, style="cyan", no_wrap=name == "job")
    for name in [*figures, f"{score}: mean ± std"]:
        table.add_column(name, justify="right", no_wrap=name in figures)
    repeated = any(row.get("runs", 1) > 1 for row in rows)
    previous: tuple[Any, ...] | None = None
    for row in rows:
        group = tuple(row[key] for key in told if key != "seed")
        if repeated and previous is not None and group != previous:
            table.add_section()
        previous = group
        cells = [str(row["job"]), *(str(row[key]) for key in told)]
        if row["status"] == "ok":
            cells += [_shown(name, row.get(name)) for name in figures] + [_spread(row, score)]
        else:
            cells += ["[red]failed[/red]", *[""] * len(figures)] if figures else ["[red]failed[/red]"]
        table.add_row(*cells)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for row in rows:
        if row["error"]:
            name = f"job {row['job']}" if isinstance(row["job"], int) else row["job"]
            said = name + (" failed" if row["status"] != "ok" else "")
            console.print(f"{said}: {row['error']}", style="red", markup=False, highlight=False)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("_acc"):
        return f"{value:.2%}"
    return f"{value:.4f}" if name not in _SPEEDS else f"{value:.3g}" if value < 1e5 else f"{value / 1e6:.3g} M"


def _spread(row: dict[str, Any], score: str) -> str:
    if row.get("runs", 1) < 2:
        return ""
    mean, std = row[f"{score}_mean"], row[f"{score}_std"]
    shown = f"{mean:.2%} ± {std:.2%}" if score.endswith("_acc") else f"{mean:.4f} ± {std:.4f}"
    return f"{shown} ({row['runs']})"
