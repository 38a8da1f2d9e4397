"""The planner of a node: closed forms, simulation and search."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hyscale.node_planner import MACHINES, Setting, contestants, judged, make_plans
from lightning_gnn.collective.plan import Duration, StageTimes, initial_ratio, relaxed_time
from lightning_gnn.collective.simulate import VirtualClock
from lightning_gnn.hyscale.analytic import PerformanceModel, Workload
from lightning_gnn.hyscale.costs import Cost, NodeCosts, TaskMapping, busy_seconds
from lightning_gnn.hyscale.plan import best_fraction, candidates, lower_bound, plan
from lightning_gnn.hyscale.simulate import simulate_iterations

TOTAL = 256
_SEVERAL = st.integers(1, 3)
per_seed = st.floats(1e-5, 1e-3)


@st.composite
def node_costs(draw, accelerators=_SEVERAL, cpu_trainers=1):
    sample, load, train_cpu, train, transfer, there, gather = (Cost(0.0, draw(per_seed)) for _ in range(7))
    return NodeCosts(
        cores=draw(st.integers(3, 16)),
        sample=sample,
        load=lambda threads: load.scaled(1 / threads),
        train_cpu=lambda threads: (train_cpu.scaled(1 / threads),) * cpu_trainers,
        train=(train,) * draw(accelerators),
        transfer=transfer,
        sample_accelerator=there,
        gather_accelerator=lambda batches: gather,
        sync=draw(st.sampled_from([0.0, 1e-3])),
        spread=draw(st.sampled_from([0.0, 0.1])),
    )


@given(node_costs(), st.booleans(), st.integers(0, TOTAL))
def test_the_best_fraction_is_that_of_a_grid(costs, collective, on_cpu):
    share, rest = divmod(TOTAL - on_cpu, costs.num_accelerators)
    seeds = (on_cpu, *(share + (index < rest) for index in range(costs.num_accelerators)))
    threads = (1, 1, 1)
    seconds, fraction = best_fraction(costs, collective, seeds, threads)
    assert max(busy_seconds(costs, collective, seeds, threads, fraction).seconds()) == pytest.approx(seconds)
    grid = (max(busy_seconds(costs, collective, seeds, threads, step / 50).seconds()) for step in range(51))
    assert seconds <= min(grid) * (1 + 1e-9)


@given(node_costs(accelerators=st.just(1), cpu_trainers=0))
def test_one_accelerator_is_equation_6(costs):
    costs = replace(costs, sync=0.0)
    seeds, workers = (TOTAL,), 4
    means = (
        costs.sample.seconds(TOTAL) + costs.load(1).seconds(TOTAL),
        costs.transfer.seconds(TOTAL),
        costs.sample_accelerator.seconds(TOTAL),
        costs.gather_accelerator(1).seconds(TOTAL),
        costs.train[0].seconds(TOTAL),
    )
    times = StageTimes(*map(Duration, means), cpu_workers=workers)
    expected = relaxed_time(initial_ratio(times), times)
    found, _ = best_fraction(replace(costs, cores=99), True, seeds, (workers // 2, workers // 2, 0))
    assert found == pytest.approx(expected)
    # The simulation of a node with one trainer is that of collective batching.
    mapping = TaskMapping(seeds, 0, (workers // 2, workers // 2, 0), 0.5, (2, 3, 6, 0))
    clock = VirtualClock(
        *_schedule(mapping, workers), lambda stage, number: dict(zip(_STAGES, means, strict=True))[stage]
    )
    ends = []
    for _ in range(60):
        clock.train_next()
        ends.append(clock.now)
    seconds = simulate_iterations(replace(costs, cores=99, spread=0.0), mapping, 60)
    assert seconds == pytest.approx((ends[-1] - ends[14]) / 45)


_STAGES = ("cpu_batching", "dma", "gpu_batching", "uva", "model")


def _schedule(mapping, workers):
    from lightning_gnn.collective.batch_schedule import BatchSchedule

    on_gpu, on_cpu, lead, row = mapping.buffers
    return BatchSchedule(60 + 2 * (on_gpu + on_cpu + lead), on_gpu, on_cpu, workers, lead, row), workers


@given(node_costs())
@settings(max_examples=15)
def test_nothing_falls_below_the_bound(costs):
    costs = replace(costs, spread=0.0)
    bound = lower_bound(costs, TOTAL, 1)
    found = candidates(costs, TOTAL, 1, costs.cores)
    assert found[0].seconds >= bound * 0.999
    for one in found[:3]:
        buffers = (1, 2, 3, 0) if one.collective else None
        mapping = replace(one.mapping, buffers=buffers)
        assert simulate_iterations(costs, mapping, 80) >= 0.97 * bound  # a start with full buffers saves a little


@pytest.mark.medium
@given(node_costs())
@settings(max_examples=5)
def test_a_plan_is_no_slower_than_each_system_alone(costs):
    found = plan(costs, TOTAL, 1, costs.cores, 10)
    assert set(found.alone) == {
        "hybrid training", "collective batching", "accelerators prepare all", "CPU prepares all"
    }  # fmt: skip
    assert found.seconds <= min(seconds for _, seconds in found.alone.values()) * 1.003
    assert found.mapping.total == TOTAL
    assert sum(found.mapping.threads) == costs.cores
    assert found == plan(costs, TOTAL, 1, costs.cores, 10)  # all ranks plan the same


def test_without_gathering_accelerators_the_plan_is_hybrid_training():
    cost = Cost(0.0, 1e-4)
    costs = NodeCosts(8, cost, cost.scaled, lambda threads: (Cost(0.0, 4e-4 / threads),), (cost, cost), Cost(0.0, 1e-5))
    costs = replace(costs, load=lambda threads: cost.scaled(1 / threads))
    found = plan(costs, TOTAL, 1, 8, 10)
    assert found.mapping.buffers is None
    assert set(found.alone) == {"hybrid training"}
    assert found.mapping.cpu_seeds > 0
    with pytest.raises(ValueError, match="nothing to train on"):
        plan(replace(costs, train=()), TOTAL, 0, 8)
    with pytest.raises(ValueError, match="need 3"):
        plan(costs, TOTAL, 1, 2)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["B: RTX 3090, 8 cores", "laptop: 8 cores, mobile GPU"])
def test_an_independent_simulation_agrees(name):
    work = Workload(2_449_029, 123_718_280, 196_615, 1024, (15, 10, 5), (100, 256, 256, 47), update_inputs=2)
    setting = Setting(name, PerformanceModel(MACHINES[name], work), 0.05)
    systems, planned = contestants(setting, make_plans(setting))
    seconds = {
        system: judged(setting.costs(cpu_trainers), mapping, 1300, [3])
        for system, (cpu_trainers, mapping) in systems.items()
    }
    ours = seconds.pop("ours")
    assert ours <= 1.02 * min(seconds.values())
    assert ours == pytest.approx(planned.seconds, rel=0.15)


def test_turns_are_measured_whole():
    """An iteration takes as long however many are simulated, also if accelerator and CPU take turns of 13."""
    work = Workload(2_449_029, 123_718_280, 196_615, 1024, (15, 10, 5), (100, 256, 256, 47), update_inputs=2)
    setting = Setting("", PerformanceModel(MACHINES["B: RTX 3090, 8 cores"], work), 0.0)
    mapping = TaskMapping((1024,), 0, (4, 4, 0), 0.77, (10, 3, 28, 3))
    seconds = [simulate_iterations(setting.costs(0), mapping, count) for count in (200, 205, 210, 1300)]
    assert max(seconds) <= 1.005 * min(seconds)
    assert judged(setting.costs(0), mapping, 1300, [3]) == pytest.approx(seconds[-1], rel=0.01)


def test_a_mapping_with_buffers_is_saved_and_described():
    mapping = TaskMapping((28, 100, 128), 1, (3, 2, 2), 0.5, (2, 4, 7, 0))
    assert TaskMapping.from_dict(mapping.to_dict()) == mapping
    assert "prepared 2 by accelerators, 4 by the CPU" in str(mapping)
    assert mapping.accelerator_fraction == pytest.approx(0.5 * 256 / 228)
    # Accelerators that prepare more than half of their mini-batches leave more threads to the CPU trainer.
    assert mapping.rank_threads(0)[0] >= replace(mapping, buffers=None).rank_threads(0)[0]
