"""Markup comes from us alone, and charts show the figures that they are given."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.report.html import page, table, tag
from lightning_gnn.report.svg import bars, line_chart, parallel_coordinates
from tests.report.reading import Page

# A browser reads some characters otherwise, whatever is written: it drops zero, and makes one line end of three.
TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0\r"))


@given(TEXT, TEXT)
def test_texts_and_attributes_come_back_as_they_were(text, value):
    read = Page(tag("p", tag("b", "in front"), text, title=value, class_=None))
    assert read.all("p") == [{"title": value}]
    assert "".join(data for _, data in read.texts) == f"in front{text}"
    read = Page(page(text, table([(text, 1.5)], head=[value])))
    read.needs_nothing_else()
    assert "".join(data for name, data in read.texts if name == "title") == text
    assert len(read.all("td")) == 2


VALUES = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


@given(st.lists(VALUES, min_size=2, max_size=20), st.booleans())
def test_a_line_passes_the_ticks_where_its_values_are(values, holes):
    points = [*enumerate(values, start=1), *([(3, math.nan), (math.inf, 1.0)] if holes else [])]
    drawn = Page(line_chart("title", {"line": points}))
    (line,) = drawn.all("polyline")
    found = [tuple(map(float, point.split(","))) for point in line["points"].split()]
    assert len(found) == len(values)
    # The labels of the axis, at the heights of their lines.
    rules = [float(rule["y1"]) for rule in drawn.all("line")]
    labels = [text for name, text in drawn.texts if name == "text" and text not in ("title", "epoch", "line")]
    labels = [float(text.replace(",", "")) for text in labels[: len(rules)]]
    assert 3 <= len(rules) <= 11
    assert labels == sorted(labels)
    (low, high), (bottom, top) = (labels[0], labels[-1]), (rules[0], rules[-1])
    assert low - 1e-3 * abs(low) <= min(values)
    assert high + 1e-3 * abs(high) >= max(values)
    for value, (_, y) in zip(values, found, strict=True):
        exact = bottom + (value - low) / (high - low) * (top - bottom)
        # Labels have four digits.
        assert y == pytest.approx(exact, abs=0.2 + 2e-3 * max(abs(low), abs(high)) / (high - low) * abs(top - bottom))


def test_charts_without_points_are_left_out():
    assert line_chart("title", {"line": []}, {"rule": 0.5}) is None
    assert line_chart("title", {"line": [(1, math.nan)]}) is None
    assert parallel_coordinates({"lr": [0.1, 0.2]}, ["a", "b"]) is None
    assert parallel_coordinates({"lr": [0.1], "acc": [1.0]}, ["a"]) is None


@pytest.mark.parametrize(("width", "lines"), [(540.0, 3), (1080.0, 2)])
def test_a_legend_that_does_not_fit_goes_on_in_the_next_line(width, lines):
    names = [f"job {i}: model=sage, seed={i}, lr=0.01" for i in range(6)]
    drawn = Page(line_chart("title", {name: [(1, 0.0), (2, 1.0)] for name in names}, width=width))
    squares = [(float(square["x"]), float(square["y"])) for square in drawn.all("rect")]
    assert len(squares) == len(names)
    assert all(x + 14 + 6.4 * len(name) <= width for (x, _), name in zip(squares, names, strict=True))
    assert len({*squares}) == len(names)
    assert len({y for _, y in squares}) == lines
    assert max(y + 10 for _, y in squares) < min(float(line["y1"]) for line in drawn.all("line"))


def test_bars_are_as_long_as_what_they_stand_for():
    drawn = Page(bars("title", {"one": [("a", 1.0, 0), ("b", 3.0, 1)], "two": [("c", 2.0, 2)]}))
    widths = [float(bar["width"]) for bar in drawn.all("rect")][:3]  # the others are the legend's
    assert widths[1] == pytest.approx(3 * widths[0], rel=1e-3)
    assert widths[2] == pytest.approx(2 * widths[0], rel=1e-3)


def test_whole_numbers_are_written_without_powers_of_ten():
    columns = {"nodes": ["20000", "5000"], "edges": ["2000000", "1.5e12"], "acc": [0.5, 0.7]}
    drawn = Page(parallel_coordinates(columns, ["a", "b"]))
    assert {"20,000", "5000", "2,000,000", "1.5e+12"} <= {text for tag, text in drawn.texts if tag == "text"}


def test_labels_that_would_cover_one_another_are_left_out():
    columns = {"lr": ["0.05847", "0.05807", "0.075", "0.016"], "acc": [0.1, 0.2, 0.3, 0.3]}
    drawn = Page(parallel_coordinates(columns, list("abcd")))
    texts = [text for tag, text in drawn.texts if tag == "text"]
    assert sorted(texts) == ["0.016", "0.05807", "0.075", "0.1", "0.2", "0.3", "acc", "lr"]
    assert len(drawn.all("polyline")) == 4


def test_parallel_coordinates_of_numbers_of_decades_and_of_names():
    columns = {"lr": ["0.001", "0.01", "0.1"], "model": ["gcn", "sage", "gcn"], "acc": [0.5, 0.7, None]}
    drawn = Page(parallel_coordinates(columns, ["a", "b", "c"]))
    lines = dict(zip("cab", drawn.all("polyline"), strict=True))  # the best last, on top
    assert [text for tag, text in drawn.texts if tag == "title"] == ["c", "a", "b"]
    points = {name: [tuple(map(float, p.split(","))) for p in line["points"].split()] for name, line in lines.items()}
    heights = [points[name][0][1] for name in "abc"]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)  # logarithmic
    assert points["a"][1] == points["c"][1] != points["b"][1]  # the same model
    assert len(points["c"]) == 2  # no score
    assert points["b"][2][1] < points["a"][2][1]  # the better, the higher
