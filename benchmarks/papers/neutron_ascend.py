"""NeutronAscend's figures 1, 4, 5 and 9 to 13 from a model of its chip: epochs of GCN and GAT, cell by cell.

No NPU is used. Cycles of aggregations are those of the library's plans (``ops/aggregate/chip_plan.py``), cycles of the
other kernels and the gain of double buffering are counted by the CPU twin of the kernels, and HBM limits all of them
together. ``--planetoid FOLDER`` reads the real Cora and CiteSeer; without it, all graphs are drawn at random.
"""

from __future__ import annotations

import warnings
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.papers.page import Cell, Page, Table, parse
from lightning_gnn.ascend_ops.tiling import update_constants, update_tiling
from lightning_gnn.ascend_ops.twin import LaunchResult, Twin, default_twin
from lightning_gnn.compressed.builder import MAX_VERTICES, chunk_rows, layout_of
from lightning_gnn.compressed.chunks import Chunks, compress_columns
from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import HybridPlan, PlanSettings, plan_cores
from lightning_gnn.compressed.locality_partition import even_bounds, partition_rows_as_published
from lightning_gnn.datasets.registry import planetoid
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.ops.aggregate import ascend_twin
from lightning_gnn.ops.aggregate.chip_plan import HEIGHT, Counts, count_chunks, estimate_cycles, plan_chip

NAME = "neutron_ascend"
CORES, CLOCK = 30, 1.85e9  # cores with one cube and two vector units each, Hz
HBM, LINK = 32 * CORES, 25e9 / CLOCK  # bytes a cycle: of HBM for all cores, and of the link to the host's memory
L2, MEMORY = 192 * 2**20, 32e9  # bytes
HIDDEN, HEADS = 256, 8
LOAD_RATIO, RANGES = 7.4, 30  # figure 4: edges of the heaviest core over those of the lightest
STEPS = ("baseline", "+HP", "+CT", "+IP")
ORDERS = ("published", "renumbered")
SMALL, LARGE = ("CiteSeer", "Cora", "PubMed"), ("Reddit", "Products")
A5000 = {"flops": 27.8e12, "bytes": 768e9}


@dataclass(frozen=True)
class Shape:
    """Sizes of table 1, and the shares of vertices and edges that the drawn graph has."""

    nodes: int
    edges: int
    features: int
    classes: int
    exponent: float  # of the power law of the degrees
    homophily: float
    node_scale: float = 1.0
    edge_scale: float = 1.0


SHAPES = {
    "CiteSeer": Shape(3_327, 9_104, 3_703, 6, 3.0, 0.74),
    "Cora": Shape(2_708, 10_556, 1_433, 7, 2.9, 0.81),
    "PubMed": Shape(19_717, 88_648, 500, 3, 2.2, 0.80),
    "Reddit": Shape(232_965, 114_615_892, 602, 41, 2.1, 0.78, 1 / 6, 1 / 36),
    "Products": Shape(2_449_029, 61_859_140, 100, 47, 2.2, 0.81, 1 / 16, 1 / 16),
}
"""Reddit's share of edges is the square of its share of vertices, which keeps the density; Products keeps degrees."""


def renumber(degrees: np.ndarray, lean: float) -> np.ndarray:
    """Return new numbers between the published order (lean 0) and that by falling degree (lean 1)."""
    by_degree = np.argsort(np.argsort(-degrees, kind="stable"))
    return np.argsort(np.argsort((1 - lean) * np.arange(degrees.size) + lean * by_degree, kind="stable"))


def load_ratio(degrees: np.ndarray, lean: float) -> float:
    """Return the edges of the heaviest of equally many vertices over those of the lightest."""
    ordered = np.empty_like(degrees)
    ordered[renumber(degrees, lean)] = degrees
    loads = [int(part.sum()) for part in np.array_split(ordered, RANGES)]
    return max(loads) / max(min(loads), 1)


