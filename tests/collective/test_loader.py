"""Mini-batches equal those of the plain loader for any plan and any speed of the threads."""

import gc
import threading
import time
import warnings
from dataclasses import replace
from inspect import signature

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.collective import prefetcher as collective_prefetcher
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.prefetcher import CollectiveBatching
from lightning_gnn.collective.routes import DeviceRoutes, HostRoute
from lightning_gnn.collective.simulate import simulate_dual_buffer
from lightning_gnn.collective.workers import THREAD_NAME, Workers
from lightning_gnn.loading import NodeLoader
from lightning_gnn.runtime import thread_pipeline
from lightning_gnn.runtime.timeline import Timeline
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data
from tests.collective.virtual_time import VirtualTime
from tests.patience import PATIENCE
from tests.sampling.test_loader import assert_same
from tests.threads import list_threads

DATA = small_data()
SAMPLER = NeighborSampler(DATA, [4, 3])
SIZES = {"batch_size": 30, "seed": 3}
PLAIN = list(NodeLoader(DATA, SAMPLER, **SIZES))
COLLECTIVE = CollectivePlan("collective", 3, 2)


BATCHING = signature(CollectiveBatching).parameters


def make_route(**kwargs):
    return NodeLoader(DATA, SAMPLER, **{**SIZES, **kwargs}).pipeline


def make_loader(plan=COLLECTIVE, num_workers=2, **kwargs):
    """Return a loader with collective batching."""
    kwargs.setdefault("route", make_route())
    own = {name: kwargs.pop(name) for name in [*kwargs] if name in BATCHING}
    own.setdefault("schedule", "in_order" if plan is None else plan.schedule)
    batching = CollectiveBatching(plan=plan, **own)
    return NodeLoader(DATA, SAMPLER, num_workers=num_workers, prefetcher=batching, **{**SIZES, **kwargs})


def assert_all_free(loader):
    """Assert that all threads end and all buffers are free."""
    assert not list_threads(THREAD_NAME)
    if loader.prefetcher.ring is not None:
        assert loader.prefetcher.ring.num_slots == len(loader.prefetcher.ring._idle) <= loader.prefetcher.ring.capacity


@st.composite
def plans(draw):
    mode = draw(st.sampled_from(["collective", "collective", "collective", "cpu", "gpu"]))
    sizes = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    schedule = draw(st.sampled_from(["in_order", "paper"]))
    return CollectivePlan(mode, *sizes, lead=draw(st.integers(0, 20)), row=draw(st.integers(0, 20)), schedule=schedule)


