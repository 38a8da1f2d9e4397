"""What the performance model of HyScale-GNN says about the runs of ``benchmarks.hyscale``, and about machines at large.

The model is given the speeds that were measured in a run on the CPU alone (and in one on the GPU alone, where there is
one), never those of a hybrid run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

from lightning_gnn.hyscale.mapping import TaskMapping
from lightning_gnn.hyscale.model import (
    ALVEO_U250,
    BATCH_SIZE,
    DATASETS,
    PerformanceModel,
    ScalingPoint,
    cpu_fpga,
    cpu_gpu,
    paper_workload,
    scaling_study,
)
from lightning_gnn.hyscale.workload import BatchSizes, Platform, Processor, Workload

NETWORK_BANDWIDTH, NETWORK_LATENCY = 12.5e9, 10e-6
"""Of the nodes in the scaling study, which the paper does not have: 100 Gbit/s, and 10 microseconds for a message."""
WITHOUT = ", without the CPU"


def workload_of(notes: dict[str, Any]) -> Workload:
    """Return the workload that a contestant has described."""
    described = dict(notes["workload"])
    found = described.pop("measured")
    for name in ("fanouts", "widths"):
        described[name] = tuple(described[name])
    measured = None if found is None else BatchSizes(found["seeds"], tuple(found["vertices"]), tuple(found["edges"]))
    return Workload(**described, measured=measured)


def platform_of(notes: dict[str, Any]) -> Platform:
    """Return the platform as the strategy's own short measurements describe it."""
    described = dict(notes["platform"])
    for name in ("cpu", "accelerator"):
        described[name] = Processor(**described[name])
    return Platform(**described)


def transferred_bytes(workload: Workload) -> float:
    """Return what an undivided mini-batch sends to an accelerator."""
    alone = Platform(Processor(1.0, 1.0), 1, Processor(1.0, 1.0), 1, pcie_bandwidth=1.0)
    return PerformanceModel(alone, workload).transfer_time(workload.batch_size)


def paper_link() -> float:
    """Return how long the paper's U250 waits for a mini-batch, as a part of how long it trains on it.

    By the model, for its GraphSAGE on ogbn-papers100M. A simulated accelerator's link is that slow beside its steps.
    """
    model = PerformanceModel(cpu_fpga(1), paper_workload("ogbn-papers100M", trainers=1, model="sage"))
    return model.transfer_time(BATCH_SIZE) / model.trainer_time(ALVEO_U250, BATCH_SIZE)


def with_accelerator(platform: Platform, threads: int, speed: float, link: float) -> Platform:
    """Return the platform with an accelerator as fast as some CPU trainers.

    Args:
        platform: Its accelerator is replaced.
        threads: Of the CPU trainer that it is compared with.
        speed: How many times as fast it is.
        link: Bytes per second to it.
    """
    there = PerformanceModel(platform, _ANY).cpu_trainer(threads, 1)
    accelerator = Processor(speed * there.flops, speed * there.memory_bandwidth)
    return replace(platform, accelerator=accelerator, num_accelerators=1, pcie_bandwidth=link)


def calibrated(notes: dict[str, Any]) -> Platform:
    """Return the platform with the speeds that a run on the CPU alone showed.

    Sampling and Feature Loading are taken over as they were. Of the CPU trainer, the floating-point operations per
    second are what is left when aggregation has taken the memory bandwidth of Feature Loading; where that leaves
    less than a fifth of the step, both are what makes the step as long as it was.

    Args:
        notes: Of the contestant.
    """
    workload, platform, stages = workload_of(notes), platform_of(notes), notes["stages"]
    sampler, loader, trainer = notes["threads"]
    seeds = sum(notes["seeds"])
    sizes = workload.sizes(seeds)
    loaded = sizes.vertices[0] * workload.widths[0] * workload.feature_bytes
    core = loaded / (stages["load"] * loader)
    found = replace(
        platform,
        sampling=sizes.edges[0] / (stages["sample_cpu"] * sampler),
        core_bandwidth=core,
        cpu=Processor(platform.cpu.flops, max(core * platform.cores, platform.cpu.memory_bandwidth)),
    )
    model, seconds = PerformanceModel(found, workload), stages["train_cpu"]
    there = model.cpu_trainer(trainer, 1)
    aggregate = model.trainer_time(Processor(1e30, there.memory_bandwidth), seeds)
    update = model.trainer_time(there, seeds) - aggregate
    factor = update / max(seconds - aggregate, 0.2 * seconds)
    bandwidth = max(1.0, aggregate / (0.8 * seconds))
    cpu = Processor(found.cpu.flops * factor, found.cpu.memory_bandwidth * bandwidth)
    return replace(found, cpu=cpu, core_bandwidth=core * bandwidth)


