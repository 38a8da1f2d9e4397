"""The planner of a whole node against each system alone, on machines of the papers and of ordinary users.

A setting is a machine, a data set, a model and a batch size. All plans are judged by an independent discrete-event
simulation (``node_events.py``) over iterations with random durations that no planner has seen. ``--sleeping 100`` runs
the plans of one setting for 100 iterations with real threads whose stages sleep (``sleeping_node.py``).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import compare, machine, measure, parse, publish
from benchmarks.hyscale.model import SpreadWorkload
from benchmarks.hyscale.node_events import JudgedNode
from benchmarks.hyscale.sleeping_node import SleepingNode
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.plan import Duration, StageTimes
from lightning_gnn.hyscale.analytic import PerformanceModel, Platform, Processor
from lightning_gnn.hyscale.costs import NodeCosts, TaskMapping, linearize, split_evenly
from lightning_gnn.hyscale.plan import NodePlan, plan
from lightning_gnn.hyscale.simulate import MIN_IN_FLIGHT, simulate_iterations

SIZES = {
    "settings": (200, 4),
    "iterations": (1300, 60),
    "draws": (1, 1),
    "sleeping": (0, 0),
    "slower": (4, 1),
    "processes": (2, 1),
}
SPREADS = (0.0, 0.05, 0.15)
PCIE_3, PCIE_4 = 12e9, 24e9  # bytes per second that transfers reach, of 16 and 32 nominal
GATHERED = 0.8  # of a link's bandwidth that single rows reach


def _machine(
    cores: int, core_gflops: float, memory: float, accelerator: tuple[float, float, float], pcie: float,
    count: int = 1, sampling: float = 60e6,
) -> Platform:  # fmt: skip
    """Return a machine whose accelerator has TFLOP/s, GB/s and GB of memory; neighbors' rows reach half of it."""
    teraflops, bandwidth, gigabytes = accelerator
    return Platform(
        cpu=Processor(core_gflops * 1e9 * cores, memory),
        cores=cores,
        accelerator=Processor(0.4 * teraflops * 1e12, 0.5 * bandwidth * 1e9),
        num_accelerators=count,
        pcie_bandwidth=pcie,
        sampling=2e6,
        accelerator_sampling=sampling,
        core_bandwidth=min(memory, 4e9),
        scattered_bandwidth=0.5 * memory,
        gather_bandwidth=GATHERED * pcie,
        accelerator_memory=0.6 * gigabytes * 1e9,
    )


MACHINES = {
    "A: A30, 12 cores": _machine(12, 30, 60e9, (10.3, 933, 24), PCIE_3),
    "B: RTX 3090, 8 cores": _machine(8, 25, 50e9, (35.6, 936, 24), PCIE_3),
    "C: half an A30, 6 cores": _machine(6, 30, 40e9, (5.2, 466, 12), PCIE_3, sampling=30e6),
    "D: V100, 8 cores": _machine(8, 30, 50e9, (15.7, 900, 32), PCIE_3),
    "HyScale: four A5000, 128 cores": _machine(128, 56, 205e9, (27.8, 768, 24), PCIE_4, 4),
    "workstation: small GPU, 8 cores": _machine(8, 50, 60e9, (4.4, 192, 6), PCIE_3, sampling=20e6),
    "laptop: 8 cores, mobile GPU": _machine(8, 40, 50e9, (2.5, 112, 4), PCIE_3 / 4, sampling=10e6),
}
GPU_BUFFER, DISPATCHED = 10, 600
"""Most mini-batches that an accelerator prepares in a row, and mini-batches of an epoch of MorphGL alone."""
MIN_HYBRID_GAIN = 0.003
"""Gain from which a CPU trainer is added, as between the planner's own alternatives."""
SLEEPING = "laptop: 8 cores, mobile GPU"
DATA = {  # vertices, edges, training vertices, feature columns
    "products": (2_449_029, 123_718_280, 196_615, 100),
    "papers100M": (111_059_956, 1_615_685_872, 1_207_179, 128),
    "MAG240M": (121_751_666, 1_297_748_926, 1_112_392, 756),
    "Twitter": (41_652_230, 1_468_365_182, 416_523, 128),
    "UK": (77_741_046, 2_965_197_340, 777_411, 128),
}
MODELS = {"GCN": (1, 128), "SAGE": (2, 256), "wide SAGE": (2, 1024)}  # input vectors of an update, hidden columns
FANOUTS = ((25, 10), (15, 10, 5), (10, 5))


