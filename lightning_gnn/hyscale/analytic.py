"""The performance model of HyScale-GNN (section V), equations 5 to 13, and the short measurements that calibrate it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import ceil, exp, inf, log
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.sampler import SamplerOutput

from lightning_gnn.features.table import FeatureTable
from lightning_gnn.gpu_sampling.pipeline import DevicePipeline
from lightning_gnn.graph.csc import count_edges
from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling
from lightning_gnn.hyscale.costs import (
    Curve,
    IterationTimes,
    NodeCosts,
    TaskMapping,
    busy_under,
    iteration,
    stages,
)
from lightning_gnn.hyscale.options import PyGLoader, TrainerSet
from lightning_gnn.hyscale.plan import plan
from lightning_gnn.loading.batch import BatchTask
from lightning_gnn.loading.loaders import NodeLoader, PipelineLoader
from lightning_gnn.ops import batch_key
from lightning_gnn.runtime.devices import num_cores
from lightning_gnn.runtime.machine_rates import measured_once, min_seconds, torch_threads
from lightning_gnn.runtime.memory_info import available_bytes

_TRANSFER_BYTES = {"float16": (2, 0), "int8": (1, 4)}
"""Bytes per number, and additional bytes per row, by transfer dtype."""
_PROBE_KEY = batch_key(1)
_DEFAULT_EDGES_PER_S = 5e6
"""Assumed sampling rate per thread if a measurement would consume numbers of the run's random stream."""
_ROWS, _WIDTH = 1 << 15, 128


@dataclass(frozen=True)
class Processor:
    """One CPU complex or one accelerator."""

    flops: float  # floating-point operations per second; a multiply-add counts twice, so this is 2 * ``N * freq``
    memory_bandwidth: float  # bytes per second of its own memory, burst reads
    pipelined: bool = False  # whether aggregation and update overlap, as on an FPGA (the operator of equation 10)

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.memory_bandwidth > 0):
            raise ValueError(f"flops and memory_bandwidth must be positive: {self}")

    def aggregate_time(self, workload: Workload, layer: int, sizes: BatchSizes) -> float:
        """Return the seconds in which layer l reads neighbor features: equation 11, corrected."""
        numbers = sizes.edges[layer - 1] * workload.widths[layer - 1]
        return numbers * workload.feature_bytes / self.memory_bandwidth


