"""The figures of a run as one dictionary: metrics.json, and the table that ends a run."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning_gnn.runtime.files import write_whole

if TYPE_CHECKING:  # which the command alone needs
    from rich.console import Console

NAMES = {
    "acc": "accuracy",
    "auc": "AUC",
    "f1": "F1 score",
    "mae": "mean absolute error",
    "mrr": "MRR",
    "loss": "loss",
}
STAGES = {"test": "Test", "val": "Validation"}
BOUNDED = ("acc", "auc", "mrr")
"""Scores from 0 to 1."""
LOWER_IS_BETTER = ("mae", "mse", "rmse", "ece")


class MeasuredEpoch(Protocol):
    """An epoch as :class:`~lightning_gnn.callbacks.Throughput` measures it, which this package does not depend on."""

    @property
    def epoch_time_s(self) -> float: ...  # noqa: D102
    @property
    def sampled_edges_per_s(self) -> float | None: ...  # noqa: D102
    @property
    def mteps(self) -> float: ...  # noqa: D102


def collect_metrics(
    scores: dict[str, float], throughput: MeasuredEpoch | None, num_epochs: int, **more: Any
) -> dict[str, Any]:
    """Put together what metrics.json holds.

    Args:
        scores: Figures such as ``test_acc`` and ``val_acc``.
        throughput: The typical epoch; None if none was measured.
        num_epochs: How many epochs were trained.
        **more: Further entries, as they are.

    Returns:
        ``scores``, ``epochs``, ``epoch_time_s``, ``sampled_edges_per_s``, ``mteps``, ``time_split`` (seconds per
        epoch: ``sampling_s`` and ``features_s`` of the preparing threads, ``model_s``, ``wait_s`` and ``other_s`` of
        the training thread) and ``more``; None for what was not measured.
    """
    measured = throughput is not None
    return {
        **scores,
        "epochs": num_epochs,
        "epoch_time_s": throughput.epoch_time_s if throughput else None,
        "sampled_edges_per_s": throughput.sampled_edges_per_s if throughput else None,
        "mteps": throughput.mteps if throughput else None,
        "time_split": {
            name: getattr(throughput, name) if measured else None
            for name in ("sampling_s", "features_s", "model_s", "wait_s", "other_s")
        },
        **more,
    }


def write_metrics(metrics: dict[str, Any], directory: str | Path) -> Path:
    """Write ``metrics.json``; figures that are no finite number become null, which JSON has no other word for."""
    text = json.dumps(_plain(metrics), indent=2, allow_nan=False) + "\n"
    return write_whole(Path(directory) / "metrics.json", text)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(metrics: dict[str, Any], title: str, console: Console) -> None:
    """Print the figures of :func:`~lightning_gnn.report.collect_metrics`, leaving out what was not measured."""
    from rich import box
    from rich.table import Table

    console.print(f"\n{title}", style="bold", highlight=False)
    table = Table(box=box.ROUNDED, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, value in metrics.items():
        stage, _, kind = name.partition("_")
        if stage in STAGES and isinstance(value, (int, float)):
            shown = f"{value:.2%}" if kind == "acc" else f"{value:.4f}"
            title, style = f"{STAGES[stage]} {NAMES.get(kind, kind)}", "bold" if kind != "loss" else None
            table.add_row(title, shown, f"of the {tested(metrics)}", style=style)
    if metrics.get("epoch_time_s") is not None:
        table.add_section()
        for row in _speed(metrics):
            table.add_row(*row)
        table.add_section()
        for row in split_rows(metrics["time_split"], metrics["epoch_time_s"]):
            table.add_row(*row)
    console.print(table)
    if metrics.get("advice"):
        console.print(metrics["advice"], soft_wrap=True, highlight=False, markup=False)


def tested(metrics: dict[str, Any]) -> str:
    """Return which weights were tested."""
    trained = metrics.get("mode", "train") == "train"
    return "best checkpoint" if metrics.get("checkpoint") and trained else "last weights" if trained else "checkpoint"


def _speed(metrics: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = [("Epoch time", f"{metrics['epoch_time_s']:.3g} s", "training only, median")]
    if metrics["sampled_edges_per_s"] is not None:
        rows.append(("Sampled edges/s", f"{metrics['sampled_edges_per_s'] / 1e6:.3g} M", "per sampling thread"))
    rows.append(("MTEPS", f"{metrics['mteps']:.3g}", "million edges trained on per second"))
    return rows


def split_rows(split: dict[str, float | None], epoch: float) -> list[tuple[str, str, str]]:
    """Return name, seconds and a note for each part of an epoch's time that was measured."""
    threads, main = "preparing, beside training", "of the training thread"
    if split["sampling_s"] is not None and split["sampling_s"] + (split["features_s"] or 0) <= (split["wait_s"] or 0):
        threads = "preparing, training thread waits"
    rows = [
        ("Sampling", split["sampling_s"], threads),
        ("Features", split["features_s"], threads),
        ("Model", split["model_s"], main),
        ("Waiting", split["wait_s"], main),
        ("Other", split["other_s"], main),
    ]
    return [(name, f"{time:.3g} s", f"{time / epoch:4.0%} {note}") for name, time, note in rows if time is not None]


@contextmanager
def reporting(what: str | Path, tell: Callable[[str], None] = warnings.warn) -> Iterator[None]:
    """Turn an error into one line, for steps without which the run is as good.

    Args:
        what: Names what is missing then, such as a file.
        tell: Takes the line; by default it becomes a Python warning.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        tell(f"{what} could not be made: {type(error).__name__}{reason and f': {reason}'}")
