"""A stopped run resumes with another number of ranks, in the same epoch, with the remaining seeds."""

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_gnn import PartitionedDataModule
from lightning_gnn.loading.seed_order import ElasticOrder, TrainingOrder
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.partitioned import partition_graph
from tests.full_graph.launch import observe, run
from tests.sampling.cases import make_plain_graph

runs = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4)


def make_orders(num_seeds, batch_size, history, ranks):
    options = {"num_replicas": ranks, "shuffle": True, "seed": 4}
    return [ElasticOrder(num_seeds, batch_size, history, rank=rank, **options) for rank in range(ranks)]


@given(st.integers(1, 60), runs)
def test_each_seed_once_whoever_takes_the_steps(num_seeds, runs):
    seen, history = [], []
    for number, (ranks, batch_size, steps) in enumerate(runs):
        orders = make_orders(num_seeds, batch_size, history, ranks)
        done = orders[0].steps_before
        of_rank = [order.positions().split(batch_size) for order in orders]
        assert {len(batches) for batches in of_rank} == {-(-len(orders[0]) // batch_size)}  # equal on all ranks
        last = number == len(runs) - 1
        stop = len(of_rank[0]) if last else min(done + steps, len(of_rank[0]))
        for step in range(done, stop):
            for order, batches in zip(orders, of_rank, strict=True):
                assert 0 < batches[step].numel() <= batch_size
                if order.weight(step):
                    seen += batches[step].tolist()
            shares = [order.weight(step) / ranks for order in orders]
            assert sum(shares) == pytest.approx(1)
        history = [*history, (stop - done, ranks * batch_size)]
    assert sorted(seen) == list(range(num_seeds))


def test_one_rank_takes_the_order_of_one_machine():
    (order,) = make_orders(23, 4, [], 1)
    plain = TrainingOrder(range(23), num_replicas=1, rank=0, shuffle=True, seed=4)
    for epoch in (0, 3):
        order.set_epoch(epoch)
        plain.set_epoch(epoch)
        assert torch.equal(order.positions(), plain.positions())


class _Stop(Exception):
    pass


class _Watch(pl.Callback):
    """Records the seeds of each epoch, and stops the run in the middle of one."""

    def __init__(self, stop_at):
        self.stop_at = stop_at
        self.seeds = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        weight = trainer.datamodule._elastic.order.weight(number)
        seeds = batch.n_id[: batch.batch_size].tolist() if weight else []
        self.seeds.setdefault(trainer.current_epoch, []).append(seeds)

    def on_train_batch_start(self, trainer, module, batch, number):
        if trainer.global_step == self.stop_at:
            raise _Stop


def _train(rank, ranks, folder, batch_size, steps, from_checkpoint, options=None):
    pl.seed_everything(3, verbose=False)
    module = NodeClassifier(GraphSAGE(3, 8, 2, 3, dropout=0.0), num_classes=3, lr=0.05)
    datamodule = PartitionedDataModule(
        f"{folder}/parts", num_neighbors=[-1, -1], batch_size=batch_size, seed=2, **{"elastic": True, **(options or {})}
    )
    watch = _Watch(steps)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, num_nodes=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=3,
        logger=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        callbacks=[watch, ModelCheckpoint(folder, save_last=True, every_n_train_steps=1, save_top_k=0)],
        default_root_dir=folder,
    )  # fmt: skip
    try:
        trainer.fit(module, datamodule=datamodule, ckpt_path=f"{folder}/last.ckpt" if from_checkpoint else None)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except _Stop:
        pass
    return watch.seeds, {name: value.clone() for name, value in module.state_dict().items()}, trainer.global_step


@pytest.fixture
def folder(tmp_path):
    partition_graph(make_plain_graph(), tmp_path / "parts", 4, "ldg")
    return str(tmp_path)


def collect_seeds(outcomes, epoch):
    """Return all seeds of an epoch, of all ranks of all runs."""
    return sorted(
        seed for outcome in outcomes for seen, *_ in outcome for batch in seen.get(epoch, []) for seed in batch
    )


@pytest.mark.slow
def test_other_numbers_of_ranks_train_as_one(folder, tmp_path_factory):
    alone = tmp_path_factory.mktemp("alone")
    partition_graph(make_plain_graph(), alone / "parts", 4, "ldg")
    (_, expected, steps), *_ = run(_train, 1, 1, str(alone), 8, -1, False)
    # Eight seeds per step on one, four and two ranks; each run stops within an epoch.
    outcomes = [
        run(_train, 1, 1, folder, 8, 2, False, nodes=1),
        run(_train, 4, 4, folder, 2, 6, True, nodes=4),
        run(_train, 2, 2, folder, 4, -1, True, nodes=2),
    ]
    trained = make_plain_graph().train_mask.nonzero().view(-1).tolist()
    for epoch in range(3):
        assert collect_seeds(outcomes, epoch) == trained
    assert {step for _, _, step in outcomes[-1]} == {steps}
    for _, weights, _ in outcomes[-1]:
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_run_that_is_not_elastic_says_so(folder):
    run(_train, 1, 1, folder, 8, 2, False)
    errors = observe(_train, 2, 2, folder, 8, -1, True, {"elastic": False}, nodes=2).errors
    assert all("within an epoch of 1 ranks, but there are 2: elastic=True" in error for error in errors)
