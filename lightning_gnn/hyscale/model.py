"""The performance model of HyScale-GNN (section V): from platform and workload to stage times and a first mapping.

Then how it scales (section VI-D), and the paper's own machines and data sets (tables II and III) as its input:
``PerformanceModel(cpu_fpga(4), paper_workload("ogbn-products", trainers=5)).table()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal

from lightning_gnn.hyscale.mapping import Cost, IterationTimes, TaskMapping, split_evenly
from lightning_gnn.hyscale.workload import Platform, Processor, Workload
from lightning_gnn.runtime.messages import aligned

_ROUNDS = 4
_TURNS = 16
"""Seeds of the CPU trainers are tried in so many steps where threads take turns."""


class PerformanceModel:
    """Predict the stages of an iteration.

    The paper's equations with these corrections: layer l aggregates ``|E^l| * f^(l-1)`` numbers and multiplies
    ``|V^l| * f^(l-1) * f^l`` times (11 and 12 are off by one); sums over trainers have n terms; the backward pass of an
    update is two products, except in layer 1, where nobody asks for the gradient of the features; a transfer carries
    the topology too. Between nodes an all-reduce is added; more CPU threads than cores take turns.

    Args:
        platform: What it runs on.
        workload: What it trains.
    """

    def __init__(self, platform: Platform, workload: Workload) -> None:
        self.platform = platform
        self.workload = workload

    def aggregate_time(self, layer: int, seeds: float, bandwidth: float) -> float:
        """Return the seconds in which layer l reads its neighbours' features: equation 11, corrected."""
        work = self.workload
        return work.sizes(seeds).edges[layer - 1] * work.widths[layer - 1] * work.feature_bytes / bandwidth

    def update_time(self, layer: int, seeds: float, flops: float) -> float:
        """Return the seconds of one product of layer l's update: equation 12, corrected."""
        work = self.workload
        products = work.sizes(seeds).vertices[layer] * work.widths[layer - 1] * work.widths[layer] * work.update_inputs
        return 2 * products / flops

    def trainer_time(self, processor: Processor, seeds: float) -> float:
        """Return the seconds in which one trainer propagates a mini-batch forward and backward: equation 10."""
        if seeds <= 0:
            return 0.0
        total = 0.0
        for layer in range(1, self.workload.num_layers + 1):
            aggregate = self.aggregate_time(layer, seeds, processor.memory_bandwidth)
            update = self.update_time(layer, seeds, processor.flops)
            total += self._joined(processor, aggregate, update)
            total += update if layer == 1 else self._joined(processor, aggregate, 2 * update)
        return total

    def load_time(self, mapping: TaskMapping) -> float:
        """Return the seconds of Feature Loading for all trainers: equation 7."""
        work = self.workload
        rows = sum(work.sizes(seeds).vertices[0] for seeds in mapping.seeds if seeds)
        return rows * work.row_bytes / self.platform.read_bandwidth(mapping.threads[1])

    def transfer_time(self, seeds: float) -> float:
        """Return the seconds of the transfer to one accelerator: equation 8, and two ids per edge, one per vertex."""
        work = self.workload
        sizes = work.sizes(seeds)
        features = sizes.vertices[0] * work.transferred_row_bytes
        topology = (2 * sizes.edges[0] + sizes.vertices[0]) * work.index_bytes
        return (features + topology) / self.platform.pcie_bandwidth

    def sync_time(self) -> float:
        """Return the seconds in which gradients are averaged and sent back: equation 13, and between nodes.

        Nodes add a ring all-reduce: ``2 (k - 1) / k`` times the model through the network, in ``2 (k - 1)`` messages.
        """
        nodes, size, platform = self.platform.num_nodes, self.workload.model_bytes, self.platform
        inside = 2 * size / platform.pcie_bandwidth if platform.num_accelerators else 0.0
        ring = 2 * (nodes - 1) * (size / nodes / platform.network_bandwidth + platform.network_latency)
        return inside + ring

    def stage_times(self, mapping: TaskMapping) -> IterationTimes:
        """Return the time of each stage, and of an iteration: equations 6 to 12.

        Args:
            mapping: Who does what. Training times are without :meth:`sync_time`; the iteration counts it.

        Raises:
            ValueError: It has other accelerators than the platform.
        """
        platform, work = self.platform, self.workload
        on_accelerators = mapping.seeds[mapping.cpu_trainers :]
        if len(on_accelerators) != platform.num_accelerators:
            raise ValueError(
                f"a mapping for {len(on_accelerators)} accelerators, but the platform has {platform.num_accelerators}"
            )
        sampled = sum(work.sizes(seeds).edges[0] for seeds in mapping.seeds if seeds)
        share = mapping.accelerator_sampling
        there = platform.accelerator_sampling * platform.num_accelerators
        if share and not there:
            raise ValueError("the mapping has accelerators sample, but the platform's accelerator_sampling is 0")
        cpu = self.cpu_trainer(mapping.threads[2], mapping.cpu_trainers)
        train_cpu = tuple(self.trainer_time(cpu, seeds) for seeds in mapping.seeds[: mapping.cpu_trainers])
        train_there: tuple[float, ...] = ()
        if platform.accelerator is not None:
            train_there = tuple(self.trainer_time(platform.accelerator, seeds) for seeds in on_accelerators)
        times = IterationTimes(
            sample_cpu=sampled * (1 - share) / platform.sampled_edges(mapping.threads[0]),
            load=self.load_time(mapping),
            train_cpu=train_cpu,
            train_accelerator=train_there,
            transfer=max((self.transfer_time(seeds) for seeds in on_accelerators if seeds), default=None),
            sample_accelerator=sampled * share / there if share else None,
            seeds=mapping.seeds,
        )
        propagation = max(*train_cpu, *train_there, 0.0) + self.sync_time()
        others = (times.sample_cpu, times.sample_accelerator, times.load, times.transfer)
        busy = self._taking_turns(times, mapping.threads)
        return replace(times, iteration=max(propagation, busy, *(seconds for seconds in others if seconds is not None)))

    def turns_time(self, mapping: TaskMapping) -> float:
        """Return the seconds in which the cores get all CPU tasks done, 0 where each thread has a core of its own."""
        return self._taking_turns(self.stage_times(mapping), mapping.threads)

    def _taking_turns(self, times: IterationTimes, threads: tuple[int, int, int]) -> float:
        cores = self.platform.cores
        if sum(threads) <= cores:
            return 0.0
        sampler, loader, trainer = threads
        propagation = max((seconds or 0.0 for seconds in times.train_cpu), default=0.0)
        work = (times.sample_cpu or 0.0) * sampler + (times.load or 0.0) * loader
        work += propagation * min(trainer, cores)  # a trainer is taken to make use of no more
        return work / cores

    def cpu_trainer(self, threads: int, trainers: int) -> Processor:
        """Return what one CPU trainer has of the CPU, when so many share so many threads."""
        cpu, count = self.platform.cpu, max(1, trainers)
        part = min(max(1, threads) / self.platform.cores, 1.0) / count
        bandwidth = self.platform.read_bandwidth(max(1, threads)) / count
        return Processor(cpu.flops * part, bandwidth, cpu.pipelined)

    def iteration_time(self, mapping: TaskMapping) -> float:
        """Return ``T_execution``, the seconds of an iteration: equation 6."""
        return self.stage_times(mapping).iteration or 0.0

    def epoch_time(self, mapping: TaskMapping) -> float:
        """Return the seconds of an epoch, without filling the pipeline."""
        return ceil(self.workload.num_train / (mapping.total * self.platform.num_nodes)) * self.iteration_time(mapping)

    def mteps(self, mapping: TaskMapping) -> float:
        """Return the throughput in million traversed edges per second, of all nodes: equation 5."""
        edges = sum(self.workload.sizes(seeds).num_edges for seeds in mapping.seeds if seeds)
        return edges * self.platform.num_nodes / self.iteration_time(mapping) / 1e6

    def best_mapping(self, cpu_trainers: int = 1, num_threads: int | None = None) -> TaskMapping:
        """Return the mapping with the shortest iteration: the initial one of section III-B.

        Every number of trainer threads is tried, each with the seeds that let all trainers finish together and the
        other threads shared out best between Sampling and Feature Loading. The CPU gets no seeds where
        that is faster, and fewer where that is faster since there are more threads than cores.

        Args:
            cpu_trainers: CPU trainers, 0 for accelerators alone.
            num_threads: Threads to share out; by default one per core, but no fewer than tasks.

        Raises:
            ValueError: There is no trainer, or there are fewer threads than tasks.
        """
        least = 2 + cpu_trainers
        threads = max(self.platform.cores, least) if num_threads is None else num_threads
        if cpu_trainers < 0 or cpu_trainers + self.platform.num_accelerators < 1:
            raise ValueError(f"cpu_trainers={cpu_trainers}, and no accelerator: there is nothing to train on")
        if threads < least:
            raise ValueError(f"num_threads={threads}, but Sampling, Feature Loading and CPU trainers need {least}")
        best, least_time = None, inf
        for trainer in range(cpu_trainers, threads - 1) if cpu_trainers else (0,):
            seeds = self._split(cpu_trainers, trainer)
            # Where threads take turns, CPU trainers hold up the other tasks.
            steps = _TURNS if threads > self.platform.cores else 1
            for step in range(steps + 1):
                candidate = self._with_less_on_cpu(seeds, cpu_trainers, 1 - step / steps)
                mapping = self._with_threads(candidate, cpu_trainers, threads, trainer)
                seconds = self.iteration_time(mapping)
                if best is None or seconds < least_time * (1 - 1e-9):
                    best, least_time = mapping, seconds
        assert best is not None
        return best

    def table(self, mapping: TaskMapping | None = None) -> str:
        """Return the prediction as a table, by default for :meth:`best_mapping`."""
        mapping = self.best_mapping() if mapping is None else mapping
        times, work = self.stage_times(mapping), self.workload
        cpu = max((seconds or 0.0 for seconds in times.train_cpu), default=None)
        there = max((seconds or 0.0 for seconds in times.train_accelerator), default=None)
        stages = {
            "Sampling, CPU": times.sample_cpu,
            "Sampling, accelerators": times.sample_accelerator,
            "Feature Loading": times.load,
            "Data Transfer": times.transfer,
            "Propagation, CPU": cpu,
            "Propagation, accelerators": there,
            "Synchronisation": self.sync_time(),
            "Iteration": times.iteration,
        }
        rows = [["stage", "ms"], *([name, f"{1e3 * t:.4g}"] for name, t in stages.items() if t is not None)]
        rows += [["Epoch", f"{1e3 * self.epoch_time(mapping):.4g}"], ["MTEPS", f"{self.mteps(mapping):.4g}"]]
        size = work.sizes(mapping.total)
        batch = f"{mapping.total} seeds, {size.vertices[0]:.4g} vertices and {size.edges[0]:.4g} edges an iteration"
        return "\n".join([str(mapping), batch, "", *aligned(rows)])

    @staticmethod
    def _joined(processor: Processor, aggregate: float, update: float) -> float:
        return max(aggregate, update) if processor.pipelined else aggregate + update

    def _split(self, cpu_trainers: int, threads: int) -> tuple[int, ...]:
        """Return the seeds with which all trainers, and the transfers to them, take equally long."""
        platform, total = self.platform, self.workload.batch_size
        count = cpu_trainers + platform.num_accelerators
        seeds = [total / count] * count
        costs: list[Cost] = []
        cpu = self.cpu_trainer(threads, cpu_trainers)
        for _ in range(_ROUNDS):  # the cost of a seed falls a little with their number: mini-batches share vertices
            costs = []
            for index, share in enumerate(seeds):
                share = max(1.0, share)
                if index < cpu_trainers:
                    seconds = self.trainer_time(cpu, share)
                else:
                    assert platform.accelerator is not None
                    seconds = max(self.trainer_time(platform.accelerator, share), self.transfer_time(share))
                costs.append(Cost(0.0, seconds / share))
            speeds = [1 / cost.per_unit for cost in costs]
            seeds = [total * speed / sum(speeds) for speed in speeds]
        return split_evenly(total, costs, least=0)

    def _with_less_on_cpu(self, seeds: tuple[int, ...], cpu_trainers: int, part: float) -> tuple[int, ...]:
        """Leave CPU trainers a part of their seeds; accelerators share the others out evenly."""
        there = self.platform.num_accelerators
        if not there or part == 1.0:
            return seeds
        left = tuple(round(part * own) for own in seeds[:cpu_trainers])
        share, rest = divmod(sum(seeds) - sum(left), there)
        return left + tuple(share + (index < rest) for index in range(there))

    def _with_threads(self, seeds: tuple[int, ...], cpu_trainers: int, threads: int, trainer: int) -> TaskMapping:
        """Share the threads left by the trainers out between Sampling and Feature Loading, and the sampling too."""
        platform, left = self.platform, threads - trainer
        there = platform.accelerator_sampling * platform.num_accelerators

        def mapping(sampler: int) -> TaskMapping:
            share = there / (there + platform.sampled_edges(sampler)) if there else 0.0
            return TaskMapping(seeds, cpu_trainers, (sampler, left - sampler, trainer), share)

        sampled = sum(self.workload.sizes(n).edges[0] for n in seeds if n)
        loaded = self.load_time(mapping(1)) * platform.read_bandwidth(left - 1)

        def slower(sampler: int) -> float:
            sampling = sampled / (platform.sampled_edges(sampler) + there)
            return max(sampling, loaded / platform.read_bandwidth(left - sampler))

        low, high = 1, left - 1
        while low < high:  # sampling gets faster with its threads, loading slower: the least of the two meets between
            middle = (low + high) // 2
            low, high = (low, middle) if slower(middle) <= slower(middle + 1) else (middle + 1, high)
        return self._sampled_beside_turns(mapping(low)) if there and threads > platform.cores else mapping(low)

    def _sampled_beside_turns(self, mapping: TaskMapping) -> TaskMapping:
        """Let accelerators sample so much that they and the CPU threads, which take turns, are done together."""
        here, there = (self.stage_times(replace(mapping, accelerator_sampling=share)) for share in (0.0, 1.0))
        most, least = (self._taking_turns(times, mapping.threads) for times in (here, there))
        share = most / (most - least + (there.sample_accelerator or 0.0))
        return replace(mapping, accelerator_sampling=max(mapping.accelerator_sampling, min(share, 1.0)))