@dataclass(frozen=True)
class Setting:
    """A machine, a data set and a model."""

    name: str
    model: PerformanceModel
    spread: float

    def costs(self, cpu_trainers: int) -> NodeCosts:
        """Return the costs, linear around equal shares."""
        trainers = cpu_trainers + self.model.platform.num_accelerators
        seeds = [self.model.workload.batch_size / trainers] * trainers
        return replace(linearize(self.model.costs(cpu_trainers), seeds), spread=self.spread)


def draw(source: random.Random) -> Setting:
    """Return a random setting."""
    where, data, kind = (source.choice(list(names)) for names in (MACHINES, DATA, MODELS))
    fanouts, batch, spread = source.choice(FANOUTS), source.choice((512, 1024, 4096)), source.choice(SPREADS)
    vertices, edges, train, columns = DATA[data]
    inputs, hidden = MODELS[kind]
    widths = (columns, *(hidden,) * (len(fanouts) - 1), 64)
    work = SpreadWorkload(
        vertices, edges, train, batch * MACHINES[where].num_accelerators, fanouts, widths, update_inputs=inputs,
        degree_spread=1.2,
    )  # fmt: skip
    name = f"{where}; {data}, {kind}, fanouts {fanouts}, {batch} seeds, spread {spread:g}"
    return Setting(name, PerformanceModel(MACHINES[where], work), spread)


def judged(costs: NodeCosts, mapping: TaskMapping, iterations: int, draws: Sequence[int]) -> float:
    """Return the mean seconds of an iteration."""
    return statistics.fmean(_judge(costs, mapping, iterations, seed) for seed in draws)


def stage_seconds(costs: NodeCosts, mapping: TaskMapping, trainer: int) -> dict[str, float]:
    """Return the mean seconds of each stage of a trainer's mini-batch."""
    seeds, cpu = mapping.seeds[trainer], mapping.cpu_trainers
    loading = mapping.threads[1]
    sample, load = costs.sample.seconds(seeds), costs.load(1).seconds(seeds)
    if mapping.buffers is not None:
        loading = max(1, round(sum(mapping.threads[:2]) * load / ((sample + load) or 1.0)))
    load = costs.load(loading).seconds(seeds) * loading
    if trainer < cpu:
        return {"sample": sample, "load": load, "dma": 0.0,
                "model": costs.train_cpu(mapping.threads[2])[trainer].seconds(seeds)}  # fmt: skip
    found = {"dma": costs.transfer.seconds(seeds), "model": costs.train[trainer - cpu].seconds(seeds)}
    found |= {"sample": sample, "load": load, "cpu_batching": sample + load}
    if costs.sample_accelerator is not None and costs.gather_accelerator is not None:
        found["gpu_batching"] = costs.sample_accelerator.seconds(seeds)
        found["uva"] = costs.gather_accelerator(1 if mapping.buffers is None else mapping.buffers[0]).seconds(seeds)
    return found


def _judge(costs: NodeCosts, mapping: TaskMapping, iterations: int, seed: int) -> float:
    active = [index for index, seeds in enumerate(mapping.seeds) if seeds]
    threads = sum(sum(mapping.rank_threads(index)[: 2 + (index < mapping.cpu_trainers)]) for index in active)
    node = JudgedNode(costs.cores, threads, len(active), iterations, costs.sync)
    for index in active:
        generator, means = np.random.default_rng((seed, index, 7)), stage_seconds(costs, mapping, index)
        margin = 2 * sum(mapping.buffers[:3]) if mapping.buffers else 0
        factors = np.maximum(generator.normal(1.0, costs.spread, (len(means), iterations + margin)), 0.01)
        drawn = {name: mean * row for (name, mean), row in zip(means.items(), factors, strict=True)}
        seconds = partial(_look_up, drawn)
        sampler, loader, trainer = mapping.rank_threads(index)
        is_cpu = index < mapping.cpu_trainers
        if mapping.buffers is not None and not is_cpu:
            node.add_collective(str(index), mapping.buffers, sampler + loader, seconds, margin)
        else:
            fraction = 0.0 if is_cpu else mapping.accelerator_fraction
            in_flight, on_cpu = max(MIN_IN_FLIGHT, sum(mapping.threads)), trainer * is_cpu
            node.add_staged(str(index), (sampler, loader), seconds, in_flight, fraction, costs.takes_turns, on_cpu)
    return node.seconds()


