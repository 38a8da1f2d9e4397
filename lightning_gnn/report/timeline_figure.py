"""Timelines as a picture: what each resource did when, predicted above measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_gnn.report.figure import GREY, INK, STYLE, save
from lightning_gnn.report.timeline import Mark, beginning, first_batches
from lightning_gnn.runtime.timeline import RESOURCES, Resource, Timeline

# Okabe and Ito's palette, which people with any kind of colour vision tell apart.
COLORS = {
    "cpu_batching": "#e69f00",
    "dma": "#56b4e9",
    "gpu_batching": "#009e73",
    "uva": "#f0e442",
    "model": "#0072b2",
    "wait": "#d55e00",
}
OTHER = "#cc79a7"
PHASES = {"filling": "#f3f0e6", "blocking": "#fbeee6", "flushing": "#e3eef6"}
NAMES = {
    "cpu_batching": "batching, CPU",
    "dma": "DMA transfer",
    "gpu_batching": "sampling, GPU",
    "uva": "gathering over PCIe (UVA)",
    "model": "model",
    "wait": "waiting",
}
_SHOWN = 40
_WIDTH = 13.0
_DIGIT = 0.065
"""Inches of a digit of a batch number."""


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
    parts = {name: first_batches(timeline, num_batches) for name, timeline in timelines.items()}
    lanes = {name: _lanes(timeline) for name, timeline in parts.items()}
    span = max((timeline.end - beginning(timelines[name]) for name, timeline in parts.items()), default=0.0) or 1.0
    scale, unit = (1.0, "s") if span >= 2 else (1e3, "ms")
    heights = [max(1, len(found)) for found in lanes.values()]
    with mpl.rc_context(STYLE):
        size = (_WIDTH, 1.2 + sum(0.34 * height + 0.75 for height in heights))
        figure = Figure(figsize=size, layout="constrained")  # not pyplot, which is not safe in threads
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        axes = figure.subplots(len(parts), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        last = list(parts)[-1]
        for axis, (name, timeline) in zip(axes, parts.items(), strict=True):
            whole = timelines[name]
            _draw(axis, timeline, lanes[name], beginning(whole), scale, span)
            axis.set_title(_heading(name, timeline, whole), pad=14 if marks and name == last else 6)
            if name == last:
                _draw_marks(axis, [mark for mark in marks if mark.weight == "decision"], beginning(whole), scale, span)
        axes[-1].set_xlabel(unit)
        axes[-1].set_xlim(0, span * scale)
        figure.legend(handles=_legend(parts.values()), loc="outside lower left", ncols=9, fontsize=9, handlelength=1.2)
        return save(figure, path)


def _lanes(timeline: Timeline) -> list[tuple[Resource, int]]:
    return [(resource, lane) for resource in RESOURCES for lane in timeline.lanes(resource)]


def _draw(
    axes: Axes, timeline: Timeline, lanes: list[tuple[Resource, int]], zero: float, scale: float, span: float
) -> None:
    for phase, start, end in timeline.phases:
        color = PHASES.get(phase, "#eeeeee")
        axes.axvspan((start - zero) * scale, (end - zero) * scale, color=color, lw=0, zorder=0)
    for row, lane in enumerate(lanes):
        items = [item for item in timeline.intervals if (item.resource, item.lane) == lane]
        for stage in sorted({item.stage for item in items}):
            bars = [item for item in items if item.stage == stage]
            spans = [((item.start - zero) * scale, (item.end - item.start) * scale) for item in bars]
            color = COLORS.get(stage, OTHER)
            axes.broken_barh(spans, (row - 0.38, 0.76), facecolors=color, edgecolors="white", linewidth=0.4, zorder=2)
            for item in bars:
                text = str(item.batch)
                if item.batch >= 0 and (item.end - item.start) / span * (_WIDTH - 1.5) > _DIGIT * len(text) + 0.04:
                    _number(axes, (item.start + item.end - 2 * zero) / 2 * scale, row, text, color)
    several = {resource for resource, lane in lanes if sum(other == resource for other, _ in lanes) > 1}
    called = {resource: timeline.names.get(resource, resource) for resource, _ in lanes}
    names = [f"{called[resource]} {lane}" if resource in several else called[resource] for resource, lane in lanes]
    axes.set_yticks(range(len(lanes)), names)
    axes.set_ylim(max(len(lanes), 1) - 0.45, -0.55)
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


def _legend(timelines: Iterable[Timeline]) -> list[Patch]:
    timelines = list(timelines)
    stages = {item.stage for timeline in timelines for item in timeline.intervals}
    phases = {phase for timeline in timelines for phase, _, _ in timeline.phases}
    called = NAMES | {name: text for timeline in timelines for name, text in timeline.names.items()}
    known = [stage for stage in COLORS if stage in stages] + sorted(stages - COLORS.keys())
    handles = [Patch(facecolor=COLORS.get(stage, OTHER), label=called.get(stage, stage)) for stage in known]
    shades = [phase for phase in PHASES if phase in phases]
    return handles + [Patch(facecolor=PHASES[phase], edgecolor=GREY, label=phase) for phase in shades]
