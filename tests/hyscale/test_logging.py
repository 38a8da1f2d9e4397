"""What several trainers log is logged once: self.log with any reduction, torchmetrics, outputs."""

import pytest
import torch
import torchmetrics
from pytorch_lightning.loggers import CSVLogger

from tests.hyscale.models import CLASSES, Module, PyGStyle, data_module, fit, graph, hybrid, trainer


class Logging(Module):
    def __init__(self, **options):
        super().__init__(**options)
        multiclass = {"task": "multiclass", "num_classes": CLASSES}
        self.accuracy = torchmetrics.Accuracy(**multiclass)
        self.forwarded = torchmetrics.Accuracy(**multiclass)
        self.largest, self.smallest = torchmetrics.MaxMetric(), torchmetrics.MinMetric()
        self.cat = torchmetrics.CatMetric()
        self.auroc = torchmetrics.AUROC(**multiclass)  # with lists of predictions for states
        self.collection = torchmetrics.MetricCollection(
            {
                "precision": torchmetrics.Precision(average="macro", **multiclass),
                "recall": torchmetrics.Recall(average="macro", **multiclass),
            }
        )
        self.values = []

    def training_step(self, batch, batch_idx):
        out = self.net(batch.x, batch.edge_index)[: batch.batch_size]
        y = batch.y[: batch.batch_size]
        loss = torch.nn.functional.cross_entropy(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("sized", loss, on_step=False, on_epoch=True, batch_size=batch.batch_size)
        self.log("max", out.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("min", out.min(), reduce_fx=torch.min, on_step=True, on_epoch=True)
        self.log("count", float(batch.batch_size), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log_dict({"a": loss * 2, "b": loss * 3}, on_step=False, on_epoch=True)
        self.accuracy.update(out, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.forwarded(out, y)
        self.log("forwarded", self.forwarded, on_step=True, on_epoch=True)
        self.largest.update(out)
        self.smallest.update(out)
        self.cat.update(y.double())
        self.auroc.update(out, y)
        self.collection(out, y)
        self.log_dict(self.collection, on_step=True, on_epoch=True)
        return {"loss": loss, "predicted": out.argmax(1), "mean": out.detach().mean(), "text": "x"}

    def on_train_epoch_end(self):
        for metric in (self.largest, self.smallest, self.cat, self.auroc):
            self.values.append(metric.compute().clone())
            metric.reset()


@pytest.mark.parametrize("options", [{}, {"cpu_trainers": 3}, {"shares": [0.9, 0.1]}, {"cpu_trainers": 1}], ids=str)
def test_values_are_those_of_one_device(options, tmp_path):
    plain, ours = Logging(), Logging()
    expected, reference = fit(plain)
    found, run = fit(ours, hybrid(**options))
    assert len(found.logged) == len(expected.logged) > 0
    for a, b in zip([*found.logged, run.callback_metrics], [*expected.logged, reference.callback_metrics], strict=True):
        assert a.keys() == b.keys()
        # Without a batch size Lightning weighs a step by the number of its nodes, and we by that of its seeds.
        for name in a.keys() - {"loss", "loss_epoch", "a", "b"}:
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-6), name
    assert float(run.callback_metrics["loss_epoch"]) == pytest.approx(float(reference.callback_metrics["sized"]))
    for a, b in zip(ours.values, plain.values, strict=True):
        torch.testing.assert_close(a, b)


def test_outputs_are_joined():
    seen = []

    class Keep(Logging):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((outputs, batch))

    fit(Keep(), hybrid(), max_epochs=1)
    plain = []

    class KeepPlain(Logging):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            plain.append(outputs)

    fit(KeepPlain(), max_epochs=1)
    for (ours, batch), theirs in zip(seen, plain, strict=True):
        torch.testing.assert_close(ours["loss"], theirs["loss"])
        torch.testing.assert_close(ours["mean"], theirs["mean"])
        assert torch.equal(ours["predicted"], theirs["predicted"])
        assert ours["text"] == "x"
        assert batch.batch_size == len(theirs["predicted"])
        assert batch.num_edges == sum(part.num_edges for part in batch.parts if part is not None)


def test_a_logger_gets_each_value_once(tmp_path):
    def rows(folder):
        return (folder / "lightning_logs/version_0/metrics.csv").read_text().splitlines()

    for name, strategy in (("plain", "auto"), ("ours", hybrid())):
        fit(PyGStyle(dropout=0.0), strategy, logger=CSVLogger(tmp_path / name), log_every_n_steps=1)
    assert len(rows(tmp_path / "ours")) == len(rows(tmp_path / "plain"))
    assert rows(tmp_path / "ours")[0] == rows(tmp_path / "plain")[0]


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (torchmetrics.PearsonCorrCoef(), "PearsonCorrCoef"),
        (torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()), "MinMaxMetric"),
        (torchmetrics.RunningMean(3), "RunningMean"),
    ],
    ids=["no reduction", "a wrapper", "a window"],
)
def test_a_metric_that_cannot_be_merged_is_refused_by_name_where_it_is_used(metric, name):
    class Using(Module):
        def __init__(self, stage):
            super().__init__()
            self.odd, self.stage = metric.clone(), stage

        def update(self, batch):
            values = batch.x[:, 0].double()
            self.odd.update(*([values, values + 1] if name == "PearsonCorrCoef" else [values.mean()]))

        def training_step(self, batch, batch_idx):
            if self.stage == "train":
                self.update(batch)
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.update(batch)

    with pytest.raises(TypeError, match=rf"the metric 'odd' \({name}\)"):
        fit(Using("train"), hybrid())
    fit(Using("validate"), hybrid(), max_epochs=1)


def test_the_style_of_pygs_example_runs_by_adding_the_strategy_alone():
    data = graph(dtype=torch.float32)
    module = PyGStyle()
    run = trainer("hyscale", max_epochs=3)
    run.fit(module, datamodule=data_module(data=data))
    assert {"train_loss_epoch", "train_acc", "val_acc"} <= run.callback_metrics.keys()
    assert "test_acc" in run.test(module, datamodule=data_module(data=data), verbose=False)[0]
    assert run.validate(module, datamodule=data_module(data=data), verbose=False)


def test_graphs_in_a_log_are_refused():
    class Graph(Module):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss, enable_graph=True)
            return loss

    with pytest.raises(ValueError, match="enable_graph"):
        fit(Graph(), hybrid())
