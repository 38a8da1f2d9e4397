"""Checkpoints: bit-for-bit resume, files that load without the strategy, decisions that are replayed."""

import json

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch.utils.data import WeightedRandomSampler
from torch_geometric.loader import NeighborLoader

from lightning_gnn.hyscale.first_mapping import describe_workload, first_mapping
from lightning_gnn.hyscale.options import Trainers
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.hyscale.work_balance import WorkBalance
from lightning_gnn.runtime.checkpoint_io import SafeCheckpointIO
from lightning_gnn.sampling.loader import ThreadedNodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.hyscale.models import Module, Steps, data_module, fit, graph, hybrid, left_threads, trainer


class SaveAt(pl.Callback):
    """Writes a checkpoint after a batch, and ends the run there if it shall."""

    def __init__(self, path, batch, stop):
        self.path, self.batch, self.stop = path, batch, stop

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.stop


def run(strategy, callbacks=(), ckpt_path=None, **options):
    module = Module("adam", dropout=0.5).double()
    torch.manual_seed(11)
    steps = Steps()
    fit_with = trainer(strategy, [steps, *callbacks], max_epochs=3, **options)
    fit_with.fit(module, datamodule=data_module(fanouts=[3, 2], num_workers=2), ckpt_path=ckpt_path, weights_only=True)
    return module, steps


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("options", [{}, {"shares": [0.7, 0.3]}, {"cpu_trainers": 1}], ids=str)
@pytest.mark.parametrize("batch", [1, 4, 6], ids=lambda batch: f"after {batch}")
def test_an_interrupted_run_goes_on_bit_for_bit(batch, options, tmp_path):
    whole, steps = run(hybrid(**options))
    path = tmp_path / "middle.ckpt"
    run(hybrid(**options), [SaveAt(path, batch, stop=True)])
    resumed, rest = run(hybrid(**options), ckpt_path=path)
    assert len(rest.gradients) == len(steps.gradients) - batch - 1
    assert same(resumed, whole)
    assert not left_threads()


@pytest.mark.slow
@pytest.mark.parametrize("cpu_trainers", [1, 2])
@pytest.mark.parametrize("batch", [1, 4, 6], ids=lambda batch: f"after {batch}")
@pytest.mark.parametrize("own_data_module", [False, True])
def test_orders_drawn_from_torchs_generator_go_on(own_data_module, batch, cpu_trainers, tmp_path):
    """Those of a loader that shuffles by itself, or of a sampler of the user's own."""

    class Shuffling(pl.LightningDataModule):
        def train_dataloader(self):
            data = graph()
            sampler = NeighborSampler(data, [3, 2], seed=5)
            return ThreadedNodeLoader(data, sampler, input_nodes=data.train_mask, batch_size=20, shuffle=True)

    def train(seed, callbacks=(), ckpt_path=None):
        torch.manual_seed(seed)
        module = Module("adam", dropout=0.5).double()
        torch.manual_seed(seed)
        data = Shuffling()
        if own_data_module:
            count = int(graph().train_mask.sum())
            data = data_module(fanouts=[3, 2], sampler=WeightedRandomSampler(torch.ones(count), count))
        fit_with = trainer(hybrid(cpu_trainers), callbacks, max_epochs=3, limit_val_batches=0)
        fit_with.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return module

    path = tmp_path / "middle.ckpt"
    whole = train(11)
    train(11, [SaveAt(path, batch, stop=True)])
    assert same(train(11, ckpt_path=path), whole)
    assert same(train(12, ckpt_path=path), whole)


@pytest.mark.usefixtures("pyg_sampling")
@pytest.mark.parametrize("batch", [1, 3])
def test_with_pygs_loader_the_order_of_the_epoch_goes_on(batch, tmp_path):
    """Its sampler draws from torch's generator: what it samples, and the next epoch's order, are not continued."""

    class Data(type(data_module())):
        state_dict, load_state_dict = pl.LightningDataModule.state_dict, pl.LightningDataModule.load_state_dict

        def train_dataloader(self):
            return NeighborLoader(self.data, [-1, -1], input_nodes=self.data.train_mask, batch_size=20, shuffle=True)

    def train(callbacks=(), ckpt_path=None):
        module = Module("adam").double()
        torch.manual_seed(11)
        data = Data(graph(), num_neighbors=[-1], batch_size=20, seed=0)
        trainer(hybrid(), callbacks, max_epochs=1).fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return module

    path = tmp_path / "middle.ckpt"
    whole = train()
    train([SaveAt(path, batch, stop=True)])
    assert same(train(ckpt_path=path), whole)