@dataclass(frozen=True)
class Platform:
    """One node, or several identical nodes."""

    cpu: Processor
    cores: int  # CPU cores, one thread each
    accelerator: Processor | None = None  # one accelerator; None for a CPU-only node
    num_accelerators: int = 0
    pcie_bandwidth: float = inf  # bytes per second to each accelerator
    sampling: float = inf  # edges per second that one CPU thread samples; inf ignores sampling
    accelerator_sampling: float = 0.0  # edges per second that one accelerator samples; 0 if unsupported
    # bytes per second that one thread reads; by default, one core saturates the CPU's memory bandwidth, as in the paper
    core_bandwidth: float = inf
    num_nodes: int = 1
    scattered_bandwidth: float = inf  # bytes per second of neighbors' rows, at random places, for all CPU trainers
    gather_bandwidth: float = (
        0.0  # bytes per second at which an accelerator gathers rows of CPU memory; 0 if unsupported
    )
    accelerator_memory: float = 0.0  # bytes of one accelerator for prepared mini-batches and a cache of feature rows

    def __post_init__(self) -> None:
        if (self.accelerator is None) != (self.num_accelerators == 0) or self.num_accelerators < 0:
            raise ValueError(
                f"num_accelerators={self.num_accelerators} with accelerator={self.accelerator}: give both or neither"
            )
        rates = (self.pcie_bandwidth, self.core_bandwidth, self.scattered_bandwidth, self.sampling)
        if min(self.cores, self.num_nodes) < 1 or min(rates) <= 0 or self.accelerator_sampling < 0:
            raise ValueError(f"cores, nodes, bandwidths and sampling rates must be positive: {self}")
        if min(self.gather_bandwidth, self.accelerator_memory) < 0:
            raise ValueError(f"gather_bandwidth and accelerator_memory must not be negative: {self}")

    def read_bandwidth(self, threads: float) -> float:
        """Return the bytes per second that ``threads`` CPU threads read from CPU memory."""
        return min(self.cpu.memory_bandwidth, self.core_bandwidth * threads)


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of one mini-batch."""

    seeds: float
    vertices: tuple[float, ...]  # ``|V^0|, ..., |V^L|``: ``V^0`` are all vertices, ``V^L`` the seeds
    edges: tuple[float, ...]  # ``|E^1|, ..., |E^L|``: ``E^l`` are the edges into ``V^l``, which layer l aggregates over

    @property
    def num_edges(self) -> float:
        """Edges traversed by all layers, the numerator of equation 5."""
        return sum(self.edges)


@dataclass(frozen=True)
class Workload:
    """A dataset, a model and a mini-batch."""

    num_vertices: int
    num_edges: int
    num_train: int  # seeds of an epoch
    batch_size: int  # seeds of an iteration, summed over all trainers of a node
    fanouts: tuple[int, ...]  # per hop, starting at the seeds; -1 for all neighbors
    widths: tuple[int, ...]  # ``f^0, ..., f^L``: columns of the features, hidden layers and output
    feature_bytes: float = 4  # ``S_feat``, bytes of one number
    index_bytes: float = 8  # bytes of one vertex id in a mini-batch
    update_inputs: int = 1  # input vectors per vertex of the update: 1 for GCN, 2 for GraphSAGE (self and neighbors)
    # measured sizes of mini-batches, by rising seeds: sizes follow a power of the seeds between them, or grow linearly
    # from a single one
    measured: tuple[BatchSizes, ...] = ()
    # dtype of the features during the transfer: ``"float16"``, ``"int8"`` with a float32 scale per row, None: unchanged
    transfer_dtype: str | None = None
    read_skew: float = 0.5  # the rows most read, a fraction q of all, get ``q ** (1 - read_skew)`` of the reads

    def __post_init__(self) -> None:
        if min(self.num_vertices, self.num_train, self.batch_size, self.update_inputs) < 1 or self.num_edges < 0:
            raise ValueError(f"sizes must be positive: {self}")
        if not self.fanouts or len(self.widths) != len(self.fanouts) + 1 or min(self.widths) < 1:
            raise ValueError(
                f"{len(self.fanouts)} fanouts need {len(self.fanouts) + 1} widths, from the features to the output, "
                f"but they are {self.widths}"
            )
        if min(self.fanouts) < -1 or not (self.feature_bytes > 0 and self.index_bytes >= 0):
            raise ValueError(f"fanouts must be at least -1, bytes not negative: {self}")
        if self.transfer_dtype not in (None, *_TRANSFER_BYTES):
            dtypes = list(_TRANSFER_BYTES)
            raise ValueError(f"transfer_dtype must be None or one of {dtypes}, but is {self.transfer_dtype!r}")
        for sizes in self.measured:
            if (len(sizes.vertices), len(sizes.edges)) == (len(self.widths), len(self.fanouts)):
                continue
            raise ValueError(
                f"measured sizes are for {len(sizes.edges)} layers, but the model has {len(self.fanouts)}: give |V^0| "
                f"to |V^L| and |E^1| to |E^L|"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers, ``L``."""
        return len(self.fanouts)

    @property
    def row_bytes(self) -> float:
        """Bytes of one vertex's features in CPU memory."""
        return self.widths[0] * self.feature_bytes

    @property
    def transferred_row_bytes(self) -> float:
        """Bytes of one vertex's features during the transfer to an accelerator."""
        if self.transfer_dtype is None:
            return self.row_bytes
        number, row = _TRANSFER_BYTES[self.transfer_dtype]
        return self.widths[0] * number + row

    @property
    def model_bytes(self) -> float:
        """Bytes of all weight matrices, the numerator of equation 13."""
        numbers = sum(wide * next_ for wide, next_ in pairwise(self.widths))
        return self.update_inputs * numbers * self.feature_bytes

    def mean_neighbors(self, hop: int) -> float:
        """Return the mean number of sampled neighbors of a vertex that a hop expands."""
        degree, fanout = self.num_edges / self.num_vertices, self.fanouts[hop]
        return degree if fanout < 0 else min(float(fanout), degree)

    def hit_rate(self, cache_bytes: float) -> float:
        """Return the fraction of feature reads that a cache of the rows most read answers."""
        return float(min(1.0, cache_bytes / (self.num_vertices * self.row_bytes)) ** (1 - self.read_skew))

    def sizes(self, seeds: float) -> BatchSizes:
        """Return the expected sizes of a mini-batch with ``seeds`` seeds."""
        # A vertex is expanded once, at its lowest hop, as in PyG. The model assumes uniformly random neighbors, so a
        # mini-batch cannot outgrow the graph.
        if self.measured:
            return _interpolate(self.measured, seeds)
        frontier, vertices, edges = seeds, [seeds], [0.0]
        for hop in range(self.num_layers):
            sampled = frontier * self.mean_neighbors(hop)
            left = self.num_vertices - vertices[-1]
            frontier = max(0.0, left * (1 - exp(-sampled / self.num_vertices)))
            vertices.append(vertices[-1] + frontier)
            edges.append(edges[-1] + sampled)
        return BatchSizes(seeds, tuple(reversed(vertices)), tuple(reversed(edges[1:])))


