"""Charts as SVG, drawn in the colours of the page around them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_gnn.report.html import Html, tag

Points = Sequence[tuple[float, float]]
_COLORS = 6
_NARROW = 540.0
"""A wider drawing is scrolled where there is no room for it: made smaller, nobody could read it."""
_WIDE = 1080.0
"""What fits a page."""
_APART = 0.05
"""Share of an axis between two labels that can both be read."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 12.0, 44.0, 34.0


def line_chart(
    title: str,
    series: Mapping[str, Points],
    rules: Mapping[str, float] | None = None,
    bounds: tuple[float, float] | None = None,
    percent: bool = False,
    width: float = 540.0,
) -> Html | None:
    """Draw lines over the epochs; None where there is no finite point.

    Args:
        series: Points of each line, by its name. Points that are not finite are left out.
        bounds: Least and largest value of the axis; by default those of the points.
        width: Of the drawing, whose text is 11 high.
    """
    lines = {name: [point for point in points if all(map(math.isfinite, point))] for name, points in series.items()}
    lines = {name: points for name, points in lines.items() if points}
    level = {name: value for name, value in (rules or {}).items() if math.isfinite(value)}
    if not lines:
        return None
    values = [y for points in lines.values() for _, y in points] + [*level.values()]
    low, high = bounds or (min(values), max(values))
    ticks = _ticks(low, high)
    low, high = bounds or (min(low, ticks[0]), max(high, ticks[-1]))
    epochs = [x for points in lines.values() for x, _ in points]
    first, last = min(epochs), max(max(epochs), min(epochs) + 1)
    names = [(name, i) for i, name in enumerate(lines)] if len(lines) <= _COLORS else []
    legend, lower = _legend([*names, *((name, i) for i, name in enumerate(level, start=3))], 28, width)
    height, top = 280.0 + lower, _TOP + lower

    def across(x: float) -> float:
        return _LEFT + (x - first) / (last - first) * (width - _LEFT - _RIGHT)

    def up(y: float) -> float:
        return height - _BOTTOM - (y - low) / (high - low or 1.0) * (height - top - _BOTTOM)

    parts = [tag("text", title, x=0, y=12, class_="title")]
    for tick in ticks:
        if low <= tick <= high:
            parts.append(_line(_LEFT, up(tick), width - _RIGHT, up(tick), "faint"))
            label = f"{tick:.0%}" if percent else _plain(tick)
            parts.append(tag("text", label, x=_LEFT - 6, y=_at(up(tick) + 4), class_="end"))
    for tick in _ticks(first, last):
        if tick == int(tick) and first <= tick <= last:
            parts.append(tag("text", int(tick), x=_at(across(tick)), y=height - _BOTTOM + 16, class_="middle"))
    parts.append(tag("text", "epoch", x=_at((_LEFT + width - _RIGHT) / 2), y=height - 4, class_="middle"))
    for i, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{_at(across(x))},{_at(up(y))}" for x, y in points)
        color = f"s{i % _COLORS}"
        parts.append(tag("polyline", tag("title", name), points=path, class_=color))
        if len(points) < 30:
            parts += [
                tag("circle", tag("title", f"{name}, epoch {x:g}: {y:.4g}"), cx=_at(across(x)), cy=_at(up(y)), r=2.6,
                    class_=f"f{i % _COLORS}")
                for x, y in points
            ]  # fmt: skip
    for i, value in enumerate(level.values(), start=3):
        parts.append(_line(_LEFT, up(value), width - _RIGHT, up(value), f"s{i % _COLORS} dashed"))
    return _drawing(width, height, title, [*parts, *legend])


def bars(title: str, rows: Mapping[str, Sequence[tuple[str, float, int]]], unit: str = "s") -> Html:
    """Draw bars of parts that lie behind one another."""
    left, width, thick = 110.0, 1080.0, 30.0
    longest = max((sum(length for _, length, _ in parts) for parts in rows.values()), default=0.0) or 1.0
    scale = (width - left - _RIGHT) / longest
    names = {f"{part} {length:.3g} {unit}": color for parts in rows.values() for part, length, color in parts}
    legend, lower = _legend([*names.items()], 28, width)
    top = _TOP + lower
    height = top + len(rows) * (thick + 8)
    drawn = [tag("text", title, x=0, y=12, class_="title")]
    for row, (name, parts) in enumerate(rows.items()):
        y, at = top + row * (thick + 8), left
        drawn.append(tag("text", name, x=left - 8, y=y + thick / 2 + 4, class_="end"))
        for part, length, color in parts:
            said = tag("title", f"{part}: {length:.3g} {unit}")
            drawn.append(tag("rect", said, x=_at(at), y=y, width=_at(length * scale), height=thick, class_=f"f{color}"))
            at += length * scale
    return _drawing(width, height, title, [*drawn, *legend])