def test_checkpoints_are_written_whole_with_loaders_of_any_kind():
    own = TorchCheckpointIO()
    assert type(hybrid().checkpoint_io) is SafeCheckpointIO
    assert hybrid(checkpoint_io=own).checkpoint_io is own


def test_a_checkpoint_loads_without_the_strategy(tmp_path):
    path = tmp_path / "middle.ckpt"
    ours, _ = run(hybrid(), [SaveAt(path, 6, stop=True)])
    state = torch.load(path, weights_only=True)
    loaded = Module("adam", dropout=0.5).double()
    loaded.load_state_dict(state["state_dict"])
    assert same(loaded, ours)
    plain, steps = run("auto", ckpt_path=path)
    assert steps.gradients
    assert not same(plain, ours)


def test_evaluation_needs_no_trainers():
    module, _ = run(hybrid())
    ours = trainer(hybrid())
    data = data_module(fanouts=[-1, -1], input_pred_nodes=torch.arange(50))
    for stage in ("validate", "test"):
        found = getattr(ours, stage)(module, datamodule=data, verbose=False)
        expected = getattr(trainer(), stage)(module, datamodule=data, verbose=False)
        assert found == expected
    found = torch.cat(ours.predict(module, datamodule=data))
    assert torch.equal(found, torch.cat(trainer().predict(module, datamodule=data)))
    assert found.size(0) == 50
    assert not left_threads()


def test_fit_twice_with_one_trainer():
    module = Module().double()
    both = trainer(hybrid(), max_epochs=1)
    both.fit(module, datamodule=data_module())
    both.fit_loop.max_epochs = 2
    both.fit(module, datamodule=data_module())
    assert both.current_epoch == 2
    assert not left_threads()


def balanced(**options):
    return HyScaleStrategy(2, **{"drm": True, "threads": [1, 1, 1], "stall_timeout": 60.0, **options})


def unlevel(monkeypatch):
    """Trainer 0 seems three times as fast as trainer 1."""
    original = WorkBalance.times

    def times(self, batch, seconds, iteration):
        found = original(self, batch, [0.001 * batch.seeds[0], 0.003 * batch.seeds[1]], 0.05)
        return found

    monkeypatch.setattr(WorkBalance, "times", times)


def test_work_moves_to_the_faster_trainer_and_decisions_are_recorded_and_replayed(monkeypatch, tmp_path):
    unlevel(monkeypatch)
    record = tmp_path / "log" / "decisions.jsonl"
    strategy = HyScaleStrategy(1, 0.5, devices=["cpu"], threads=[1, 1, 1], decision_log=record)
    whole, steps = run(strategy, max_steps=40)
    mapping = strategy.balance.mapping
    assert mapping.total == 20
    assert mapping.seeds[0] > mapping.seeds[1] > 0
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(lines) >= 2
    assert all(line["explanation"] for line in lines)
    assert lines[0]["mapping"]["seeds"] == [10, 10]
    assert len(strategy.balance.history) == len(steps.gradients)

    replayed = HyScaleStrategy(1, devices=["cpu"], drm=record)
    again, others = run(replayed, max_steps=40)
    assert same(again, whole)
    assert len(others.gradients) == len(steps.gradients)

    path = tmp_path / "middle.ckpt"
    batch = lines[1]["observation"]  # while iterations that were shared out before the decision are under way
    run(HyScaleStrategy(1, devices=["cpu"], drm=record), [SaveAt(path, batch, stop=True)])
    resumed, _ = run(HyScaleStrategy(1, devices=["cpu"], drm=record), ckpt_path=path)
    assert same(resumed, whole)


class Removes(pl.Callback):
    def __init__(self, record):
        self.record = record

    def on_train_start(self, trainer, module):
        self.record.unlink()
        self.record.mkdir()


def test_decisions_that_cannot_be_recorded_do_not_end_a_run(monkeypatch, tmp_path):
    unlevel(monkeypatch)
    options = {"devices": ["cpu"], "threads": [1, 1, 1]}
    record = tmp_path / "decisions.jsonl"
    with pytest.warns(UserWarning, match=r"decisions.jsonl ends before observation \d+, which a replay would miss"):
        _, steps = run(HyScaleStrategy(1, 0.5, decision_log=record, **options), [Removes(record)], max_steps=40)
    _, others = run(HyScaleStrategy(1, 0.5, **options), max_steps=40)
    assert len(steps.gradients) == len(others.gradients)
    with pytest.raises(IsADirectoryError):  # at the start it is
        run(HyScaleStrategy(1, 0.5, decision_log=record, **options))


