import random
from collections import defaultdict
from itertools import pairwise
from statistics import mean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.collective.planner import Node
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.simulate import draw_durations, simulate_dual_buffer

SPREAD = StageTimes(
    Duration(0.08, 0.008), Duration(0.002, 2e-4), Duration(0.004, 4e-4), Duration(0.003, 0.01), Duration(0.005), 8
)


def make_stage_times(cpu, dma, gpu, uva, model, workers=1):
    return StageTimes(*map(Duration, map(float, (cpu * workers, dma, gpu, uva, model))), workers)


def draw_plan(source):
    mode = source.choice(["collective", "collective", "cpu", "gpu"])
    return CollectivePlan(
        mode, source.randrange(1, 7), source.randrange(1, 9), lead=source.randrange(20), row=source.randrange(6)
    )


def test_agrees_with_a_simulation_by_events():
    """Compare with an independent simulation of processes and a queue; no two events are simultaneous."""
    source = random.Random(7)
    for case in range(200):
        plan, workers, num_batches = draw_plan(source), source.randrange(1, 6), source.randrange(1, 45)
        means = [10 ** source.uniform(-2, 1) for _ in range(5)]
        times = StageTimes(*(Duration(mean, 0.3 * mean) for mean in means), cpu_workers=workers)
        seconds = draw_durations(times, num_batches, case)
        ours = simulate_dual_buffer(times, plan, num_batches, durations=seconds)
        schedule = plan.create_schedule(num_batches, workers)
        assert ours.makespan == pytest.approx(Node(schedule, workers, seconds).makespan(), rel=1e-9), (plan, times)


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_constraints_and_lower_bounds(source):
    """Equations 1 to 3 and 7."""
    workers, num_batches = source.randrange(1, 6), source.randrange(1, 60)
    times = make_stage_times(*(source.choice([0.001, 0.5, 1.0, 3.7]) for _ in range(5)), workers)
    plan = draw_plan(source)
    simulation = simulate_dual_buffer(times, plan, num_batches)
    stages = {(item.stage, item.batch, item.resource): item for item in simulation.timeline.intervals}
    on_cpu = {batch for stage, batch, _ in stages if stage == "cpu_batching"}
    on_gpu = {batch for stage, batch, _ in stages if stage == "gpu_batching"}
    assert on_cpu | on_gpu == set(range(num_batches))
    assert not on_cpu & on_gpu
    assert {batch for stage, batch, _ in stages if stage == "dma"} == on_cpu
    for batch in on_cpu:
        assert stages["cpu_batching", batch, "CPU"].end <= stages["dma", batch, "PCIe"].start
        assert stages["dma", batch, "PCIe"].end <= stages["model", batch, "GPU"].start
    for batch in on_gpu:
        assert stages["gpu_batching", batch, "GPU"].end == stages["uva", batch, "PCIe"].start
        assert stages["uva", batch, "GPU"].end <= stages["model", batch, "GPU"].start
    tracks = defaultdict(list)
    for item in simulation.timeline.intervals:
        tracks[item.resource, item.lane].append((item.start, item.end))
    for spans in tracks.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))

    n_cpu, n_gpu = len(on_cpu), len(on_gpu)
    bounds = {
        "GPU": num_batches * times.model.mean + n_gpu * times.gpu,
        "PCIe": n_gpu * times.gpu + n_cpu * times.dma.mean,
        "CPU": n_cpu * times.cpu,
    }
    for resource, bound in bounds.items():
        assert simulation.makespan >= bound * (1 - 1e-9)
        busy = sum(item.end - item.start for item in simulation.timeline.intervals if item.resource == resource)
        assert busy == pytest.approx(bound * (workers if resource == "CPU" else 1))
    assert simulation.makespan == simulation.timeline.end
    assert [step.number for step in simulation.steps if step.kind == "train"] == list(range(num_batches))
    assert simulation.on_cpu == len(on_cpu)


def test_drawn_durations_depend_on_the_seed_alone():
    plan = CollectivePlan("collective", 10, 8)
    first, again, other = (simulate_dual_buffer(SPREAD, plan, 100, seed=seed) for seed in (1, 1, 2))
    assert first.timeline.intervals == again.timeline.intervals
    assert first.makespan != other.makespan
    assert all(item.end > item.start for item in first.timeline.intervals)
    on_gpu = simulate_dual_buffer(SPREAD, CollectivePlan("gpu", 10, 0), 100, seed=1)
    models = [
        {item.batch: item.end - item.start for item in run.timeline.intervals if item.stage == "uva"}
        for run in (first, on_gpu)
    ]
    assert models[0].keys() < models[1].keys()
    assert all(seconds == pytest.approx(models[1][batch]) for batch, seconds in models[0].items())


def test_drawn_durations_have_the_mean_and_spread_and_are_positive():
    times = StageTimes(Duration(10.0, 2.0), Duration(1.0, 50.0), Duration(0.0), Duration(0.0), Duration(1.0), 2)
    draw = draw_durations(times, 4000, seed=5)
    cpu = [draw("cpu_batching", number) for number in range(4000)]
    assert mean(cpu) == pytest.approx(10, rel=0.02)
    assert stdev(cpu) == pytest.approx(2, rel=0.05)
    dma = [draw("dma", number) for number in range(4000)]
    assert min(dma) == pytest.approx(0.01)
    assert max(dma) > 50
    assert {draw("uva", 3), draw("gpu_batching", 4)} == {0.0}
    assert {draw("model", number) for number in range(4000)} == {1.0}


def test_nonsense_is_refused():
    plan, times = CollectivePlan("collective", 2, 2), make_stage_times(1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="num_batches must be at least 1, but is 0"):
        simulate_dual_buffer(times, plan, 0)