@dataclass(frozen=True)
class ScalingPoint:
    """The prediction for one number of accelerators and nodes.

    Args:
        mapping: The best one, the same on each node.
        sync: Seconds of it in which gradients are averaged, inside the node and between nodes.
        mteps: Million traversed edges per second, all nodes together.
        speedup: Against the first point.
        limit: The stage that takes longest.
    """

    accelerators: int
    nodes: int
    mapping: TaskMapping
    iteration: float
    sync: float
    mteps: float
    speedup: float
    limit: str


def scaling_study(
    platform: Platform,
    workload: Workload,
    accelerators: Sequence[int] = (1, 2, 4, 8, 12, 16),
    nodes: Sequence[int] = (1,),
    cpu_trainers: int = 1,
) -> list[ScalingPoint]:
    """Predict the throughput for numbers of accelerators and nodes.

    The batch grows with the accelerators, as in the paper: each brings the seeds that one of the platform's has in the
    workload. Between nodes only the gradients' all-reduce is added, since each has the graph and its own seeds.

    Args:
        platform: The node; its own numbers of accelerators and nodes do not matter beyond the batch.
        workload: What is trained; its batch is that of the platform as given.
        accelerators: Numbers of accelerators of a node, at least 1.
    """
    if platform.accelerator is None:
        raise ValueError("the scaling study multiplies accelerators, but the platform has none")
    each = workload.batch_size / platform.num_accelerators
    points: list[ScalingPoint] = []
    for count in nodes:
        for number in accelerators:
            here = replace(platform, num_accelerators=number, num_nodes=count)
            model = PerformanceModel(here, replace(workload, batch_size=max(1, round(each * number))))
            mapping = model.best_mapping(cpu_trainers)
            mteps = model.mteps(mapping)
            points.append(
                ScalingPoint(
                    number,
                    count,
                    mapping,
                    model.iteration_time(mapping),
                    model.sync_time(),
                    mteps,
                    mteps / points[0].mteps if points else 1.0,
                    _limit(model, mapping),
                )
            )
    return points


