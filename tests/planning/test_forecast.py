"""Measurements of a run and forecasts from them, on constructed numbers and real runs, without timing assertions."""

import copy
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.nn import GAT, GCN, GraphSAGE, LinkPredictor, NodeClassifier
from lightning_gnn.planning.forecast import CPUForecast, batches_of_epoch, measure_run
from lightning_gnn.planning.preparation import Preparation, ahead_of, prepare
from lightning_gnn.planning.steps import PARTS, TimedStep, product_flops, take_apart, time_together
from lightning_gnn.runtime.devices import num_cores
from tests.refusals import refuses

DATA = planted_power_law(300, 2000, 3, 8, split=(0.5, 0.2, 0.2))
SAMPLED = {"num_neighbors": [4, 3], "batch_size": 20}


def make_trainer(**more):
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "enable_model_summary": False, **more})


def make_gnn(**more):
    return NodeClassifier(GraphSAGE(8, 16, 2, 3, dropout=0.5, **more), 3)


# -- measurements


@pytest.mark.parametrize("num_workers", [0, 2])
def test_mini_batches_are_those_of_the_run(num_workers):
    datamodule = NeighborDataModule(DATA, **SAMPLED, num_workers=num_workers, seed=5)
    batches, cost = prepare(datamodule.train_dataloader())
    real = list(NeighborDataModule(DATA, **SAMPLED, num_workers=num_workers, seed=5).train_dataloader())
    for ours, theirs in zip(batches, real, strict=False):
        assert torch.equal(ours.n_id, theirs.n_id)
        assert torch.equal(ours.edge_index, theirs.edge_index)
        assert torch.equal(ours.x, theirs.x)
    count = len(batches)
    assert cost.nodes == sum(batch.num_nodes for batch in batches) / count
    assert cost.edges == sum(batch.num_edges for batch in batches) / count
    assert cost.feature_bytes == sum(batch.x.nbytes for batch in batches) / count
    assert cost.known
    assert cost.workers == num_workers
    assert cost.seconds == cost.sampling_s + cost.features_s > 0
    assert (cost.training_thread_s >= cost.seconds) == (num_workers == 0)


