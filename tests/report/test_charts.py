"""Charts show the figures that they are given, and all text of a page comes back as it was."""

import math
import re

import pytest

from lightning_gnn.report import charts
from tests.report.reading import Page


def paths(drawing, color):
    """The corners of what is drawn in a color."""
    found = re.findall(r'd="([^"]*)"[^>]*(?:stroke|fill): var\(' + color, drawing)
    return [[tuple(map(float, corner)) for corner in re.findall(r"[ML] (\S+) (\S+)", path)] for path in found]


def test_a_line_passes_its_values_and_leaves_out_what_is_no_number():
    values = [3.0, 1.0, 4.0, 1.5]
    points = [*enumerate(values, start=1), (5, math.nan), (math.inf, 1.0)]
    chart = charts.line_chart("title", {"$a <b>": points}, {"level": 2.0}, width=540)
    line = paths(chart.drawing, "--c0")[0]
    assert len(line) == len(values)
    scale = (line[1][1] - line[0][1]) / (values[1] - values[0])
    assert scale < 0  # upwards
    for i, (x, y) in enumerate(line):
        assert y == pytest.approx(line[0][1] + scale * (values[i] - values[0]), abs=0.01)
        assert x == pytest.approx(line[0][0] + i * (line[1][0] - line[0][0]), abs=0.01)
    ((_, level), _) = paths(chart.drawing, "--c3")[0]
    assert level == pytest.approx(line[0][1] + scale * (2.0 - values[0]), abs=0.01)
    assert chart.legend == [("$a <b>", "C0"), ("level", "C3")]
    read = Page(chart.drawing)
    read.needs_nothing_else()
    assert [text for tag, text in read.texts if tag == "title"] == ["$a <b>", "level: 2"]
    assert "#3b6fb6" not in chart.drawing


def test_scores_over_few_settings_have_their_texts_and_many_an_axis():
    few, many = ["0.1", "0.001", "0.1", "gcn$", "gcn$", None, "", "0.1"], [f"1e{-i}" for i in range(8)]
    names = [f"run {i}" for i in range(8)]
    chart = charts.slice_chart("test_acc", {"lr": few, "decay": many}, [0.1 * i for i in range(7)] + [None], names)
    read = Page(chart.drawing)
    labels = read.text("text").splitlines()
    assert {"lr", "decay", "0.1", "0.001", "gcn$", "20%"} <= {*labels}
    assert read.text("title").splitlines().count("run 1") == 2
    dots = [float(dot["x"]) for dot in read.all("use") if "--c1" in dot["style"]]
    assert len(dots) == 6 - 1 + 8 - 1  # run 7 has no score
    spread = sorted(dots)[-7:]
    assert spread[1] - spread[0] == pytest.approx(spread[2] - spread[1], abs=0.01)  # logarithmic


def test_the_picture_is_made_of_what_there_is(tmp_path):
    for epochs in ([{"epoch": 0.0, "val_acc": 0.5}], [{"epoch": 0.0}]):
        path = charts.save_figure({"test_acc": 0.5}, epochs, "acc", "$title", tmp_path / "report.png")
        assert path.read_bytes().startswith(b"\x89PNG")
