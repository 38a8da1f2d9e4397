"""MorphGL's evaluation, cell by cell: stage times solved from the paper's tables, then planned and simulated.

SALIENT's epoch is bound by its CPU workers, so it gives the CPU's time for a mini-batch. DUCATI batches and trains in
turn, so its epoch gives the sum of both on the GPU; equation 6 must have its minimum at table 6's ratio, which divides
it. Table 6 is about GraphSAGE: GCN and GAT have its batching times, and the rest of DUCATI's epoch is their model's.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from statistics import fmean, geometric_mean

import torch
from torch_geometric.sampler import NodeSamplerInput

from benchmarks.harness import RESULTS
from benchmarks.papers.page import Cell, Page, Table, parse
from lightning_gnn.collective.batch_schedule import Route, ScheduleAction
from lightning_gnn.collective.plan import CollectivePlan, Duration, ScheduleName, StageTimes
from lightning_gnn.collective.prefetcher import PLANNERS
from lightning_gnn.collective.simulate import draw_durations, makespan, run_schedule, simulate_dual_buffer
from lightning_gnn.datasets.synthetic import power_law_graph
from lightning_gnn.gpu_sampling.placement import count_reads
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.runtime.timeline import Timeline
from lightning_gnn.sampling.neighbor import NeighborSampler

Setting = tuple[str, str, str]  # model, data set, machine

SYSTEMS = ("SALIENT", "DUCATI", "MorphGL")
MODELS, DATA, MACHINES = ("GCN", "GraphSAGE", "GAT"), ("PA", "TW", "UK"), ("A", "B", "C")
CORES = {"A": 12, "B": 8, "C": 6, "D": 8}
BATCHES = {"PA": 1179, "TW": 408, "UK": 759}  # of 1024 seeds in an epoch
DEGREES = {"PA": 27, "TW": 50, "UK": 68}  # table 3
_TABLE_4 = """
GCN       PA 29.45 19.91 16.94 54.08 20.72 19.92 57.51 28.65 24.72
GCN       TW 10.91 15.42 10.14 19.80 14.17 10.76 20.54 21.90 14.86
GCN       UK 18.74 32.17 15.42 36.14 29.02 23.40 38.44 41.58 30.83
GraphSAGE PA 29.12 22.75 17.02 53.63 20.44 19.40 56.58 38.30 31.57
GraphSAGE TW 10.89 16.69 10.33 19.34 14.11 10.14 22.27 26.04 19.22
GraphSAGE UK 18.62 35.59 16.62 33.40 30.49 21.24 38.33 51.47 34.65
GAT       PA 29.05 28.30 21.49 53.50 28.93 28.57 62.82 38.42 33.97
GAT       TW 10.98 17.85 10.69 20.56 16.06 13.00 23.05 24.40 17.66
GAT       UK 18.40 37.12 16.86 33.43 36.43 27.92 36.94 46.73 30.54
"""
EPOCHS = {
    (model, data, machine): tuple(map(float, seconds[3 * number : 3 * number + 3]))
    for model, data, *seconds in map(str.split, _TABLE_4.strip().splitlines())
    for number, machine in enumerate(MACHINES)
}
"""Seconds of an epoch of SALIENT, DUCATI and MorphGL (table 4)."""
TABLE_5 = {
    "PA": ((798, 26.1, 21.6), (101, 12.9, 66.9), (801, 33.0, 69.3)),
    "TW": ((797, 39.4, 39.3), (100, 23.5, 87.7), (799, 51.5, 87.4)),
    "UK": ((801, 34.3, 30.4), (100, 25.2, 86.4), (798, 45.9, 88.7)),
}
TABLE_6 = {
    ("PA", "A"): (0.65, 15), ("PA", "B"): (2.00, 5), ("PA", "C"): (0.90, 11),
    ("TW", "A"): (0.29, 20), ("TW", "B"): (1.12, 8), ("TW", "C"): (0.41, 24),
    ("UK", "A"): (0.19, 30), ("UK", "B"): (0.83, 12), ("UK", "C"): (0.36, 28),
}  # fmt: skip
"""Initial x, and the final size of the CPU's buffer beside a GPU buffer of 10."""
TABLE_7 = {12: (40.97, 54.26, 31.68, 38.80), 16: (40.76, 49.53, 29.67, 34.78), 32: (40.21, 48.61, 29.19, 32.99)}
"""By GB of device memory: epochs of the three systems in seconds, and T_GBT in ms."""
TABLE_8 = {
    ("PA", "A"): 65.5, ("TW", "A"): 41.0, ("UK", "A"): 67.0, ("PA", "B"): 86.3, ("TW", "B"): 49.6, ("UK", "B"): 76.7,
    ("PA", "C"): 112.2, ("TW", "C"): 63.4, ("UK", "C"): 110.6,
}  # fmt: skip
GPU_BUFFER = 10
SPREAD = 2.0 / 149.7  # of the size of a mini-batch, relative to its mean (section 5.8)
SAMPLING_SHARE = 0.5  # of T_G: an assumption, as the paper reports only the sum
SHARES = [number / 20 for number in range(21)]  # of the CPU, which the paper tries for DUCATI-delta
SCHEDULES: tuple[ScheduleName, ...] = ("in_order", "paper")


