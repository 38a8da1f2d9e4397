"""Run by test_backend.py in a process of its own, whose torch has a simulated NPU: training on it through the twin."""

import sys

import pytorch_lightning as pl

import lightning_gnn  # noqa: F401  registers the accelerator and the strategies
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.nn import GAT, GCN, NodeClassifier
from lightning_gnn.ops import default_backend
from lightning_gnn.ops.aggregate.ascend_twin import record_launches
from tests.accelerators import simulated_npu
from tests.accelerators.graph import training_graph

simulated_npu.install()


class Losses(pl.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


def losses(model, backend, **settings):
    data = training_graph()
    num_classes = int(data.y.max()) + 1
    pl.seed_everything(0, verbose=False)
    module = NodeClassifier(model(data.num_features, 16, 2, num_classes, dropout=0.0), num_classes, lr=0.02)
    recorder = Losses()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(max_epochs=4, devices=1, num_sanity_val_steps=0, callbacks=[recorder], **quiet, **settings)
    with default_backend(backend):
        trainer.fit(module, FullGraphDataModule(data))
    return recorder.values


for model in (GCN, GAT):
    expected = losses(model, None, accelerator="cpu")
    with record_launches() as launches:
        found = losses(model, "ascend_twin", accelerator="npu", strategy=sys.argv[1])
    print(model.__name__, len(launches), found, expected)
    # The first layer of GCN aggregates features that stay what they are: once, not in each epoch.
    assert len(launches) >= 4 * 3 + 1
    assert len(found) == len(expected) == 4
    assert expected[-1] < expected[0] - 0.02
    assert all(abs(a - b) < 0.001 * b for a, b in zip(found, expected, strict=True))