def scaling_table(points: Sequence[ScalingPoint]) -> str:
    """Return a scaling study as a table."""
    rows = [["nodes", "accelerators", "seeds on the CPU", "iteration ms", "sync ms", "MTEPS", "speedup", "limit"]]
    for point in points:
        share = f"{point.mapping.cpu_seeds / point.mapping.total:.1%}"
        times = [f"{1e3 * point.iteration:.4g}", f"{1e3 * point.sync:.3g}"]
        speed = [f"{point.mteps:.4g}", f"{point.speedup:.2f}"]
        rows.append([str(point.nodes), str(point.accelerators), share, *times, *speed, point.limit])
    return "\n".join(aligned(rows))


def _limit(model: PerformanceModel, mapping: TaskMapping) -> str:
    times = model.stage_times(mapping)
    propagation = max(seconds or 0.0 for seconds in times.trainers) + model.sync_time()
    stages = {
        "Sampling": max(times.sample_cpu or 0.0, times.sample_accelerator or 0.0),
        "Feature Loading": times.load or 0.0,
        "Data Transfer": times.transfer or 0.0,
        "Propagation": propagation,
        "CPU cores": model.turns_time(mapping),
    }
    return max(stages, key=stages.__getitem__)


EPYC_7763 = Processor(flops=3.6e12, memory_bandwidth=205e9)
RTX_A5000 = Processor(flops=27.8e12, memory_bandwidth=768e9)
ALVEO_U250 = Processor(flops=0.6e12, memory_bandwidth=77e9, pipelined=True)
"""Table II."""