def bus_seconds(data: str, system: int) -> float:
    """Return the transfer time of a mini-batch at the full bandwidth of PCIe, of SALIENT (0) or DUCATI (1)."""
    return TABLE_5[data][system][1] / 100 * EPOCHS["GraphSAGE", data, "B"][system] / BATCHES[data]


def make_times(cpu: float, dma: float, gpu: float, model: float, cores: int) -> StageTimes:
    """Return stage times, in seconds, with ``cpu`` for all workers together; one core is the main thread's."""
    means = (cpu * (cores - 1), dma, SAMPLING_SHARE * gpu, (1 - SAMPLING_SHARE) * gpu, model)
    return StageTimes(*(Duration(mean, SPREAD * mean) for mean in means), cpu_workers=cores - 1)


def solve(setting: Setting) -> StageTimes:
    """Return the stage times of one of the paper's settings."""
    _, data, machine = setting
    number, x = BATCHES[data], TABLE_6[data, machine][0]
    sage_cpu, sage_alone = (seconds / number for seconds in EPOCHS["GraphSAGE", data, machine][:2])
    gpu = sage_alone - (sage_cpu - x * sage_alone)  # as x = (T_C - T_M) / (T_G + T_M)
    cpu, alone = (seconds / number for seconds in EPOCHS[setting][:2])
    return make_times(cpu, bus_seconds(data, 0), gpu, alone - gpu, CORES[machine])


@cache
def planned(times: StageTimes, number: int, planner: str, schedule: ScheduleName, size: int) -> CollectivePlan:
    """Return the plan of a planner for an epoch."""
    return PLANNERS[planner](times, size, num_batches=number, schedule=schedule).plan()


def epoch(
    times: StageTimes, number: int, planner: str = "auto", schedule: ScheduleName = "in_order", size: int = GPU_BUFFER
) -> float:
    """Return the seconds of a planned epoch whose durations vary, all mini-batches simulated."""
    plan = planned(times, number, planner, schedule, size)
    return makespan(times, plan, number, draw_durations(times, number, seed=0))


def used(timeline: Timeline, seconds: float) -> dict[str, float]:
    """Return the mean number of busy workers, and the utilization of PCIe and the GPU by time."""
    busy: dict[str, float] = {"CPU": 0.0, "PCIe": 0.0, "GPU": 0.0}
    for item in timeline.intervals:
        busy[item.resource] += item.end - item.start
    return {resource: round(value / seconds, 3) for resource, value in busy.items()}


def explained(why: str, name: str, paper: float | None, simulated: float, measured: float | None = None) -> Cell:
    """Return a cell, with a reason if it is far from the paper."""
    cell = Cell(name, paper, simulated, measured)
    return replace(cell, why=why) if cell.is_far else cell


