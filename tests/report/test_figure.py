"""The picture shows all that belongs to it."""

from matplotlib.backends.backend_agg import FigureCanvasAgg

from lightning_gnn.report import figure as drawn


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