@settings(max_examples=40)
@given(plans(), st.integers(1, 4), st.integers(0, 15), st.integers(0, 16))
def test_batches_equal_those_of_the_plain_loader(plan, num_workers, first, num_batches):
    loader = make_loader(plan, num_workers, first_batch=lambda: first, num_batches=lambda: num_batches)
    batches = list(loader)
    numbers = loader.prefetcher.trained[first:]
    assert sorted(numbers) == list(range(first, num_batches))
    assert plan.schedule == "paper" or numbers == sorted(numbers)
    for batch, number in zip(batches, numbers, strict=True):
        assert_same(batch, PLAIN[number])
    assert_all_free(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_a_device_it_is_a_plain_pipeline(num_workers):
    loader = make_loader(None, num_workers, route=None)
    for a, b in zip(loader, PLAIN, strict=True):
        assert_same(a, b)
    assert loader.prefetcher.ring is None
    assert not loader.prefetcher.measures
    assert_all_free(loader)


@pytest.mark.medium
@settings(max_examples=60)
@given(plans(), st.integers(1, 4), st.lists(st.floats(0.05, 3.0), min_size=42, max_size=42, unique=True))
def test_the_loader_decides_as_the_simulator_does(plan, num_workers, seconds):
    number = len(PLAIN)
    by_stage = {
        "cpu_batching": [num_workers * s for s in seconds[:number]],
        "gpu_batching": seconds[number : 2 * number],
        "model": seconds[2 * number :],
    }

    def duration(stage, batch):
        return by_stage[stage][batch] if stage in by_stage else 0.0

    times = StageTimes(*[Duration(1.0)] * 5, cpu_workers=num_workers)
    expected = simulate_dual_buffer(times, plan, number, durations=duration)
    clock, steps = VirtualTime(1 + num_workers * (plan.mode != "gpu")), []

    class Recorded(Workers):
        def next(self):
            steps.append(super().next())
            return steps[-1]

    loader = make_loader(plan, num_workers)
    prepare_on_host, prepare = HostRoute.prepare, DeviceRoutes.prepare

    def slow_on_host(self, task):
        clock.sleep(duration("cpu_batching", task.index))
        return prepare_on_host(self, task)

    def slow(self, route, task):
        clock.sleep(duration("gpu_batching", task.index))
        return prepare(self, route, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostRoute, "prepare", slow_on_host)
        patch.setattr(DeviceRoutes, "prepare", slow)
        patch.setattr(collective_prefetcher, "Workers", Recorded)
        patch.setattr(thread_pipeline, "threading", clock.threading())
        for _ in loader:
            clock.sleep(duration("model", loader.prefetcher.trained[-1]))
    decided = [step for step in steps if step.kind != "wait"]
    assert decided == [step for step in expected.steps if step.kind not in ("wait", "end")]
    assert clock.now == pytest.approx(expected.makespan)


@settings(max_examples=30)
@given(plans(), plans(), st.lists(st.integers(1, 4), min_size=len(PLAIN), max_size=len(PLAIN)), st.integers(1, 9))
def test_plan_and_threads_change_within_an_epoch_and_no_task_is_taken_too_early(plan, other, threads, most_ahead):
    loader, taken = make_loader(replace(plan, schedule="in_order")), []
    tasks = loader.tasks
    loader.tasks = lambda *options: (taken.append(task.index) or task for task in tasks(*options))
    loader.prefetcher.manage(most_ahead, PATIENCE)
    for number, batch in enumerate(loader):
        assert_same(batch, PLAIN[number])
        if number == len(PLAIN) // 2:
            loader.prefetcher.adopt(replace(other, schedule="in_order"))
        loader.prefetcher.resize(threads[number])
        assert max(taken) <= number + most_ahead
    assert taken == list(range(len(PLAIN)))
    assert_all_free(loader)


def test_a_worker_that_hangs_ends_a_managed_epoch():
    release, hangs = threading.Event(), lambda batch: release.wait(PATIENCE) and batch
    loader = make_loader(CollectivePlan("cpu", 1, 2), transform=hangs, thread_safe=True)
    loader.prefetcher.manage(9, 0.05)
    with pytest.raises(TimeoutError, match=r"no progress for 0.05 s; thread lightning-gnn-collective-\d:"):
        next(iter(loader))
    release.set()


# -- planning


@pytest.mark.medium
def test_it_measures_while_training_and_then_plans_once():
    made = []
    loader = make_loader(
        None,
        batch_size=5,
        route=make_route(batch_size=5),
        profile_batches=4,
        gpu_buffer_size=4,
        on_plan=lambda plan: made.append(plan) or plan,
        epoch=lambda number: 0,
    )
    plain = list(NodeLoader(DATA, SAMPLER, **{**SIZES, "batch_size": 5}))
    for _ in range(3):
        for batch, expected in zip(loader, plain, strict=True):
            assert_same(batch, expected)
    assert made == [loader.prefetcher.plan]
    assert loader.prefetcher.plan.num_batches == len(plain)
    assert loader.prefetcher.plan.times.cpu_workers == 2
    assert loader.prefetcher.profiler.epochs <= 2
    assert_all_free(loader)


@pytest.mark.parametrize("num_seeds", [1, 2, 3, 7])
def test_tiny_epochs_are_measured_for_two_epochs_at_most(num_seeds):
    options = {"batch_size": 1, "input_nodes": torch.arange(num_seeds)}
    loader = make_loader(None, route=make_route(**options), profile_batches=20, **options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for epoch in range(3):
            assert len(list(loader)) == num_seeds
            assert epoch == 2 or num_seeds > 3 or loader.prefetcher.plan is None
    assert loader.prefetcher.plan is not None
    assert loader.prefetcher.profiler.epochs <= 3
    said = sum("too short to measure" in str(warning.message) for warning in warned)
    assert said == (loader.prefetcher.plan.times is None) == (num_seeds == 1)


def test_the_timeline_tells_every_stage_of_every_batch():
    loader = make_loader()
    loader.prefetcher.timeline = Timeline()
    start = time.perf_counter()
    for _ in loader:
        pass
    timeline = loader.prefetcher.timeline
    twice = [(i.stage, i.batch, i.start, i.end) for i in timeline.intervals if i.stage in ("gpu_batching", "uva")]
    assert all(twice.count(entry) == 2 for entry in twice)  # the GPU's reads occupy PCIe too
    found = sorted({(item.stage, item.batch) for item in timeline.intervals})
    on_cpu = [number for number in range(len(PLAIN)) if ("cpu_batching", number) in found]
    on_gpu = sorted(set(range(len(PLAIN))) - set(on_cpu))
    assert on_cpu
    assert on_gpu[:3] == [0, 1, 2]  # the CPU begins five ahead
    expected = [(stage, number) for stage in ("cpu_batching", "dma") for number in on_cpu]
    expected += [(stage, number) for stage in ("gpu_batching", "uva") for number in on_gpu]
    assert found == sorted(expected + [("model", number) for number in range(len(PLAIN))])
    assert all(start <= item.start <= item.end <= time.perf_counter() for item in timeline.intervals)


def test_workers_use_the_device_of_the_training_thread(monkeypatch):
    used = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: used.append(device))
    loader = make_loader()
    loader.prefetcher.routes.recorder.clock.device = torch.device("cuda", 1)
    list(loader)
    assert used == [torch.device("cuda", 1)] * 2
    used.clear()
    loader.prefetcher.routes.recorder.clock.device = torch.device("cpu")
    list(loader)
    assert used == []


# -- faults


def make_failing_transform(number, error):
    """Return a transform that fails at one mini-batch."""
    wanted = PLAIN[number].input_id.tolist()

    def transform(batch):
        if batch.input_id.tolist() == wanted:
            raise error
        return batch

    return transform


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [("cpu", "in_order"), ("gpu", "in_order"), ("collective", "in_order"), ("collective", "paper")],
)
def test_an_error_reaches_the_caller_with_its_traceback(mode, schedule):
    options = {"transform": make_failing_transform(6, RuntimeError("the transform failed")), "thread_safe": True}
    options["route"] = make_route(**options)  # any of its users
    loader = make_loader(CollectivePlan(mode, 3, 2, schedule=schedule), epoch=lambda number: 0, **options)
    with pytest.raises(RuntimeError, match="the transform failed") as caught:
        list(loader)
    assert any(entry.name == "transform" for entry in caught.traceback)
    assert_all_free(loader)
    iterator = iter(loader)
    with pytest.raises(RuntimeError):
        list(iterator)
    assert list(iterator) == []


