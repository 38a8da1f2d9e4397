"""Lightning's own callbacks: weight averages equal manual averages; a found batch size trains like a given one."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_gnn import FullGraphDataModule, LinkDataModule, NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GAT, GCN, GraphSAGE, LinkPredictor, NodeClassifier
from tests.cli.command import lgnn, metrics_of
from tests.nn.test_embeddings import make_batches, make_embedded, typed_data

DECAY = 0.6


class WeightRecorder(pl.Callback):
    """Stores the weights after each step, and at the start of each epoch before other callbacks change them."""

    def __init__(self):
        self.steps, self.epochs = [], []

    def on_train_batch_end(self, trainer, module, *args):
        self.steps.append(copy_weights(module))

    def on_train_epoch_start(self, trainer, module):
        self.epochs.append(copy_weights(module))


def copy_weights(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def trainer(tmp_path, callbacks, **options):
    return pl.Trainer(**{
        "max_epochs": 3, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "callbacks": callbacks,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path, **options,
    })  # fmt: skip


def draw():
    return planted_power_law(300, 3000, 3, 8, split=(0.5, 0.2, 0.2))


def make_gnn(kind=GraphSAGE, **options):
    torch.manual_seed(0)
    return NodeClassifier(kind(8, 16, 2, 3, **options), 3, lr=0.02)


SIZES = {"num_neighbors": [4, 3], "batch_size": 40}
CASES = {
    "SAGE, mini-batches": lambda: (make_gnn(), NeighborDataModule(draw(), **SIZES)),
    "GAT, exact inference": lambda: (make_gnn(GAT, heads=2), NeighborDataModule(draw(), **SIZES, inference="full")),
    "GCN, batch normalisation, full graph": lambda: (make_gnn(GCN, norm="batch_norm"), FullGraphDataModule(draw())),
    "SAGE, batch normalisation": lambda: (make_gnn(GraphSAGE, norm="batch_norm"), NeighborDataModule(draw(), **SIZES)),
    "types, sparse embeddings": lambda: (make_embedded(data := typed_data(), lr=0.02), make_batches(data)),
    "types, embeddings": lambda: (make_embedded(data := typed_data(), sparse=False, lr=0.02), make_batches(data)),
}
AVERAGES = {
    "exponential": lambda before, now, count: [
        old * DECAY + new * (1 - DECAY) for old, new in zip(before, now, strict=True)
    ],
    "equal": lambda before, now, count: [old + (new - old) / (count + 1) for old, new in zip(before, now, strict=True)],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", AVERAGES)
def test_weights_are_averaged_and_evaluated(case, kind, tmp_path, fused_always):
    module, datamodule = CASES[case]()
    seen = WeightRecorder()
    averaging = EMAWeightAveraging(decay=DECAY) if kind == "exponential" else WeightAveraging()
    run = trainer(tmp_path, [seen, averaging])
    run.fit(module, datamodule=datamodule)
    expected = seen.steps[0]
    for count, now in enumerate(seen.steps[1:], start=1):
        expected = AVERAGES[kind](expected, now, count)
    for found, value in zip(copy_weights(module), expected, strict=True):
        torch.testing.assert_close(found, value, atol=1e-5, rtol=1e-4)
    weights = zip(copy_weights(module), seen.steps[-1], strict=True)
    assert any(not torch.allclose(found, last) for found, last in weights)
    logged = run.callback_metrics["val_loss"].item()
    again = trainer(tmp_path, []).validate(module, datamodule=datamodule, verbose=False)[0]["val_loss"]
    assert logged == pytest.approx(again, rel=1e-5)


@pytest.mark.parametrize("case", ["SAGE, mini-batches", "types, sparse embeddings"])
def test_an_average_goes_on_where_a_run_was_interrupted(case, tmp_path):
    module, datamodule = CASES[case]()
    trainer(tmp_path, [EMAWeightAveraging(decay=DECAY)]).fit(module, datamodule=datamodule)
    begun, datamodule = CASES[case]()
    saves = ModelCheckpoint(tmp_path, "first", save_on_train_epoch_end=True)
    trainer(tmp_path, [EMAWeightAveraging(decay=DECAY), saves], max_epochs=1, enable_checkpointing=True).fit(
        begun, datamodule=datamodule
    )
    resumed, datamodule = CASES[case]()
    trainer(tmp_path, [EMAWeightAveraging(decay=DECAY)]).fit(
        resumed, datamodule=datamodule, ckpt_path=tmp_path / "first.ckpt", weights_only=True
    )
    for found, value in zip(copy_weights(resumed), copy_weights(module), strict=True):
        torch.testing.assert_close(found, value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if "GCN" not in case])
def test_stochastic_weight_averaging(case, tmp_path, fused_always):
    module, datamodule = CASES[case]()
    seen = WeightRecorder()
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)
    trainer(tmp_path, [seen, averaging], max_epochs=4).fit(module, datamodule=datamodule)
    for found, *values in zip(copy_weights(module), *seen.epochs[1:4], strict=True):
        torch.testing.assert_close(found, torch.stack(values).mean(0), atol=1e-5, rtol=1e-4)
    for name, buffer in module.named_buffers():  # batch normalization statistics are recomputed after averaging
        assert not name.endswith("num_batches_tracked") or 0 < buffer <= 5


def make_links():
    data = draw()
    torch.manual_seed(0)
    module = LinkPredictor(GraphSAGE(8, 16, 2), lr=0.02)
    edges = {"input_train_edges": data.edge_index[:, :200], "input_val_edges": data.edge_index[:, 200:260]}
    return module, lambda size: LinkDataModule(
        data, **edges, num_neighbors=[4, 3], batch_size=size, seed=1, neg_sampling="binary"
    )


def make_nodes(num_workers=0):
    options = {"num_neighbors": [4, 3], "seed": 1, "num_workers": num_workers}
    return make_gnn(), lambda size: NeighborDataModule(draw(), batch_size=size, **options)


def make_types():
    data = typed_data()
    options = {"num_neighbors": [3, 2], "seed": 1, "share_memory": False}
    return make_embedded(data, lr=0.02), lambda size: NeighborDataModule(data, batch_size=size, **options)


SIZED = {"nodes": make_nodes, "threads": lambda: make_nodes(2), "types": make_types, "links": make_links}


@pytest.mark.slow
@pytest.mark.parametrize("case", SIZED)
def test_a_batch_size_that_is_found_trains_as_if_it_had_been_given(case, tmp_path):
    module, build = SIZED[case]()
    datamodule = build(2)
    finder = BatchSizeFinder(steps_per_trial=2, init_val=4, max_trials=3)
    trainer(tmp_path, [finder], max_epochs=2).fit(module, datamodule=datamodule)
    assert finder.optimal_batch_size == datamodule.batch_size >= 8
    given, build = SIZED[case]()
    trainer(tmp_path, [], max_epochs=2).fit(given, datamodule=build(finder.optimal_batch_size))
    for found, value in zip(copy_weights(module), copy_weights(given), strict=True):
        torch.testing.assert_close(found, value)


@pytest.mark.slow
def test_from_the_command_line_the_average_is_tested_and_kept(tmp_path):
    averaging = [
        "+callbacks.ema._target_=pytorch_lightning.callbacks.EMAWeightAveraging", "+callbacks.ema.decay=0.9",
        "datamodule.num_neighbors=[-1,-1]",
    ]  # fmt: skip
    assert lgnn(tmp_path / "run", *averaging) == 0
    assert lgnn(tmp_path / "plain", averaging[-1]) == 0
    checkpoint = f"ckpt_path={tmp_path}/run/checkpoints/best.ckpt"
    assert lgnn(tmp_path / "test", "mode=test", checkpoint, base=[]) == 0
    found = metrics_of(tmp_path / "run")
    assert metrics_of(tmp_path / "test")["test_loss"] == pytest.approx(found["test_loss"], rel=1e-6)
    assert found["test_loss"] != metrics_of(tmp_path / "plain")["test_loss"]
