"""With ``Trainer(deterministic=True)`` or a resumed checkpoint, measurements do not affect decisions."""

import traceback
import warnings
from itertools import count
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn.hyscale import analytic as first_mapping
from lightning_gnn.hyscale import loader_setup
from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling
from lightning_gnn.hyscale.analytic import Platform, Processor
from lightning_gnn.hyscale.drm import BalanceController
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.planning import hyscale as report
from tests.campaigns import cases_of
from tests.full_graph.launch import run
from tests.hyscale.test_resume import SaveAt, are_equal, train
from tests.hyscale.training import SILENT, Plain, make_data

TRAINERS = ({"cpu_trainers": 2}, {"devices": ["cpu"]})


def measure_another(found):
    """Make each measurement of the machine return a different result, and record them in ``found``."""

    def another(trainers, *rates):
        slow, fast = (Processor(speed, speed) for speed in (1e8, 1e8 * (1 + len(found))))
        found.append(trainers)
        return Platform(slow, 2, fast, trainers.num_accelerators, sampling=1e9)

    return another


def make_unsteady_methods():
    """Return controller methods with which a different trainer seems to be slow in each run."""
    number = count()
    begin, times = BalanceController.__init__, BalanceController._compute_times

    def __init__(self, *args, **kwargs):
        self.number = next(number)
        begin(self, *args, **kwargs)

    def _compute_times(self, reports):
        factors = [5 if (trainer + self.number) % 2 else 1 for trainer in range(len(reports))]
        slowed = [
            report._replace(train=1e-3 * report.seeds * factor) for report, factor in zip(reports, factors, strict=True)
        ]
        return times(self, slowed)

    return {"__init__": __init__, "_compute_times": _compute_times}


