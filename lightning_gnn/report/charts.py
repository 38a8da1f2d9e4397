"""Training curves as PNG and SVG; importing this module imports matplotlib, which is slow."""

import math
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lightning_gnn.report.metrics import BOUNDED, NAMES, Metrics, number, tested_weights
from lightning_gnn.runtime.files import write_whole

_STYLE = Path(__file__).parent / "templates/charts.mplstyle"
_VARIABLES = {"#30343b": "--ink", "#dfe2e6": "--rule", "#3b6fb6": "--c0", "#c8701a": "--c1", "#3a8a5d": "--c2",
              "#b8473d": "--c3", "#7a5bb0": "--c4", "#8a8f98": "--c5"}  # fmt: skip
_MAX_LEGEND_LINES = 6  # with more lines, the legend would cover the chart
Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """Lines over the epochs, and dashed levels; ``kind`` is the quantity, such as ``"acc"``."""

    kind: str
    lines: Mapping[str, Points]
    levels: Mapping[str, float]


def panel_of(metrics: Metrics, epochs: Sequence[Mapping[str, float]], kind: str) -> Panel:
    """Return the curves of a score or the loss in training and validation, and the level of the test score."""
    keys = {"training": "train_loss_epoch" if kind == "loss" else f"train_{kind}", "validation": f"val_{kind}"}
    lines = {
        name: [(row["epoch"] + 1, row[key]) for row in epochs if {"epoch", key} <= {*row}] for name, key in keys.items()
    }
    score = number(metrics.get(f"test_{kind}"))
    return Panel(kind, lines, {} if score is None or kind == "loss" else {f"test, {tested_weights(metrics)}": score})


def inline_svg(panels: Sequence[Panel], label: str) -> Markup:
    """Return panels as an SVG element in the page's colors; ``label`` is for screen readers."""
    text = draw(panels, image_format="svg").decode()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub("#[0-9a-f]{6}", lambda color: f"var({_VARIABLES.get(color[0], '--ink')})", text)
    return Markup('<svg role="img" aria-label="{}"').format(label) + Markup(text[text.index("<svg") + 4 :])


def draw(panels: Sequence[Panel], title: str = "", image_format: str = "png") -> bytes:
    """Return an image of panels, two per row; points that are not finite are omitted."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    with mpl.rc_context(fname=_STYLE):
        figure = Figure(figsize=(11, 4 * rows), layout="constrained")  # pyplot is not thread-safe
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        for index, panel in enumerate(panels, start=1):
            name = NAMES.get(panel.kind, panel.kind)
            _draw_panel(figure.add_subplot(rows, columns, index, title=name[:1].upper() + name[1:]), panel)
        image = BytesIO()
        figure.savefig(image, format=image_format, dpi=130, facecolor="none" if image_format == "svg" else "white")
    return image.getvalue()


def save_figure(
    metrics: Metrics, epochs: Sequence[Mapping[str, float]], metric: str, title: str, path: str | Path
) -> Path:
    """Plot the loss and a score, such as ``"acc"``, over the epochs to a PNG file; return its path."""
    return write_whole(path, draw([panel_of(metrics, epochs, kind) for kind in ("loss", metric)], title))


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for name, points in panel.lines.items():
        finite = [point for point in points if all(map(math.isfinite, point))]
        if finite:
            axes.plot(*zip(*finite, strict=True), label=name, lw=1.8, marker="o" if len(finite) < 30 else "", ms=4)
    for i, (name, level) in enumerate(panel.levels.items(), start=3):
        axes.axhline(level, color=f"C{i}", label=name, lw=1.2, ls="--")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    if panel.kind in BOUNDED:
        axes.set_ylim(0.0, 1.02)  # the full range: a zoomed axis would exaggerate small differences
    if panel.kind == "acc":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if axes.has_data() and len(panel.lines) <= _MAX_LEGEND_LINES:
        axes.legend(loc="best")
