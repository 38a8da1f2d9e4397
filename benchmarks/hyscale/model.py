"""Predictions of HyScale-GNN's performance model for the runs of ``benchmarks.hyscale.epochs``.

The model uses speeds measured in a CPU-only run (and in a GPU-only run, if there is a GPU), never those of a hybrid
run. This module also defines the paper's machines and data sets (tables II and III) as input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import exp, inf, log
from typing import Any, Literal

from lightning_gnn.hyscale.analytic import BatchSizes, PerformanceModel, Platform, Processor, Workload
from lightning_gnn.hyscale.costs import TaskMapping


@dataclass(frozen=True)
class DataflowKernel(Processor):
    """An FPGA kernel of scatter-gather PEs that feed a systolic array (section IV-C, figure 6)."""

    # Edges are sorted by source: the Feature Duplicator reads each source vertex once and broadcasts it to all PEs.
    # Rows between layers stay on the chip while they fit.
    pes: int = 1  # ``n``: edges that are aggregated in parallel
    frequency: float = 1.0  # hertz
    lanes: int = 16  # numbers of a row that a PE adds per cycle; 16 are a 512-bit memory word
    on_chip_bytes: float = inf  # memory for the rows between two layers

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.pes, self.lanes) < 1 or not (self.frequency > 0 and self.on_chip_bytes >= 0):
            raise ValueError(f"pes, lanes and frequency must be positive, on_chip_bytes not negative: {self}")

    def aggregate_time(self, workload: Workload, layer: int, sizes: BatchSizes) -> float:
        """Return the seconds in which layer l reads each source vertex once, or not if the chip holds it."""
        numbers = sizes.edges[layer - 1] * workload.widths[layer - 1]
        rows = sizes.vertices[layer - 1] * workload.widths[layer - 1] * workload.feature_bytes
        if layer > 1:  # layer l - 1 writes what does not fit, and layer l reads it
            rows = 2 * max(0.0, rows - self.on_chip_bytes)
        added = numbers / (self.pes * self.lanes * self.frequency)
        return max(rows / self.memory_bandwidth, added)


@dataclass(frozen=True)
class SpreadWorkload(Workload):
    """A workload on a graph whose vertices have very different degrees."""

    degree_spread: float = 0.0  # sigma of log-normal degrees; 0: every vertex has the mean degree
    undirected: bool = False  # whether a hop reaches a vertex as often as it has neighbors; citations do not

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.degree_spread < 0:
            raise ValueError(f"degree_spread must not be negative, but is {self.degree_spread}")

    def mean_neighbors(self, hop: int) -> float:
        """Return the mean number of sampled neighbors of a vertex that a hop expands."""
        degree = self.num_edges / self.num_vertices
        return _expect_neighbors(self.fanouts[hop], degree, self.degree_spread, self.undirected and hop > 0)


@cache
def _expect_neighbors(fanout: int, degree: float, spread: float, by_degree: bool) -> float:
    """Return the mean of sampled neighbors; ``by_degree``: of vertices that are reached in proportion to degree."""
    if not spread or not degree:
        return degree if fanout < 0 else min(float(fanout), degree)
    center = log(degree) + spread**2 * (by_degree - 0.5)
    steps = [0.02 * step for step in range(-300, 301)]
    degrees = [exp(center + spread * step) for step in steps]
    weights = [exp(-(step**2) / 2) for step in steps]
    found = degrees if fanout < 0 else [min(float(fanout), each) for each in degrees]
    return sum(each * weight for each, weight in zip(found, weights, strict=True)) / sum(weights)


TERAFLOPS = {"EPYC 7763": 3.6, "A5000": 27.8, "U250": 0.6}
"""Table II. The U250's are multiply-accumulates: table IV has 2048 units at 300 MHz, 0.614e12 per second."""

MACS, FREQUENCY = 2048, 300e6
ON_CHIP_BYTES = 0.48 * 1280 * 36_864 + 0.40 * 2688 * 4608
"""Table IV's parts of the U250's URAM and BRAM blocks; the number of blocks is from its data sheet."""
ALVEO_U250 = DataflowKernel(2 * MACS * FREQUENCY, 77e9, True, 8, FREQUENCY, on_chip_bytes=ON_CHIP_BYTES)

RTX_A5000 = Processor(1e12 * TERAFLOPS["A5000"], memory_bandwidth=768e9)
DUAL_EPYC_7763 = Processor(2e12 * TERAFLOPS["EPYC 7763"], memory_bandwidth=205e9)
"""Both sockets, with features in one's memory, so that Feature Loading saturates at 12 accelerators as in the paper."""

CORES = 2 * 64
PCIE_3, PCIE_4 = 16e9, 32e9
"""Bytes per second of 16 PCIe lanes, as in the U250 and the A5000; not stated in the paper."""

