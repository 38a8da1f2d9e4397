import random
from collections import defaultdict
from itertools import pairwise
from statistics import mean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.simulate import drawn_durations, simulate_dual_buffer
from tests.collective.time_steps import Node

SPREAD = StageTimes(
    Duration(0.08, 0.008), Duration(0.002, 2e-4), Duration(0.004, 4e-4), Duration(0.003, 0.01), Duration(0.005), 8
)


def stage_times(cpu, dma, gpu, uva, model, workers=1):
    return StageTimes(*map(Duration, map(float, (cpu * workers, dma, gpu, uva, model))), workers)


def random_plan(source):
    mode = source.choice(["collective", "collective", "cpu", "gpu"])
    return CollectivePlan(mode, source.randrange(1, 7), source.randrange(1, 9))


def trainings(simulation):
    return [(item.batch, item.start) for item in simulation.timeline.intervals if item.stage == "model"]


@pytest.mark.parametrize("deterministic", [True, False])
def test_agrees_with_a_simulation_in_steps_of_time(deterministic):
    source = random.Random(7)
    for _ in range(700):
        plan, workers, num_batches = random_plan(source), source.randrange(1, 6), source.randrange(1, 45)
        least = {"cpu_batching": 1, "model": 1, "dma": 0, "gpu_batching": 0, "uva": 0}
        most = {stage: source.choice([1, 3, 12]) for stage in least}
        if source.random() < 0.5:  # the same for every mini-batch: many things happen at the same moment
            same = {stage: source.randint(least[stage], most[stage]) for stage in least}
            table = {(stage, n): same[stage] for stage in least for n in range(num_batches)}
        else:
            table = {(s, n): source.randint(least[s], most[s]) for s in least for n in range(num_batches)}

        def seconds(stage, number, table=table):
            return table[stage, number]

        times = stage_times(1, 1, 1, 1, 1, workers)
        ours = simulate_dual_buffer(times, plan, num_batches, durations=seconds, deterministic=deterministic)
        other = Node(num_batches, *plan.buffers, workers, seconds, deterministic).run()
        assert trainings(ours) == other.trained, (plan, workers, num_batches, table)
        assert ours.makespan == other.time
        assert ours.cpu_lag == other.cpu_lag
        assert ours.gpu_lag * workers == pytest.approx(other.gpu_lag)


@settings(max_examples=300)
@given(st.randoms(use_true_random=False), st.booleans())
def test_constraints_and_lower_bounds(source, deterministic):
    """Equations 1 to 3 and 7."""
    workers, num_batches = source.randrange(1, 6), source.randrange(1, 60)
    times = stage_times(*(source.choice([0.001, 0.5, 1.0, 3.7]) for _ in range(5)), workers)
    plan = random_plan(source)
    simulation = simulate_dual_buffer(times, plan, num_batches, deterministic=deterministic)
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
        assert simulation.busy[resource] == pytest.approx(bound)
        assert simulation.busy[resource] + simulation.idle[resource] == pytest.approx(simulation.makespan)
    assert simulation.makespan == simulation.timeline.end
    assert simulation.timeline.busy("GPU") == pytest.approx(simulation.busy["GPU"])


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("mode", ["collective", "cpu", "gpu"])
def test_phases_and_steps_cover_the_epoch(mode, deterministic):
    plan = CollectivePlan(mode, 10, 8)
    simulation = simulate_dual_buffer(SPREAD, plan, 100, seed=3, deterministic=deterministic)
    order = [step.number for step in simulation.steps if step.kind == "train"]
    assert sorted(order) == list(range(100))
    assert not deterministic or order == sorted(order)
    assert [step.kind for step in simulation.steps].count("end") == 1
    assert simulation.phases[0][1] == 0
    assert simulation.phases[-1][2] == simulation.makespan
    for (name, _, end), (following, start, _) in pairwise(simulation.phases):
        assert name != following
        assert end == start


def test_feedback_says_who_is_slow():
    plan = CollectivePlan("collective", 10, 10)
    slow_cpu = simulate_dual_buffer(stage_times(50, 1, 2, 2, 1, 4), plan, 200)
    assert slow_cpu.cpu_lag > 10 * slow_cpu.overlaps
    assert slow_cpu.gpu_lag == 0
    slow_gpu = simulate_dual_buffer(stage_times(1, 1, 10, 10, 1, 4), plan, 200)
    assert slow_gpu.gpu_lag > 10 * slow_gpu.overlaps
    assert slow_gpu.cpu_lag == 0
    assert slow_cpu.overlaps == slow_gpu.overlaps == 10


