"""The pictures show all that belongs to them."""

import itertools

import matplotlib as mpl
import pytest
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