def _interpolate(measured: Sequence[BatchSizes], seeds: float) -> BatchSizes:
    """Return the sizes of a mini-batch by a power law through the two nearest measured ones."""
    # Larger mini-batches share more vertices, so sizes grow more slowly than the seeds.
    place = next((index for index, sizes in enumerate(measured) if seeds <= sizes.seeds), len(measured) - 1)
    high, low = measured[max(1, place) if len(measured) > 1 else 0], measured[max(0, place - 1)]
    factor = seeds / high.seeds
    if not factor:
        low = high
    steps = log(factor) / log(low.seeds / high.seeds) if low is not high else 0.0

    def scale(large: Sequence[float], small: Sequence[float]) -> tuple[float, ...]:
        pairs = zip(large, small, strict=True)
        return tuple(a * ((b / a) ** steps if low is not high and a and b else factor) for a, b in pairs)

    return BatchSizes(seeds, scale(high.vertices, low.vertices), scale(high.edges, low.edges))


class PerformanceModel:
    """Predict the stage times of an iteration.

    Implements the paper's equations with these corrections: layer l aggregates ``|E^l| * f^(l-1)`` numbers and performs
    ``|V^l| * f^(l-1) * f^l`` multiplications (11 and 12 are off by one); sums over trainers have n terms; the backward
    pass of an update has two products, except in layer 1, which needs no feature gradient; transfers include the
    topology; CPU threads in excess of the cores share them.

    Args:
        platform: The hardware.
        workload: The graph, the model and the mini-batch.
    """

    def __init__(self, platform: Platform, workload: Workload) -> None:
        self.platform = platform
        self.workload = workload

    def aggregate_time(self, layer: int, seeds: float, processor: Processor) -> float:
        """Return the seconds in which layer l reads neighbor features: equation 11, corrected."""
        return processor.aggregate_time(self.workload, layer, self.workload.sizes(seeds))

    def update_time(self, layer: int, seeds: float, flops: float) -> float:
        """Return the seconds of one product of layer l's update: equation 12, corrected."""
        work = self.workload
        products = work.sizes(seeds).vertices[layer] * work.widths[layer - 1] * work.widths[layer] * work.update_inputs
        return 2 * products / flops

    def trainer_time(self, processor: Processor, seeds: float) -> float:
        """Return the seconds of one trainer's forward and backward pass: equation 10."""
        if seeds <= 0:
            return 0.0

        def combine(aggregate: float, update: float) -> float:
            return max(aggregate, update) if processor.pipelined else aggregate + update

        total = 0.0
        for layer in range(1, self.workload.num_layers + 1):
            aggregate = self.aggregate_time(layer, seeds, processor)
            update = self.update_time(layer, seeds, processor.flops)
            total += combine(aggregate, update)
            total += update if layer == 1 else combine(aggregate, 2 * update)
        return total

    def transfer_time(self, seeds: float) -> float:
        """Return the seconds of a transfer to one accelerator: equation 8 plus two ids per edge and one per vertex."""
        work = self.workload
        sizes = work.sizes(seeds)
        features = sizes.vertices[0] * work.transferred_row_bytes
        topology = (2 * sizes.edges[0] + sizes.vertices[0]) * work.index_bytes
        return (features + topology) / self.platform.pcie_bandwidth

    def sync_time(self) -> float:
        """Return the seconds of averaging and returning the gradients: equation 13."""
        platform = self.platform
        return 2 * self.workload.model_bytes / platform.pcie_bandwidth if platform.num_accelerators else 0.0

    def cpu_trainer(self, threads: int, trainers: int) -> Processor:
        """Return one CPU trainer's part of the CPU if ``trainers`` trainers share ``threads`` threads."""
        platform, count = self.platform, max(1, trainers)
        fraction = min(max(1, threads) / platform.cores, 1.0) / count
        bandwidth = min(platform.read_bandwidth(max(1, threads)), platform.scattered_bandwidth) / count
        return Processor(platform.cpu.flops * fraction, bandwidth, platform.cpu.pipelined)

    def costs(self, cpu_trainers: int) -> NodeCosts[Curve]:
        """Return the predicted costs of each stage: equations 7 to 13."""
        platform, work = self.platform, self.workload
        rate, accelerator = platform.accelerator_sampling, platform.accelerator

        def sample(rate: float) -> Curve:
            return Curve(lambda seeds: work.sizes(seeds).edges[0] / rate)

        def read(bandwidth: float) -> Curve:
            return Curve(lambda seeds: work.sizes(seeds).vertices[0] * work.row_bytes / bandwidth)

        def train(processor: Processor) -> Curve:
            return Curve(partial(self.trainer_time, processor))

        def gather(batches: int) -> Curve:
            def seconds(seeds: float) -> float:
                rows_bytes = work.sizes(seeds).vertices[0] * work.row_bytes
                cache_bytes = max(0.0, platform.accelerator_memory - batches * rows_bytes)
                return rows_bytes * (1 - work.hit_rate(cache_bytes)) / platform.gather_bandwidth

            return Curve(seconds)

        return NodeCosts(
            cores=platform.cores,
            sample=sample(platform.sampling),
            load=lambda threads: read(platform.read_bandwidth(threads)),
            train_cpu=lambda threads: (train(self.cpu_trainer(threads, cpu_trainers)),) * cpu_trainers,
            train=() if accelerator is None else (train(accelerator),) * platform.num_accelerators,
            transfer=Curve(self.transfer_time),
            sample_accelerator=sample(rate) if rate else None,
            gather_accelerator=gather if platform.gather_bandwidth else None,
            sync=self.sync_time(),
        )

    def stage_times(self, mapping: TaskMapping) -> IterationTimes:
        """Return the time of each stage, with training excluding :meth:`sync_time`: equations 7 to 12.

        Raises:
            ValueError: The mapping does not match the platform's accelerators.
        """
        return stages(self._staged_costs(mapping), mapping)

    def shared_core_time(self, mapping: TaskMapping) -> float:
        """Return the seconds of all CPU tasks if threads outnumber cores and share them, otherwise 0."""
        return busy_under(self._staged_costs(mapping), mapping).cores

    def iteration_time(self, mapping: TaskMapping) -> float:
        """Return ``T_execution``, the seconds of an iteration including :meth:`sync_time`: equation 6."""
        return iteration(self._staged_costs(mapping), mapping)

    def _staged_costs(self, mapping: TaskMapping) -> NodeCosts[Curve]:
        """Return the costs of HyScale-GNN's stages under a mapping, which must be for this platform."""
        platform, accelerators = self.platform, len(mapping.seeds) - mapping.cpu_trainers
        if accelerators != platform.num_accelerators:
            raise ValueError(
                f"a mapping for {accelerators} accelerators, but the platform has {platform.num_accelerators}"
            )
        if mapping.accelerator_sampling and not platform.accelerator_sampling:
            raise ValueError("the mapping has accelerators sample, but the platform's accelerator_sampling is 0")
        return _staged(self.costs(mapping.cpu_trainers))

    def epoch_time(self, mapping: TaskMapping) -> float:
        """Return the seconds of an epoch, excluding the pipeline's warm-up."""
        return ceil(self.workload.num_train / (mapping.total * self.platform.num_nodes)) * self.iteration_time(mapping)

    def mteps(self, mapping: TaskMapping) -> float:
        """Return the throughput of all nodes in million traversed edges per second: equation 5."""
        edges = sum(self.workload.sizes(seeds).num_edges for seeds in mapping.seeds if seeds)
        return edges * self.platform.num_nodes / self.iteration_time(mapping) / 1e6

    def best_mapping(self, cpu_trainers: int = 1, num_threads: int | None = None) -> TaskMapping:
        """Return the mapping with the shortest predicted iteration: the initial mapping of section III-B.

        ``num_threads`` are the threads to distribute, by default one per core, but at least one per task; see
        :func:`~lightning_gnn.hyscale.plan.plan`.
        """
        threads = max(self.platform.cores, 2 + cpu_trainers) if num_threads is None else num_threads
        return plan(_staged(self.costs(cpu_trainers)), self.workload.batch_size, cpu_trainers, threads).mapping


