"""Run by test_backend.py in a process of its own, whose torch has a simulated NPU: training on it through the twin."""

import sys
from functools import partial

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision

import lightning_gnn  # noqa: F401  registers the accelerator and the strategies
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.nn import GAT, GCN, GraphSAGE, NodeClassifier
from lightning_gnn.nn.conv import fused
from lightning_gnn.ops import default_backend
from lightning_gnn.ops.aggregate.ascend_twin import record_launches
from tests.accelerators import simulated_npu
from tests.accelerators.graph import training_graph

simulated_npu.install()
fused.PLAIN_TENSORS += (simulated_npu.NPUTensor,)


class Losses(pl.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


def neighbours(data):
    nodes = data.train_mask.nonzero().view(-1)
    return NeighborDataModule(data, input_train_nodes=nodes, num_neighbors=[4, 4], batch_size=64)


def losses(model, backend, datamodule=FullGraphDataModule, **settings):
    data = training_graph()
    num_classes = int(data.y.max()) + 1
    pl.seed_everything(0, verbose=False)
    module = NodeClassifier(model(data.num_features, 16, 2, num_classes, dropout=0.0), num_classes, lr=0.02)
    recorder = Losses()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(max_epochs=4, devices=1, num_sanity_val_steps=0, callbacks=[recorder], **quiet, **settings)
    with default_backend(backend):
        trainer.fit(module, datamodule(data))
    return recorder.values


largest = partial(GraphSAGE, aggr="max")  # of float32: no number is rounded

if sys.argv[1] == "neighbours":
    expected = losses(largest, None, neighbours, accelerator="cpu")
    with record_launches() as launches:
        found = losses(largest, "ascend_twin", neighbours, accelerator="npu")
    names = [launch.kernel for launch in launches]
    print("largest", len(launches), set(names), found, expected)
    # No gradient goes to the features: in each step one layer of two has one.
    assert names.count("aggregate_max_backward") == len(found) > 4
    assert names.count("aggregate_max") > 2 * len(found)
    assert all(abs(a - b) < 1e-5 * b for a, b in zip(found, expected, strict=True))
    for model in (GraphSAGE, GCN):
        # The first scale of a scaler is so large that it leaves out a step.
        scaled = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("npu", init_scale=64.0))
        for settings in ({}, {"plugins": [scaled]}):
            expected = losses(model, None, neighbours, accelerator="cpu")
            with record_launches() as launches:
                found = losses(model, "ascend_twin", neighbours, accelerator="npu", **settings)
            names = {launch.kernel for launch in launches}
            print(model.__name__, settings, len(launches), names, found, expected)
            # Each layer of each batch runs forward in one kernel, and so does its gradient.
            assert names >= {"aggregate_update", "update"}
            assert len(found) == len(expected) > 4
            assert abs(found[0] - expected[0]) < 1e-4 * expected[0] or settings
            # Adam enlarges what rounding to float16 does to a gradient near 0, such as one that ReLU just lets through.
            assert all(abs(a - b) < 0.03 * b for a, b in zip(found, expected, strict=True))
            assert found[-1] < found[0] - 0.02
    sys.exit()

for model in (GCN, GAT, largest):
    expected = losses(model, None, accelerator="cpu")
    with record_launches() as launches:
        found = losses(model, "ascend_twin", accelerator="npu", strategy=sys.argv[1])
    names = {launch.kernel for launch in launches}
    print(getattr(model, "__name__", "largest"), len(launches), names, found, expected)
    assert (names == {"aggregate_max", "aggregate_max_backward"}) == (model is largest)
    # The first layer of GCN aggregates features that stay what they are: once, not in each epoch.
    assert len(launches) >= 4 * 3 + 1
    assert len(found) == len(expected) == 4
    assert expected[-1] < expected[0] - 0.02
    assert all(abs(a - b) < 0.001 * b for a, b in zip(found, expected, strict=True))
