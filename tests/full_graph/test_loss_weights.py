"""Losses that are not means over the nodes: weighted by what ``training_step`` returns, or warned about."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from lightning_gnn.nn import NodeClassifier
from tests.full_graph.launch import run
from tests.full_graph.training import SideBySide, Twice, assert_same, model_of, train

KINDS = ("class weights", "ignored", "labelled", "sum", "mean")
FEW = {"max_epochs": 4, "check_val_every_n_epoch": 4}


class Weighted(SideBySide):
    """Computes one of several kinds of loss; with ``returned``, also returns its weight."""

    def __init__(self, kind, returned=True):
        super().__init__((("gcn", 0.5),))
        self.kind, self.returned = kind, returned

    def training_step(self, batch, index):
        out, y = self.outputs(batch)[0][batch.train_mask], batch.y[batch.train_mask]
        weight = torch.linspace(0.1, 5, 7, dtype=out.dtype)
        if self.kind == "class weights":
            loss, own = F.cross_entropy(out, y, weight=weight), weight[y].sum()
        elif self.kind == "ignored":
            loss, own = F.cross_entropy(out, y, ignore_index=3), int((y != 3).sum())
        elif self.kind == "labelled":
            loss, own = F.cross_entropy(out[y > 2], y[y > 2]), float((y > 2).sum())
        elif self.kind == "sum":
            loss, own = F.cross_entropy(out, y, reduction="sum"), "sum"
        elif self.kind == "nowhere":
            loss, own = F.cross_entropy(out, torch.full_like(y, -100)), 0
        else:
            loss, own = F.cross_entropy(out, y), y.numel()
        return {"loss": loss, "weight": own} if self.returned else loss


def train_with_weights(rank, num_ranks):
    results = {kind: train(num_ranks, module=Weighted(kind), **FEW) for kind in (*KINDS, "nowhere")}
    results["accumulated"] = train(
        num_ranks, module=Weighted("class weights"), accumulate_grad_batches=2, batches=Twice, **FEW
    )
    results["clipped"] = train(num_ranks, module=Weighted("ignored"), gradient_clip_val=0.05, **FEW)
    return results


@pytest.mark.slow
def test_weights_that_are_returned_make_it_one_process():
    alone = train_with_weights(0, 1)
    for results in run(train_with_weights, 2, 2):
        for name, expected in alone.items():
            assert_same(expected, results[name], 1e-10)
    assert not alone["nowhere"]["gradients"].any()


class ManualOptimization(Weighted):
    def __init__(self):
        super().__init__("class weights", returned=False)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


def train_without_weights(rank, num_ranks):
    modules = {kind: Weighted(kind, returned=False) for kind in KINDS}
    modules["by hand"] = ManualOptimization()
    modules["classifier"] = NodeClassifier(model_of("gcn").double(), 7)
    modules["weighted"] = Weighted("class weights")
    said = {}
    for name, module in modules.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(num_ranks, module=module, max_epochs=2)
        said[name] = [str(warning.message) for warning in caught if "not a mean over" in str(warning.message)]
    return said


@pytest.mark.slow
def test_without_weights_such_losses_are_warned_about_once():
    first, second = run(train_without_weights, 2, 2)
    assert not any(second.values())
    for name, part in {
        "class weights": "class weights",
        "ignored": "ignore_index=3",
        "labelled": "labels for",
        "sum": "reduction='sum'",
        "by hand": "class weights",
    }.items():
        (message,) = first.pop(name)
        assert part in message
        assert "'weight': weight" in message
    assert not any(first.values())
    assert not any(train_without_weights(0, 1).values())
