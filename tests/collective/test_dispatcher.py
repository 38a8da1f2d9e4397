import random
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.collective.dispatcher import SIMULATED_BATCHES, Dispatcher, buffer_size, initial_ratio, relaxed_time
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.simulate import simulate_dual_buffer
from tests.campaigns import campaign, one_slice


def stage_times(cpu, dma, gpu, model, workers=1):
    """Stage times with ``cpu`` seconds for all workers together."""
    gpu_batching = 0.6 * gpu
    return StageTimes(*map(Duration, (cpu * workers, dma, gpu_batching, gpu - gpu_batching, model)), workers)


def random_times(source, workers=(1, 2, 4, 8)):
    """Return stage times of all kinds, a tenth of the transfers for nothing."""
    cpu, dma, gpu, model = (10 ** source.uniform(-2, 1) for _ in range(4))
    return stage_times(cpu, dma if source.random() < 0.9 else 0.0, gpu, model, source.choice(workers))


def equation_6(x, times):
    """C'(x) / n as it should read."""
    cpu, dma, gpu, model = times.cpu, times.dma.mean, times.gpu, times.model.mean
    return (x * gpu + np.maximum(np.maximum(dma, (1 + x) * model), cpu - x * gpu)) / (1 + x)


def test_the_initial_ratio_is_the_minimum():
    source = random.Random(3)
    grid = np.concatenate([[0.0], np.geomspace(1e-5, 1e5, 4001), np.linspace(0, 20, 4001)])
    for _ in range(3000):
        times = random_times(source)
        x = initial_ratio(times)
        found = relaxed_time(x, times)
        assert found == pytest.approx(equation_6(x, times), rel=1e-9)
        near = x * np.linspace(0.9, 1.1, 2001)
        assert found <= min(equation_6(grid, times).min(), equation_6(near, times).min()) * (1 + 1e-9)


def test_relaxed_time_at_its_ends():
    times = stage_times(8.0, 3.0, 2.0, 1.0)
    assert relaxed_time(0, times) == 8
    assert relaxed_time(inf, times) == 3
    assert relaxed_time(2, times) == pytest.approx(max(8, 2 * 2 + 3, 2 * 2 + 3 * 1) / 3)
    for x in (-1, float("nan")):
        with pytest.raises(ValueError, match="x must be at least 0"):
            relaxed_time(x, times)


@pytest.mark.parametrize("gpu", [0.0, 1e-300, 1e300])
@pytest.mark.parametrize("dma", [0.0, 2.0])
def test_extreme_gpus(gpu, dma):
    times = stage_times(5.0, dma, gpu, 1.0)
    x = initial_ratio(times)
    assert 0 <= x < inf
    plan = Dispatcher(times, num_batches=60).plan()
    assert plan.mode == ("cpu" if gpu > 1 else "gpu")
    assert plan.epoch_s["collective"] == pytest.approx(60 if gpu < 1 else 60 * 5 + dma + 1, rel=0.05)


def least_time(times, num_batches):
    """Equation 7 for the best of all splits."""
    on_cpu = np.arange(num_batches + 1)
    on_gpu = num_batches - on_cpu
    bounds = (
        num_batches * times.model.mean + on_gpu * times.gpu,
        on_gpu * times.gpu + on_cpu * times.dma.mean,
        on_cpu * times.cpu,
    )
    return np.max(bounds, axis=0).min()


def cases_of_theorem_2(count):
    """Draw times, sizes of the GPU's buffer and numbers of mini-batches for which the theorem holds.

    At least 10 overlaps, and 5 mini-batches per CPU worker: the bound knows no start and no whole mini-batches.
    """
    source, sizes, cases = random.Random(11), (1, 2, 5, 10), []
    while len(cases) < count:
        times, size = random_times(source), source.choice(sizes)
        if times.cpu <= max(times.dma.mean, times.model.mean) or times.cpu > 50 * (times.gpu + times.model.mean):
            continue
        cpu_buffer_size = buffer_size(size, max(1e-9, initial_ratio(times)))
        overlaps = max(10, ceil(5 * times.cpu_workers / cpu_buffer_size))
        num_batches = overlaps * (size + cpu_buffer_size) + source.randrange(10)
        if num_batches <= 220:
            cases.append((times, size, num_batches))
    return cases


@campaign
@pytest.mark.parametrize(("deterministic", "count"), [(True, 1000), (False, 300)])
def test_close_to_the_lower_bound_where_theorem_2_holds(deterministic, count, number):
    modes = set()
    for times, size, num_batches in one_slice(cases_of_theorem_2(count), number):
        plan = Dispatcher(times, size, num_batches=num_batches, deterministic=deterministic).plan()
        ratio = plan.epoch_s["collective"] / least_time(times, num_batches)
        assert 1 - 1e-9 <= ratio <= 1.5, (ratio, plan)
        modes.add(plan.mode)
    assert modes >= {"collective", "gpu"}


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(1, 120), st.booleans())
def test_never_worse_than_one_processor_alone(source, size, num_batches, deterministic):
    times = random_times(source)
    plan = Dispatcher(times, size, num_batches=num_batches, deterministic=deterministic).plan()
    assert (plan.gpu_buffer_size, plan.num_batches, plan.times) == (size, num_batches, times)
    assert plan.ratio == initial_ratio(times)
    for mode, places in (("cpu", size), ("gpu", 0)):
        alone = CollectivePlan(mode, size, places, times=times)
        makespan = simulate_dual_buffer(times, alone, num_batches, deterministic=deterministic).makespan
        assert plan.epoch_s["collective"] <= plan.epoch_s[mode] == makespan
    again = simulate_dual_buffer(times, plan, num_batches, deterministic=deterministic)
    assert again.makespan == plan.epoch_s["collective"]
    assert Dispatcher(times, size, num_batches=num_batches, deterministic=deterministic).plan() == plan


