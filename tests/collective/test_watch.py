"""Epochs that part from their plan are planned anew, others are not, and it comes to rest."""

import pytest

from lightning_gnn.collective import prefetcher as module
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.loading import NodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data
from tests.sampling.test_loader import assert_same

DATA = small_data()
SAMPLER = NeighborSampler(DATA, [4, 3])
SIZES = {"batch_size": 5, "seed": 3, "epoch": lambda number: 0}
TIMES = StageTimes(Duration(0.4), Duration(0.1), Duration(0.1), Duration(0.2), Duration(0.5), cpu_workers=2)
PLAN = CollectivePlan("collective", 2, 3, lead=4, num_batches=10, times=TIMES, epoch_s={"collective": 8.5})


def loader_of(plan=PLAN, **kwargs):
    route = NodeLoader(DATA, SAMPLER, **SIZES).pipeline
    batching = module.CollectiveBatching(route=route, plan=plan, profile_batches=3, **kwargs)
    batching.profiler.cpu_workers = 2
    return NodeLoader(DATA, SAMPLER, num_workers=2, prefetcher=batching, **SIZES)


def plans_of(loader):
    """Note what a loader would plan for, instead of planning."""
    planned = []
    loader.prefetcher.start_planning = lambda times, num_batches, why: planned.append((times, why))
    return planned


@pytest.mark.parametrize(("seconds", "parts"), [(8.0, False), (8.7, False), (7.3, False), (9.0, True), (7.0, True)])
def test_a_tenth_is_too_much(seconds, parts):
    loader = loader_of()
    planned = plans_of(loader)
    loader.prefetcher.watch(PLAN, 10)
    loader.prefetcher.last_epoch = seconds, 10  # the last mini-batch's training is not seen
    loader.prefetcher.watch(PLAN, 10)
    assert bool(planned) == parts
    if parts:
        assert planned[0][1] == f"planned anew, as an epoch took {seconds:.3g} s instead of 8"


@pytest.mark.parametrize(("plan", "seconds"), [(PLAN, 0.9), (CollectivePlan("collective", 2, 4), 8.0)])
def test_short_epochs_and_plans_by_hand_are_none_to_go_by(plan, seconds):
    loader = loader_of(plan)
    planned = plans_of(loader)
    loader.prefetcher.last_epoch = seconds, 10
    loader.prefetcher.watch(plan, 10)
    assert planned == []


def test_a_validation_and_an_epoch_that_ends_early_do_not_count(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock, loader = Clock(), loader_of()
    monkeypatch.setattr(module, "time", clock)
    for number, _ in enumerate(loader):
        clock.now += 2.0
        if number == 4:
            loader.prefetcher.end_model()
            clock.now += 100.0
    seconds, num_batches = loader.prefetcher.last_epoch
    assert (seconds, num_batches) == (2.0 * (len(loader) - 1), len(loader))
    next(iter(loader))
    loader.prefetcher.stop()
    assert loader.prefetcher.last_epoch is None
    loader.prefetcher.close()


@pytest.mark.parametrize("replan", [True, False])
def test_the_loader_plans_anew_and_its_batches_stay(replan, monkeypatch):
    """The plan promises epochs of a thousand seconds; real ones last some milliseconds."""
    monkeypatch.setattr(module, "SHORTEST_S", 0.0)
    plain = list(NodeLoader(DATA, SAMPLER, **SIZES))
    slow = StageTimes(*[Duration(10.0)] * 5, cpu_workers=2)
    plan = Dispatcher(slow, 4, num_batches=len(plain)).plan()
    made = []
    loader = loader_of(plan, replan=replan, on_plan=lambda plan, why: made.append((plan, why)) or plan)
    for _ in range(4):
        for batch, expected in zip(loader, plain, strict=True):
            assert_same(batch, expected)
        if loader.prefetcher.planning is not None:
            loader.prefetcher.planning.result()
    assert bool(made) == replan
    if replan:
        new, why = made[0]
        assert why.startswith("planned anew, as an epoch took ")
        assert new.epoch_s["collective"] < 0.1 * plan.epoch_s["collective"]
        assert new.times.model.mean < 1.0
        assert loader.prefetcher.plan is made[-1][0]
    loader.prefetcher.close()