def predicted(model: PerformanceModel, mapping: TaskMapping, prefetch: int) -> float:
    """Return the seconds of an iteration.

    Args:
        model: The performance model.
        mapping: Who does what. Where one trainer has all seeds there is nothing to synchronise, which the paper's
            equation 9 counts all the same.
        prefetch: With 1, Feature Loading and Data Transfer are one stage.

    Where there are more CPU threads than cores, these take turns.
    """
    times = model.stage_times(mapping)
    load, transfer = times.load or 0.0, times.transfer or 0.0
    sync = model.sync_time() if sum(seeds > 0 for seeds in mapping.seeds) > 1 else 0.0
    propagation = max(seconds or 0.0 for seconds in times.trainers) + sync
    stages = (load + transfer,) if prefetch == 1 else (load, transfer)
    return max(times.sample_cpu or 0.0, propagation, model.turns_time(mapping), *stages)


def scaling(quick: bool = False) -> dict[str, Any]:
    """Predict MTEPS of the paper's platforms (tables II and III) for 1 to 16 accelerators, and for 1 to 64 nodes.

    Sampling is left out, as the paper leaves out how long it took. The CPU trainer of the paper's two EPYC is worth
    several of its accelerators, so the speed-up over one accelerator with the CPU is small; over one accelerator
    alone it is not.
    """
    study: dict[str, Any] = {"accelerators": {}, "nodes": {}}
    counts, nodes = ((1, 4), (1, 4)) if quick else ((1, 2, 4, 8, 12, 16), (1, 2, 4, 8, 16, 32, 64))
    for label, platform in (("CPU-GPU", cpu_gpu(4)), ("CPU-FPGA", cpu_fpga(4))):
        many = replace(platform, network_bandwidth=NETWORK_BANDWIDTH, network_latency=NETWORK_LATENCY)
        for dataset in list(DATASETS)[: 1 if quick else None]:
            workload, name = paper_workload(dataset, trainers=4), f"{label}, {dataset}"
            alone = scaling_study(platform, workload, counts, cpu_trainers=0)
            hybrid = scaling_study(platform, workload, counts)
            study["accelerators"][name + WITHOUT] = _points(alone, alone[0])
            study["accelerators"][name] = _points(hybrid, alone[0])
            spread = scaling_study(many, workload, (4,), nodes)
            study["nodes"][name] = _points(spread, spread[0])
    return study


def _points(points: Sequence[ScalingPoint], first: ScalingPoint) -> list[dict[str, Any]]:
    """Return points as plain numbers, with their speed-up over another one."""
    return [
        {
            "accelerators": point.accelerators,
            "nodes": point.nodes,
            "mteps": point.mteps,
            "speedup": point.mteps / first.mteps,
            "iteration_ms": 1e3 * point.iteration,
            "cpu_part": point.mapping.cpu_seeds / point.mapping.total,
            "limit": point.limit,
        }
        for point in points
    ]


def draw(bars: dict[str, dict[str, float]], study: dict[str, Any], path: Path) -> None:
    """Plot the ablation as the paper's figure 11 does, and the scaling study.

    Args:
        bars: By speed of the accelerator, then by contestant: how many times as fast as the accelerator alone.
        study: Of :func:`scaling`.
        path: The PNG.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    names = list(dict.fromkeys(name for group in bars.values() for name in group))
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        found = [(group, bars[speed][name]) for group, speed in enumerate(bars) if name in bars[speed]]
        left = [group + (place - (len(names) - 1) / 2) * width for group, _ in found]
        axes[0].bar(left, [value for _, value in found], width, label=name)
    axes[0].axhline(1.0, color="black", linewidth=0.8)
    axes[0].set(title="Measured, by the accelerator's speed", ylabel="speed-up over the accelerator alone")
    axes[0].set_xticks(range(len(bars)), [speed.replace(" the ", "\nthe ") for speed in bars])
    if names:
        axes[0].legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    for axis, what in zip(axes[1:], ("accelerators", "nodes"), strict=True):
        colors: dict[str, str] = {}
        for name, points in study[what].items():
            if what == "nodes" or "FPGA" in name:
                base = name.removesuffix(WITHOUT)
                style = {"linestyle": "-" if name == base else "--", "color": colors.get(base)}
                places, speedups = [point[what] for point in points], [point["speedup"] for point in points]
                line = axis.plot(places, speedups, marker="o", label=name, **style)[0]
                colors[base] = line.get_color()
        first = "node" if what == "nodes" else "accelerator without the CPU"
        axis.set(xlabel=what, ylabel=f"speed-up over one {first}")
        axis.set_title("Predicted for the paper's platforms, GCN")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


_ANY = Workload(1, 1, 1, 1, (1,), (1, 1))
