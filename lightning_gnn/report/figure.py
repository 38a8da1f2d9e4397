"""The pictures: report.png, with learning curves and where the time of an epoch goes, and timelines.

Importing this file imports matplotlib, which is slow and may be missing or broken: whoever draws imports it then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lightning_gnn.report.metrics import BOUNDED, tested
from lightning_gnn.report.timeline import Mark
from lightning_gnn.runtime.files import write_whole
from lightning_gnn.runtime.timeline import Timeline

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


# Okabe and Ito's palette, which people with any kind of colour vision tell apart.
STAGE_COLORS = {
    "cpu_batching": "#e69f00",
    "dma": "#56b4e9",
    "gpu_batching": "#009e73",
    "uva": "#f0e442",
    "model": "#0072b2",
    "wait": "#d55e00",
}
OTHER = "#cc79a7"
PHASES = {"filling": "#f3f0e6", "blocking": "#fbeee6", "flushing": "#e3eef6"}
PHASE_NAMES = {
    "filling": "filling: the GPU prepares, the CPU beside it",
    "blocking": "blocking: what is next to train is still with the CPU",
    "flushing": "flushing: what both have prepared is trained on",
}
STAGE_NAMES = {
    "cpu_batching": "batching, CPU",
    "dma": "DMA transfer",
    "gpu_batching": "sampling, GPU",
    "uva": "gathering over PCIe (UVA)",
    "model": "model",
    "wait": "waiting for a mini-batch",
}
_SCORES = {
    "acc": "Accuracy",
    "auc": "Area under the ROC curve",
    "f1": "F1 score",
    "mae": "Mean absolute error",
    "mrr": "Mean reciprocal rank",
}
_SHOWN = 40
_WIDTH = 13.0
_LETTER, _BESIDE = 0.075, 0.6
"""Inches of a letter of the legend, and of what is beside a label."""
_DIGIT = 0.065
"""Inches of a digit of a batch number."""


def save_figure(
    metrics: dict[str, Any], epochs: list[dict[str, float]], metric: str, title: str, path: str | Path
) -> Path:
    """Draw loss and score over the epochs, and the split of the epoch's time.

    Args:
        metrics: As :func:`~lightning_gnn.report.collect_metrics` returns them.
        epochs: One dictionary per epoch, as :class:`~lightning_gnn.callbacks.LearningCurves` keeps them.
        metric: ``"acc"``, ``"auc"``, ``"f1"``, ``"mae"`` or ``"mrr"``; others are drawn under their own name.
        title: Heads the figure.
        path: The file to write.
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