def test_a_hand_made_overlap():
    """gbs = cbs = 2: two GPU batchings of 3, wait for the CPU until 8, then two transfers while two are trained."""
    times = stage_times(4, 3, 1, 2, 2)
    simulation = simulate_dual_buffer(times, CollectivePlan("collective", 2, 2), 4)
    assert trainings(simulation) == [(0, 8), (1, 10), (2, 12), (3, 14)]
    assert simulation.phases == [("filling", 0, 6), ("blocking", 6, 8), ("flushing", 8, 16)]
    transfers = [(item.batch, item.start, item.end) for item in simulation.timeline.intervals if item.stage == "dma"]
    assert transfers == [(2, 8, 11), (3, 11, 14)]
    assert simulation.cpu_lag == 2
    assert simulation.makespan == 16


def test_gpu_batching_never_meets_a_transfer():
    """A flush ends with the training of what it has transferred, so PCIe is free when the GPU fills its buffer."""
    times = stage_times(1, 20, 2, 3, 1)
    simulation = simulate_dual_buffer(times, CollectivePlan("collective", 2, 1), 6)
    # 0..10 GPU batchings, 10..30 the transfer; 0 and 1 are trained until 12, 2 from 30 to 31.
    assert trainings(simulation)[:3] == [(0, 10), (1, 11), (2, 30)]
    begun = {item.batch: item.start for item in simulation.timeline.intervals if item.stage == "gpu_batching"}
    assert begun == {0: 0, 1: 5, 3: 31, 4: 36}


def test_a_plain_pipeline_transfers_while_it_trains():
    """The CPU is fast; two transfers of 3, then one for each training of 7."""
    times = stage_times(1, 3, 1, 1, 7)
    simulation = simulate_dual_buffer(times, CollectivePlan("cpu", 1, 4), 5)
    assert trainings(simulation) == [(0, 4), (1, 14), (2, 21), (3, 28), (4, 35)]


def test_training_one_at_a_time_while_the_cpu_lags():
    """Without an order to keep, 2 for each of the GPU's mini-batches; with it, all wait for the CPU's."""
    times, plan = stage_times(40, 1, 1, 0, 1), CollectivePlan("collective", 4, 2)
    in_order = simulate_dual_buffer(times, plan, 60)
    as_ready = simulate_dual_buffer(times, plan, 60, deterministic=False)
    assert in_order.makespan == pytest.approx(20 * 40, rel=0.05)
    assert in_order.cpu_lag > 600
    assert as_ready.makespan < 60 * 2.1
    assert as_ready.cpu_lag < 5  # at the end
    trained_while_blocked = [step for step in as_ready.steps if step.kind == "train" and step.phase == "blocking"]
    assert {step.route for step in trained_while_blocked} == {"gpu"}


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
    draw = drawn_durations(times, 4000, seed=5)
    cpu = [draw("cpu_batching", number) for number in range(4000)]
    assert mean(cpu) == pytest.approx(10, rel=0.02)
    assert stdev(cpu) == pytest.approx(2, rel=0.05)
    dma = [draw("dma", number) for number in range(4000)]
    assert min(dma) == pytest.approx(0.01)
    assert max(dma) > 50
    assert {draw("uva", 3), draw("gpu_batching", 4)} == {0.0}
    assert {draw("model", number) for number in range(4000)} == {1.0}


def test_without_spread_drawing_changes_nothing():
    times = stage_times(9, 2, 3, 1, 4, 3)
    plan = CollectivePlan("collective", 5, 3)
    assert simulate_dual_buffer(times, plan, 50, seed=0).makespan == simulate_dual_buffer(times, plan, 50).makespan


def test_transfers_may_take_no_time_and_gpu_batching_ages():
    times = StageTimes(Duration(1), Duration(0), Duration(1e300), Duration(0), Duration(1))
    assert simulate_dual_buffer(times, CollectivePlan("cpu", 1, 4), 10).makespan == 11
    assert simulate_dual_buffer(times, CollectivePlan("gpu", 1, 0), 10).makespan == pytest.approx(1e301)


def test_nonsense_is_refused():
    plan, times = CollectivePlan("collective", 2, 2), stage_times(1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="num_batches must be at least 1, but is 0"):
        simulate_dual_buffer(times, plan, 0)
    with pytest.raises(ValueError, match="exclude one another"):
        simulate_dual_buffer(times, plan, 3, durations=lambda stage, number: 1.0, seed=1)
    with pytest.raises(ValueError, match="model of mini-batch 0 must take"):
        simulate_dual_buffer(times, plan, 3, durations=lambda stage, number: -1.0 if stage == "model" else 1.0)
