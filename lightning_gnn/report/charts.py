"""Charts by matplotlib: SVG in the colors of the page around it, and the picture report.png.

Importing this file imports matplotlib, which is slow: whoever draws imports it then.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lightning_gnn.report.metrics import BOUNDED, NAMES, number, tested
from lightning_gnn.runtime.files import write_whole

_STYLE = Path(__file__).parent / "templates/charts.mplstyle"
_VARIABLES = {"#30343b": "--ink", "#dfe2e6": "--rule", "#ffffff": "--back", "#3b6fb6": "--c0", "#c8701a": "--c1",
              "#3a8a5d": "--c2", "#b8473d": "--c3", "#7a5bb0": "--c4", "#8a8f98": "--c5"}  # fmt: skip
Points = Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """A drawing with what the page writes above it: its title, and the names of its colors."""

    title: str
    legend: Sequence[tuple[str, str]]
    drawing: Markup
    width: int


def line_chart(
    title: str, lines: Mapping[str, Points], levels: Mapping[str, float] | None = None, kind: str = "", width: int = 540
) -> Chart | None:
    """Draw lines over the epochs, and dashed levels; None where there is no finite point.

    Args:
        kind: What is drawn, such as ``"acc"``, which tells the axis.
    """
    found = {name: [point for point in points if all(map(math.isfinite, point))] for name, points in lines.items()}
    found, levels = {name: points for name, points in found.items() if points}, levels or {}
    if not found:
        return None
    legend = [*enumerate(found)] if len(found) <= len("012345") else []
    legend += enumerate(levels, start=3)
    drawing = _svg(title, width, 256, lambda figure: _draw_lines(figure.add_subplot(), found, levels, kind))
    return Chart(title, [(name, f"C{color}") for color, name in legend], drawing, width)


def slice_chart(
    title: str, settings: Mapping[str, Sequence[Any]], scores: Sequence[Any], names: Sequence[str]
) -> Chart:
    """Draw the score of each run over each of its settings: over their texts where they are few, or no numbers."""

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
        # Each setting has a panel; empty values have no place in it.
        for axes, (setting, values) in zip(panels, settings.items(), strict=True):
            places = [*map(_as_number, values)]
            texts = [None if value in (None, "") else str(value)[:24] for value in values]
            known = {text: place for text, place in zip(texts, places, strict=True) if text is not None}
            numbers = sorted(place for place in known.values() if place is not None)
            # Many numbers are an axis of their own, logarithmic if they span two decades.
            if len(known) == len(numbers) > 6:
                axes.set_xscale("log" if 0 < 100 * numbers[0] <= numbers[-1] else "linear")
                axes.xaxis.set_major_formatter("{x:.4g}")
            else:
                # Few values, or texts, are put at equal distances.
                order = sorted(known, key=lambda text: known[text] or 0.0)
                places = [None if text is None else order.index(text) for text in texts]
                axes.set_xticks(range(len(order)), order)
            # Draw a point for each run that has both a value and a score.
            for place, score, name in zip(places, scores, names, strict=True):
                if place is not None and score is not None:
                    axes.plot([place], [score], "o", color="C1", alpha=0.7, gid=_told(name))
            axes.set_title(setting)
            axes.margins(x=0.2, y=0.1)
            axes.grid(axis="y")
        # Accuracies are shown in percent.
        if title.endswith("_acc"):
            panels[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    width = max(1080, 180 * len(settings))
    return Chart(title, [], _svg(title, width, 256, draw), width)


def save_figure(
    metrics: dict[str, Any], epochs: list[dict[str, float]], metric: str, title: str, path: str | Path
) -> Path:
    """Draw loss and score over the epochs into a PNG file.

    Args:
        metric: ``"acc"``, ``"auc"``, ``"f1"``, ``"mae"`` or ``"mrr"``; others are drawn under their own name.
    """
    with mpl.rc_context(fname=_STYLE):
        figure = Figure(figsize=(11, 4), layout="constrained")  # not pyplot, which is not safe in threads
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        for place, kind in enumerate(("loss", metric), start=1):
            axes = figure.add_subplot(1, 2, place, title=name_of(kind))
            _draw_lines(axes, *curves_of(metrics, epochs, kind), kind)
            if axes.has_data():
                axes.legend(loc="best")
        image = BytesIO()
        figure.savefig(image, format="png", dpi=130, facecolor="white")
    return write_whole(path, image.getvalue())


def name_of(kind: str) -> str:
    """Return the title of a score's chart."""
    name = NAMES.get(kind, kind)
    return name[:1].upper() + name[1:]


def curves_of(
    metrics: dict[str, Any], epochs: Sequence[dict[str, float]], kind: str
) -> tuple[dict[str, Points], dict[str, float]]:
    """Return the curves of a score or the loss in training and validation, and the levels to draw beside them."""
    keys = {"training": "train_loss_epoch" if kind == "loss" else f"train_{kind}", "validation": f"val_{kind}"}
    lines = {
        name: [(row["epoch"] + 1, row[key]) for row in epochs if {"epoch", key} <= {*row}] for name, key in keys.items()
    }
    score = number(metrics.get(f"test_{kind}"))
    levels = {} if score is None or kind == "loss" else {f"test, {tested(metrics)}": score}
    return {name: points for name, points in lines.items() if points}, levels


def _draw_lines(axes: Axes, lines: Mapping[str, Points], levels: Mapping[str, float], kind: str) -> None:
    for i, (name, points) in enumerate(lines.items()):
        marker: dict[str, Any] = {"marker": "o" if len(points) < 30 else "", "ms": 4}
        axes.plot(*zip(*points, strict=True), color=f"C{i}", label=name, gid=_told(name), lw=1.8, **marker)
    for i, (name, level) in enumerate(levels.items(), start=3):
        axes.axhline(level, color=f"C{i}", label=name, gid=_told(f"{name}: {level:.4g}"), lw=1.2, ls="--")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    if kind in BOUNDED:
        axes.set_ylim(0.0, 1.02)  # the whole axis: a part of it makes small differences look large
    if kind == "acc":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _told(text: str) -> str:
    """Return the id of what shall say this where one points at it."""
    return f"told:{text}"


def _svg(title: str, width: int, height: int, draw: Callable[[Figure], None]) -> Markup:
    """Return a drawing as an element of a page, whose colors, font and width it takes."""
    with mpl.rc_context(fname=_STYLE):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        draw(figure)
        file = BytesIO()
        figure.savefig(file, format="svg")
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", file.getvalue().decode(), flags=re.DOTALL)
    text = re.sub("#[0-9a-f]{6}", lambda color: f"var({_VARIABLES.get(color[0], '--ink')})", text)
    text = re.sub(r' id="[a-z]+[\w.]*_\d+"', "", text)  # of which another drawing in the page has the same
    text = re.sub(r'<g id="told:([^"]*)">', r"<g><title>\1</title>", text)
    wide = Markup(' style="min-width: {}px"').format(width) if width > 1080 else ""
    opened = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}"{}>').format(width, height, title, wide)
    return opened + Markup(text[text.index(">", text.index("<svg")) + 1 :])


def _as_number(value: Any) -> float | None:
    try:
        return number(float(value))
    except (TypeError, ValueError):
        return None
