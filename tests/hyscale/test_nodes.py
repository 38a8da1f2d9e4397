"""Two nodes with several trainers each act as one: weights, buffers, metrics, resuming, naming of lost ranks."""

import signal
import time

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch_geometric.loader import NeighborLoader

from lightning_gnn.distributed import heartbeat
from lightning_gnn.pyg import enable_pyg_sampling
from tests.full_graph.launch import observe, run
from tests.hyscale.test_faults import RankLoss, train_for_ever
from tests.hyscale.test_resume import SaveAt, are_equal, train
from tests.hyscale.training import Plain, copy_state, fit, make_data, make_graph, make_hybrid
from tests.patience import NEVER

pytestmark = pytest.mark.slow  # every rank is a process


class Logging(Plain):
    """Logs values that must be reduced over all nodes."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def training_step(self, batch, index):
        scores, y = self.scores(batch), batch.y[: batch.batch_size]
        loss = F.cross_entropy(scores, y)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=batch.batch_size)
        self.log("count", float(batch.batch_size), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", scores.max(), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch), batch_size=batch.batch_size)


class Manual(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.manual_backward(self.loss(batch))
        if index % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class ClassWeights(Plain):
    def training_step(self, batch, index):
        weight, y = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64), batch.y[: batch.batch_size]
        return {"loss": F.cross_entropy(self.scores(batch), y, weight), "weight": weight[y].sum()}


CASES = {
    "plain": (Logging, {}, {}),
    "unlike shares": (Logging, {"shares": [0.9, 0.1]}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "manual": (Manual, {}, {}),
    "class weights": (ClassWeights, {}, {"accumulate_grad_batches": 2}),
    "few seeds": (Logging, {}, {"batch_size": 3, "limit_train_batches": 5}),
}
"""Module, strategy options and Trainer options; in the last case, one trainer has no seeds."""


def train_case(case, strategy, nodes=1):
    kind, _, options = CASES[case]
    options = dict(options)
    data, module = make_data(batch_size=options.pop("batch_size", 60)), kind()
    trainer = fit(module, strategy, data, num_nodes=nodes, limit_val_batches=1.0, num_sanity_val_steps=0, **options)
    return copy_state(module), {name: float(value) for name, value in trainer.callback_metrics.items()}


class OfPyG(pl.LightningDataModule):
    """Uses PyG's loader with a random order."""

    def train_dataloader(self):
        data = make_graph()
        return NeighborLoader(data, [-1], input_nodes=data.train_mask, batch_size=60, shuffle=True)


def train_with_pyg(strategy, nodes=1):
    torch.manual_seed(3)
    module = Plain()
    with enable_pyg_sampling(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "5")  # DDP reseeds from it
        torch.manual_seed(4)
        fit(module, strategy, OfPyG(), num_nodes=nodes)
    return copy_state(module)


def run_node(rank, path):
    found = {case: train_case(case, make_hybrid(**options), 2) for case, (_, options, _) in CASES.items()}
    more = {"num_nodes": 2, "limit_val_batches": 0}
    _, whole = train(make_hybrid(), **more)
    train(make_hybrid(), [SaveAt(path, 5)], **more)
    _, resumed = train(make_hybrid(), path=path, **more)
    return {**found, "resumed": are_equal(whole, resumed), "PyG's": train_with_pyg(make_hybrid(), 2)}


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """Start two nodes of two ranks once for all tests."""
    return run(run_node, 4, str(tmp_path_factory.mktemp("nodes") / "middle.ckpt"), nodes=2)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_two_nodes_are_one_device(case, two_nodes):
    weights, logged = train_case(case, "auto")
    for found in two_nodes:
        assert_equal(found[case][0], weights)
        assert found[case][1] == {name: pytest.approx(value, rel=1e-6) for name, value in logged.items()}


def test_a_random_order_is_the_first_ranks_everywhere(two_nodes):
    for found in two_nodes:
        assert_equal(found["PyG's"], train_with_pyg("auto"))


def test_two_nodes_resume_bit_for_bit(two_nodes):
    assert [found["resumed"] for found in two_nodes] == [True] * 4


def train_elsewhere(rank, *args):
    heartbeat.state_of = lambda process: "unknown"  # as for a process of another machine
    train_for_ever(rank, *args)


def test_a_node_that_is_killed_on_another_machine_is_named_by_its_connection():
    said = RankLoss(1, signal.SIGKILL, "training")
    found = observe(train_elsewhere, 2, "training", NEVER, during=said, lost=[1])
    said.assert_named(found, "has closed its connection")


class Slow(pl.Callback):
    """Delays rank 1 beyond the timeout in the first step, a validation, and between two runs."""

    def __init__(self, rank, seconds):
        self.seconds = seconds if rank == 1 else 0.0

    def on_train_batch_start(self, trainer, module, batch, index):
        time.sleep(self.seconds if trainer.global_step == 0 else 0.0)

    def on_validation_start(self, trainer, module):
        time.sleep(self.seconds)


def train_slowly(rank, timeout):
    slow, module = Slow(rank, 1.6 * timeout), Logging()
    options = {"num_nodes": 2, "callbacks": [slow], "limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer = fit(module, make_hybrid(1, stall_timeout=timeout), epochs=1, **options)
    time.sleep(slow.seconds)
    trainer.validate(module, make_data(), verbose=False)
    return copy_state(module)


def test_a_node_that_is_only_slow_is_waited_for():
    module = Logging()
    fit(module, epochs=1)
    for found in run(train_slowly, 2, 2.0, nodes=2):
        assert_equal(found, copy_state(module))