DATASETS = {
    "ogbn-products": (2_449_029, 61_859_140, (100, 256, 47)),
    "ogbn-papers100M": (111_059_956, 1_615_685_872, (128, 256, 172)),
    "MAG240M (homo)": (121_751_666, 1_297_748_926, (756, 256, 153)),
}
"""Table III: vertices, edges, and f0, f1, f2."""

NUM_TRAIN = {"ogbn-products": 196_615, "ogbn-papers100M": 1_207_179, "MAG240M (homo)": 1_112_392}
"""Number of training vertices of the data sets' splits, not stated in the paper."""

FANOUTS = (25, 10)
BATCH_SIZE = 1024
"""Seeds of each trainer (section VI-A2)."""


def cpu_gpu(num_accelerators: int = 4) -> Platform:
    """Return two EPYC 7763 and some A5000. Sampling is not included, as the paper does not report its time."""
    return Platform(DUAL_EPYC_7763, CORES, RTX_A5000, num_accelerators, PCIE_4)


def cpu_fpga(num_accelerators: int = 4) -> Platform:
    """Return two EPYC 7763 and some Alveo U250. Sampling is not included."""
    return Platform(DUAL_EPYC_7763, CORES, ALVEO_U250, num_accelerators, PCIE_3)


def paper_workload(dataset: str, trainers: int, model: Literal["gcn", "sage"] = "gcn") -> SpreadWorkload:
    """Return a workload of section VI-A2.

    Args:
        trainers: Number of trainers, each with 1024 seeds per iteration.
    """
    vertices, edges, widths = DATASETS[dataset]
    return SpreadWorkload(
        vertices,
        edges,
        NUM_TRAIN[dataset],
        BATCH_SIZE * trainers,
        FANOUTS,
        widths,
        update_inputs=2 if model == "sage" else 1,
    )


def workload_of(notes: dict[str, Any]) -> SpreadWorkload:
    """Return the workload described by a contestant."""
    described = dict(notes["workload"])
    found = described.pop("measured")
    for name in ("fanouts", "widths"):
        described[name] = tuple(described[name])
    measured = (BatchSizes(each["seeds"], tuple(each["vertices"]), tuple(each["edges"])) for each in found)
    return Workload(**described, measured=tuple(measured))


def platform_of(notes: dict[str, Any]) -> Platform:
    """Return the platform described by the strategy's short measurements."""
    described = dict(notes["platform"])
    for name in ("cpu", "accelerator"):
        described[name] = Processor(**described[name])
    return Platform(**described)


def transferred_bytes(workload: Workload) -> float:
    """Return the bytes that an undivided mini-batch transfers to an accelerator."""
    alone = Platform(Processor(1.0, 1.0), 1, Processor(1.0, 1.0), 1, pcie_bandwidth=1.0)
    return PerformanceModel(alone, workload).transfer_time(workload.batch_size)


def paper_link() -> float:
    """Return the paper's U250's transfer time of a mini-batch relative to its training time.

    Computed by the model for GraphSAGE on ogbn-papers100M. A simulated accelerator's link has this ratio.
    """
    model = PerformanceModel(cpu_fpga(1), paper_workload("ogbn-papers100M", trainers=1, model="sage"))
    return model.transfer_time(BATCH_SIZE) / model.trainer_time(ALVEO_U250, BATCH_SIZE)


def with_accelerator(platform: Platform, threads: int, speed: float, link: float) -> Platform:
    """Return the platform with an accelerator of the given speed relative to the CPU trainer."""
    there = PerformanceModel(platform, _ANY).cpu_trainer(threads, 1)
    accelerator = Processor(speed * there.flops, speed * there.memory_bandwidth)
    return replace(platform, accelerator=accelerator, num_accelerators=1, pcie_bandwidth=link)


def calibrated(notes: dict[str, Any]) -> Platform:
    """Return the platform with the speeds of a CPU-only run.

    Sampling and Feature Loading have their measured speeds. The CPU trainer's floating-point operations per second
    follow from the step time that remains after aggregation at Feature Loading's memory bandwidth. If less than a fifth
    of the step remains, both are scaled to match the measured step time.
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

    More CPU threads than cores share the cores.
    """
    times = model.stage_times(mapping)
    load, transfer = times.load or 0.0, times.transfer or 0.0
    sync = model.sync_time() if sum(seeds > 0 for seeds in mapping.seeds) > 1 else 0.0
    propagation = max(seconds or 0.0 for seconds in times.trainers) + sync
    stages = (load + transfer,) if prefetch == 1 else (load, transfer)
    return max(times.sample_cpu or 0.0, propagation, model.shared_core_time(mapping), *stages)


_ANY = Workload(1, 1, 1, 1, (1,), (1, 1))