def parallel_coordinates(
    columns: Mapping[str, Sequence[str | float | None]], names: Sequence[str], lowest: bool = False
) -> Html | None:
    """Draw one line per run across what it was told and what came out; the last column's best is drawn strongest.

    Args:
        columns: The values of all runs, by column. Where all are numbers the axis is one of numbers, logarithmic where
            they span two decades or more; else each text has its place.
        lowest: Whether the least value of the last column is the best.
    """
    if len(columns) < 2 or len(names) < 2:
        return None
    height, top, bottom = 320.0, 30.0, 20.0
    longest = max(7.4 * len(column) for column in columns)  # in bold; labels are cut
    step = max(840.0 / (len(columns) - 1), longest + 12.0, 170.0 if len(columns) > 5 else 0.0)
    width = 240.0 + step * (len(columns) - 1)
    places: list[list[float | None]] = []
    parts: list[Html] = []

    def up(share: float) -> float:
        return height - bottom - share * (height - top - bottom)

    for i, (column, values) in enumerate(columns.items()):
        x = 120.0 + i * step
        axis, ticks = _axis(values)
        places.append(axis)
        parts.append(_line(x, top, x, height - bottom, "faint"))
        parts.append(tag("text", column, x=_at(x), y=14, class_="title middle"))
        for label, share in ticks:
            parts.append(tag("text", label, x=_at(x + 6), y=_at(up(share) + 4)))
    strength = [0.0 if share is None else 1.0 - share if lowest else share for share in places[-1]]
    known = [share is not None for share in places[-1]]
    for run in sorted(range(len(names)), key=lambda run: (known[run], strength[run])):  # the best on top
        found = [(120.0 + i * step, place) for i, axis in enumerate(places) if (place := axis[run]) is not None]
        color = f"color-mix(in srgb, var(--c1) {strength[run]:.0%}, var(--c5))"
        path = " ".join(f"{_at(x)},{_at(up(place))}" for x, place in found)
        style = f"stroke: {color}; stroke-opacity: {0.35 + 0.6 * strength[run]:.2f}"
        parts.append(tag("polyline", tag("title", names[run]), points=path, style=style))
    return _drawing(width, height, "settings and scores of the runs", parts)


def _axis(values: Sequence[str | float | None]) -> tuple[list[float | None], list[tuple[str, float]]]:
    """Return where each value lies between 0 and 1, and the labels."""
    numbers = [_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    if known and all(number is not None or value in (None, "") for number, value in zip(numbers, values, strict=True)):
        low, high = min(known), max(known)
        logarithmic = low > 0 and high >= 100 * low

        def share(number: float) -> float:
            if high == low:
                return 0.5
            if logarithmic:
                return math.log(number / low) / math.log(high / low)
            return (number - low) / (high - low)

        distinct = sorted({*known})
        labelled = [low, high]
        for number in distinct if len(distinct) <= 6 else ():
            if all(abs(share(number) - share(other)) > _APART for other in labelled):
                labelled.append(number)
        return [None if number is None else share(number) for number in numbers], [
            (_plain(number), share(number)) for number in labelled
        ]
    texts = list(dict.fromkeys(str(value) for value in values if value not in (None, "")))
    at = {text: (i + 0.5) / len(texts) for i, text in enumerate(texts)}
    return [at.get(str(value)) for value in values], [(text[:24], place) for text, place in at.items()]


def _number(value: str | float | None) -> float | None:
    try:
        number = float(value) if value is not None else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _plain(number: float) -> str:
    """Return a number with four digits, and as people write it where it is large."""
    return f"{number:,.0f}" if 1e4 <= abs(number) < 1e7 and number == int(number) else f"{number:.4g}"


def _ticks(low: float, high: float) -> list[float]:
    """Return four to ten round numbers that enclose a range."""
    span = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 8)
    begin, end = math.floor(low / step), math.ceil(high / step)
    if end - begin < 2:
        begin, end = begin - 1, end + 1
    return [number * step for number in range(begin, end + 1)]


def _legend(names: Sequence[tuple[str, int]], y: float, width: float) -> tuple[list[Html], float]:
    """Return the legend from y on, and by how much it is higher than one line."""
    found, x, first, most = [], 0.0, y, int((width - 14) / 6.4)
    for text, color in names:
        name = text if len(text) <= most else f"{text[: most - 1]}…"
        if x and x + 14 + 6.4 * len(name) > width:
            x, y = 0.0, y + 16
        found.append(tag("rect", x=_at(x), y=y - 9, width=10, height=10, class_=f"f{color % _COLORS}"))
        found.append(tag("text", name, x=_at(x + 14), y=y))
        x += 14 + 6.4 * len(name) + 16
    return found, y - first


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    return tag("line", x1=_at(x1), y1=_at(y1), x2=_at(x2), y2=_at(y2), class_=kind)


def _drawing(width: float, height: float, title: str, parts: Sequence[Html]) -> Html:
    wider = f"min-width: {width:g}px" if width > _WIDE else None
    drawing = tag("svg", *parts, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=title, style=wider)
    return drawing if width <= _NARROW else tag("div", drawing, class_="wide")


def _at(number: float) -> str:
    return f"{number:.1f}"
