"""What decides nothing with ``Trainer(deterministic=True)``, and what a checkpoint decides: no measurement does."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from omegaconf import OmegaConf

from lightning_gnn.hyscale import first_mapping, report, strategy
from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.hyscale.work_balance import WorkBalance
from lightning_gnn.hyscale.workload import Platform, Processor
from tests.hyscale.models import Module, data_module, trainer
from tests.hyscale.test_resume import SaveAt, run, same


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.use_deterministic_algorithms(False)  # the Trainer's option is a switch of the whole process


@pytest.fixture
def measured(monkeypatch):
    """Each measurement of the machine finds another one; returns how many there were."""
    found = []

    def another(trainers, *rates):
        slow, fast = Processor(1e9, 1e9), Processor(1e9 * 2 ** (1 + len(found)), 1e9 * 2 ** (1 + len(found)))
        found.append(trainers)
        return Platform(slow, 2, fast, trainers.num_accelerators, sampling=1e7)

    for place in (first_mapping, report):
        monkeypatch.setattr(place, "measure_platform", another)
    return found


@pytest.fixture
def unsteady(monkeypatch):
    """In each run another trainer seems to be slow."""
    original, run_number = WorkBalance.__init__, count()

    def begin(self, *args, **kwargs):
        self.run = next(run_number)
        original(self, *args, **kwargs)

    def times(self, batch, seconds, iteration):
        cpu = self.trainers.num_cpu
        own = [1e-3 * seeds * (5 if (i + self.run) % 2 else 1) for i, seeds in enumerate(batch.seeds)]
        return replace(
            steady(self, batch, seconds, iteration),
            train_cpu=tuple(own[:cpu]),
            train_accelerator=tuple(own[cpu:]),
            iteration=0.05,
        )

    steady = WorkBalance.times
    monkeypatch.setattr(WorkBalance, "__init__", begin)
    monkeypatch.setattr(WorkBalance, "times", times)


TRAINERS = [{"cpu_trainers": 2}, {"devices": ["cpu"]}, {"cpu_trainers": 2, "devices": ["cpu", "cpu"]}]


@pytest.mark.usefixtures("unsteady")
@pytest.mark.parametrize("trainers", TRAINERS, ids=str)
@pytest.mark.parametrize("deterministic", [True, "warn"])
def test_equal_runs_are_equal_bit_for_bit_whatever_is_measured(deterministic, trainers, measured):
    with pytest.warns(UserWarning, match="measurements: drm=True") as told:
        first, _ = run(HyScaleStrategy(**trainers), deterministic=deterministic)
    second, _ = run(strategy_again := HyScaleStrategy(**trainers), deterministic=deterministic)
    assert same(first, second)
    assert not measured
    assert strategy_again.drm is True
    assert strategy_again.balance.manager is None
    assert len(set(strategy_again.balance.weights)) == 1
    messages = [str(warning.message) for warning in told if "measurements" in str(warning.message)]
    assert len(messages) == 1
    assert ("cpu_share='auto'" in messages[0]) == ("devices" in trainers)
    assert "shares=" in messages[0]


@pytest.mark.usefixtures("unsteady", "measured")
@pytest.mark.parametrize("trainers", TRAINERS, ids=str)
def test_without_it_such_runs_differ(trainers):
    first, _ = run(HyScaleStrategy(**trainers))
    second, _ = run(HyScaleStrategy(**trainers))
    assert not same(first, second)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_forecast_begins_as_the_run_would(deterministic, measured):
    options = {"devices": ["cpu"], "drm": True, "threads": [1, 1, 1]}
    plan = OmegaConf.create({"accelerators": [1], "nodes": [1]})
    run_with = trainer(HyScaleStrategy(**options), deterministic=deterministic)
    begin = report.forecast({}, plan, data_module(fanouts=[3, 2]), Module(), run_with).begin
    assert len(measured) == 1
    assert (begin.seeds == (10, 10)) is deterministic


@pytest.mark.parametrize("options", [{"cpu_share": 0.3}, {"shares": [0.3, 0.7]}], ids=str)
def test_nothing_is_said_where_nothing_is_turned_off(options, recwarn, measured):
    fixed = HyScaleStrategy(devices=["cpu"], drm=False, **options)
    run(fixed, deterministic=True)
    assert fixed.balance.weights == pytest.approx([0.3, 0.7])
    assert not [warning for warning in recwarn if "measurements" in str(warning.message)]
    assert not measured


@pytest.mark.usefixtures("unsteady")
def test_recorded_decisions_are_replayed(measured, tmp_path, recwarn):
    record = tmp_path / "decisions.jsonl"
    whole, _ = run(HyScaleStrategy(cpu_share=0.5, devices=["cpu"], threads=[1, 1, 1], decision_log=record))
    assert len(record.read_text().splitlines()) > 1
    replaying = HyScaleStrategy(devices=["cpu"], drm=record)
    replayed, _ = run(replaying, deterministic=True)
    assert same(whole, replayed)
    assert replaying.balance.manager is not None
    assert not [warning for warning in recwarn if "measurements" in str(warning.message)]
    assert not measured


@pytest.mark.parametrize("trainers", TRAINERS[1:], ids=str)
def test_a_measured_mapping_goes_on_after_a_kill(trainers, measured, tmp_path):
    """Twice: what the resumed run writes is as good as what it read."""

    def automatic():
        return HyScaleStrategy(**{"drm": False, **trainers})

    whole, _ = run(automatic())
    measured.clear()
    paths = [tmp_path / "first.ckpt", tmp_path / "second.ckpt"]
    run(automatic(), [SaveAt(paths[0], 2, stop=True)])
    assert len(measured) == 1
    run(automatic(), [SaveAt(paths[1], 5, stop=True)], ckpt_path=paths[0])
    found = automatic()
    resumed, _ = run(found, ckpt_path=paths[1])
    assert len(measured) == 1
    assert same(resumed, whole)
    measured.append("another machine")
    fresh = automatic()
    run(fresh)
    assert fresh.balance.weights != found.balance.weights  # as the resumed run would have measured


@pytest.mark.usefixtures("unsteady")
@pytest.mark.parametrize("trainers", TRAINERS, ids=str)
def test_a_deterministic_run_goes_on_bit_for_bit(trainers, measured, tmp_path):
    path = tmp_path / "middle.ckpt"
    whole, _ = run(HyScaleStrategy(**trainers), deterministic=True)
    run(HyScaleStrategy(**trainers), [SaveAt(path, 4, stop=True)], deterministic=True)
    resumed, _ = run(HyScaleStrategy(**trainers), ckpt_path=path, deterministic=True)
    assert same(resumed, whole)
    assert not measured


def test_a_balanced_run_goes_on_without_measuring(measured, tmp_path):
    path = tmp_path / "middle.ckpt"
    run(HyScaleStrategy(devices=["cpu"]), [SaveAt(path, 6, stop=True)])
    balanced = HyScaleStrategy(devices=["cpu"])
    run(balanced, ckpt_path=path)
    assert balanced.balance.manager._number > 8
    assert len(measured) == 1


def test_a_deterministic_run_goes_on_with_what_another_had_measured(measured, tmp_path):
    path = tmp_path / "middle.ckpt"
    before = HyScaleStrategy(devices=["cpu"], drm=False)
    run(before, [SaveAt(path, 2, stop=True)])
    after = HyScaleStrategy(devices=["cpu"])
    with pytest.warns(UserWarning, match="measurements: drm=True"):
        run(after, ckpt_path=path, deterministic=True)
    assert after.balance.weights == before.balance.weights
    assert after.balance.threads == before.balance.threads
    assert len(set(before.balance.weights)) == 2


def test_options_given_by_hand_win_over_a_checkpoint(measured, tmp_path):
    path = tmp_path / "middle.ckpt"
    run(HyScaleStrategy(devices=["cpu"], drm=False), [SaveAt(path, 2, stop=True)])
    by_hand = HyScaleStrategy(cpu_share=0.3, devices=["cpu"], drm=False, threads=[1, 1, 1])
    run(by_hand, ckpt_path=path)
    assert by_hand.balance.weights == pytest.approx([0.3, 0.7])
    assert by_hand.balance.threads == (1, 1, 1)
    threads_by_hand = HyScaleStrategy(devices=["cpu"], drm=False, threads=[1, 1, 1])
    run(threads_by_hand, ckpt_path=path)
    assert threads_by_hand.balance.threads == (1, 1, 1)
    assert len(measured) == 1


def test_threads_of_a_larger_machine_are_left_out(measured, tmp_path):
    path = tmp_path / "middle.ckpt"
    before = HyScaleStrategy(devices=["cpu"], drm=False)
    run(before, [SaveAt(path, 2, stop=True)])
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["hyscale"]["balance"][0]["first"]["threads"] = [40, 40, 40]
    torch.save(checkpoint, path)
    after = HyScaleStrategy(devices=["cpu"], drm=False)
    run(after, ckpt_path=path)
    assert sum(after.balance.threads) < 40
    assert after.balance.weights == before.balance.weights
    assert len(measured) == 1


def of_other_trainers(state):
    state["shares"], state["cpu_trainers"] = [0.5, 0.25, 0.25], 2


def of_another_batch_size(state):
    state["total"] = 21


def of_another_version(state):
    del state["threads"]


@pytest.mark.parametrize("change", [of_other_trainers, of_another_batch_size, of_another_version])
@pytest.mark.parametrize("drm", [False, True])
def test_a_mapping_that_does_not_fit_is_measured_anew(drm, change, measured, tmp_path):
    path = tmp_path / "middle.ckpt"
    run(HyScaleStrategy(devices=["cpu"], drm=drm), [SaveAt(path, 2, stop=True)])
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint["hyscale"]["balance"][0]["first"])
    torch.save(checkpoint, path)
    with pytest.warns(UserWarning, match="hyscale balances anew") as told:
        run(HyScaleStrategy(devices=["cpu"], drm=drm), ckpt_path=path)
    assert len([warning for warning in told if "hyscale balances anew" in str(warning.message)]) == 1
    assert len(measured) == 2


def test_nothing_is_balanced_anew_where_options_say_all(tmp_path, recwarn):
    path = tmp_path / "middle.ckpt"
    run(HyScaleStrategy(cpu_share=0.5, devices=["cpu"], drm=False), [SaveAt(path, 2, stop=True)])
    run(HyScaleStrategy(2, cpu_share=0.5, devices=["cpu"], drm=False), ckpt_path=path)
    assert not [warning for warning in recwarn if "anew" in str(warning.message)]


def test_a_checkpoint_from_before_has_no_mapping(measured, tmp_path, recwarn):
    path = tmp_path / "middle.ckpt"
    run(HyScaleStrategy(devices=["cpu"], drm=False), [SaveAt(path, 2, stop=True)])
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["hyscale"]["balance"] = [{}]
    torch.save(checkpoint, path)
    run(HyScaleStrategy(devices=["cpu"], drm=False), ckpt_path=path)
    assert len(measured) == 2
    assert not [warning for warning in recwarn if "anew" in str(warning.message)]


def test_sampling_on_accelerators_goes_on_too(monkeypatch, tmp_path):
    """Here the CPU stands for one; what is measured for it is told by hand."""
    rates = iter([1e6, 3e6])
    monkeypatch.setattr(first_mapping, "first_share", lambda *args: (rate := next(rates)) / (rate + 1e6))

    def there(wanted, loader, trainers, present=None):
        return None if wanted == 0.0 else AcceleratorSampling(loader.node_sampler, trainers.devices, trainers.num_cpu)

    monkeypatch.setattr(strategy, "find_sampling", there)
    path = tmp_path / "middle.ckpt"
    options = {"cpu_share": 0.5, "devices": ["cpu"], "drm": False}
    before, after, fixed = (HyScaleStrategy(**options) for _ in range(3))
    run(before, [SaveAt(path, 2, stop=True)])
    run(after, ckpt_path=path)
    assert before.balance.accelerator_sampling == after.balance.accelerator_sampling == 0.5
    run(fixed, deterministic=True)
    assert fixed.balance.accelerator_sampling == 0.0
    assert next(rates) == 3e6  # nobody measured a second time


def test_one_fit_says_it_once_and_the_next_one_again(measured):
    again = trainer(HyScaleStrategy(devices=["cpu"]), max_epochs=1, deterministic=True)
    for epochs in (1, 2):
        again.fit_loop.max_epochs = epochs
        with pytest.warns(UserWarning, match="measurements: drm=True"):
            again.fit(Module().double(), datamodule=data_module(fanouts=[3, 2]))
    assert not measured