def _staged(costs: NodeCosts[Curve]) -> NodeCosts[Curve]:
    """Return the costs of HyScale-GNN's stages: accelerators sample beside training."""
    return replace(costs, gather_accelerator=None, takes_turns=False)


def model_of(
    trainers: TrainerSet,
    loader: PyGLoader,
    module: nn.Module,
    total: int,
    sampling: AcceleratorSampling | None = None,  # None if accelerators do not sample
    transfer_dtype: str | None = None,  # dtype of features during the transfer; None: unchanged
    gathers: bool = False,  # whether accelerators also gather features
) -> PerformanceModel | None:
    """Return a calibrated performance model of this node and workload, or None if the workload is unknown."""
    workload, sampled_per_s = describe_workload(loader, module, total, transfer_dtype)
    if workload is None:
        return None
    accelerator_rate = 0.0 if sampling is None else measure_accelerator_rate(sampling, loader, total)
    return PerformanceModel(measure_platform(trainers, sampled_per_s, accelerator_rate, gathers), workload)


def describe_workload(
    loader: PyGLoader, module: nn.Module, total: int, transfer_dtype: str | None = None
) -> tuple[Workload | None, float]:
    """Return the workload of an iteration, or None if unknown, and one thread's sampling rate in edges per second."""
    # The model needs integer fanouts and a feature tensor; otherwise the defaults apply.
    data: Any = getattr(loader, "data", None)
    sampler = getattr(loader, "node_sampler", None) or getattr(loader, "link_sampler", None)
    fanouts = getattr(sampler, "num_neighbors", None)
    fanouts = list(getattr(fanouts, "values", fanouts) or []) if not isinstance(fanouts, dict) else []
    features = getattr(data, "x", None)
    if not fanouts or not all(isinstance(fanout, int) for fanout in fanouts) or not isinstance(features, torch.Tensor):
        return None, _DEFAULT_EDGES_PER_S
    # Layer widths come from the message-passing layers; the last one is repeated for hops without a layer.
    outputs = [
        layer.out_channels
        for layer in module.modules()
        if isinstance(layer, MessagePassing) and isinstance(getattr(layer, "out_channels", None), int)
    ]
    widths = [features.size(-1), *outputs][: len(fanouts) + 1]
    widths += widths[-1:] * (len(fanouts) + 1 - len(widths))
    # Measure the sizes of mini-batches and the sampling rate if this package's own sampler is used. Trainers get parts
    # of an iteration's seeds, and a part of the seeds reaches more than that part of the vertices.
    measured: list[BatchSizes] = []
    sampled_per_s = _DEFAULT_EDGES_PER_S
    if isinstance(loader, PipelineLoader):
        for number in sorted({max(1, total // part) for part in (8, 4, 2, 1)}):
            seeds = _take_first_seeds(loader, number)
            out, sampled_per_s = _time_sampling(lambda: loader.pipeline.sample(BatchTask(0, 0, seeds)).out)  # noqa: B023
            if out.num_sampled_nodes and out.num_sampled_edges and (not measured or len(seeds) > measured[-1].seeds):
                # The model counts vertices and edges from the input layer to the seeds, the reverse of the sampler's.
                vertices = list(accumulate(out.num_sampled_nodes))[::-1]
                edges = list(accumulate(out.num_sampled_edges))[::-1]
                measured.append(BatchSizes(len(seeds), tuple(map(float, vertices)), tuple(map(float, edges))))
        if isinstance(loader.pipeline, DevicePipeline):
            sampled_per_s = _DEFAULT_EDGES_PER_S  # that was the GPU
    # The transfer dtype applies to floating-point features only.
    workload = Workload(
        num_vertices=int(data.num_nodes),
        num_edges=count_edges(data),
        num_train=len(loader.dataset),
        batch_size=total,
        fanouts=tuple(fanouts),
        widths=tuple(widths),
        feature_bytes=features.element_size(),
        index_bytes=8,
        update_inputs=2,
        measured=tuple(measured),
        transfer_dtype=transfer_dtype if features.is_floating_point() else None,
    )
    return workload, sampled_per_s


def measure_sampling_share(
    sampling: AcceleratorSampling, loader: PyGLoader, total: int, threads: int, num_accelerators: int = 1
) -> float:
    """Measure and return the accelerators' share of the sampling with which they and the CPU finish together."""
    seeds = _take_first_seeds(loader, total)
    accelerator_rate = num_accelerators * measure_accelerator_rate(sampling, loader, total)
    cpu_rate = threads * _time_sampling(lambda: loader.pipeline.sample(BatchTask(0, 0, seeds)).out)[1]
    return accelerator_rate / (accelerator_rate + cpu_rate)


def measure_accelerator_rate(sampling: AcceleratorSampling, loader: NodeLoader, total: int) -> float:
    """Measure one accelerator's sampling rate in edges per second, over the seeds of one iteration."""
    inputs = loader.pipeline.seeds[_take_first_seeds(loader, total)]
    return _time_sampling(lambda: sampling.sample(inputs, _PROBE_KEY))[1]


def _take_first_seeds(loader: PipelineLoader, total: int) -> list[int]:
    return list(range(min(total, len(loader.dataset))))


def _time_sampling(sample: Callable[[], SamplerOutput]) -> tuple[SamplerOutput, float]:
    """Return a sample and its sampling rate in edges per second."""
    sample()  # warm-up: compiles the kernels
    start = time.perf_counter()
    out = sample()
    return out, max(1, out.row.numel()) / (time.perf_counter() - start)


def measure_platform(
    trainers: TrainerSet, sampled_per_s: float, accelerator_rate: float = 0.0, gathers: bool = False
) -> Platform:
    """Measure this node's compute, memory and PCIe rates, and with ``gathers`` those of gathering on accelerators."""
    cpu = torch.device("cpu")
    accelerators = trainers.devices[trainers.num_cpu :]
    pcie = float("inf")
    if accelerators and accelerators[0].type != "cpu":
        rows = torch.ones(_ROWS, _WIDTH)
        pcie = rows.nbytes / min_seconds(lambda: rows.to(accelerators[0])[0, 0].item())
    all_cores = _measure_processor(cpu)
    with torch_threads(1):
        core_bandwidth = _measure_processor(cpu).memory_bandwidth
    accelerator = _measure_processor(accelerators[0]) if accelerators else None
    gather_bandwidth, memory = 0.0, 0
    if gathers and accelerator is not None and accelerators[0].type == "cuda":
        table, index = FeatureTable(torch.ones(_ROWS, _WIDTH)).pin_memory(), _scattered(accelerators[0])
        gather_bandwidth = table.values.nbytes / min_seconds(lambda: table.gather(index)[0, 0].item())
        memory = available_bytes(accelerators[0]) or 0
    elif gathers and accelerator is not None and accelerators[0].type == "cpu":  # an emulated accelerator
        gather_bandwidth = accelerator.memory_bandwidth
    return Platform(
        cpu=all_cores,
        cores=num_cores(),
        accelerator=accelerator,
        num_accelerators=len(accelerators),
        pcie_bandwidth=pcie,
        sampling=sampled_per_s,
        accelerator_sampling=accelerator_rate,
        core_bandwidth=min(core_bandwidth, all_cores.memory_bandwidth),
        gather_bandwidth=gather_bandwidth,
        accelerator_memory=memory,
    )


def cached_platform(
    trainers: TrainerSet, sampled_per_s: float, accelerator_rate: float = 0.0, gathers: bool = False
) -> Platform:
    """Return :func:`measure_platform` from the cache of this machine, or measure; not cached on a busy machine."""
    kinds = [torch.cuda.get_device_name(each) if each.type == "cuda" else str(each) for each in trainers.devices]
    state = measured_once(
        "devices of this machine", lambda: asdict(measure_platform(trainers, 1.0, 0.0, gathers)),
        kinds, trainers.num_cpu, torch.get_num_threads(), gathers,
    )  # fmt: skip
    rates = {name: None if state[name] is None else Processor(**state[name]) for name in ("cpu", "accelerator")}
    return Platform(**{**state, **rates, "sampling": sampled_per_s, "accelerator_sampling": accelerator_rate})


def _scattered(device: torch.device) -> Tensor:
    return torch.arange(_ROWS, device=device) * 7919 % _ROWS


def _measure_processor(device: torch.device) -> Processor:
    """Time a matrix product of a typical layer's size, and a gather of rows in scattered order."""
    x, weight = torch.ones(_ROWS, _WIDTH, device=device), torch.ones(_WIDTH, _WIDTH, device=device)
    index = _scattered(device)
    product = min_seconds(lambda: (x @ weight)[0, 0].item())
    gather = min_seconds(lambda: x.index_select(0, index)[0, 0].item())
    return Processor(2 * _ROWS * _WIDTH * _WIDTH / product, x.nbytes / gather)