class Own(pl.LightningModule):
    """A module with manual optimization and its own model."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 3)
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.lin(batch.x).square().mean())
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnData(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader([DATA] * 6, batch_size=None, collate_fn=lambda data: data)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


RUNS = {
    "SAGE": lambda: (NeighborDataModule(DATA, **SAMPLED, num_workers=1), make_gnn()),
    "GCN": lambda: (NeighborDataModule(DATA, **SAMPLED, num_workers=0), NodeClassifier(GCN(8, 16, 2, 3), 3)),
    "GAT": lambda: (NeighborDataModule(DATA, **SAMPLED), NodeClassifier(GAT(8, 16, 2, 3, heads=4), 3)),
    "links": lambda: (
        LinkDataModule(DATA, DATA.edge_index[:, :100], **SAMPLED, neg_sampling="binary"),
        LinkPredictor(GraphSAGE(8, 16, 2, 16)),
    ),
    "full graph": lambda: (FullGraphDataModule(DATA), make_gnn()),
    "own": lambda: (OwnData(), Own()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_measured_and_left_alone(name):
    torch.manual_seed(0)
    datamodule, module = RUNS[name]()
    before, threads = copy.deepcopy(module.state_dict()), torch.get_num_threads()
    found = measure_run(datamodule, module, make_trainer, threads=2)
    assert torch.get_num_threads() == threads
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])
    assert set(found.steps) == {1, 2, num_cores()}
    for step in found.steps.values():
        assert set(step.parts) == set(PARTS)
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        assert step.seconds > 0
        assert step.flops > 0
        assert step.parts["products"] > 0
        assert step.parts["optimizer"] > 0
    assert found.batches == len(datamodule.train_dataloader())
    assert found.epoch_s >= found.batches * found.step.total * found.slowdown
    assert found.preparation.workers or found.slowdown == 1.0
    assert found.bottleneck in found.parts
    unknown = " ".join(found.unknown)
    assert ("on_after_batch_transfer" in unknown) == (name == "own")


@pytest.mark.slow
def test_products_are_counted():
    """One layer of GraphSAGE: two products forward, and two for the gradients of their weights."""
    wide = planted_power_law(400, 4000, 3, 32, split=(0.5, 0.2, 0.2))
    datamodule = NeighborDataModule(wide, num_neighbors=[5], batch_size=200, num_workers=0)
    model = NodeClassifier(GraphSAGE(32, 64, 1, 3), 3)
    found = measure_run(datamodule, model, make_trainer, threads=1)
    assert found.step.flops == 2 * (200 * 32 * 3) * 2 * 2


@pytest.mark.parametrize(("limit", "count"), [(None, 10), (1.0, 10), (0.25, 2), (3, 3), (30, 10), (0, 0)])
def test_mini_batches_of_an_epoch_as_lightning_counts_them(limit, count):
    assert batches_of_epoch(range(10), limit) == count
    assert batches_of_epoch(iter([]), limit) == (limit if isinstance(limit, int) else 0)  # without a known length
    if count:
        trainer = make_trainer(limit_train_batches=limit, max_epochs=1, logger=False, enable_checkpointing=False,
                               enable_progress_bar=False)  # fmt: skip
        module = Own()
        trainer.fit(module, DataLoader([DATA] * 10, batch_size=None, collate_fn=lambda data: data))
        assert module.steps == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"limit_train_batches": 0}, "leaves nothing to train"), ({"devices": 2, "strategy": "ddp"}, "one process")],
)
def test_what_cannot_be_planned(arguments, message):
    datamodule = NeighborDataModule(DATA, **SAMPLED)
    refuses(ValueError, message, measure_run, datamodule, make_gnn(), lambda **more: make_trainer(**(more | arguments)))


# -- forecasts from constructed numbers


def record(name, milliseconds, start=0, parent=None, shapes=()):
    return SimpleNamespace(
        name=name, self_cpu_time_total=1e3 * milliseconds, cpu_parent=parent, input_shapes=list(shapes),
        time_range=SimpleNamespace(start=start, end=start + 1),
    )  # fmt: skip


def test_a_step_is_taken_apart():
    optimizer = record("Optimizer.step#Adam.step", 1)
    events = [
        record("aten::addmm", 5, parent=optimizer, shapes=[[3], [10, 4], [4, 3]]),
        record("aten::bmm", 1, shapes=[[2, 5, 4], [2, 4, 3]]),
        record("aten::linear", 0, shapes=[[10, 4], [3, 4], [3]]),
        record("lightning_gnn::aggregate_update", 7),
        record("aten::index_select", 2),
        record("aten::bernoulli_", 3),
        record("lightning_gnn::row_dropout", 1),
        record("aten::relu", 2),
        optimizer,
        record("autograd::engine::evaluate_function: AddmmBackward0", 1, start=7, parent=optimizer),
        record("aten::_fused_adam_", 4, start=8, parent=record("inner", 0, parent=optimizer)),
        record("aten::add", 1, start=9),
    ]
    parts, flops = take_apart(events, 0.030)
    assert {name: round(1e3 * value, 6) for name, value in parts.items()} == {
        "products": 6, "aggregation": 9, "dropout": 4, "elementwise": 3, "optimizer": 4, "Python": 4,
    }  # fmt: skip
    assert flops == 2 * 10 * 4 * 3 + 2 * 2 * 5 * 4 * 3
    assert product_flops([]) == product_flops([[3], [4, 5]]) == 0  # fewer than two matrices


def forecast(sampling=0.0, features=0.0, workers=1, threads=1, cores=4, **steps):
    prepared = Preparation(sampling, features, workers=workers, edges=1.0)
    made = {
        int(number.removeprefix("t")): TimedStep(
            seconds, 0.0, 1, {"products": 0.6 * seconds, "aggregation": 0.4 * seconds}
        )
        for number, seconds in steps.items()
    }
    return CPUForecast(prepared, made, threads, cores, batches=10)


@pytest.mark.parametrize(("batches", "known"), [(4, False), (40, True)])
def test_training_and_preparing_are_measured_together(batches, known):
    datamodule = NeighborDataModule(DATA, num_neighbors=[3], batch_size=3, input_train_nodes=torch.arange(3 * batches))
    datamodule.setup("fit")
    loader, threads = datamodule.train_dataloader(), torch.get_num_threads()
    seconds = time_together(make_gnn(), make_trainer, loader, ahead_of(loader), 1)
    assert (seconds is not None) == known
    assert seconds is None or 0 < seconds < 60
    assert torch.get_num_threads() == threads


def test_bottlenecks_and_better_settings():
    training = forecast(0.1, 0.2, t1=2.0, t4=0.6)
    assert (training.rhythm.bound, training.bottleneck) == ("training", "products")
    assert training.epoch_s == pytest.approx(0.3 + 20.0)
    assert training.better_threads()[1] == 4
    waiting = forecast(1.0, 3.0, t1=1.0)
    assert (waiting.rhythm.bound, waiting.bottleneck) == ("preparing", "features")
    assert waiting.epoch_s == pytest.approx(4.0 + 40.0)
    workers, threads, seconds = waiting.better_threads()
    assert (workers, threads) in ((3, 1), (4, 1))
    assert seconds == pytest.approx(4.0 + 10 * 4 / 3, rel=0.1)
    alone = forecast(1.0, 3.0, workers=0, cores=1, t1=1.0)
    assert (alone.epoch_s, alone.bottleneck) == (pytest.approx(50.0), "features")
    assert alone.better_threads()[:2] == (0, 1), "one core gains nothing by workers"
    full = forecast(3.0, 0.0, workers=2, cores=2, threads=2, t1=4.0, t2=2.0)
    assert (full.rhythm.bound, full.bottleneck) == ("cores", "sampling")
