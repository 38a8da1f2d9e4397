"""Several ranks and one process agree: gradients, weights, logs, test results and predictions."""

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.full_graph.strategy import AscendHybridParallelStrategy
from tests.campaigns import campaign
from tests.full_graph.launch import run
from tests.full_graph.training import (
    ALL,
    DROPPING,
    ManualOptimization,
    SideBySide,
    Twice,
    assert_same,
    small_data,
    train,
    trainer_of,
)
from tests.patience import NEVER

EPOCHS = {"max_epochs": 5, "check_val_every_n_epoch": 5}


def train_in_groups(rank, num_ranks, numbers, models, logs):
    return [train(num_ranks, groups, SideBySide(models, logs=logs), **EPOCHS) for groups in numbers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "numbers", "models", "logs"), [(2, [1, "auto"], ALL, True), (3, [1, 3], ALL, False)]
)
def test_every_number_of_groups_trains_like_one_process(num_ranks, numbers, models, logs):
    alone = train(1, module=SideBySide(models, logs=logs), **EPOCHS)
    for results in run(train_in_groups, num_ranks, num_ranks, numbers, models, logs):
        for result in results:
            assert_same(alone, result, 1e-10)


@campaign
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "numbers"), [(4, [1, 2, 4]), (6, [1, 2, 3, 6])])
def test_many_ranks_train_like_one_process(num_ranks, numbers, number):
    groups = numbers[number % len(numbers)]
    test_every_number_of_groups_trains_like_one_process(num_ranks, [groups], DROPPING, False)


def train_other_ways(rank, num_ranks):
    """Train with other options of Lightning."""
    two = (("gcn", 0.5), ("gat", 0.5))
    few = {"max_epochs": 4, "check_val_every_n_epoch": 2}
    single = small_data(dtype=torch.float32)
    twice = {"accumulate_grad_batches": 2, "batches": Twice}
    return {
        "float32": train(num_ranks, module=SideBySide(two, torch.float32), data=single),
        "by hand": train(num_ranks, module=ManualOptimization(two), **few),
        "clipped": train(num_ranks, module=SideBySide(two), gradient_clip_val=0.05, **few),
        "accumulated": train(num_ranks, module=SideBySide(two), **few, **twice),
    }


@pytest.mark.slow
def test_other_ways_of_training_are_those_of_one_process():
    alone = train_other_ways(0, 1)
    for results in run(train_other_ways, 2, 2):
        for name, expected in alone.items():
            assert_same(expected, results[name], 1e-5 if name == "float32" else 1e-10)
    assert (torch.linalg.vector_norm(alone["clipped"]["gradients"], dim=1) > 0.05).all()  # norms before clipping


def resume(rank, num_ranks, folder):
    """Train four epochs, and resume the last two from a checkpoint."""
    paths = []
    for epochs, ckpt_path in ((2, None), (4, f"{folder}/2.ckpt"), (4, None)):
        pl.seed_everything(3, verbose=False)
        module = SideBySide(DROPPING[:1])
        trainer = trainer_of(AscendHybridParallelStrategy(timeout=NEVER), num_ranks, max_epochs=epochs)
        trainer.fit(module, datamodule=FullGraphDataModule(small_data()), ckpt_path=ckpt_path)
        if epochs == 2:
            trainer.save_checkpoint(f"{folder}/2.ckpt")
        paths.append(module.state_dict())
    return paths[1:]


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_which_any_strategy_reads(tmp_path):
    for resumed, whole in run(resume, 2, 2, str(tmp_path)):
        assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    checkpoint = torch.load(tmp_path / "2.ckpt", weights_only=True)
    module = SideBySide(DROPPING[:1])
    module.load_state_dict(checkpoint["state_dict"])
    trainer_of("auto", 1, max_epochs=4).fit(
        module, datamodule=FullGraphDataModule(small_data()), ckpt_path=tmp_path / "2.ckpt"
    )


def predict_some(rank, num_ranks):
    data = small_data()
    data.pred_nodes = torch.tensor([5, 80, 5, 0, 33, 7])
    module = Chosen(DROPPING)
    trainer = trainer_of(AscendHybridParallelStrategy(timeout=NEVER), num_ranks)
    return trainer.predict(module, datamodule=FullGraphDataModule(data))[0]


class Chosen(SideBySide):
    def predict_step(self, batch, index):
        return self.outputs(batch)[0][batch.pred_nodes]


@pytest.mark.slow
def test_predictions_of_chosen_nodes_come_in_their_order():
    expected = predict_some(0, 1)
    assert len(expected) == 6
    for predicted in run(predict_some, 3, 3):
        torch.testing.assert_close(predicted, expected, rtol=1e-12, atol=1e-12)