def test_no_other_buffer_is_much_better():
    """Of all sizes of the CPU's buffer, short epochs included."""
    source = random.Random(5)
    for _ in range(40):
        times, num_batches, gpu_buffer_size = random_times(source), source.randrange(30, 130), source.choice([1, 5, 10])
        chosen = Dispatcher(times, gpu_buffer_size, num_batches=num_batches).plan().epoch_s["collective"]
        for size in range(1, num_batches + 1, 1 + num_batches // 50):
            plan = CollectivePlan("collective", gpu_buffer_size, size)
            assert chosen <= 1.05 * simulate_dual_buffer(times, plan, num_batches).makespan, (times, num_batches, size)


def test_a_balanced_node_is_shared():
    """The CPU and the GPU are equally fast: together they take little more than half as long."""
    plan = Dispatcher(stage_times(10.0, 1.0, 8.5, 0.5, 4), num_batches=400).plan()
    assert plan.mode == "collective"
    assert 0.4 < plan.cpu_share < 0.6
    assert plan.epoch_s["cpu"] > 1.8 * plan.epoch_s["collective"]
    assert plan.epoch_s["gpu"] > 1.6 * plan.epoch_s["collective"]


def test_feedback_makes_the_buffer_smaller_when_the_epoch_is_short():
    """With unlimited buffers x would be 0.05; but of 60 mini-batches none could be trained before 180 are there."""
    times = stage_times(1.0, 0.02, 18.0, 0.04, 2)
    plan = Dispatcher(times, num_batches=60).plan()
    assert buffer_size(10, plan.ratio) > 60
    assert plan.rounds >= 1
    assert plan.epoch_s["collective"] <= plan.epoch_s["cpu"]


class Recording(Dispatcher):
    """Begins with a size of its own, and notes what is tried."""

    def follow(self, size):
        self._follow_feedback(size)
        return list(self._seen)


@pytest.mark.parametrize("start", [1, 3, 25])
def test_feedback_leads_to_where_the_gap_is_below_one_gpu_batching(start):
    """10 GPU batchings of 1.2 and cbs + 10 trainings of 0.3 take as long as the CPU for cbs: at 21.4."""
    times = stage_times(1.0, 0.1, 1.2, 0.3, 2)
    tried = Recording(times, 10, num_batches=1500).follow(start)
    direction = 1 if start < 21 else -1
    assert tried == list(range(start, tried[-1] + direction, direction))
    assert tried[-1] in (20, 21, 22)
    for size in tried:
        simulation = simulate_dual_buffer(times, CollectivePlan("collective", 10, size), 1500)
        gap = abs(simulation.cpu_lag - simulation.gpu_lag) / simulation.overlaps
        assert (gap < times.gpu) == (size == tried[-1])


def test_feedback_is_given_up_when_nothing_gets_better():
    """PCIe is the bottleneck: the CPU idles whatever its buffer, and each mini-batch more of it makes it worse."""
    tried = Recording(stage_times(0.1, 5.0, 1.0, 0.5), 10, num_batches=600).follow(1)
    assert tried == [1, 2, 3, 4, 5, 6, 7]


def test_a_model_that_takes_longest_leaves_all_to_the_cpu():
    times = stage_times(2.0, 1.0, 3.0, 4.0, 4)
    plan = Dispatcher(times, num_batches=200).plan()
    assert (plan.mode, plan.ratio, plan.rounds) == ("cpu", 0.0, 0)
    assert plan.epoch_s["collective"] == pytest.approx(800, rel=0.05)


def test_a_cpu_that_is_far_too_slow_is_left_out():
    plan = Dispatcher(stage_times(1000.0, 1.0, 2.0, 1.0, 2), num_batches=200).plan()
    assert plan.mode == "gpu"
    assert plan.ratio > 100
    assert plan.rounds >= 1
    assert plan.buffers == (1, 0)


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_epochs_of_a_few_mini_batches(num_batches):
    plan = Dispatcher(stage_times(3.0, 0.5, 2.0, 1.0, 2), num_batches=num_batches).plan()
    assert plan.epoch_s["collective"] <= min(plan.epoch_s["cpu"], plan.epoch_s["gpu"])


def test_nonsense_is_refused():
    times = stage_times(3.0, 0.5, 2.0, 1.0)
    with pytest.raises(ValueError, match="num_batches must be at least 1, but is 0"):
        Dispatcher(times, num_batches=0)
    with pytest.raises(ValueError, match="gpu_buffer_size must be at least 1, but is 0"):
        Dispatcher(times, 0, num_batches=5)


@pytest.mark.parametrize("deterministic", [True, False])
def test_long_epochs_are_planned_by_a_part_of_them(deterministic):
    times = stage_times(2.0, 0.1, 1.0, 0.4, 4)
    parts = Dispatcher(times, num_batches=SIMULATED_BATCHES, deterministic=deterministic).plan()
    plan = Dispatcher(times, num_batches=3000 * SIMULATED_BATCHES, deterministic=deterministic).plan()
    assert (plan.mode, plan.buffers, plan.rounds) == (parts.mode, parts.buffers, parts.rounds)
    assert plan.num_batches == 3000 * SIMULATED_BATCHES
    assert plan.epoch_s == {name: 3000 * seconds for name, seconds in parts.epoch_s.items()}
