"""The pictures show all that belongs to them."""

import itertools

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_gnn.report import figure as drawn
from lightning_gnn.runtime.timeline import Interval, Timeline


def timeline(stages, phases, names):
    intervals = [Interval("CPU", stage, i, float(i), i + 1.0) for i, stage in enumerate(stages)]
    return Timeline(intervals, [(phase, float(i), i + 1.0) for i, phase in enumerate(phases)], names)


@pytest.mark.parametrize("number", range(1, len(drawn.STAGE_NAMES) + 1))
@pytest.mark.parametrize("phases", [(), tuple(drawn.PHASES)])
def test_the_legend_of_a_timeline_fits_and_explains_its_phases(number, phases):
    names = {"gpu_batching": "sampling, CPU as GPU", "uva": "gathering, CPU as GPU", "dma": "copying, CPU as PCIe"}
    for stages in itertools.islice(itertools.combinations(drawn.STAGE_NAMES, number), 4):
        handles = drawn._legend([timeline(stages, phases, names)])
        labels = [handle.get_label() for handle in handles]
        assert [label for label in labels if ":" in label] == [drawn.PHASE_NAMES[phase] for phase in phases]
        with mpl.rc_context(drawn.STYLE):
            figure = Figure(figsize=(drawn._WIDTH, 3), layout="constrained")
            columns = drawn._columns(handles)
            legend = figure.legend(
                handles=handles, loc="outside lower left", ncols=columns, fontsize=9, handlelength=1.2
            )
            figure.draw_without_rendering()
            extent = legend.get_window_extent()
        assert extent.x0 >= 0
        assert extent.x1 <= figure.bbox.x1
        assert columns == len(handles) or extent.width > figure.bbox.width / 3  # no more rows than needed


def test_the_legend_of_the_times_covers_nothing_however_many_digits(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(drawn, "save", lambda figure, path: figures.append(figure))
    split = {"model_s": 1.363, "wait_s": 0.00682, "other_s": 0.000292, "sampling_s": 0.000963, "features_s": 0.000599}
    metrics = {"epoch_time_s": 1.371, "mteps": 0.008181, "time_split": split}
    drawn.save_figure(metrics, [{"epoch": 0.0, "val_acc": 0.5}], "acc", "title", tmp_path / "report.png")
    (figure,) = figures
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    (legend,) = figure.legends
    box = legend.get_window_extent(renderer)
    assert len(legend.get_texts()) == 5
    for axes in figure.axes:
        assert not box.overlaps(axes.get_tightbbox(renderer))
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1 + 1