DUAL_EPYC_7763 = Processor(flops=2 * EPYC_7763.flops, memory_bandwidth=EPYC_7763.memory_bandwidth)
"""Both sockets, features in the memory of one: so Feature Loading saturates at 12 accelerators, as in the paper."""

CORES = 2 * 64
PCIE_3, PCIE_4 = 16e9, 32e9
"""Bytes per second of 16 lanes, which the U250 and the A5000 have; the paper leaves them out."""

DATASETS = {
    "ogbn-products": (2_449_029, 61_859_140, (100, 256, 47)),
    "ogbn-papers100M": (111_059_956, 1_615_685_872, (128, 256, 172)),
    "MAG240M (homo)": (121_751_666, 1_297_748_926, (756, 256, 153)),
}
"""Table III: vertices, edges, and f0, f1, f2."""

NUM_TRAIN = {"ogbn-products": 196_615, "ogbn-papers100M": 1_207_179, "MAG240M (homo)": 1_112_392}
"""Training vertices of the data sets' own splits, which the paper leaves out."""

FANOUTS = (25, 10)
BATCH_SIZE = 1024
"""Of each trainer (section VI-A2)."""


def cpu_gpu(num_accelerators: int = 4) -> Platform:
    """Return two EPYC 7763 and some A5000. Sampling is left out: the paper measured it, and does not say how long."""
    return Platform(DUAL_EPYC_7763, CORES, RTX_A5000, num_accelerators, PCIE_4)


def cpu_fpga(num_accelerators: int = 4) -> Platform:
    """Return two EPYC 7763 and some Alveo U250. Sampling is left out."""
    return Platform(DUAL_EPYC_7763, CORES, ALVEO_U250, num_accelerators, PCIE_3)


def paper_workload(dataset: str, trainers: int, model: Literal["gcn", "sage"] = "gcn") -> Workload:
    """Return a workload of section VI-A2.

    Args:
        trainers: How many trainers share an iteration's seeds, 1024 each.
    """
    vertices, edges, widths = DATASETS[dataset]
    return Workload(
        vertices,
        edges,
        NUM_TRAIN[dataset],
        BATCH_SIZE * trainers,
        FANOUTS,
        widths,
        update_inputs=2 if model == "sage" else 1,
    )