def test_the_training_thread_does_not_wait_for_ever_for_a_worker_that_died(monkeypatch):
    def dies(self, task):
        raise SystemExit("killed")

    loader = make_loader(CollectivePlan("cpu", 1, 2))
    monkeypatch.setattr(HostRoute, "prepare", dies)
    with pytest.raises(SystemExit, match="killed"):
        next(iter(loader))
    assert_all_free(loader)


def test_an_error_does_not_wait_for_the_other_workers(monkeypatch):
    resume = threading.Event()

    def prepare(self, task):
        if task.index == 0:
            raise RuntimeError("failed")
        assert resume.wait(PATIENCE)

    loader = make_loader(CollectivePlan("cpu", 1, 2))
    monkeypatch.setattr(HostRoute, "prepare", prepare)
    with pytest.raises(RuntimeError, match="failed"):
        next(iter(loader))
    left = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]
    assert len(left) <= 1
    resume.set()
    for thread in left:
        thread.join(PATIENCE)
    assert not list_threads(THREAD_NAME)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "drop", "another", "break"])
@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("plan", [COLLECTIVE, replace(COLLECTIVE, schedule="paper")], ids=["in_order", "paper"])
def test_stopping_early_leaves_nothing_behind(plan, end, taken):
    loader = make_loader(plan)
    iterator = iter(loader)
    assert not list_threads(THREAD_NAME)
    for _ in range(taken):
        next(iterator)
    if end == "close":
        iterator.close()
        iterator.close()
        assert list(iterator) == []
    elif end == "another":
        assert len(list(loader)) == len(PLAIN)
    elif end == "break":
        for _ in loader:
            break
    del iterator
    gc.collect()
    assert_all_free(loader)


def test_torch_threads_are_lowered_while_it_iterates():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        loader = make_loader(torch_threads=2)
        iterator = iter(loader)
        assert torch.get_num_threads() == 3
        next(iterator)
        assert torch.get_num_threads() == 2
        iterator.close()
        assert torch.get_num_threads() == 3
        list(loader)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# -- memory


@pytest.mark.parametrize("where", ["prepare", "transfer"])
def test_too_little_device_memory_says_what_to_lower(where):
    loader = make_loader(CollectivePlan("collective", 8, 4))

    def short(*args):
        raise torch.OutOfMemoryError("out of memory")

    setattr(loader.prefetcher.routes, where, short)
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\n.* ahead in the memory of cpu: lower gpu_buffer"):
        list(loader)
    assert_all_free(loader)


@pytest.mark.parametrize("mode", ["collective", "cpu"])
def test_too_little_host_memory_says_what_to_lower(mode, monkeypatch):
    loader = make_loader(CollectivePlan(mode, 4, 8), num_workers=3)
    empty = torch.empty

    def refused(*args, **kwargs):
        if kwargs.get("dtype") == torch.uint8:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refused)
    with pytest.raises(RuntimeError, match=r"MB more, was refused \(CUDA error: out of memory\); lower gpu_buffer"):
        list(loader)
    assert_all_free(loader)
