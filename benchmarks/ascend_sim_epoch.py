"""A GCN epoch on a simulated Ascend chip: graphs of the sizes of the paper's table 1, plans, launch after launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ascend_sim_model import (
    UNIFIED_COLUMNS,
    Launch,
    Setting,
    aggregate_cube,
    aggregate_vector,
    combine_parts,
    tables_of,
    update,
)
from benchmarks.ascend_sim_order import ranks
from lightning_gnn.ascend_ops.tiling import CubeTables, cube_tables, row_tables
from lightning_gnn.graph import CSCGraph
from lightning_gnn.graph.chunks import Chunks
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.hybrid_plan import HybridPlan, PlanSettings
from lightning_gnn.graph.synthetic import planted_power_law
from lightning_gnn.ops.aggregate.chip_plan import plan_chip

HIDDEN = 256
PLANETOID = ("Cora", "CiteSeer", "PubMed")


@dataclass(frozen=True)
class Shape:
    """A graph of the paper's table 1, and how much smaller the generated one is.

    Args:
        nodes: Vertices.
        edges: Directed edges.
        features: Columns of the features.
        classes: Classes.
        exponent: Exponent of the power law of the generated degrees.
        homophily: Share of the edges inside a class, as reported for the real graph.
        node_scale: The generated graph has this share of the vertices.
        edge_scale: And this share of the edges.
    """

    nodes: int
    edges: int
    features: int
    classes: int
    exponent: float
    homophily: float
    node_scale: float = 1.0
    edge_scale: float = 1.0


SHAPES = {
    "CiteSeer": Shape(3_327, 9_104, 3_703, 6, 3.0, 0.74),
    "Cora": Shape(2_708, 10_556, 1_433, 7, 2.9, 0.81),
    "PubMed": Shape(19_717, 88_648, 500, 3, 2.2, 0.80),
    "Reddit": Shape(232_965, 114_615_892, 602, 41, 2.1, 0.78, 1 / 6, 1 / 36),
    "Products": Shape(2_449_029, 61_859_140, 100, 47, 2.2, 0.81, 1 / 16, 1 / 16),
    "Reddit, smaller": Shape(232_965, 114_615_892, 602, 41, 2.1, 0.78, 1 / 12, 1 / 144),
}
"""Reddit is dense: fewer vertices by a factor and fewer edges by its square keep the share of the vertices that are
neighbours of a vertex, so the share that a chunk of rows uses and how full its tiles are. Products is sparse: the same
factor for both keeps the degrees, on which there depends how many edges a loaded row serves. L2 is scaled down with
the vertices, so that it holds the same share of the features."""


def is_real(name: str, planetoid: str | None) -> bool:
    """Return whether a graph is read from a folder of PyG's Planetoid files, not generated."""
    return planetoid is not None and name in PLANETOID and (Path(planetoid) / name).is_dir()


