import math

import pytest
from matplotlib.figure import Figure

from lightning_gnn.report import charts


def test_a_line_passes_its_values_and_leaves_out_what_is_no_number():
    points = [(1, 3.0), (2, 1.0), (3, 4.0), (4, 1.5), (5, math.nan), (math.inf, 1.0)]
    axes = Figure().add_subplot()
    charts._draw_panel(axes, charts.Panel("acc", {"$a <b>": points, "empty": []}, {"level": 2.0}))
    line, level = axes.get_lines()
    assert line.get_xydata().tolist() == [[1, 3.0], [2, 1.0], [3, 4.0], [4, 1.5]]
    assert [*level.get_ydata()] == [2.0, 2.0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["$a <b>", "level"]


@pytest.mark.medium
@pytest.mark.parametrize("epochs", [[{"epoch": 0.0, "val_acc": 0.5}], [{"epoch": 0.0}]])
def test_the_picture_is_made_of_what_there_is(tmp_path, epochs):
    path = charts.save_figure({"test_acc": 0.5}, epochs, "acc", "$title", tmp_path / "report.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert charts.panel_of({"test_acc": 0.5}, epochs, "acc").levels == {"test, last weights": 0.5}