def save_timeline(
    timelines: Mapping[str, Timeline],
    title: str,
    path: str | Path,
    marks: Sequence[Mark] = (),
    num_batches: int = _SHOWN,
) -> Path:
    """Draw timelines below one another, on one scale.

    Args:
        timelines: By name, such as ``"predicted"`` and ``"measured"``.
        title: Heads the figure.
        path: The PNG file to write.
        marks: Moments of the last timeline.
        num_batches: So many mini-batches are drawn, from the beginning.

    Raises:
        ValueError: There is no timeline.
    """
    if not timelines:
        raise ValueError("there is no timeline to draw")
    parts = {name: timeline.first(num_batches) for name, timeline in timelines.items()}
    span = max((timeline.end - timelines[name].begin for name, timeline in parts.items()), default=0.0) or 1.0
    scale, unit = (1.0, "s") if span >= 2 else (1e3, "ms")
    heights = [max(1, len(timeline.tracks())) for timeline in parts.values()]
    with mpl.rc_context(STYLE):
        size = (_WIDTH, 1.2 + sum(0.34 * height + 0.75 for height in heights))
        figure = Figure(figsize=size, layout="constrained")  # not pyplot, which is not safe in threads
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        axes = figure.subplots(len(parts), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        last = list(parts)[-1]
        for axis, (name, timeline) in zip(axes, parts.items(), strict=True):
            whole = timelines[name]
            _draw(axis, timeline, whole.begin, scale, span)
            axis.set_title(_heading(name, timeline, whole), pad=14 if marks and name == last else 6)
            if name == last:
                _draw_marks(axis, [mark for mark in marks if mark.weight == "decision"], whole.begin, scale, span)
        axes[-1].set_xlabel(unit)
        axes[-1].set_xlim(0, span * scale)
        handles = _legend(parts.values())
        figure.legend(handles=handles, loc="outside lower left", ncols=_columns(handles), fontsize=9, handlelength=1.2)
        return save(figure, path)


def _draw(axes: Axes, timeline: Timeline, zero: float, scale: float, span: float) -> None:
    tracks = timeline.tracks()
    for phase, start, end in timeline.phases:
        color = PHASES.get(phase, "#eeeeee")
        axes.axvspan((start - zero) * scale, (end - zero) * scale, color=color, lw=0, zorder=0)
    for row, track in enumerate(tracks):
        items = [item for item in timeline.intervals if (item.resource, item.lane) == track]
        for stage in sorted({item.stage for item in items}):
            bars = [item for item in items if item.stage == stage]
            spans = [((item.start - zero) * scale, (item.end - item.start) * scale) for item in bars]
            color = STAGE_COLORS.get(stage, OTHER)
            axes.broken_barh(spans, (row - 0.38, 0.76), facecolors=color, edgecolors="white", linewidth=0.4, zorder=2)
            for item in bars:
                text = str(item.batch)
                if item.batch >= 0 and (item.end - item.start) / span * (_WIDTH - 1.5) > _DIGIT * len(text) + 0.04:
                    _number(axes, (item.start + item.end - 2 * zero) / 2 * scale, row, text, color)
    axes.set_yticks(range(len(tracks)), list(tracks.values()))
    axes.set_ylim(max(len(tracks), 1) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _number(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    red, green, blue = to_rgb(color)
    ink = INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
    axes.text(x, y, text, ha="center", va="center", fontsize=7, color=ink, zorder=3, clip_on=True)


def _draw_marks(axes: Axes, marks: Iterable[Mark], zero: float, scale: float, span: float) -> None:
    for mark in marks:
        if 0 <= mark.time - zero <= span:
            x = (mark.time - zero) * scale
            axes.axvline(x, color=INK, lw=1.0, ls="--", zorder=4)
            axes.text(
                x, 1.0, f" {mark.name}", rotation=0, fontsize=7, va="bottom", transform=axes.get_xaxis_transform()
            )


def _heading(name: str, shown: Timeline, whole: Timeline) -> str:
    number, all_ = (len({i.batch for i in part.intervals if i.stage == "model"}) for part in (shown, whole))
    of = f"first {number} of {all_} mini-batches" if number < all_ else f"{all_} mini-batches"
    seconds = whole.makespan
    took = f"{seconds:.3g} s" if seconds >= 2 else f"{1e3 * seconds:.4g} ms"
    return f"{name[:1].upper()}{name[1:]}: {of}, all in {took}"


def _columns(handles: Sequence[Patch]) -> int:
    """Return as many columns as fit beside one another, each as wide as its longest label."""
    lengths = [len(str(handle.get_label())) for handle in handles]
    for columns in range(len(lengths), 1, -1):
        left, width = iter(lengths), 0.0
        for column in range(columns):  # the first ones have one more where they cannot have equally many
            rows = len(lengths) // columns + (column < len(lengths) % columns)
            width += _LETTER * max(islice(left, rows)) + _BESIDE
        if width <= _WIDTH - _BESIDE:
            return columns
    return 1


def _legend(timelines: Iterable[Timeline]) -> list[Patch]:
    timelines = list(timelines)
    stages = {item.stage for timeline in timelines for item in timeline.intervals}
    phases = {phase for timeline in timelines for phase, _, _ in timeline.phases}
    called = STAGE_NAMES | {name: text for timeline in timelines for name, text in timeline.names.items()}
    known = [stage for stage in STAGE_COLORS if stage in stages] + sorted(stages - STAGE_COLORS.keys())
    handles = [Patch(facecolor=STAGE_COLORS.get(stage, OTHER), label=called.get(stage, stage)) for stage in known]
    shades = [phase for phase in PHASES if phase in phases]
    return handles + [Patch(facecolor=PHASES[phase], edgecolor=GREY, label=PHASE_NAMES[phase]) for phase in shades]