def make_topology(
    name: str, planetoid: str | None = None, shrink: int = 1, lean: float = 0.0, homophily: float | None = None
) -> CSCGraph:
    """Return a symmetric graph with self-loops, as a GCN aggregates over.

    Args:
        name: One of ``SHAPES``.
        planetoid: Folder of PyG's Planetoid files for the real Cora, CiteSeer and PubMed; what is not there is
            generated.
        shrink: Divide vertices and edges by this.
        lean: How far the vertices' order leans towards falling degree (``ascend_sim_order``); 0 is the published one,
            in which, where a graph is generated, a vertex's number says nothing about its degree.
        homophily: Share of the edges inside a class, by default the shape's.

    Raises:
        ValueError: There is no such graph.
    """
    if name not in SHAPES:
        raise ValueError(f"dataset {name!r} is unknown; use some of {', '.join(SHAPES)}")
    shape = SHAPES[name]
    if planetoid is not None and is_real(name, planetoid):
        from lightning_gnn.graph.datasets import planetoid as load

        data = load(name=name, root=str(Path(planetoid)))
    else:
        nodes = max(round(shape.nodes * shape.node_scale) // shrink, 8 * shape.classes)
        count = round(shape.edges * shape.edge_scale) // shrink
        inside = shape.homophily if homophily is None else homophily
        inside = inside if shrink == 1 else 0.0  # so small a graph has not so many edges inside its classes
        data = planted_power_law(nodes, count, shape.classes, 1, exponent=shape.exponent, homophily=inside)
    loops = torch.arange(data.num_nodes).expand(2, -1)
    edges = torch.cat([data.edge_index, loops], dim=1)
    if lean:
        degrees = edges[1].bincount(minlength=data.num_nodes).numpy()
        edges = torch.from_numpy(ranks(degrees, lean))[edges]
    return CSCGraph.from_edge_index(edges, data.num_nodes)


@dataclass(eq=False)
class Graph:
    """A graph in the forms that the steps of figure 10 need."""

    name: str
    topology: CSCGraph
    l2_scale: float
    widths: tuple[int, ...]
    natural: CompressedGraph
    compressed: CompressedGraph
    _tables: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Vertices."""
        return self.topology.num_nodes

    def with_hidden(self, channels: int) -> Graph:
        """Return the same with another number of hidden channels."""
        return replace(self, widths=(self.widths[0], channels, self.widths[-1]))

    def ranges_of_vertices(self, cores: int) -> CompressedGraph:
        """Return the graph in as many chunks of equally many vertices, in their natural order."""
        key = ("ranges", cores)
        if key not in self._tables:
            self._tables[key] = CompressedGraph.from_graph(self.topology, num_chunks=cores, order="natural")
        return self._tables[key]

    def cut(self, plan: HybridPlan) -> Chunks:
        """Return the chunks that a plan is for."""
        key = ("cut", plan.order, plan.height)
        if key not in self._tables:
            source = self.natural if plan.order == "natural" else self.compressed
            self._tables[key] = source.forward.recut(plan.height or 1)
        return self._tables[key]

    def cube_tables(self, plan: HybridPlan, tile_columns: int) -> CubeTables:
        """Return what aggregate_cube reads for a plan."""
        arrays = tables_of(self.cut(plan))
        return cube_tables(arrays, plan.chunk_ranges, plan.num_groups, plan.num_columns, tile_columns=tile_columns)


@lru_cache(maxsize=8)
def make_graph(
    name: str, planetoid: str | None = None, shrink: int = 1, lean: float = 0.0, homophily: float | None = None
) -> Graph:
    """Return a graph with its partition; see :func:`make_topology`."""
    topology = make_topology(name, planetoid, shrink, lean, homophily)
    shape, nodes = SHAPES[name], topology.num_nodes
    features = shape.features if shrink == 1 else max(shape.features // shrink, 16)
    return Graph(
        name=name,
        topology=topology,
        l2_scale=min(1.0, nodes / shape.nodes),
        widths=(features, HIDDEN if shrink == 1 else 32, shape.classes),
        natural=CompressedGraph.from_graph(topology, num_chunks=1, order="natural"),
        compressed=CompressedGraph.from_graph(topology, num_chunks=max(-(-nodes // 128), 1), order="locality"),
    )


STEPS = ("baseline", "+HP", "+CT", "+IP")


@dataclass(frozen=True, eq=False)
class Epoch:
    """What an epoch took.

    Args:
        launches: The launches in order, each with what it is for.
        plans: The plan of each aggregation, by its number of columns; none for the baseline.
        loads: Edges times columns of each core in each aggregation, by its number of columns.
        setting: The chip.
    """

    launches: list[tuple[str, Launch]]
    plans: dict[int, HybridPlan]
    loads: dict[int, np.ndarray]
    setting: Setting

    @property
    def cycles(self) -> float:
        """Cycles of all launches, one after the other."""
        return sum(launch.cycles for _, launch in self.launches)

    @property
    def milliseconds(self) -> float:
        """The same in milliseconds."""
        return self.cycles / dict(self.setting.changes).get("clock_mhz", self.setting.machine["clock_mhz"]) / 1e3

    @property
    def milliseconds_launched(self) -> float:
        """With the time that it takes to launch the kernels."""
        return self.milliseconds + len(self.launches) * self.setting.machine["launch_us"] / 1e3

    def share(self, text: str) -> float:
        """Return which share of the time the launches take whose purpose contains a text."""
        return sum(launch.cycles for what, launch in self.launches if text in what) / self.cycles

    def busy(self, unit: str, cores: int) -> float:
        """Return which share of the time a unit works, on average over the cores that have one."""
        return sum(launch.busy[unit] for _, launch in self.launches) / (self.cycles * cores)

    def running(self, unit: str = "") -> float:
        """Return the cores' utilisation as msprof defines it, on average over the launches' blocks.

        That is the cycles of tasks, each from its first to its last instruction on a core, over the interval.

        Args:
            unit: Count only the tasks that use this unit.
        """
        tasks = [launch for _, launch in self.launches if not unit or launch.busy[unit]]
        return sum(float(launch.ends.mean()) for launch in tasks) / self.cycles

    def idle(self) -> np.ndarray:
        """Return which share of the epoch each core has nothing to do, float64 ``[cores]``.

        The cores are those of the launch with the most blocks; the vector cores of a block work while it does.
        """
        cores = max(launch.ends.size for _, launch in self.launches)
        ends = [np.repeat(launch.ends, -(-cores // launch.ends.size))[:cores] for _, launch in self.launches]
        return 1 - np.sum(ends, axis=0) / self.cycles


def simulate(
    setting: Setting,
    graph: Graph,
    step: str,
    cores: int | None = None,
    num_groups: int | None = None,
) -> Epoch:
    """Simulate one epoch of a two-layer GCN: per layer aggregate, update, and backward (algorithm 3).

    Args:
        setting: The chip; its number of buffers is set by the step.
        graph: The graph.
        step: One of ``STEPS``, each with all that come before it. ``baseline``: aggregate_vector, each core a range of
            equally many vertices. ``+HP``: the hybrid plan. ``+CT``: the plan also chooses the order, the height of the
            chunks and, where it is faster, aggregate_cube. ``+IP``: double buffering.
        cores: Cores with a cube unit, by default all; a split chip has two vector cores for each.
        num_groups: M of every plan, by default what the planner chooses.
    """
    machine = setting.machine
    cores = cores or machine.cube_cores
    vector_cores = cores * (machine.vector_cores // machine.cube_cores)
    setting = setting.with_buffers(2 if step == "+IP" else 1)
    chunked = step in ("+CT", "+IP")
    launches: list[tuple[str, Launch]] = []
    plans: dict[int, HybridPlan] = {}
    loads: dict[int, np.ndarray] = {}
    nodes = graph.num_nodes
    done: dict[Any, list[tuple[str, Launch]]] = {}

    def once(key: Any, run: Callable[[], list[tuple[str, Launch]]]) -> None:
        if key not in done:  # forward and backward of a symmetric graph are the same launch
            done[key] = run()
        launches.extend(done[key])

    def aggregate(width: int) -> list[tuple[str, Launch]]:
        if step == "baseline":
            source = graph.ranges_of_vertices(vector_cores)
            ranges = tuple(pairwise(range(vector_cores + 1)))
            tables = row_tables(tables_of(source.forward), chunk_ranges=ranges, num_columns=width)
            loads[width] = source.forward.loads.numpy() * width
            return [("aggregate", aggregate_vector(setting, tables, nodes, nodes, True))]
        orders = {"natural": graph.natural.forward} | ({"locality": graph.compressed.forward} if chunked else {})
        kernels: tuple[Any, ...] = ("cube", "vector") if chunked else ("vector",)
        if chunked and (setting.rows_at_once or setting.own_lists):  # unknown to the planner: both kernels are tried
            tried = [planned(width, orders, (kernel,)) for kernel in kernels]
            runs = [run(width, plan) for plan in tried]
            took = [sum(launch.cycles for _, launch in launches) for launches in runs]
            best = int(np.argmin(took))
            plans[width], loads[width] = tried[best], tried[best].work
            return runs[best]
        plans[width] = planned(width, orders, kernels)
        loads[width] = plans[width].work
        return run(width, plans[width])

    def planned(width: int, orders: dict[str, Chunks], kernels: tuple[Any, ...]) -> HybridPlan:
        wanted = PlanSettings(num_groups=num_groups or "auto")
        return plan_chip(
            width, orders, wanted, cores, setting.parameters, kernels=kernels, buffers=setting.buffers
        )  # fmt: skip

    def run(width: int, plan: HybridPlan) -> list[tuple[str, Launch]]:
        if plan.kernel == "vector":
            tables = row_tables(
                tables_of(graph.cut(plan)), chunk_ranges=plan.chunk_ranges, num_groups=plan.num_groups,
                num_columns=width,
            )  # fmt: skip
            return [("aggregate", aggregate_vector(setting, tables, nodes, nodes, True))]
        dense = graph.cube_tables(plan, UNIFIED_COLUMNS if machine.unified else 128)
        result = [("aggregate", aggregate_cube(setting, dense, nodes, nodes))]
        if len(dense.splits):
            first = np.concatenate([dense.splits[:, 1], dense.splits[-1:, 2]])
            result.append(("aggregate, split vertices", combine_parts(setting, first, width, blocks=vector_cores)))
        return result

    def weight_gradient(out: int, width: int) -> list[tuple[str, Launch]]:
        product = update(setting, out, nodes, width, transpose_a=True, split_k=cores, blocks=cores)
        parts = min(cores, -(-nodes // 128))
        first = np.arange(out + 1) * parts
        return [
            ("update, gradient of the weight", product),
            ("update, sum of parts", combine_parts(setting, first, width, True, vector_cores)),
        ]

    widths = list(pairwise(graph.widths))
    for width, out in widths:
        once(("aggregate", width), lambda width=width: aggregate(width))
        forward = update(setting, nodes, width, out, transpose_b=True, bias=True, blocks=cores)
        once(("forward", width), lambda forward=forward: [("update, forward", forward)])
    for width, out in reversed(widths):
        once(("weight", width), lambda width=width, out=out: weight_gradient(out, width))
        backward = update(setting, nodes, out, width, blocks=cores)
        once(("backward", width), lambda backward=backward: [("update, gradient of the rows", backward)])
        once(("aggregate", width), lambda width=width: aggregate(width))
    return Epoch(launches, plans, loads, setting)
