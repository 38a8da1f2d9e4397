"""Metrics of a run as one dictionary, for metrics.json and the table at the end of a run."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_gnn.runtime.files import write_whole

if TYPE_CHECKING:  # rich is a dependency of the command only
    from rich.console import Console

NAMES = {"acc": "accuracy", "auc": "AUC", "f1": "F1 score", "mae": "mean absolute error", "mrr": "MRR", "loss": "loss"}
METRIC_STAGES = {"test": "Test", "val": "Validation"}
BOUNDED = ("acc", "auc", "mrr")  # scores from 0 to 1
LOWER_IS_BETTER = ("mae", "mse", "rmse", "ece")
SPEEDS = ("epoch_time_s", "sampled_edges_per_s", "mteps")
SPLIT = ("sampling_s", "features_s", "model_s", "wait_s", "other_s")
"""Parts of an epoch's time: two of the sampling threads, then three of the training thread."""
Row = tuple[str, str, str]
Metrics = dict[str, Any]  # numbers and texts by name, as in metrics.json


def collect_metrics(scores: dict[str, float], throughput: object, num_epochs: int, **more: object) -> Metrics:
    """Collect the content of metrics.json.

    Args:
        scores: Scores such as ``test_acc`` and ``val_acc``.
        throughput: The typical epoch, an :class:`~lightning_gnn.callbacks.EpochThroughput`; None if not measured.
        num_epochs: Number of epochs trained.
        **more: Further entries, stored unchanged.

    Returns:
        ``scores``, ``epochs``, ``epoch_time_s``, ``sampled_edges_per_s``, ``mteps``, ``time_split`` (seconds per
        epoch: ``sampling_s`` and ``features_s`` of the sampling threads, ``model_s``, ``wait_s`` and ``other_s`` of
        the training thread) and ``more``; None for values that were not measured.
    """
    speeds, split = ({name: getattr(throughput, name, None) for name in names} for names in (SPEEDS, SPLIT))
    return {**scores, "epochs": num_epochs, **speeds, "time_split": split, **more}


def write_metrics(metrics: Metrics, directory: str | Path) -> Path:
    """Write ``metrics.json``; NaN and infinity, which JSON cannot represent, become null. Return its path."""
    text = json.dumps(_plain(metrics), indent=2, allow_nan=False) + "\n"
    return write_whole(Path(directory) / "metrics.json", text)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: object) -> float | None:
    """Return ``value`` if it is a finite number, else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


def shown(name: str, value: object) -> str:
    """Format a score or a speed, accuracy in percent; empty if it is not a number."""
    if not isinstance(value, (int, float)):
        return ""
    if name in SPEEDS:
        return f"{value:.3g}" if value < 1e5 else f"{value / 1e6:.3g} M"
    return f"{value:.2%}" if name.endswith("_acc") else f"{value:.4f}"


def format_seconds(seconds: object) -> str:
    """Format a duration in seconds, minutes or hours; empty if it is not a finite number."""
    if (duration := number(seconds)) is None:
        return ""
    if duration < 100:
        return f"{duration:.3g} s"
    minutes = round(duration / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def tested_weights(metrics: Metrics) -> str:
    """Return the name of the weights that were tested, such as ``"best checkpoint"``."""
    trained = metrics.get("mode", "train") == "train"
    return "best checkpoint" if metrics.get("checkpoint") and trained else "last weights" if trained else "checkpoint"


def score_rows(metrics: Metrics) -> list[Row]:
    """Return name, value and a note for each score."""
    note = f"of the {tested_weights(metrics)}"
    parts = [(name.partition("_"), shown(name, value)) for name, value in metrics.items()]
    return [
        (f"{METRIC_STAGES[stage]} {NAMES.get(kind, kind)}", value, note)
        for (stage, _, kind), value in parts
        if stage in METRIC_STAGES and value
    ]


def speed_rows(metrics: Metrics) -> list[Row]:
    """Return name, value and a note for each measured speed."""
    if not (epoch := number(metrics.get("epoch_time_s"))):
        return []
    rows = [("Epoch time", format_seconds(epoch), "training only, median")]
    if (edges := number(metrics.get("sampled_edges_per_s"))) is not None:
        rows.append(("Sampled edges/s", f"{edges / 1e6:.3g} M", "per sampling thread"))
    if mteps := shown("mteps", metrics.get("mteps")):
        rows.append(("MTEPS", mteps, "million edges trained on per second"))
    return rows


def split_rows(metrics: Metrics) -> dict[Row, float]:
    """Map name, value and note of each measured part of an epoch's time to its fraction of the epoch."""
    epoch, split = number(metrics.get("epoch_time_s")), metrics.get("time_split")
    measured = {name: number(split.get(name)) for name in SPLIT} if epoch and isinstance(split, dict) else {}
    preparing = (measured.get("sampling_s") or 0.0) + (measured.get("features_s") or 0.0)
    overlap = "in parallel to training" if preparing > (measured.get("wait_s") or 0.0) else "training thread waits"
    rows = {}
    for label, name in zip(("Sampling", "Features", "Model", "Waiting", "Other"), SPLIT, strict=True):
        if epoch and (seconds := measured.get(name)) is not None:
            note = f"preparing, {overlap}" if name in SPLIT[:2] else "of the training thread"
            rows[label, f"{seconds:.3g} s", f"{seconds / epoch:4.0%} {note}"] = seconds / epoch
    return rows


def print_table(metrics: Metrics, title: str, console: Console) -> None:
    """Print the measured values of :func:`~lightning_gnn.report.collect_metrics` as a table."""
    from rich import box
    from rich.table import Table

    console.print(f"\n{title}", style="bold", highlight=False)
    table = Table(box=box.ROUNDED, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for row in score_rows(metrics):
        table.add_row(*row, style=None if row[0].endswith(" loss") else "bold")
    for rows in (speed_rows(metrics), split_rows(metrics)):
        table.add_section()
        for row in rows:
            table.add_row(*row)
    console.print(table)
    if metrics.get("advice"):
        console.print(metrics["advice"], soft_wrap=True, highlight=False, markup=False)


@contextmanager
def reporting(what: str | Path, tell: Callable[[str], None] = warnings.warn) -> Iterator[None]:
    """Pass an error in making ``what`` to ``tell`` as one line instead of raising it, for optional steps of a run."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        tell(f"{what} could not be made: {type(error).__name__}{reason and f': {reason}'}")
