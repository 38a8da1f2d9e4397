"""A plain Trainer trains the same on a partitioned graph as on the whole one; differing or lost ranks cause no hang."""

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn import NeighborDataModule, PartitionedDataModule
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.partitioned import partition_graph
from tests.full_graph.launch import observe, run
from tests.patience import NEVER
from tests.sampling.cases import make_plain_graph

OPTIONS = {"num_neighbors": [3, 3], "batch_size": 8, "seed": 7}


def make_trainer(ranks, strategy="ddp", **options):
    return pl.Trainer(
        accelerator="cpu", devices=1, num_nodes=ranks, strategy=strategy, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def make_module():
    pl.seed_everything(1, verbose=False)
    return NodeClassifier(GraphSAGE(3, 8, 2, 3), num_classes=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    partition_graph(make_plain_graph(), folder / "parts", 4, "ldg")
    return str(folder / "parts")


def _train(rank, ranks, folder, strategy):
    weights = []
    for make in (
        lambda: NeighborDataModule(make_plain_graph(), **OPTIONS),
        lambda: PartitionedDataModule(folder, **OPTIONS),
    ):
        module, datamodule = make_module(), make()
        trainer = make_trainer(ranks, strategy, deterministic=strategy == "hyscale")
        trainer.fit(module, datamodule=datamodule)
        scores = trainer.validate(module, datamodule=datamodule, verbose=False)
        weights.append((module.state_dict(), scores))
    torch.distributed.destroy_process_group()
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "hyscale"])
def test_trains_as_on_the_whole_graph(folder, strategy):
    for (whole, scores), (in_parts, others) in run(_train, 2, 2, folder, strategy, nodes=2):
        assert scores == others
        for name, value in whole.items():
            assert torch.equal(value, in_parts[name]), name


def _train_unequal_seeds(rank, ranks, folder):
    # Rank 0 has seeds of one part, the others far fewer.
    chosen = torch.arange(60)[:50]
    datamodule = PartitionedDataModule(folder, chosen, order="local", **OPTIONS)
    owners = datamodule.owners_of_seeds(ranks)
    trainer = make_trainer(ranks, limit_val_batches=0)
    trainer.fit(make_module(), datamodule=datamodule)
    torch.distributed.destroy_process_group()
    return trainer.global_step, torch.bincount(owners, minlength=ranks).tolist(), dict(datamodule.rows_read)


@pytest.mark.slow
def test_unequal_numbers_of_seeds(folder):
    results = run(_train_unequal_seeds, 3, 3, folder, nodes=3)
    counts = results[0][1]
    assert len(set(counts)) > 1
    assert {step for step, _, _ in results} == {2 * -(-max(counts) // 8)}


def _read_some_batches(rank, ranks, folder):
    datamodule = PartitionedDataModule(folder, **OPTIONS, num_workers=2)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    datamodule.setup("fit")
    taken = 0
    for _ in range(1 + 2 * rank):  # without a Trainer, ranks may read different numbers of batches
        for number, _ in enumerate(datamodule.train_dataloader()):
            taken += 1
            if number == rank:
                break
    datamodule.teardown("fit")
    torch.distributed.destroy_process_group()
    return taken


@pytest.mark.slow
def test_ranks_that_read_different_numbers_of_batches(folder):
    assert run(_read_some_batches, 3, 3, folder) == [1, 6, 10]


class _Fail(pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            raise ValueError("too cold")


def _train_and_fail(rank, ranks, folder):
    make_trainer(ranks, callbacks=[_Fail()]).fit(
        make_module(), datamodule=PartitionedDataModule(folder, **OPTIONS, silence=NEVER)
    )


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_by_name(folder):
    outcome = observe(_train_and_fail, 3, 3, folder, nodes=3)
    assert all(code != 0 for code in outcome.exit_codes) or all(outcome.errors)
    assert any("rank 1" in error and "too cold" in error for error in outcome.errors[::2]), outcome.errors
