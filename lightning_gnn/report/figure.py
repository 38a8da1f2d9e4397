"""The picture report.png, with learning curves and where the time of an epoch goes.

Importing this file imports matplotlib, which is slow and may be missing or broken: whoever draws imports it then.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lightning_gnn.report.metrics import BOUNDED, tested
from lightning_gnn.runtime.files import write_whole

BLUE, ORANGE, GREEN, GREY, RED, INK = "#3b6fb6", "#e08a2e", "#4a9b6e", "#c3c7cd", "#b8473d", "#30343b"
STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}

_SCORES = {
    "acc": "Accuracy",
    "auc": "Area under the ROC curve",
    "f1": "F1 score",
    "mae": "Mean absolute error",
    "mrr": "Mean reciprocal rank",
}


def save_figure(
    metrics: dict[str, Any], epochs: list[dict[str, float]], metric: str, title: str, path: str | Path
) -> Path:
    """Draw loss and score over the epochs, and the split of the epoch's time.

    Args:
        metric: ``"acc"``, ``"auc"``, ``"f1"``, ``"mae"`` or ``"mrr"``; others are drawn under their own name.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 5.6), layout="constrained")  # not pyplot, which is not safe in threads
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        timed = metrics.get("epoch_time_s") is not None
        grid = figure.add_gridspec(2 if timed else 1, 2, height_ratios=[3.2, 1] if timed else [1])
        name = _SCORES.get(metric, metric)
        _curves(
            figure.add_subplot(grid[0, 0]), epochs, "Loss", {"train_loss_epoch": "training", "val_loss": "validation"}
        )
        scores = figure.add_subplot(grid[0, 1])
        _curves(scores, epochs, name, {f"train_{metric}": "training", f"val_{metric}": "validation"})
        _mark_test(scores, metrics, metric)
        if timed:
            _time_split(figure.add_subplot(grid[1, :]), metrics)
        return save(figure, path)


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as a whole PNG file."""
    image = BytesIO()
    figure.savefig(image, format="png", dpi=130)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return write_whole(Path(path), image.getvalue())


def _curves(axes: Axes, epochs: list[dict[str, float]], title: str, lines: dict[str, str]) -> None:
    for (key, label), color in zip(lines.items(), (BLUE, ORANGE), strict=True):
        points = [(row["epoch"] + 1, row[key]) for row in epochs if key in row]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=color,
                label=label,
                lw=1.8,
                marker="o" if len(points) < 30 else "",
                ms=4,
            )
    axes.set_title(title)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=GREY, alpha=0.4, lw=0.7)
    if axes.has_data():
        axes.legend(loc="best")


def _mark_test(axes: Axes, metrics: dict[str, Any], metric: str) -> None:
    if metric in BOUNDED:
        axes.set_ylim(0.0, 1.02)  # the whole axis: a part of it makes small differences look large
    if metric == "acc":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    score = metrics.get(f"test_{metric}")
    if score is None:
        return
    shown = f"{score:.1%}" if metric == "acc" else f"{score:.3f}"
    axes.axhline(score, color=RED, lw=1.2, ls="--", label=f"test, {tested(metrics)}: {shown}")
    axes.legend(loc="best")


def _time_split(axes: Axes, metrics: dict[str, Any]) -> None:
    split, epoch = metrics["time_split"], metrics["epoch_time_s"]
    bars = [
        (
            "training thread",
            [
                ("model", split["model_s"], BLUE),
                ("waiting", split["wait_s"], RED),
                ("other", split["other_s"], GREY),
            ],
        )
    ]
    if split["sampling_s"] is not None:
        parts = [("sampling", split["sampling_s"], GREEN), ("features", split["features_s"], ORANGE)]
        bars.append(("preparation", parts))
    longest = max(sum(time for _, time, _ in parts) for _, parts in bars)
    for row, (_, parts) in enumerate(bars):
        left = 0.0
        for name, time, color in parts:
            axes.barh(row, time, left=left, color=color, height=0.62, edgecolor="white", label=f"{name} {time:.2g} s")
            if time > 0.12 * longest:
                dark = color != GREY
                axes.text(
                    left + time / 2,
                    row,
                    f"{name} {time:.2g} s",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if dark else INK,
                )
            left += time
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("seconds per epoch")
    axes.set_title(f"One epoch: {epoch:.3g} s, {metrics['mteps']:.3g} MTEPS")
    handles, labels = axes.get_legend_handles_labels()
    legend = {"ncols": len(labels), "fontsize": 9, "handlelength": 1.0, "columnspacing": 1.4}
    axes.figure.legend(handles, labels, loc="outside lower right", **legend)  # beside the title they may be too wide