def test_a_balanced_run_is_resumed_with_its_state(tmp_path):
    path = tmp_path / "middle.ckpt"
    strategy = balanced()
    run(strategy, [SaveAt(path, 6, stop=True)])
    resumed = balanced()
    run(resumed, ckpt_path=path)
    assert resumed.balance.manager._number > 6
    other = HyScaleStrategy(3, threads=[1, 1, 1])
    run(other, ckpt_path=path)  # with other trainers it begins anew
    assert not left_threads()


def sampling_there(share):
    return HyScaleStrategy(1, 0.5, devices=["cpu"], threads=[1, 1, 1], accelerator_sampling=share)


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.4), (0.4, 0.0), (0.2, 0.4)])
def test_a_balanced_run_whose_sampling_is_elsewhere_after_it_is_resumed(before, after, tmp_path):
    """A share of 0 could not grow, and one for accelerators that no longer sample would be kept for ever."""
    path = tmp_path / "middle.ckpt"
    run(sampling_there(before), [SaveAt(path, 6, stop=True)])
    resumed = sampling_there(after)
    run(resumed, ckpt_path=path)
    balance = resumed.balance
    if before and after:
        assert balance.manager._number > 8
        return
    assert balance.mapping.accelerator_sampling == balance.accelerator_sampling == after
    assert balance.manager._number <= 8
    assert (resumed.loader.sampling is not None) == any(times.sample_accelerator for times, _ in balance.history)
    assert not left_threads()


def of_other_threads(state):
    state["mapping"]["threads"] = [9, 9, 9]


def of_another_version(state):
    state["history"] = [[state["mapping"], {}]]  # as it once was
    del state["iterations"]


@pytest.mark.parametrize("change", [of_other_threads, of_another_version])
def test_a_state_that_does_not_fit_is_left_out(change, tmp_path):
    path = tmp_path / "middle.ckpt"
    run(balanced(), [SaveAt(path, 6, stop=True)])
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint["hyscale"]["balance"][0]["manager"])
    torch.save(checkpoint, path)
    resumed = balanced()
    with pytest.warns(UserWarning, match="hyscale balances anew"):
        run(resumed, ckpt_path=path)
    assert resumed.balance.threads == resumed.balance.mapping.threads == (1, 1, 1)
    assert resumed.balance.manager._number <= 8


def test_times_of_every_stage_are_measured():
    strategy = hybrid(1, devices=["cpu"], transfer_dtype="int8")
    fit(Module(), strategy)
    times = [entry for entry, _ in strategy.balance.history]
    assert times
    for entry in times:
        assert entry.sample_cpu > 0
        assert entry.load > 0
        assert entry.transfer > 0
        assert len(entry.train_cpu) == len(entry.train_accelerator) == 1
        assert sum(entry.seeds) <= 20


def test_the_first_mapping_is_the_performance_models():
    """By measurements of this machine, of which only the kind of the answer is known."""
    loader = data_module(fanouts=[3, 2]).train_dataloader()
    trainers = Trainers.of(1, [torch.device("cpu")] * 2)
    mapping = first_mapping(trainers, loader, Module(), 20, (1, 2, 3))
    assert mapping.total == 20
    assert len(mapping.seeds) == 3
    assert sum(mapping.threads) == 6
    workload, edges_per_s = describe_workload(loader, Module(), 20)
    assert workload.widths == (6, 8, 4)
    assert workload.measured.vertices[-1] == 20
    assert workload.measured.edges == tuple(map(float, sorted(workload.measured.edges, reverse=True)))
    assert edges_per_s > 0
    assert first_mapping(Trainers.of(2, []), loader, Module(), 20, (1, 1, 1)) is None


def test_accumulated_and_skipped_losses_do_not_disturb_the_balance():
    class Skipping(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else self.loss(batch)

    strategy = balanced()
    fit(Skipping(), strategy, accumulate_grad_batches=2)
    assert len(strategy.balance.history) >= 8
    assert not strategy.balance._issued


@pytest.mark.parametrize("kind", ["LBFGS"])
def test_an_optimizer_that_runs_several_times_over_a_batch(kind):
    class Closure(Module):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)

    plain, ours = Closure(), Closure()
    expected, _ = fit(plain, max_epochs=1)
    found, _ = fit(ours, hybrid(), max_epochs=1)
    assert len(found.gradients) == len(expected.gradients) > 5
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