class Case:
    """A data set in one order of vertices, in the forms that the steps of figure 10 need."""

    def __init__(self, name: str, order: str, folder: str | None, shrink: int) -> None:
        shape, self.name = SHAPES[name], name
        self.real = folder is not None and (Path(folder) / name / "raw").is_dir()
        if self.real:
            assert folder is not None
            data = planetoid(folder, name)
        else:
            nodes = max(int(shape.nodes * shape.node_scale) // shrink, 400)
            edges, inside = int(shape.edges * shape.edge_scale) // shrink, shape.homophily if shrink == 1 else 0.0
            data = planted_power_law(nodes, edges, shape.classes, 1, exponent=shape.exponent, homophily=inside)
        self.nodes: int = data.num_nodes
        edge_index = torch.cat([data.edge_index, torch.arange(self.nodes).expand(2, -1)], 1)
        self.degrees = edge_index[1].bincount(minlength=self.nodes).numpy()
        if order == "renumbered":
            leans = np.linspace(0, 1, 201)
            lean = next((lean for lean in leans if load_ratio(self.degrees, lean) >= LOAD_RATIO), 1.0)
            edge_index = torch.from_numpy(renumber(self.degrees, lean))[edge_index]
            self.degrees = edge_index[1].bincount(minlength=self.nodes).numpy()
        self.features, self.classes = max(shape.features // shrink, 32), shape.classes
        self.scale = self.nodes / shape.nodes  # of L2, which then holds the same share of the features
        self.matrix = CompressedGraph.from_edge_index(edge_index, self.nodes).forward
        indptr, indices = self.matrix.indptr.numpy(), self.matrix.indices.numpy()
        rows = np.arange(self.nodes, dtype=np.int32)
        cut = chunk_rows(rows, indptr[:-1], indptr[1:], indices, self.nodes, MAX_VERTICES)
        self.natural, _ = compress_columns(indices, *cut, self.nodes, self.nodes)
        self.chunks: Chunks = layout_of(self.matrix).chunks

    @property
    def edges(self) -> int:
        """Edges with self-loops."""
        return self.matrix.num_edges

    def serial(self, kernel: str) -> float:
        """Return how much longer a kernel takes with one buffer per queue, counted on some rows."""
        if (self.name, kernel) not in _serial:
            first, rows = self.nodes // 2, min(512 if self.edges < 1_000_000 else 128, self.nodes // 2)
            indptr = self.matrix.indptr[first : first + rows + 1]
            indices = self.matrix.indices[int(indptr[0]) : int(indptr[-1])].long()
            part = CompressedGraph.from_csc(indptr - indptr[0], indices, self.nodes)
            chunks, x = part.chunked().chunks.recut(HEIGHT[kernel]), torch.ones(self.nodes, 1, HIDDEN).half()
            run = ascend_twin.aggregate_vector if kernel == "vector" else ascend_twin.aggregate_chunks
            ranges = [0, HIDDEN], [0, chunks.num_chunks]
            _serial[self.name, kernel] = serial_factor(
                count(lambda: run(chunks.tensors(), rows, x, torch.ones(part.num_edges, 1).half(), "sum", *ranges))
            )
        return _serial[self.name, kernel]


_serial: dict[tuple[str, str], float] = {}


def count(call: Any) -> LaunchResult:
    """Run a kernel on the twin, with all rows in L2, since HBM is shared by all cores, and return its counters."""
    launch = Twin.launch

    def launch_in_l2(*args: Any, **how: Any) -> LaunchResult:
        return launch(*args, **how, parameters={"hbm_bytes": 1e9})

    with patch.object(Twin, "launch", launch_in_l2), ascend_twin.record_launches() as launches:
        call()
    return launches[0]


def serial_factor(counted: LaunchResult) -> float:
    """Return the time with one buffer per queue over the counted time: the units of a core then work in turn.

    The scalar unit requests copies while they are under way; the cube core and the vector cores of a block exchange
    tiles by a workspace, which does not depend on the number of buffers.
    """
    times = [
        max(core["scalar"], core["mte2"]) + sum(core[unit] for unit in ("vector", "cube", "mte1", "mte3", "fix"))
        for core in counted.cores
    ]
    return max(max(times) / counted.makespan, 1.0)


@cache
def edge_costs(kernel: str, heads: int, width: int) -> tuple[float, float, float]:
    """Return the cycles of a row and of an entry on a vector core, counted on two graphs, and the serial factor."""
    found, rows = [], 256
    for degree in (4, 24):
        draw = torch.Generator().manual_seed(degree)
        sources, targets = torch.randint(rows, (rows * degree,), generator=draw), torch.arange(rows * degree) % rows
        chunks = CompressedGraph.from_edge_index(torch.stack([sources, targets]), rows).chunked().chunks.tensors()
        ends, scores, values = [0, chunks[1].numel() - 1], torch.ones(rows, heads), torch.ones(rows * degree, heads)
        side = torch.ones(rows, heads, width // heads).half()
        arguments: dict[str, tuple[Any, ...]] = {
            "edge_softmax": (scores, scores, 0.2, ends),
            "edge_softmax_backward": (scores, scores, 0.2, values, values, ends),
            "edge_products": (side, side, ends),
        }
        found.append(count(partial(getattr(ascend_twin, kernel), chunks, *arguments[kernel])))
    low, high = (2 * counted.makespan / rows for counted in found)  # two vector cores share the rows
    entry = (high - low) / 20
    return max(low - 4 * entry, 0.0), entry, serial_factor(found[1])


@cache
def update_costs() -> tuple[float, float, float]:
    """Return the cycles of a step of 128 along k of a tile of 128 x 128, of the rest of a tile, and the factor."""
    results = []
    for k in (512, 1024):
        a, out = np.ones((128, k), np.float16), np.zeros((128, 128), np.float16)
        args = [a, np.ones((k, 128), np.float16), np.zeros((16, 128), np.float16), update_constants(), out]
        tiling = update_tiling(128, k, 128, k, 128)
        results.append(default_twin().launch("update", [*args, tiling], 1, parameters={"hbm_bytes": 1e9}))
    step = (results[1].makespan - results[0].makespan) / 4
    return step, results[0].makespan - 4 * step, serial_factor(results[1])


@dataclass
class Epoch:
    """Cycles of an epoch by what they are for, and the plans of its aggregations."""

    cycles: dict[str, float]
    plans: dict[int, HybridPlan]
    aggregated: float  # cycles of the aggregations that the cube cores execute

    @property
    def total(self) -> float:
        """Cycles of the epoch."""
        return sum(self.cycles.values())

    def share(self, *parts: str) -> float:
        """Return the share of the time."""
        return sum(self.cycles[part] for part in parts) / self.total


def simulate(
    case: Case,
    step: str,
    model: str = "GCN",
    hidden: int = HIDDEN,
    cores: int = CORES,
    groups: int | str = "auto",
    kernels: Sequence[Any] = ("cube", "vector"),
    forward: bool = False,
) -> Epoch:
    """Simulate an epoch, or its forward pass, of a two-layer model (algorithm 3), launch after launch."""
    overlaps, chunked = step == "+IP", step in ("+CT", "+IP")
    settings, plans, cube_time = PlanSettings(num_groups=groups), {}, 0.0  # type: ignore[arg-type]
    parts = dict.fromkeys(("aggregate", "attention", "update"), 0.0)
    equal = even_bounds(case.nodes, 2 * cores)[:-1]

    def aggregate(width: int, heads: int = 1) -> float:
        nonlocal cube_time
        slow = {kernel: 1.0 if overlaps else case.serial(kernel) for kernel in ("cube", "vector")}
        if step == "baseline":
            each = Counts((case.degrees > 0).astype(int), case.degrees, case.degrees, case.degrees)
            cycles = float(np.add.reduceat(estimate_cycles("vector", each, width, 1, heads), equal).max())
            cycles, loaded = cycles * slow["vector"], case.edges
        else:
            found = [
                plan_chip(width, chunks, settings, cores, kernels=(kernel,), heads=heads)
                for kernel in (kernels if chunked else ("vector",))
                for chunks in ((case.natural, case.chunks) if chunked else (case.natural,))
            ]
            costs = [min(one.cost for one in plan.candidates) * slow[plan.kernel] for plan in found]
            plan, cycles = found[int(np.argmin(costs))], min(costs)
            chosen = next(one for one in plan.candidates if one.num_groups == plan.num_groups)
            plans[width], loaded = plan, chosen.terms["rows loaded"] / plan.num_groups
            cube_time += cycles if plan.kernel == "cube" else 0.0
        held = min(1.0, L2 * case.scale / (case.nodes * width * 2))
        missed = (case.nodes + max(loaded - case.nodes, 0) * (1 - held)) * width * 2
        return max(cycles, missed / HBM)

    def edge_kernel(kernel: str, width: int, heads: int) -> float:
        row, entry, factor = edge_costs(kernel, heads, width)
        each = row + entry * case.degrees
        heaviest = np.add.reduceat(each, equal).max() if step == "baseline" else each.sum() / (2 * cores)
        return float(heaviest) * (1.0 if overlaps else factor)

    def update(m: int, k: int, n: int) -> float:
        each, rest, factor = update_costs()
        tiles, steps = -(-m // 128) * -(-n // 128), -(-k // 128)
        split = max(1, min(steps, cores // tiles))
        busiest = -(-tiles * split // cores) * (-(-steps // split) * each + rest)
        return busiest * (1.0 if overlaps else factor)

    widths = list(pairwise((case.features, hidden, case.classes)))
    for layer, (width, out) in enumerate(widths):
        heads = HEADS if layer == 0 else 1
        passes = 1 if forward else 2  # the graph is symmetric, so the backward aggregation is the same
        parts["aggregate"] += passes * (aggregate(width) if model == "GCN" else aggregate(out, heads))
        parts["update"] += update(case.nodes, width, out)
        if model == "GAT":
            parts["attention"] += edge_kernel("edge_softmax", heads, heads)
        if not forward:
            parts["update"] += update(out, case.nodes, width) + update(case.nodes, out, width)
            if model == "GAT":
                parts["attention"] += edge_kernel("edge_softmax_backward", heads, heads)
                parts["attention"] += edge_kernel("edge_products", -(-out // heads) * heads, heads)
    return Epoch(parts, plans, cube_time * (1 if forward else 2))


def mindspore(case: Case, copies: bool = True, swaps: bool = False, **how: Any) -> float:
    """Return the cycles of MindSporeGL: the baseline's, its neighbor copies (section 7.2) and their swapping."""
    time = simulate(case, "baseline", **how).total
    copied, memory = copied_bytes(case, how.get("hidden", HIDDEN))
    return time + copies * 2 * copied / HBM + swaps * 2 * max(copied - memory, 0.0) / LINK


def copied_bytes(case: Case, hidden: int = HIDDEN) -> tuple[float, float]:
    """Return the bytes of the neighbor copies, forward and backward, and of the memory, scaled like the graph.

    The copies have the widths after the product: with the features' widths, 32 channels would not fit, against
    section 7.4.
    """
    scale = 1.0 if case.real else case.edges / (SHAPES[case.name].edges + SHAPES[case.name].nodes)
    return 4.0 * case.edges * (hidden + case.classes), MEMORY * min(scale, 1.0)


def gpu_cycles(case: Case) -> float:
    """Return the time of a GCN epoch on an A5000 by a roofline, in the chip's cycles."""
    seconds = 0.0
    for width, out in pairwise((case.features, HIDDEN, case.classes)):
        seconds += 2 * case.edges * min(width, out) * 4 / A5000["bytes"]
        seconds += 3 * 2 * case.nodes * width * out / A5000["flops"]
    return seconds * CLOCK


def published(case: Case, width: int, ranges: str) -> float:
    """Return the cycles of an aggregation by algorithm 1: the cube kernel, M = 1, edges or chunks shared evenly."""
    counts = count_chunks(case.chunks, HEIGHT["cube"])
    plan = plan_cores(width, counts.entries, PlanSettings(grouping="paper"), CORES)
    assert plan.num_groups == 1
    equal = list(pairwise(even_bounds(counts.entries.size, CORES).tolist()))
    cycles = estimate_cycles("cube", counts, width, 1)
    return float(max(cycles[first:last].sum() for first, last in (equal if ranges == "equal" else plan.chunk_ranges)))


TEXT = """A model of the chip, not a measurement: no NPU was at hand. {cores} cores, each with a cube unit and two
vector units, run the kernels of `ascend_ops/csrc`. Aggregations take the cycles by which the library plans, within
25 % of the CPU twin's. The twin counts products, softmax and gradients, and what one buffer per queue costs. HBM limits
all cores together.

Real: {real}. Drawn at the sizes of table 1: {drawn}.
Reddit has 1/6 of the vertices and 1/36 of the edges, Products 1/16 of both, with L2 and memory scaled equally. Vertices
are in the *published* order, or *renumbered* towards falling degree until the edges of 30 ranges differ by 7.4, as
figure 4 says of Reddit: an input. Where a graph is drawn, the published order says nothing about degrees. Figures 1, 5
and 11 to 13 are renumbered. Layers aggregate before they multiply (equations 1 and 2).

Most values of the paper's figures are bars without numbers. Cells without a paper's value are those. Contradictions:

- **The trend over data sets is inverted.** In the paper the small graphs gain most (section 7.2), here least: products,
  which the first two steps do not change, take {small} of an epoch on CiteSeer and Cora, {large} on Reddit.
- **Hybrid parallelism is hardly tensor parallelism.** M = 1 in most layers: the bytes of the loaded rows do not depend
  on M, but the number of requests grows with M. In the published order "+HP" gains {published}, not 1.84 to 2.40.
- **Algorithm 1 always answers M = 1** ([proof](../guides/ascend.md#published-and-ours)).
- **Swapping explains the rise of figure 11, not its size**: kernels alone are flat, and at 25 GB/s what exceeds 32 GB
  costs many times more than the paper's factors.

Figure 14, the accuracy by epoch, is a curve without numbers; the kernels' results are tested against the CPU's instead.

`python -m benchmarks.papers.neutron_ascend --planetoid FOLDER` repeats it.
"""
WHY_GPU = "a roofline of an A5000 stands for the framework: no launches, no wasted reads"
WHY_CACHE = "the GPU's roofline reads each edge's row from memory, not its cache; the chip's model has no launches"
WHY_LOAD = "the drawn order knows no degrees, so ranges are even; the paper does not give its order"
WHY_IDLE = "follows from the paper's own 7.4: 1 - 1/7.4 of the aggregation, which is nearly all of the epoch"
WHY_VECTOR = "no host, launches or loss in the model: with 83 edges a vertex, products take 2 % of the forward pass"
WHY_EVEN = "in the published order ranges of equally many vertices are nearly even (figure 4)"
WHY_FLAT = "flat: both aggregate the features first, whatever follows; too high by as much as +IP, an upper bound"
WHY_SWAP = "all that exceeds 32 GB crosses the link twice; in the paper most of it cannot have"
WHY_BUSY = "on the small graphs products are a third of the baseline's time, on Reddit 2 %"
WHY_STEP = {
    "+HP": "gains what equal ranges of vertices waste, which is a matter of the order; M = 1 nearly everywhere",
    "+CT": "a tile gathers its distinct rows: 10 cycles each, against 26 per edge; small graphs have few edges a row",
    "+IP": "an upper bound: with one buffer per queue, the units of a core work strictly in turn",
}
TEXT_GROUPS = """Algorithm 1: chunks of 128 rows on the cube cores, one group, ranges of equal edges or of equally many
chunks (section 6.2). [The guide](../guides/ascend.md#published-and-ours) has the `lgnn` line of each."""
TEXT_LOADS = "Larger graphs are left out: algorithm 2 to the letter takes O(k E) steps for k chunks."
EXTREMES = (("+HP", min, 1.84), ("+CT", max, 3.33), ("+IP", min, 1.14), ("+IP", max, 1.30))
LEVELS = {"kernels only": {"copies": False}, "with copies": {}, "with copies and swapping": {"swaps": True}}


def gains(epochs: Sequence[Epoch]) -> list[float]:
    """Return the gain of each step over the one before, and of all."""
    totals = [epoch.total for epoch in epochs]
    return [*(before / after for before, after in pairwise(totals)), totals[0] / totals[-1]]


def show_groups(epoch: Epoch) -> str:
    return ", ".join(f"{width}: {plan.kernel}, M = {plan.num_groups}" for width, plan in epoch.plans.items())


def figures_of_baseline(reddit: dict[str, Case], large: list[Case]) -> list[Table]:
    ratios = {case.name: mindspore(case) / gpu_cycles(case) for case in large}
    one = [Cell("mean of both, time of MindSporeGL over the GPU's", 3.71, mean(ratios.values()))]
    one += [Cell(name, simulated=ratio) for name, ratio in ratios.items()]
    one.append(Cell("utilization, GPU over NPU", 4.2, why="not simulated: a roofline has no utilization"))
    four = []
    for order, case in reddit.items():
        ratio = load_ratio(case.degrees, 0)
        idle = (1 - 1 / ratio) * simulate(case, "baseline").share("aggregate")
        fitted = order == "renumbered"
        four.append(Cell(f"{order}, heaviest over lightest core", LOAD_RATIO, ratio, why="fitted" if fitted else ""))
        four.append(Cell(f"{order}, idle time at most", 0.70, idle, why=WHY_IDLE if fitted else ""))
    forward = simulate(reddit["renumbered"], "baseline", forward=True)
    five = [Cell("vector units' share of the forward pass", 0.76, forward.share("aggregate"))]
    return [
        Table("Figure 1: MindSporeGL on the NPU, a framework on the GPU", "ratio", one, "", WHY_GPU),
        Table("Figure 4: edges of 30 cores, GCN on Reddit", "value", four, "", WHY_LOAD),
        Table("Figure 5: units in the forward pass, GCN on Reddit", "share", five, "", WHY_VECTOR),
    ]


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def figure_9(cases: dict[tuple[str, str], Case]) -> Table:
    cells: list[Cell] = []
    for order in ORDERS:
        keys = [(name, model) for name in SHAPES for model in ("GCN", "GAT")]
        ours = {(name, model): simulate(cases[name, order], "+IP", model=model).total for name, model in keys}
        for level, how in LEVELS.items():
            found = {key: mindspore(cases[key[0], order], **how, model=key[1]) / ours[key] for key in keys}
            why = WHY_SWAP if "swaps" in how else ""
            cells.append(Cell(f"{order}, mean, {level}", 4.71, mean(found.values()), why=why))
            if level == "with copies":
                cells += [Cell(f"{order}, {' '.join(key)}, {level}", simulated=found[key]) for key in keys]
    for name in SHAPES:
        copied, memory = copied_bytes(cases[name, "published"])
        what = "static graph mode runs out of memory" if copied > memory else "fits"
        cells.append(Cell(f"{name}, bytes of the copies over the memory's", simulated=copied / memory, why=what))
    return Table("Figure 9: speedup over MindSporeGL", "speedup", cells, "", WHY_EVEN)


def figure_10(epochs: dict[tuple[str, str], list[Epoch]]) -> Table:
    cells = []
    paper = {("Reddit", "+HP"): 2.40, ("Products", "+CT"): 1.37}
    for order in ORDERS:
        steps = {name: dict(zip((*STEPS[1:], "all"), gains(epochs[name, order]), strict=True)) for name in SHAPES}
        for name, gained in steps.items():
            for step, gain in gained.items():
                epoch = epochs[name, order][STEPS.index("+IP" if step == "all" else step)]
                why = show_groups(epoch) if step != "all" else f"products: {epoch.share('update'):.0%} of the epoch"
                known = paper.get((name, step))
                why = why if known is None or 1 / 1.15 < gain / known < 1.15 else f"{why}; {WHY_STEP[step]}"
                cells.append(Cell(f"{order}, {name}, {step}", known, gain, why=why))
        for step, extreme, value in EXTREMES:
            found = extreme(gained[step] for gained in steps.values())
            what = f"{'least' if extreme is min else 'most'} {step} of the five"
            cells.append(Cell(f"{order}, {what}", value, found, why=WHY_STEP[step]))
    return Table("Figure 10: gain of each step over the one before, GCN", "speedup", cells)


def figures_11_and_12(large: list[Case]) -> list[Table]:
    tables = []
    for number, unit, key, paper in (
        (11, "hidden channels", "hidden", {32: 1.97, 64: 3.51, 128: 3.75, 256: 4.08}),
        (12, "cores", "cores", {10: 3.22, 20: 3.67, 30: 4.08}),
    ):
        cells = []
        for value, gain in paper.items():
            how: dict[str, Any] = {key: value}
            ours = {case.name: simulate(case, "+IP", **how).total for case in large}
            for level, extra in LEVELS.items():
                found = {case.name: mindspore(case, **extra, **how) / ours[case.name] for case in large}
                why = WHY_SWAP if "swaps" in extra else ""
                cells.append(Cell(f"{value} {unit}, mean, {level}", gain, mean(found.values()), why=why))
                cells += [Cell(f"{value} {unit}, {name}, {level}", simulated=ratio) for name, ratio in found.items()]
        why = WHY_FLAT if number == 11 else WHY_STEP["+IP"]
        tables.append(Table(f"Figure {number}: speedup over MindSporeGL by {unit}, GCN", "speedup", cells, "", why))
    return tables


def figure_13(epochs: dict[tuple[str, str], list[Epoch]]) -> Table:
    """Return the share of the time in which cube cores execute a kernel."""
    cells, values = [], {}
    for name in SHAPES:
        first, last = (epochs[name, "renumbered"][step] for step in (0, -1))
        values[name] = (last.cycles["update"] + last.aggregated) / last.total, first.share("update")
    for number, (what, paper) in enumerate((("all steps", 0.8892), ("baseline", 0.1675))):
        cells.append(Cell(f"{what}, mean", paper, mean(pair[number] for pair in values.values())))
        cells += [Cell(f"{what}, {name}", simulated=pair[number]) for name, pair in values.items()]
    return Table("Figure 13: utilization of the cube cores, GCN", "share", cells, "", WHY_BUSY)


def figure_15(cases: dict[tuple[str, str], Case], epochs: dict[tuple[str, str], list[Epoch]]) -> Table:
    cells = []
    for order in ORDERS:
        found = {name: gpu_cycles(cases[name, order]) / epochs[name, order][-1].total for name in SHAPES}
        cells.append(Cell(f"{order}, mean of five", 1.47, mean(found.values())))
        cells += [Cell(f"{order}, {name}", simulated=ratio) for name, ratio in found.items()]
    cells.append(Cell("utilization, NPU over GPU", 1.111, why="not simulated: a roofline has no utilization"))
    return Table("Figure 15: time of a GPU over NeutronAscend's, GCN", "ratio", cells, "", WHY_CACHE)


def ablation(cases: list[Case]) -> list[Table]:
    """Return what the groupings and kernels cost, and what the chunks load, relative to the plan."""
    cells, loads = [], []
    for case in cases:
        chosen = simulate(case, "+IP")
        base = chosen.cycles["aggregate"]
        others = {
            "M = 1": simulate(case, "+IP", groups=1).cycles["aggregate"],
            f"M = N = {CORES}": simulate(case, "+IP", groups=CORES).cycles["aggregate"],
            "algorithm 1, equal edges": 2 * sum(published(case, width, "edges") for width in (case.features, HIDDEN)),
            "algorithm 1, equal chunks": 2 * sum(published(case, width, "equal") for width in (case.features, HIDDEN)),
            "cube always": simulate(case, "+IP", kernels=("cube",)).cycles["aggregate"],
            "vector always": simulate(case, "+IP", kernels=("vector",)).cycles["aggregate"],
        }
        cells.append(Cell(f"{case.name}: plan", simulated=1.0, why=show_groups(chosen)))
        cells += [Cell(f"{case.name}: {what}", simulated=time / base) for what, time in others.items()]
        if case.name in SMALL:
            indptr, indices = case.matrix.indptr.numpy(), case.matrix.indices.numpy()
            parts = case.natural.num_chunks
            rows, _ = partition_rows_as_published(indptr, indices, case.nodes, parts)
            letter = chunk_rows(rows, indptr[rows], indptr[rows + 1], indices, case.nodes, MAX_VERTICES).rows_loaded
            ids = case.natural.columns.numel()
            loads.append(Cell(f"{case.name}: ours", simulated=case.chunks.columns.numel() / ids))
            loads.append(Cell(f"{case.name}: algorithm 2 to the letter, {parts} chunks", simulated=letter / ids))
    return [
        Table("Ablation: aggregations of a GCN epoch, published order", "time over the plan's", cells, TEXT_GROUPS),
        Table("Ablation: rows that the chunks load", "rows over the order of ids", loads, TEXT_LOADS),
    ]


def main(argv: Sequence[str] | None = None) -> Page:
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--planetoid")
    own, rest = parser.parse_known_args(argv)
    args = parse(NAME, __doc__, rest)
    warnings.filterwarnings("ignore")
    shrink = 40 if args.quick else 1
    cases = {(name, order): Case(name, order, own.planetoid, shrink) for name in SHAPES for order in ORDERS}
    epochs = {key: [simulate(case, step) for step in STEPS] for key, case in cases.items()}
    large = [cases[name, "renumbered"] for name in LARGE]
    tables = [
        *figures_of_baseline({order: cases["Reddit", order] for order in ORDERS}, large),
        figure_9(cases),
        figure_10(epochs),
        *figures_11_and_12(large),
        figure_13(epochs),
        figure_15(cases, epochs),
        *ablation([cases[name, "published"] for name in SHAPES]),
    ]
    real = [name for name in SHAPES if cases[name, "published"].real]
    drawn = [f"{name} ({cases[name, ORDERS[0]].nodes:,} vertices)" for name in SHAPES if name not in real]
    shares = {name: f"{epochs[name, 'published'][-1].share('update'):.0%}" for name in SHAPES}
    balanced = [gains(epochs[name, "published"])[0] for name in SHAPES]
    text = TEXT.format(
        cores=CORES,
        real=" and ".join(real) or "No graph",
        drawn=", ".join(drawn),
        small=f"{shares['CiteSeer']} and {shares['Cora']}",
        large=shares["Reddit"],
        published=f"{min(balanced):.2f} to {max(balanced):.2f}",
    )
    page = Page(NAME, "NeutronAscend, cell by cell", text, tables)
    page.write(args.out)
    return page


if __name__ == "__main__":
    main()
