"""Epochs that part from their plan are planned anew, others are not, and it comes to rest."""

import pytest

from lightning_gnn.collective import dispatcher
from lightning_gnn.collective import watch as module
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.loader import CollectiveLoader
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.watch import Watch
from lightning_gnn.sampling.loader import ThreadedNodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data
from tests.sampling.test_loader import assert_same

DATA = small_data()
SAMPLER = NeighborSampler(DATA, [4, 3])
SIZES = {"batch_size": 5, "seed": 3, "epoch": lambda number: 0}
TIMES = StageTimes(Duration(0.4), Duration(0.1), Duration(0.1), Duration(0.2), Duration(0.5), cpu_workers=2)
PLAN = CollectivePlan("collective", 2, 3, lead=4, num_batches=10, times=TIMES, epoch_s={"collective": 8.5})


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def epoch(watch, clock, seconds, plan=PLAN, num_batches=10, model=0.5, measured=5):
    watch.begin(plan, num_batches)
    for _ in range(measured):
        watch.add("model", 0.0, model)
    for number in range(num_batches):
        clock.now += seconds / num_batches
        watch.trained()
        if number == 4:  # a validation
            watch.pause()
            clock.now += 100.0
            watch.go()
    clock.now += 1000.0  # what is done between epochs


@pytest.mark.parametrize(("seconds", "parts"), [(8.0, False), (8.7, False), (7.3, False), (9.0, True), (7.0, True)])
def test_a_tenth_is_too_much(clock, seconds, parts):
    watch = Watch(3, 2)
    assert watch.parted() is None
    epoch(watch, clock, seconds)
    assert watch.took_s == pytest.approx(seconds)
    assert watch.expected_s == pytest.approx(8.0)  # the last mini-batch's training is not seen
    assert (watch.parted() is not None) == parts


def test_what_was_measured_replaces_what_was_planned_for(clock):
    watch = Watch(3, 2)
    epoch(watch, clock, 12.0, model=0.9, measured=2)
    assert watch.parted() == TIMES  # of two there are too few
    epoch(watch, clock, 12.0, model=0.9)
    times = watch.parted()
    assert times.model.mean == pytest.approx(0.9)
    assert times.model.spread == pytest.approx(0.0)
    assert times.cpu_batching == TIMES.cpu_batching
    assert times.cpu_workers == 2


def test_an_epoch_that_is_as_long_as_it_must_be_is_planned_once(clock):
    watch = Watch(3, 2)
    epoch(watch, clock, 12.0)
    assert watch.parted() is not None
    again = CollectivePlan("collective", 2, 3, lead=4, num_batches=10, times=TIMES, epoch_s={"collective": 8.6})
    epoch(watch, clock, 12.1, again)
    assert watch.expected_s == pytest.approx(12.0)
    assert watch.parted() is None
    epoch(watch, clock, 24.0, again, num_batches=20)
    assert watch.parted() is None
    epoch(watch, clock, 9.0, again)
    assert watch.parted() is not None


def test_epochs_that_end_early_or_are_short_are_none_to_go_by(clock):
    watch = Watch(3, 2)
    watch.begin(PLAN, 10)
    clock.now += 50.0
    for _ in range(9):
        watch.trained()
    assert watch.parted() is None
    epoch(watch, clock, 8.0)
    assert watch.took_s == pytest.approx(8.0)
    watch.begin(PLAN, 10)
    watch.forget()
    for _ in range(10):
        clock.now += 3.0
        watch.trained()
    assert watch.parted() is None
    brief = CollectivePlan("collective", 3, 3, num_batches=10, times=TIMES, epoch_s={"collective": 0.6})
    epoch(watch, clock, 0.9, brief)
    assert watch.parted() is None
    by_hand = CollectivePlan("collective", 2, 4)
    epoch(watch, clock, 8.0, by_hand)
    assert watch.parted() is None


def loader_of(plan, **kwargs):
    route = ThreadedNodeLoader(DATA, SAMPLER, **SIZES)
    return CollectiveLoader(
        DATA, SAMPLER, num_workers=2, route=route, plan=plan, profile_batches=3, **{**SIZES, **kwargs}
    )


@pytest.mark.parametrize("replan", [True, False])
def test_the_loader_plans_anew_and_its_batches_stay(replan, monkeypatch):
    """The plan promises epochs of a thousand seconds; real ones last some milliseconds."""
    monkeypatch.setattr(module, "SHORTEST_S", 0.0)
    monkeypatch.setattr(dispatcher, "ROUNDS", 4)
    plain = list(ThreadedNodeLoader(DATA, SAMPLER, **SIZES))
    slow = StageTimes(*[Duration(10.0)] * 5, cpu_workers=2)
    plan = Dispatcher(slow, 4, num_batches=len(plain)).plan()
    made = []
    loader = loader_of(plan, replan=replan, on_plan=lambda plan, why: made.append((plan, why)) or plan)
    for _ in range(4):
        for batch, expected in zip(loader, plain, strict=True):
            assert_same(batch, expected)
        if loader.planning is not None:
            loader.planning.result()
    assert bool(made) == replan
    if replan:
        new, why = made[0]
        assert why.startswith("planned anew, as an epoch took ")
        assert new.epoch_s["collective"] < 0.1 * plan.epoch_s["collective"]
        assert new.times.model.mean < 1.0
        assert loader.plan is made[-1][0]
    loader.close()


def test_a_loader_without_two_processors_watches_nothing():
    assert CollectiveLoader(DATA, SAMPLER, num_workers=2, **SIZES).watch is None
    assert loader_of(PLAN, replan=False).watch is None