class ScenarioRank:
    """One rank in one scenario; files are written to ``folder``."""

    def __init__(self, rank, folder, monkeypatch):
        self.rank, self.folder, self.monkeypatch = rank, folder, monkeypatch
        self.measured, self.messages = [], []
        monkeypatch.setattr(first_mapping, "measure_platform", measure_another(self.measured))

    def path(self, name="middle.ckpt"):
        return self.folder / name

    def vary_speeds(self):
        for name, method in make_unsteady_methods().items():
            self.monkeypatch.setattr(BalanceController, name, method)

    def train(self, strategy, at=None, **options):
        """Train, until a checkpoint if a batch is given; record warnings."""
        callbacks = () if at is None else [SaveAt(self.path(options.pop("saved", "middle.ckpt")), at)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = train(strategy, callbacks, **{"limit_val_batches": 0, **options})[1]
        self.messages = [str(warning.message) for warning in caught]
        return found

    def find_warnings(self, of):
        """Return the recorded warnings that contain a text; only rank 0 warns."""
        return [message for message in self.messages if of in message]

    def count(self, number):
        """Return the expected number of measurements: only rank 0 measures."""
        return number * (self.rank == 0)

    def write_changed(self, change):
        """Write a changed copy of the checkpoint for this rank and return its path."""
        checkpoint = torch.load(self.path(), weights_only=True)
        change(checkpoint["hyscale"]["balance"])
        path = self.path(f"changed {self.rank}.ckpt")
        torch.save(checkpoint, path)
        return path


def equal_runs_are_equal(here):
    here.vary_speeds()
    for trainers in TRAINERS:
        for deterministic in (True, "warn"):
            first = here.train(HyScaleStrategy(**trainers), deterministic=deterministic, max_epochs=8)
            messages = here.find_warnings("measurements")
            second = here.train(again := HyScaleStrategy(**trainers), deterministic=deterministic, max_epochs=8)
            assert are_equal(first, second)
            assert again.options.drm is True
            assert again.balance.manager is None
            assert len(set(again.balance.first.seeds)) == 1
            assert len(messages) == here.count(1)
            for message in messages:
                assert "disables all decisions based on measurements: drm=True" in message
                assert "shares=" in message
    assert not here.measured


def without_it_they_differ(here):
    here.vary_speeds()
    for trainers in TRAINERS:
        first, second = (here.train(HyScaleStrategy(**trainers), max_epochs=8) for _ in range(2))
        assert not are_equal(first, second)


def recorded_decisions_are_replayed(here):
    here.vary_speeds()
    record = here.path("decisions.jsonl")
    options = {"cpu_share": 0.5, "devices": ["cpu"], "threads": [1, 1, 1], "decision_log": record}
    whole = here.train(HyScaleStrategy(**options), max_epochs=8)
    assert len(record.read_text().splitlines()) > 1
    replaying = HyScaleStrategy(devices=["cpu"], drm=record)
    assert are_equal(here.train(replaying, deterministic=True, max_epochs=8), whole)
    assert replaying.balance.manager is not None
    assert not here.find_warnings("measurements")
    assert not here.measured


def a_measured_mapping_goes_on(here):
    """Resume twice: a checkpoint of the resumed run works like the one that it read."""
    found = [HyScaleStrategy(devices=["cpu"], drm=False) for _ in range(5)]
    whole = here.train(found[0])
    here.measured.clear()
    here.train(found[1], 2, saved="first.ckpt")
    assert len(here.measured) == here.count(1)
    here.train(found[2], 5, saved="second.ckpt", path=here.path("first.ckpt"))
    resumed = here.train(found[3], path=here.path("second.ckpt"))
    assert len(here.measured) == here.count(1)
    assert are_equal(resumed, whole)
    here.measured.append("another machine")
    here.train(found[4])
    assert found[4].balance.first.seeds != found[3].balance.first.seeds, (
        found[4].balance.first.seeds,
        found[0].balance.first.seeds,
    )  # as the resumed run would have measured


def a_deterministic_run_goes_on(here):
    here.vary_speeds()
    for trainers in TRAINERS:
        whole = here.train(HyScaleStrategy(**trainers), deterministic=True)
        here.train(HyScaleStrategy(**trainers), 5, deterministic=True)
        assert are_equal(here.train(HyScaleStrategy(**trainers), path=here.path(), deterministic=True), whole)
    assert not here.measured


def a_balanced_run_goes_on_without_measuring(here):
    here.train(HyScaleStrategy(devices=["cpu"]), 6)
    balanced = HyScaleStrategy(devices=["cpu"])
    here.train(balanced, path=here.path())
    assert balanced.balance.manager._number == 11  # of 12 iterations; the times of the last one are never reported
    assert len(here.measured) == here.count(1)


def of_other_trainers(state):
    state["seeds"], state["cpu_trainers"] = [25, 12, 13], 2


def of_another_batch_size(state):
    state["seeds"] = [26, 25]


def of_another_version(state):
    del state["threads"]


def a_mapping_that_does_not_fit_is_measured_anew(here):
    for drm in (False, True):
        here.train(HyScaleStrategy(devices=["cpu"], drm=drm), 2)
        for change in (of_other_trainers, of_another_batch_size, of_another_version):
            here.measured.clear()
            path = here.write_changed(lambda balance, change=change: change(balance["0"]["first"]))
            here.train(HyScaleStrategy(devices=["cpu"], drm=drm), path=path)
            assert len(here.find_warnings("hyscale rebalances")) == here.count(1)
            assert len(here.measured) == here.count(1)


def sampling_on_accelerators_goes_on_too(here):
    """The CPU stands in for an accelerator with fixed sampling rates."""
    rates = iter([1e6, 3e6])
    here.monkeypatch.setattr(loader_setup, "measure_sampling_share", lambda *args: (rate := next(rates)) / (rate + 1e6))

    def there(wanted, loader, trainers, present=None, device=None):
        return None if wanted == 0.0 else AcceleratorSampling(loader.node_sampler, torch.device("cpu"))

    here.monkeypatch.setattr(loader_setup, "find_sampling", there)
    before, after, fixed = (HyScaleStrategy(cpu_share=0.5, devices=["cpu"], drm=False) for _ in range(3))
    here.train(before, 2)
    here.train(after, path=here.path())
    assert before.balance.first.accelerator_sampling == after.balance.first.accelerator_sampling == 0.5
    here.train(fixed, deterministic=True)
    assert fixed.balance.first.accelerator_sampling == 0.0
    assert next(rates) == (3e6 if here.rank == 0 else 1e6)  # the rates are measured once only


def one_fit_says_it_once_and_the_next_one_again(here):
    again = pl.Trainer(**SILENT, strategy=HyScaleStrategy(devices=["cpu"]), max_epochs=1, deterministic=True)
    for epochs in (1, 2):
        again.fit_loop.max_epochs = epochs
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again.fit(Plain(), make_data())
        assert sum("measurements: drm=True" in str(warning.message) for warning in caught) == here.count(1)
    assert again.current_epoch == 2
    assert not here.measured


SCENARIOS = (
    equal_runs_are_equal,
    without_it_they_differ,
    recorded_decisions_are_replayed,
    a_measured_mapping_goes_on,
    a_deterministic_run_goes_on,
    a_balanced_run_goes_on_without_measuring,
    a_mapping_that_does_not_fit_is_measured_anew,
    sampling_on_accelerators_goes_on_too,
    one_fit_says_it_once_and_the_next_one_again,
)


def run_scenarios(rank, folder, scenarios):
    """Run scenarios; return the error of each."""
    errors = {}
    for scenario in scenarios:
        path = Path(folder, scenario.__name__)
        path.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as monkeypatch:
            try:
                scenario(ScenarioRank(rank, path, monkeypatch))
            except Exception:
                errors[scenario.__name__] = traceback.format_exc()
        torch.use_deterministic_algorithms(False)  # the Trainer's option changes the state of the whole process
    return errors


@pytest.fixture(scope="module")
def errors(request, tmp_path_factory):
    """Return the errors of one start of two ranks."""
    scenarios = [case["scenario"] for case in cases_of(request.session, test_on_two_ranks)]
    return run(run_scenarios, 2, str(tmp_path_factory.mktemp("repeat")), scenarios)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_on_two_ranks(scenario, errors):
    for found in errors:
        assert scenario.__name__ not in found, found[scenario.__name__]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_forecast_begins_as_the_run_would(deterministic, monkeypatch):
    measured = []
    monkeypatch.setattr(first_mapping, "measure_platform", measure_another(measured))
    options = {"devices": ["cpu"], "drm": True, "threads": [1, 1, 1]}
    run_with = pl.Trainer(**SILENT, strategy=HyScaleStrategy(**options), deterministic=deterministic)
    try:
        begin = report.forecast(make_data([3], batch_size=20), Plain(), run_with).begin
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(measured) == 1
    assert (begin.seeds == (10, 10)) is deterministic
