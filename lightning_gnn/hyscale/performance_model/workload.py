"""Platform and workload descriptions: the inputs of HyScale-GNN's performance model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import exp, inf, log

_TRANSFER_BYTES = {"float16": (2, 0), "int8": (1, 4)}
"""Bytes per number, and additional bytes per row, by transfer dtype."""


@dataclass(frozen=True)
class Processor:
    """One CPU complex or one accelerator."""

    flops: float  # floating-point operations per second; a multiply-add counts twice, so this is 2 * ``N * freq``
    memory_bandwidth: float  # bytes per second of its own memory, burst reads
    pipelined: bool = False  # whether aggregation and update overlap, as on an FPGA (the operator of equation 10)

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.memory_bandwidth > 0):
            raise ValueError(f"flops and memory_bandwidth must be positive: {self}")


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
    measured: BatchSizes | None = None  # measured sizes of one mini-batch, scaled linearly with the seeds
    # dtype of the features during the transfer: ``"float16"``, ``"int8"`` with a float32 scale per row, None: unchanged
    transfer_dtype: str | None = None
    degree_spread: float = 0.0  # sigma of log-normal degrees; 0: every vertex has the mean degree
    undirected: bool = False  # whether a hop reaches a vertex as often as it has neighbors; citations do not
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
        if self.degree_spread < 0:
            raise ValueError(f"degree_spread must not be negative, but is {self.degree_spread}")
        if self.transfer_dtype not in (None, *_TRANSFER_BYTES):
            dtypes = list(_TRANSFER_BYTES)
            raise ValueError(f"transfer_dtype must be None or one of {dtypes}, but is {self.transfer_dtype!r}")
        sizes = self.measured
        if sizes is not None and (len(sizes.vertices), len(sizes.edges)) != (len(self.widths), len(self.fanouts)):
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

    def hit_rate(self, cache_bytes: float) -> float:
        """Return the fraction of feature reads that a cache of the rows most read answers."""
        return float(min(1.0, cache_bytes / (self.num_vertices * self.row_bytes)) ** (1 - self.read_skew))

    def sizes(self, seeds: float) -> BatchSizes:
        """Return the expected sizes of a mini-batch with ``seeds`` seeds."""
        # A vertex is expanded once, at its lowest hop, as in PyG. The model assumes uniformly random neighbors, so a
        # mini-batch cannot outgrow the graph.
        if self.measured is not None:
            factor = seeds / self.measured.seeds
            return BatchSizes(
                seeds,
                tuple(size * factor for size in self.measured.vertices),
                tuple(size * factor for size in self.measured.edges),
            )
        degree = self.num_edges / self.num_vertices
        frontier, vertices, edges = seeds, [seeds], [0.0]
        for hop, fanout in enumerate(self.fanouts):
            sampled = frontier * _expect_neighbors(fanout, degree, self.degree_spread, self.undirected and hop > 0)
            left = self.num_vertices - vertices[-1]
            frontier = max(0.0, left * (1 - exp(-sampled / self.num_vertices)))
            vertices.append(vertices[-1] + frontier)
            edges.append(edges[-1] + sampled)
        return BatchSizes(seeds, tuple(reversed(vertices)), tuple(reversed(edges[1:])))


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