def _look_up(drawn: dict[str, Any], stage: str, number: int) -> float:
    return float(drawn[stage][number])


def morphgl(costs: NodeCosts, total: int, threads: int) -> TaskMapping:
    """Return the plan of collective batching's own dispatcher, by a grid."""
    assert costs.sample_accelerator is not None
    assert costs.gather_accelerator is not None
    mapping = TaskMapping(split_evenly(total, costs.train), 0, (threads // 2, threads - threads // 2, 0))
    seeds = max(mapping.seeds)
    means = {
        "cpu_batching": costs.sample.seconds(seeds) + costs.load(1).seconds(seeds),
        "dma": costs.transfer.seconds(seeds),
        "gpu_batching": costs.sample_accelerator.seconds(seeds),
        "uva": costs.gather_accelerator(GPU_BUFFER).seconds(seeds),
        "model": max(cost.seconds(seeds) for cost in costs.train) + costs.sync,
    }
    durations = {name: Duration(mean, costs.spread * mean) for name, mean in means.items()}
    times = StageTimes(**durations, cpu_workers=max(1, threads // costs.num_accelerators))
    found = Dispatcher(times, GPU_BUFFER, num_batches=DISPATCHED).plan()
    buffers = (*found.buffers, found.ahead, found.row)
    return replace(mapping, accelerator_sampling=1 - found.cpu_share, buffers=buffers)


def make_plans(setting: Setting) -> dict[int, NodePlan]:
    """Return the plans without and with a CPU trainer."""
    cores, total = setting.model.platform.cores, setting.model.workload.batch_size
    return {
        number: plan(setting.costs(number), total, number, cores, GPU_BUFFER)
        for number in (0, 1)
        if cores >= 2 + number
    }


def contestants(setting: Setting, plans: dict[int, NodePlan]) -> tuple[dict[str, tuple[int, TaskMapping]], NodePlan]:
    """Return the CPU trainers and the mapping of each system: ours, each system alone and each pure mode."""
    cores, total = setting.model.platform.cores, setting.model.workload.batch_size
    is_faster = 1 in plans and plans[1].seconds < (1 - MIN_HYBRID_GAIN) * plans[0].seconds
    best = int(is_faster and plans[1].mapping.cpu_seeds > 0)  # a CPU trainer without seeds only takes threads
    found = {"ours": (best, plans[best].mapping)}
    found["HyScale alone"] = (1, plans[1].alone["hybrid training"][0])
    found["equations 5 to 13"] = (1, setting.model.best_mapping(1, cores))
    found["MorphGL alone"] = (0, morphgl(setting.costs(0), total, cores))
    for name in ("accelerators prepare all", "CPU prepares all"):
        found[name] = (0, plans[0].alone[name][0])
    return found, plans[best]


def _run(
    setting: Setting, iterations: int, draws: Sequence[int]
) -> tuple[dict[str, float], dict[str, tuple[int, TaskMapping]], NodePlan, float]:
    start = time.process_time()
    plans = make_plans(setting)
    planning = time.process_time() - start
    systems, chosen = contestants(setting, plans)
    seconds = {
        name: judged(setting.costs(cpu_trainers), mapping, iterations, draws)
        for name, (cpu_trainers, mapping) in systems.items()
    }
    return seconds, systems, chosen, planning


def _row(
    setting: Setting,
    seconds: dict[str, float],
    systems: dict[str, tuple[int, TaskMapping]],
    chosen: NodePlan,
    planning: float,
) -> dict[str, Any]:
    ours = seconds.pop("ours")
    best = min(seconds, key=lambda name: seconds[name])
    mapping = systems["ours"][1]
    ratio = ours / seconds[best]
    print(f"{ratio:.3f} of {best}: {setting.name}: {mapping}", flush=True)
    return {
        "setting": setting.name, "ours_ms": 1e3 * ours, "predicted_ms": 1e3 * chosen.seconds, "gap": chosen.gap,
        "best alone": best, "ratio": ratio, **{f"{name}_ms": 1e3 * each for name, each in seconds.items()},
        "mapping": str(mapping), "cpu_seeds": mapping.cpu_seeds / mapping.total,
        "on_accelerators": mapping.accelerator_fraction, "planning_s": planning,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return the ratios of ours to the best system alone."""
    args = parse("node_planner", __doc__ or "", SIZES, argv)
    if args.sleeping:
        return sleep(
            args.sleeping, args.slower, args.runs, args.out and args.out.with_name("node_planner_sleeping.json")
        )
    described, source = machine(), random.Random(0)
    draws = [100 + each for each in range(args.draws)]
    settings = [draw(source) for _ in range(args.settings)]
    with ProcessPoolExecutor(args.processes, get_context("fork")) as processes:
        results = processes.map(partial(_run, iterations=args.iterations, draws=draws), settings)
        rows = [_row(setting, *each) for setting, each in zip(settings, results, strict=True)]
    ratios = sorted(row["ratio"] for row in rows)
    result = {
        "benchmark": "node_planner",
        "title": "Planning a whole node against each system alone, simulated",
        "unit": "seconds of an iteration over those of the best system alone",
        "settings": {**args.sizes, "spreads": SPREADS},
        "machine": described,
        "rows": [],
        "comparisons": [],
        "extra": {
            "ratio": {
                "geometric mean": statistics.geometric_mean(ratios), "best": ratios[0], "worst": ratios[-1],
                "quartiles": statistics.quantiles(ratios, n=4), "more than 1 % behind": sum(r > 1.01 for r in ratios),
                "more than 2 % ahead": sum(r < 0.98 for r in ratios),
            },
            "geometric mean by machine": {
                name: statistics.geometric_mean(r["ratio"] for r in rows if r["setting"].startswith(name))
                for name in MACHINES if any(r["setting"].startswith(name) for r in rows)
            },
            "gains from": _sources(rows),
            "prediction": {
                "median": statistics.median(row["predicted_ms"] / row["ours_ms"] for row in rows),
                "within 10 %": sum(abs(row["predicted_ms"] / row["ours_ms"] - 1) < 0.1 for row in rows),
            },
            "gap to the bound": statistics.quantiles([row["gap"] for row in rows], n=4),
            "planning_s": {
                "median": statistics.median(row["planning_s"] for row in rows),
                "most": max(row["planning_s"] for row in rows),
            },
            "settings": rows,
        },
    }  # fmt: skip
    return publish(result, args.out)


def sleep(iterations: int, slower: int, runs: int, out: Path | None) -> dict[str, Any]:
    """Run the systems of one setting with real threads, and compare their seconds with those predicted."""
    work = SpreadWorkload(
        *DATA["Twitter"][:3], 1024, (25, 10), (DATA["Twitter"][3], 256, 64), update_inputs=2, degree_spread=1.2
    )
    setting = Setting(SLEEPING, PerformanceModel(MACHINES[SLEEPING], work), 0.05)
    systems, _ = contestants(setting, make_plans(setting))
    predicted, calls = {}, {}
    for name, (cpu_trainers, mapping) in systems.items():
        costs = setting.costs(cpu_trainers)
        seconds = (simulate_iterations(costs, mapping, 400, seed) for seed in range(4))
        predicted[name] = slower * statistics.fmean(seconds)
        calls[name] = SleepingNode(costs, mapping, iterations, slower, stage_seconds).run
    rows = measure(calls, runs)
    measured = {row["name"]: row["median"] for row in rows}
    orders = [sorted(each, key=each.__getitem__) for each in (predicted, measured)]
    result = {
        "benchmark": "node_planner_sleeping",
        "title": f"A node with sleeping stages: {SLEEPING}, Twitter, SAGE",
        "unit": "seconds of an iteration",
        "settings": {"iterations": iterations, "slower": slower, "runs": runs, "spread": setting.spread},
        "machine": machine(),
        "rows": rows,
        "comparisons": [
            compare(rows, f"ours against {name}", ["ours"], [name], False) for name in systems if name != "ours"
        ],
        "extra": {
            "predicted_s": predicted,
            "measured over predicted": {name: measured[name] / predicted[name] for name in systems},
            "order predicted": orders[0],
            "order measured": orders[1],
        },
    }
    return publish(result, out)


def _sources(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Group the settings by what ours combines, with the number of settings and their mean ratio."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        trains, prepares = row["cpu_seeds"] > 0, 0 < row["on_accelerators"] < 1
        name = {
            (True, True): "CPU trains, both prepare", (True, False): "CPU trains, one prepares",
            (False, True): "accelerators train, both prepare", (False, False): "accelerators train, one prepares",
        }[trains, prepares]  # fmt: skip
        groups.setdefault(name, []).append(row["ratio"])
    return {
        name: {"settings": len(each), "geometric mean": statistics.geometric_mean(each)}
        for name, each in groups.items()
    }


if __name__ == "__main__":
    main()
