import random
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.collective.dispatcher import SIMULATED_BATCHES, Dispatcher, initial_ratio, relaxed_time
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.simulate import draw_durations, simulate_dual_buffer
from tests.campaigns import campaign, one_slice

pytestmark = pytest.mark.medium


def make_stage_times(cpu, dma, gpu, model, workers=1):
    """Return stage times with ``cpu`` seconds for all workers together."""
    gpu_batching = 0.6 * gpu
    return StageTimes(*map(Duration, (cpu * workers, dma, gpu_batching, gpu - gpu_batching, model)), workers)


def draw_times(source, workers=(1, 2, 4, 8)):
    """Return random stage times; a tenth of the transfers take no time."""
    cpu, dma, gpu, model = (10 ** source.uniform(-2, 1) for _ in range(4))
    return make_stage_times(cpu, dma if source.random() < 0.9 else 0.0, gpu, model, source.choice(workers))


def compute_equation_6(x, times):
    """Return C'(x) / n in its corrected form."""
    cpu, dma, gpu, model = times.cpu, times.dma.mean, times.gpu, times.model.mean
    return (x * gpu + np.maximum(np.maximum(dma, (1 + x) * model), cpu - x * gpu)) / (1 + x)


def test_the_initial_ratio_is_the_minimum():
    source = random.Random(3)
    grid = np.concatenate([[0.0], np.geomspace(1e-5, 1e5, 4001), np.linspace(0, 20, 4001)])
    for _ in range(3000):
        times = draw_times(source)
        x = initial_ratio(times)
        found = relaxed_time(x, times)
        assert found == pytest.approx(compute_equation_6(x, times), rel=1e-9)
        near = x * np.linspace(0.9, 1.1, 2001)
        assert found <= min(compute_equation_6(grid, times).min(), compute_equation_6(near, times).min()) * (1 + 1e-9)


def compute_least_time(times, num_batches):
    """Return equation 7 for the best split."""
    on_cpu = np.arange(num_batches + 1)
    on_gpu = num_batches - on_cpu
    bounds = (
        num_batches * times.model.mean + on_gpu * times.gpu,
        on_gpu * times.gpu + on_cpu * times.dma.mean,
        on_cpu * times.cpu,
    )
    return np.max(bounds, axis=0).min()


def draw_theorem_2_case(count):
    """Draw times, sizes of the GPU's buffer and numbers of mini-batches for which the theorem holds.

    At least 5 mini-batches per CPU worker: the bound neglects the start and fractions of mini-batches.
    """
    source, sizes, cases = random.Random(11), (1, 2, 5, 10), []
    while len(cases) < count:
        times, size = draw_times(source), source.choice(sizes)
        if times.cpu <= max(times.dma.mean, times.model.mean) or times.cpu > 50 * (times.gpu + times.model.mean):
            continue
        share = 1 / (1 + initial_ratio(times))
        num_batches = ceil(5 * times.cpu_workers / share) + 10 * size + source.randrange(10)
        if num_batches <= 220:
            cases.append((times, size, num_batches))
    return cases


@campaign
def test_close_to_the_lower_bound_where_theorem_2_holds(number):
    modes = set()
    for times, size, num_batches in one_slice(draw_theorem_2_case(200), number):
        plan = Dispatcher(times, size, num_batches=num_batches).plan()
        ratio = plan.epoch_s["collective"] / compute_least_time(times, num_batches)
        assert 1 - 1e-9 <= ratio <= 1.4, (ratio, plan)
        modes.add(plan.mode)
    assert "collective" in modes


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(1, 120))
def test_never_worse_than_one_processor_alone(source, size, num_batches):
    times = draw_times(source)
    plan = Dispatcher(times, size, num_batches=num_batches).plan()
    assert (plan.num_batches, plan.times) == (num_batches, times)
    assert plan.gpu_buffer_size <= size
    assert plan.ratio == initial_ratio(times)
    assert 1 < plan.rounds <= 220
    for mode, places in (("cpu", max(size, 2 * times.cpu_workers)), ("gpu", 0)):
        alone = CollectivePlan(mode, size, places, times=times)
        makespan = simulate_dual_buffer(times, alone, num_batches).makespan
        assert plan.epoch_s["collective"] <= plan.epoch_s[mode] == makespan
    again = simulate_dual_buffer(times, plan, num_batches)
    assert again.makespan == plan.epoch_s["collective"]
    assert again.on_cpu / num_batches == plan.cpu_share
    assert Dispatcher(times, size, num_batches=num_batches).plan() == plan


