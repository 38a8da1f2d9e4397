"""The table that ends a run."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

NAMES = {"acc": "accuracy", "auc": "AUC", "loss": "loss"}
STAGES = {"test": "Test", "val": "Validation"}


def print_table(metrics: dict[str, Any], title: str, console: Console) -> None:
    """Print the figures of :func:`~lightning_gnn.report.collect_metrics`, leaving out what was not measured."""
    console.print(f"\n{title}", style="bold", highlight=False)
    table = Table(box=box.ROUNDED, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, value in metrics.items():
        stage, _, kind = name.partition("_")
        if stage in STAGES and kind in NAMES and value is not None:
            shown = f"{value:.2%}" if kind == "acc" else f"{value:.4f}"
            table.add_row(
                f"{STAGES[stage]} {NAMES[kind]}", shown, _note(metrics), style="bold" if kind != "loss" else None
            )
    if metrics.get("epoch_time_s") is not None:
        table.add_section()
        for row in _speed(metrics):
            table.add_row(*row)
        table.add_section()
        for row in _split(metrics["time_split"], metrics["epoch_time_s"]):
            table.add_row(*row)
    console.print(table)


def _note(metrics: dict[str, Any]) -> str:
    return "of the best checkpoint" if metrics.get("mode") == "train" and metrics.get("checkpoint") else ""


def _speed(metrics: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = [("Epoch time", f"{metrics['epoch_time_s']:.3g} s", "training only, median")]
    if metrics["sampled_edges_per_s"] is not None:
        rows.append(("Sampled edges/s", f"{metrics['sampled_edges_per_s'] / 1e6:.3g} M", "per sampling thread"))
    rows.append(("MTEPS", f"{metrics['mteps']:.3g}", "million edges trained on per second"))
    return rows


def _split(split: dict[str, float | None], epoch: float) -> list[tuple[str, str, str]]:
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