class RandomSplit:
    """DUCATI-delta: the CPU prepares each mini-batch with a probability, ahead of time; trained in order."""

    def __init__(self, share: float, num_batches: int, workers: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._on_cpu = (torch.rand(num_batches, generator=generator) < share).tolist()
        self._to_claim = deque(number for number, on_cpu in enumerate(self._on_cpu) if on_cpu)
        self._places = 2 * workers
        self._ready: set[int] = set()
        self._device: deque[tuple[int, Route]] = deque()
        self._next = 0

    def claim(self) -> int | None:
        """Assign a mini-batch to a CPU worker."""
        if not self._places or not self._to_claim:
            return None
        self._places -= 1
        return self._to_claim.popleft()

    def ready(self, number: int) -> None:
        """Add a finished mini-batch."""
        self._ready.add(number)

    def next(self) -> ScheduleAction:
        """Transfer a mini-batch beside the training of the one before it; batch on the GPU after that."""
        number = self._next
        on_cpu = number < len(self._on_cpu) and self._on_cpu[number]
        if on_cpu and number in self._ready and len(self._device) < 2:
            self._places += 1
            return self._start("transfer", "cpu")
        if self._device:
            return ScheduleAction("train", *self._device.popleft())
        if number == len(self._on_cpu):
            return ScheduleAction("end")
        return ScheduleAction("wait") if on_cpu else self._start("batch", "gpu")

    def _start(self, kind: str, route: Route) -> ScheduleAction:
        self._device.append((self._next, route))
        self._next += 1
        return ScheduleAction(kind, self._next - 1, route)  # type: ignore[arg-type]


def figure_5(nodes: int, batches: int) -> Table:
    """Sample mini-batches of synthetic graphs with the paper's mean degrees."""
    cells = []
    for data, degree in DEGREES.items():
        sampler = NeighborSampler(CSCGraph.from_csc(*power_law_graph(nodes, degree * nodes, seed=0)), [15, 10, 5])
        order = torch.randperm(nodes, generator=torch.Generator().manual_seed(0)).split(1024)[:batches]
        outputs = (sampler.sample_from_nodes(NodeSamplerInput(None, seeds), key=key) for key, seeds in enumerate(order))
        sizes = torch.tensor([float(out.node.numel()) for out in outputs])
        paper = 100 * SPREAD if data == "PA" else None
        cells.append(Cell(f"{data}, mean degree {degree}", paper, None, float(100 * sizes.std() / sizes.mean())))
    return Table(
        "Figure 5: spread of the number of nodes per mini-batch", "% of the mean", cells,
        f"Measured: this package's sampler on power-law graphs of {nodes:,} nodes with the mean degrees of table 3; "
        f"{batches} mini-batches of 1024 seeds, fanouts 15, 10, 5. The figure has no numbers; PA's is of section 5.8.",
        "The synthetic graph is smaller, so that mini-batches cover more of it, and its degrees are not those of PA.",
    )  # fmt: skip


SIDE_BY_SIDE = "solved from stages that run alone; that they slow each other down side by side is not simulated"


def table_4(settings: Sequence[Setting]) -> list[Table]:
    """Simulate each setting with each combination of planner and schedule."""
    ways = list(product(PLANNERS, SCHEDULES))
    found = {way: [epoch(solve(setting), BATCHES[setting[1]], *way) for setting in settings] for way in ways}
    ours, papers = found["auto", "in_order"], [EPOCHS[setting][2] for setting in settings]
    names = [", ".join(setting) for setting in settings]
    plans = [planned(solve(setting), BATCHES[setting[1]], *ways[0], GPU_BUFFER) for setting in settings]
    bounds = [plan.epoch_s["collective"] / (1 + (plan.optimality_gap or 0.0)) for plan in plans]

    def cells(seconds: Sequence[float]) -> list[Cell]:
        rows = zip(names, papers, seconds, bounds, strict=True)
        text = SIDE_BY_SIDE + "; no schedule of them takes less than {:.1f} s"
        return [explained(text.format(bound), name, paper, own) for name, paper, own, bound in rows]

    def over(ones: Sequence[float], others: Sequence[float]) -> list[float]:
        return [one / other for one, other in zip(ones, others, strict=True)]

    speedups = []
    for number, name in enumerate(SYSTEMS[:2]):
        theirs = [EPOCHS[setting][number] for setting in settings]
        for how, value in (("mean", fmean), ("maximum", max)):
            pair = value(over(theirs, papers)), value(over(theirs, ours))
            speedups.append(explained(SIDE_BY_SIDE, f"over {name}, {how}", *pair))
    ablation = []
    for (planner, schedule), seconds in found.items():
        name, longer = f"plan={planner} schedule={schedule}", over(seconds, ours)
        if seconds is not ours:
            ablation.append(Cell(f"{name}, over ours: geometric mean", None, geometric_mean(longer)))
            ablation += [Cell(f"{name}, over ours: {value.__name__}", None, value(longer)) for value in (min, max)]
        ablation.append(Cell(f"{name}, over equation 6: max", None, max(over(seconds, bounds))))
    return [
        Table(
            "Table 4: epochs (our plan and schedule)", "model, data, machine: s", cells(ours),
            "SALIENT's and DUCATI's epochs are inputs, MorphGL's is predicted: for GraphSAGE with table 6's ratio, for "
            "GCN and GAT without further inputs.",
        ),
        Table("Table 4: speedups (our plan and schedule)", "times as fast", speedups),
        Table(
            "Table 4: epochs (published plan and schedule)", "model, data, machine: s", cells(found["paper", "paper"]),
            '`CollectiveDataModule(plan="paper", schedule="paper")`, simulated with the same stage times.',
        ),
        Table(
            "Ablation: published against ours", "ratio of epochs", ablation,
            f"{len(settings)} settings of table 4. Over ours (plan=auto schedule=in_order): above 1, ours is faster. "
            "Over equation 6: how far from a lower bound for every schedule with these stage times. Theorem 2 of the "
            "paper bounds its own by more than 3.",
        ),
    ]  # fmt: skip


def table_5(names: Sequence[str]) -> Table:
    """Simulate the utilization of machine B with GraphSAGE."""
    cells = []
    shorter = "the simulated epoch is shorter (table 4), so that more is done per second"
    gaps = "`nvidia-smi` counts the time in which a kernel runs; simulated stages have no gaps between kernels"
    longer = "T_Model follows from table 6's ratio; from this utilization it would be longer"
    for data in names:
        times, number = solve(("GraphSAGE", data, "B")), BATCHES[data]
        plans = (CollectivePlan("cpu", 1, 2 * times.cpu_workers, times=times), CollectivePlan("gpu", 1, 0, times=times),
                 planned(times, number, "auto", "in_order", GPU_BUFFER))  # fmt: skip
        for system, plan, paper in zip(SYSTEMS, plans, TABLE_5[data], strict=True):
            run = simulate_dual_buffer(times, plan, number, seed=0)
            busy = used(run.timeline, run.makespan)
            moved = run.on_cpu * bus_seconds(data, 0) + (number - run.on_cpu) * bus_seconds(data, 1)
            shares = 1 + busy["CPU"], moved / run.makespan, busy["GPU"]
            reasons = (shorter, shorter, longer if system == "SALIENT" else gaps)
            for unit, one, own, why in zip("CPG", paper, shares, reasons, strict=True):
                cells.append(explained(why, f"{data}, {system}, %{unit}", one, 100 * own))
    return Table(
        "Table 5: utilization of CPU cores, PCIe and GPU (machine B, GraphSAGE)", "%", cells,
        "Cores: the busy workers and the main thread's core. PCIe: bytes over what the bandwidth allows meanwhile, the "
        "paper's unit. The bytes of a mini-batch follow from SALIENT's and DUCATI's utilization, which are inputs.",
    )  # fmt: skip


def table_6(names: Sequence[str], machines: Sequence[str], settings: Sequence[Setting]) -> Table:
    """Compare ratios, buffers and shares of GraphSAGE, and rounds of feedback in all settings."""
    cells = []
    for data, machine in product(names, machines):
        times, number = solve(("GraphSAGE", data, machine)), BATCHES[data]
        x, size = TABLE_6[data, machine]
        published = planned(times, number, "paper", "paper", GPU_BUFFER)
        ours = planned(times, number, "auto", "in_order", GPU_BUFFER)
        theirs = replace(published, cpu_buffer_size=size)
        drawn = draw_durations(times, number, seed=0)
        seconds = [makespan(times, plan, number, drawn) for plan in (theirs, published)]
        flat = "when blocking ends is described in words only; epochs of {:.2f} s with theirs, {:.2f} s with this one"
        for name, paper, own in (
            ("initial x", x, ours.ratio),
            ("CPU buffer, plan=paper", size, published.cpu_buffer_size),
            ("CPU's share, %, plan=auto", 100 * size / (size + GPU_BUFFER), 100 * ours.cpu_share),
        ):
            cells.append(explained(flat.format(*seconds), f"{data}, {machine}, {name}", paper, own))
    rounds = [planned(solve(each), BATCHES[each[1]], "paper", "paper", GPU_BUFFER).rounds for each in settings]
    fewer = "what counts as a round is not described; in 7 of the 9 settings above, theirs ends near floor(gbs / x)"
    cells.append(explained(fewer, "rounds of feedback, mean", 17.6, fmean(rounds)))
    cells.append(explained(fewer, "rounds of feedback, maximum", 53, max(rounds)))
    text = "The initial x is an input of the solved stage times, and the share 1 / (1 + gbs / cbs) in the paper."
    return Table("Table 6: ratios and buffers (GraphSAGE)", "value", cells, text)


def table_7() -> Table:
    """Simulate machine D (V100) with GAT on UK and limited device memory."""
    cells = []
    for memory, (salient, ducati, paper, batching_ms) in TABLE_7.items():
        number, gpu = BATCHES["UK"], batching_ms / 1000
        times = make_times(salient / number, bus_seconds("UK", 0), gpu, ducati / number - gpu, CORES["D"])
        for planner, schedule in (("auto", SCHEDULES[0]), ("paper", SCHEDULES[1])):
            name = f"{memory} GB, plan={planner} schedule={schedule}"
            cells.append(explained(SIDE_BY_SIDE, name, paper, epoch(times, number, planner, schedule)))
    text = "T_GBT is the paper's. `datamodule.device_memory` limits the memory that placements plan for on a GPU."
    return Table("Table 7: device memory (machine D, GAT, UK)", "s", cells, text)


def table_8(names: Sequence[str], machines: Sequence[str]) -> Table:
    """Time the planner, and simulate the measurements before it."""
    cells = []
    for data, machine in product(names, machines):
        times, number = solve(("GraphSAGE", data, machine)), BATCHES[data]
        profile = 40 * epoch(times, number) / number  # 20 mini-batches of each route
        start = time.process_time()
        PLANNERS["auto"](times, GPU_BUFFER, num_batches=number).plan()
        cells.append(Cell(f"{data}, {machine}", TABLE_8[data, machine], profile, time.process_time() - start))
    return Table(
        "Table 8: preparation before training (GraphSAGE)", "s", cells,
        "Simulated: the time in which 20 mini-batches of each route are measured, which are trained on all the same. "
        "Measured: planning, on a core of this machine, beside training. The ratio is that of planning alone.",
        "The paper measures 1000 mini-batches of each stage before training; 20 suffice here, while training.",
    )  # fmt: skip


def figure_8(cores: Sequence[int]) -> Table:
    """Simulate UK with GraphSAGE on machine B with other numbers of cores."""
    number, papers = BATCHES["UK"], EPOCHS["GraphSAGE", "UK", "B"]
    slept = json.loads((RESULTS / "collective.json").read_text())
    scale = slept["settings"]["slower"] * number / slept["settings"]["sleeping_batches"]
    measured = {row["name"]: scale * row["median"] for row in slept["rows"] if "sleep" in row["name"]}
    cells, first = [], None
    for count in cores:
        times = replace(solve(("GraphSAGE", "UK", "B")), cpu_workers=count - 1)
        plan = planned(times, number, "auto", "in_order", GPU_BUFFER)
        seconds = plan.epoch_s["cpu"], plan.epoch_s["gpu"], epoch(times, number)
        asleep = (f"CPU-only, stages sleep, {count} cores", "GPU-only, stages sleep",
                  f"ours, collective, stages sleep, {count} cores")  # fmt: skip
        for system, paper, own, name in zip(SYSTEMS, papers, seconds, asleep, strict=True):
            given = paper if count == CORES["B"] else None
            cells.append(explained(SIDE_BY_SIDE, f"{system}, {count} cores", given, own, measured.get(name)))
        if first is None and seconds[0] < seconds[1]:
            first = count
    if first is not None:
        why = "workers scale perfectly here; the paper's share memory bandwidth"
        cells.append(explained(why, "cores from which SALIENT beats DUCATI", 12, first))
    return Table(
        "Figure 8: CPU cores per GPU (machine B, UK, GraphSAGE)", "s", cells,
        "The figure has no numbers; the paper's are those of table 4, and section 5.3 says that SALIENT is faster with "
        "more than 10 cores. Measured: real threads and schedules with stages that sleep "
        "(`benchmarks.collective.epochs`), scaled to a whole epoch.",
    )  # fmt: skip


def figure_9(nodes: int, sizes: Sequence[int]) -> Table:
    """Simulate PA on machine A with other GPU buffers, of whose memory the cache gets the rest."""
    graph = CSCGraph.from_csc(*power_law_graph(nodes, DEGREES["PA"] * nodes, seed=0))
    inputs = NodeSamplerInput(None, torch.arange(nodes))
    reads = count_reads(NeighborSampler(graph, [15, 10, 5]), inputs, max(1, nodes // 108_000), range(64)).rows[None]
    hits = reads[torch.argsort(graph.out_degrees, descending=True)].double().cumsum(0)
    hits /= hits[-1].clone()
    times, number = solve(("GraphSAGE", "PA", "A")), BATCHES["PA"]

    def missed(size: int) -> float:
        rows = int(nodes * max(0.0, 24.0 - 0.1497 * (size + 2)) / 53.0)
        return 1.0 - (float(hits[rows - 1]) if rows else 0.0)

    cells = []
    for size, (planner, schedule) in product(sizes, (("auto", SCHEDULES[0]), ("paper", SCHEDULES[1]))):
        scale = missed(size) / missed(GPU_BUFFER)
        changed = replace(times, uva=Duration(scale * times.uva.mean, scale * times.uva.spread))
        name = f"gbs up to {size}, plan={planner} schedule={schedule}"
        cells.append(Cell(name, 17.02 if size == GPU_BUFFER else None, epoch(changed, number, planner, schedule, size)))
    return Table(
        "Figure 9: GPU buffer size (machine A, PA, GraphSAGE)", "s", cells,
        "24 GB for cache and buffer, 149.7 MB a mini-batch, 53 GB of topology and features. The hit rate of that cache "
        "is measured on a synthetic graph with PA's mean degree. Only gbs = 10 has a number, in table 4.",
    )  # fmt: skip


def figure_10(names: Sequence[str], shares: Sequence[float]) -> Table:
    """Simulate DUCATI-delta with GraphSAGE on machine B."""
    papers = {"PA": (1.05, 1.37), "TW": (1.34, 1.02), "UK": (1.16, 1 / 1.18)}
    why = "how far ahead DUCATI-delta prepares, and what a contended bus costs it, is not described"
    cells = []
    for data in names:
        times, number = solve(("GraphSAGE", data, "B")), BATCHES[data]
        drawn, workers = draw_durations(times, number, seed=0), times.cpu_workers
        tried = {share: run_schedule(RandomSplit(share, number, workers), workers, drawn).makespan for share in shares}
        best = min(tried, key=lambda share: tried[share])
        over = tried[best] / epoch(times, number), tried[0.5] / EPOCHS["GraphSAGE", data, "B"][1]
        what = f"best r = {best:g}, over MorphGL", "r = 0.5, over DUCATI"
        for name, paper, own in zip(what, papers[data], over, strict=True):
            cells.append(explained(why, f"{data}, {name}", paper, own))
    text = f"{len(shares)} values of r. A mini-batch of the CPU is transferred beside the training step before it."
    return Table("Figure 10: a random split (machine B, GraphSAGE)", "ratio of epochs", cells, text)


TEXT = """
Made by `python -m benchmarks.papers.morphgl`. **Simulated**: stage times solved from the paper's own tables, planned
and scheduled by this package with a virtual clock. **Measured**: on this project's machine, which has no GPU, as each
table says. No cell was measured on a GPU. Bold ratios are further than 15 % from the paper and have a reason.

How stage times are solved: SALIENT's epoch is bound by its CPU workers. DUCATI's epoch is the sum of batching and
training on the GPU. Table 6's initial ratio is the minimum of equation 6, which separates the two. Table 5 gives the
transfer time. [The guide](../guides/collective.md#published-and-ours) compares the published system with ours.
"""


def main(argv: Sequence[str] | None = None) -> Page:
    """Write ``benchmarks/results/papers_morphgl.json`` and ``docs/papers/morphgl.md``."""
    args = parse("morphgl", __doc__, argv)
    names, machines, models = (DATA[:1], MACHINES[:1], MODELS[:2]) if args.quick else (DATA, MACHINES, MODELS)
    settings, nodes = list(product(models, names, machines)), 20_000 if args.quick else 300_000
    tables = [
        figure_5(nodes, batches=4 if args.quick else 64),
        *table_4(settings),
        table_5(names),
        table_6(names, machines, settings),
        table_7(),
        table_8(names, machines),
        figure_8(range(2, 5 if args.quick else 18, 2)),
        figure_9(nodes, (1, 10) if args.quick else (1, 2, 4, 8, 10, 16, 32, 64, 128)),
        figure_10(names, SHARES[:: 5 if args.quick else 1]),
    ]
    page = Page("morphgl", "MorphGL, cell by cell", TEXT, tables)
    page.write(args.out)
    return page


if __name__ == "__main__":
    main()