@pytest.mark.slow
def test_no_other_plan_is_much_better():
    """Compare with many CPU buffer sizes and leads, also for short epochs, on unseen epochs."""
    source = random.Random(5)
    for case in range(10):
        times, num_batches, gpu_buffer_size = draw_times(source), source.randrange(30, 130), source.choice([1, 5, 10])
        stages = ("cpu_batching", "dma", "gpu_batching", "uva", "model")
        spread = {stage: Duration(getattr(times, stage).mean, 0.2 * getattr(times, stage).mean) for stage in stages}
        times = StageTimes(**spread, cpu_workers=times.cpu_workers)
        unseen = [draw_durations(times, num_batches, 100 + seed) for seed in range(4)]

        def seconds(plan, times=times, number=num_batches, unseen=unseen):
            return np.mean([simulate_dual_buffer(times, plan, number, durations=each).makespan for each in unseen])

        chosen = seconds(Dispatcher(times, gpu_buffer_size, num_batches=num_batches).plan())
        for size in (1, 4, 16, 64):
            for lead in range(1, num_batches, 1 + num_batches // 12):
                plan = CollectivePlan("collective", gpu_buffer_size, size, lead=lead)
                assert chosen <= 1.08 * seconds(plan), (case, times, num_batches, plan)


def test_a_gain_within_the_noise_is_no_reason_for_both():
    """The CPU alone is optimal except for one mini-batch at the beginning; durations vary by half."""
    times = StageTimes(
        Duration(0.9, 0.5), Duration(0.1, 0.05), Duration(3.0, 1.5), Duration(2.0, 1.0), Duration(1.0, 0.5), 1
    )
    assert Dispatcher(times, num_batches=400).plan().mode == "cpu"


def test_transfers_that_are_longer_than_a_training_step_are_hidden_by_turns():
    """Fifteen workers whose mini-batches take 17 ms to transfer, while training takes 10 ms."""
    seconds = (0.0345, 0.0171, 0.004, 0.0056, 0.01)
    times = StageTimes(*(Duration(each, 0.2 * each) for each in seconds), cpu_workers=15)
    plan = Dispatcher(times, num_batches=255).plan()
    unseen = [draw_durations(times, 255, 100 + seed) for seed in range(8)]

    def took(plan):
        return np.mean([simulate_dual_buffer(times, plan, 255, durations=each).makespan for each in unseen])

    assert plan.row
    assert took(plan) < 1.06 * 255 * relaxed_time(initial_ratio(times), times)
    assert took(replace(plan, row=0)) > 1.05 * took(plan)


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_epochs_of_a_few_mini_batches(num_batches):
    plan = Dispatcher(make_stage_times(3.0, 0.5, 2.0, 1.0, 2), num_batches=num_batches).plan()
    assert plan.epoch_s["collective"] <= min(plan.epoch_s["cpu"], plan.epoch_s["gpu"])


def test_nonsense_is_refused():
    times = make_stage_times(3.0, 0.5, 2.0, 1.0)
    for size, number in ((1, 0), (0, 5)):
        with pytest.raises(ValueError, match=rf"num_batches={number} and gpu_buffer_size={size} must be at least 1"):
            Dispatcher(times, size, num_batches=number)


@pytest.mark.slow
def test_long_epochs_are_planned_by_a_part_of_them():
    times = make_stage_times(2.0, 0.1, 1.0, 0.4, 4)
    parts = Dispatcher(times, num_batches=SIMULATED_BATCHES + 1).plan()
    plan = Dispatcher(times, num_batches=3000 * SIMULATED_BATCHES).plan()
    assert (plan.mode, plan.buffers, plan.rounds) == (parts.mode, parts.buffers, parts.rounds)
    assert plan.num_batches == 3000 * SIMULATED_BATCHES
    scale = 3000 * SIMULATED_BATCHES / (SIMULATED_BATCHES + 1)
    assert plan.epoch_s == pytest.approx({name: scale * seconds for name, seconds in parts.epoch_s.items()})
