"""Several ranks log, measure and predict the same values as a plain Trainer."""

import functools

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import Callback

from tests.campaigns import cases_of
from tests.full_graph.launch import run
from tests.hyscale.training import SILENT, Plain, fit, make_data, make_hybrid

STRATEGIES = {
    "two": (2, {}),
    "one has nothing": (2, {"shares": [1.0, 0.0]}),
    "accelerator and CPU": (2, {"cpu_trainers": 1, "devices": ["cpu"], "shares": None, "cpu_share": 0.4}),
    "no shares before training": (2, {"cpu_trainers": 1, "devices": ["cpu"], "shares": None, "drm": True}),
    "three": (3, {}),
}


class Logging(Plain):
    """Logs values of all kinds in all steps."""

    def __init__(self):
        super().__init__()
        multiclass = {"task": "multiclass", "num_classes": 3}
        self.metrics = torch.nn.ModuleDict()
        for split in ("train_", "val_", "test_"):
            self.metrics[split] = torch.nn.ModuleDict(
                {
                    "accuracy": torchmetrics.Accuracy(**multiclass),
                    "auroc": torchmetrics.AUROC(**multiclass),  # its states are lists of predictions
                    "largest": torchmetrics.MaxMetric(),
                    "collection": torchmetrics.MetricCollection(
                        {
                            "precision": torchmetrics.Precision(average="macro", **multiclass),
                            "recall": torchmetrics.Recall(average="macro", **multiclass),
                        },
                        prefix=split,
                    ),
                }
            )

    def step(self, batch, split, index):
        out, y = self.scores(batch), batch.y[: batch.batch_size]
        loss = torch.nn.functional.cross_entropy(out, y)
        both = {"on_step": split == "train_", "on_epoch": True}
        self.log(f"{split}loss", loss, prog_bar=True, batch_size=batch.batch_size, **both)
        self.log(f"{split}max", out.max(), reduce_fx="max", **both)
        self.log(f"{split}min", out.min(), reduce_fx=torch.min, **both)
        self.log(f"{split}count", batch.batch_size, reduce_fx="sum", **both)
        self.log_dict({f"{split}a": loss * 2}, batch_size=batch.batch_size, **both)
        if index == 1:
            self.log(f"{split}once", 2.5, batch_size=batch.batch_size, **both)
        if batch.batch_size < 15:
            self.log(f"{split}of_few", 1.0, reduce_fx="max", **both)  # only on some ranks in some steps
        metrics = self.metrics[split]
        metrics["accuracy"](out, y)
        self.log(f"{split}accuracy", metrics["accuracy"], on_step=False, on_epoch=True)
        metrics["auroc"].update(out, y)
        self.log(f"{split}auroc", metrics["auroc"], on_step=False, on_epoch=True)
        metrics["largest"].update(out)
        self.log(f"{split}largest", metrics["largest"], on_step=False, on_epoch=True)
        metrics["collection"].update(out, y)
        self.log_dict(metrics["collection"], on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train_", batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.step(batch, "val_", batch_idx)

    def test_step(self, batch, batch_idx):
        self.step(batch, "test_", batch_idx)

    def predict_step(self, batch, batch_idx):
        return {"scores": self.scores(batch), "nodes": batch.n_id[: batch.batch_size], "text": str(batch_idx)}


class MetricRecorder(Callback):
    """Records the metrics that are logged after each batch."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, *args):
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def run_all_stages(strategy="auto"):
    module, seen = Logging(), MetricRecorder()
    data = make_data(input_val_nodes=torch.arange(150, 230), input_test_nodes=torch.arange(100, 173))
    trainer = fit(module, strategy, data, epochs=3, callbacks=[seen], limit_val_batches=1.0)
    values = seen.values
    tested = trainer.test(module, data, verbose=False)
    validated = trainer.validate(module, data, verbose=False)
    data.input_pred_nodes = torch.arange(20, 155)
    predicted = trainer.predict(module, data)
    alone = pl.Trainer(strategy=make_hybrid_strategy(strategy), **SILENT).test(module, data, verbose=False)
    return values, tested, validated, predicted, alone


def make_hybrid_strategy(strategy):
    if isinstance(strategy, str):
        return strategy
    number, options = STRATEGIES[strategy.test_name]
    return make_hybrid(number, **options)


def run_rank(rank, num_ranks, names):
    found = {}
    for name in names:
        number, options = STRATEGIES[name]
        if number == num_ranks:
            strategy = make_hybrid(number, **options)
            strategy.test_name = name
            found[name] = run_all_stages(strategy)
    return found


@functools.cache
def run_outcomes(session, num_ranks):
    names = [case["name"] for case in cases_of(session, test_values_are_those_of_one_device_on_all_ranks)]
    return run(run_rank, num_ranks, num_ranks, names)


@functools.cache
def run_plain():
    return run_all_stages()


def assert_same(found, expected, only_rank_zero=()):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        missing = set(b) ^ set(a)
        assert not missing, missing
        for name, value in b.items():
            assert a[name] == pytest.approx(value, rel=1e-5, abs=1e-9), name


@pytest.mark.medium
@pytest.mark.campaign
@pytest.mark.parametrize("name", STRATEGIES)
def test_values_are_those_of_one_device_on_all_ranks(name, request):
    for found in run_outcomes(request.session, STRATEGIES[name][0]):
        values, tested, validated, predicted, alone = found[name]
        expected = run_plain()
        few = {f"{split}of_few{end}" for split in ("train_", "val_", "test_") for end in ("", "_step", "_epoch")}
        for ours, theirs in (
            (values, expected[0]),
            (tested, expected[1]),
            (validated, expected[2]),
            (alone, expected[4]),
        ):
            cleaned = [[{k: v for k, v in row.items() if k not in few} for row in rows] for rows in (ours, theirs)]
            assert_same(*cleaned)
        assert len(predicted) == len(expected[3])
        for ours, theirs in zip(predicted, expected[3], strict=True):
            assert ours["scores"].equal(theirs["scores"]) or (ours["scores"] - theirs["scores"]).abs().max() < 1e-12
            assert ours["nodes"].equal(theirs["nodes"])
            assert ours["text"] == theirs["text"]
