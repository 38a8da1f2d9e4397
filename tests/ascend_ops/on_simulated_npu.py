"""Run by test_backend.py in its own process, where torch has a simulated NPU: training on it through the twin."""

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


class LossRecorder(pl.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


def build_neighbor_data(data):
    nodes = data.train_mask.nonzero().view(-1)
    return NeighborDataModule(data, input_train_nodes=nodes, num_neighbors=[4, 4], batch_size=64)


def compute_losses(model, backend, datamodule=FullGraphDataModule, **settings):
    data = training_graph()
    num_classes = int(data.y.max()) + 1
    pl.seed_everything(0, verbose=False)
    module = NodeClassifier(model(data.num_features, 16, 2, num_classes, dropout=0.0), num_classes, lr=0.02)
    recorder = LossRecorder()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(max_epochs=4, devices=1, num_sanity_val_steps=0, callbacks=[recorder], **quiet, **settings)
    with default_backend(backend):
        trainer.fit(module, datamodule(data))
    return recorder.values


largest = partial(GraphSAGE, aggr="max")  # in float32: nothing is rounded

if sys.argv[1] == "neighbors":
    expected = compute_losses(largest, None, build_neighbor_data, accelerator="cpu")
    with record_launches() as launches:
        found = compute_losses(largest, "ascend_twin", build_neighbor_data, accelerator="npu")
    names = [launch.kernel for launch in launches]
    print("largest", len(launches), set(names), found, expected)
    # The features receive no gradient, so in each step only one of two layers computes one.
    assert names.count("aggregate_max_backward") == len(found) > 4
    assert names.count("aggregate_max") > 2 * len(found)
    assert all(abs(a - b) < 1e-5 * b for a, b in zip(found, expected, strict=True))
    for model in (GraphSAGE, GCN):
        # The initial scale of a gradient scaler is so large that one step is skipped.
        scaled = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("npu", init_scale=64.0))
        for settings in ({}, {"plugins": [scaled]}):
            expected = compute_losses(model, None, build_neighbor_data, accelerator="cpu")
            with record_launches() as launches:
                found = compute_losses(model, "ascend_twin", build_neighbor_data, accelerator="npu", **settings)
            names = {launch.kernel for launch in launches}
            print(model.__name__, settings, len(launches), names, found, expected)
            # Each layer of each batch runs forward in one kernel, and its gradient in another.
            assert names >= {"aggregate_update", "update"}
            assert len(found) == len(expected) > 4
            assert abs(found[0] - expected[0]) < 1e-4 * expected[0] or settings
            # Adam amplifies the float16 rounding of a gradient near 0, for example just above ReLU's threshold.
            assert all(abs(a - b) < 0.03 * b for a, b in zip(found, expected, strict=True))
            assert found[-1] < found[0] - 0.02
    sys.exit()

for model in (GCN, GAT, largest):
    expected = compute_losses(model, None, accelerator="cpu")
    with record_launches() as launches:
        found = compute_losses(model, "ascend_twin", accelerator="npu", strategy=sys.argv[1])
    names = {launch.kernel for launch in launches}
    print(getattr(model, "__name__", "largest"), len(launches), names, found, expected)
    assert (names == {"aggregate_max", "aggregate_max_backward"}) == (model is largest)
    # The first layer of GCN aggregates constant features once, not in each epoch.
    assert len(launches) >= 4 * 3 + 1
    assert len(found) == len(expected) == 4
    assert expected[-1] < expected[0] - 0.02
    assert all(abs(a - b) < 0.001 * b for a, b in zip(found, expected, strict=True))
