"""MorphGL's own settings: measured on a machine whose stages sleep, and simulated (its figures 8 to 10, tables 5, 8).

The durations of the stages are solved from the paper's tables: CPU-only batching is bound by the workers, GPU-only
batching does one thing after the other, and equation 6 has its minimum at the ratio of table 6.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

from benchmarks.collective_scripted import SleepingMachine
from benchmarks.harness import Rows, measure
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.simulate import simulate_dual_buffer
from lightning_gnn.graph.cache import hottest
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.synthetic import power_law_graph
from lightning_gnn.persistent import count_accesses
from lightning_gnn.runtime.timeline import Timeline

RATIOS = [number / 20 for number in range(21)]
SPREAD = 2.0 / 149.7
"""Section 5.8: spread of the size of a mini-batch, as a part of its mean."""
WAYS = ("collective", "CPU-only", "GPU-only", "random split")
GPU_BUFFER = 10
ASLEEP = "stages sleep"


@dataclass(frozen=True)
class Setting:
    """One of the paper's machines with a data set, GraphSAGE, fanouts 15, 10, 5 and 1024 seeds.

    Args:
        name: The machine and the data.
        cores: Of its CPU; one is the main thread's.
        num_batches: Mini-batches of an epoch.
        epochs: Seconds of an epoch of each system (table 4).
        ratio: Mini-batches of the GPU for every one of the CPU (table 6).
        dma: Seconds of the transfer of a mini-batch.
        utilisation: Cores, and parts of the PCIe bandwidth and of the time in which the GPU is busy (table 5).
    """

    name: str
    cores: int
    num_batches: int
    epochs: dict[str, float]
    ratio: float
    dma: float
    utilisation: dict[str, tuple[float, float, float]]

    def times(self, cores: int, scale: float = 1.0) -> StageTimes:
        """Return what the stages take with another number of cores, at least 2, multiplied by ``scale``."""
        between = self.epochs["CPU-only"] / self.num_batches  # of two mini-batches of all workers
        alone = self.epochs["GPU-only"] / self.num_batches  # T_G + T_M
        model = between - self.ratio * alone  # x = (T_C - T_M) / (T_G + T_M)
        found = {
            "cpu_batching": between * (self.cores - 1),
            "dma": self.dma,
            "gpu_batching": SAMPLING_SHARE * (alone - model),
            "uva": (1 - SAMPLING_SHARE) * (alone - model),
            "model": model,
        }
        durations = {name: Duration(scale * mean, scale * mean * SPREAD) for name, mean in found.items()}
        return StageTimes(**durations, cpu_workers=cores - 1)


SAMPLING_SHARE = 0.5
"""How much of T_G the GPU samples for, the rest being reads: assumed, the paper does not tell."""
UK = Setting(
    "an RTX 3090 with 8 cores, UK",
    cores=8,
    num_batches=759,
    epochs={"CPU-only": 33.40, "GPU-only": 30.49, "collective": 21.24},
    ratio=0.83,
    dma=0.343 * 33.40 / 759,  # the bandwidth that CPU-only batching used, all by transfers
    utilisation={
        "CPU-only": (8.01, 0.343, 0.304),
        "GPU-only": (1.01, 0.252, 0.864),
        "collective": (7.98, 0.459, 0.887),
    },
)
PAPERS = Setting(
    "an A30 with 12 cores, ogbn-papers100M",
    cores=12,
    num_batches=1179,
    epochs={"CPU-only": 29.12, "GPU-only": 22.75, "collective": 17.02},
    ratio=0.65,
    dma=149.7e6 / 12e9,  # section 5.8, over PCIe 3.0 x16
    utilisation={},
)
PAPER_PLANNING = 76.7 / 21.2
"""Table 8: epochs that planning took on UK."""


def row_name(way: str, cores: int) -> str:
    """Return the name of a contestant that sleeps."""
    ours = "ours, " if way == "collective" else ""
    return f"{ours}{way}, {ASLEEP}" + ("" if way == "GPU-only" else f", {cores} cores")


def sleep(cores: Sequence[int], num_batches: int, slower: int, runs: int) -> tuple[Rows, list[dict[str, Any]]]:
    """Measure the four ways on :class:`SleepingMachine`, for each number of cores.

    The ratios of the random split are tried once each, in rising order, until the workers alone would need 1.5 times
    the best epoch; the best ratio then takes part in the rounds.

    Args:
        cores: Numbers of CPU cores, at least 2 each.
        num_batches: Mini-batches of an epoch.
        slower: The paper's durations are divided by it.
        runs: Rounds.

    Returns:
        The rows, and for each number of cores the plan, the prediction, utilisation and the ratios.
    """
    contestants: dict[str, Callable[[], float] | None] = {}
    cells: list[dict[str, Any]] = []
    utilisation: dict[str, dict[str, float]] = {}

    def contestant(name: str, times: StageTimes, run: Callable[[SleepingMachine], Timeline]) -> Callable[[], float]:
        def call() -> float:
            machine = SleepingMachine(times, num_batches)
            start = time.perf_counter()
            timeline = run(machine)
            seconds = time.perf_counter() - start
            utilisation[name] = used(timeline, seconds)
            return seconds

        return call

    for count in cores:
        times = UK.times(count, 1 / slower)
        plan = Dispatcher(times, GPU_BUFFER, num_batches=num_batches).plan()
        names = {way: row_name(way, count) for way in WAYS}
        tried: dict[float, float] = {}
        for ratio in RATIOS:
            if tried and ratio * num_batches * times.cpu > 1.5 * min(tried.values()):
                break
            tried[ratio] = contestant("", times, lambda machine, ratio=ratio: machine.random_split(ratio))()  # type: ignore[misc]
        best = min(tried, key=lambda ratio: tried[ratio])
        ways: dict[str, Callable[[SleepingMachine], Timeline]] = {
            "collective": lambda machine, plan=plan: machine.collective(plan),  # type: ignore[misc]
            "CPU-only": SleepingMachine.cpu_only,
            "GPU-only": SleepingMachine.gpu_only,
            "random split": lambda machine, best=best: machine.random_split(best),  # type: ignore[misc]
        }
        for way, run in ways.items():
            contestants.setdefault(names[way], contestant(names[way], times, run))
        cells.append(
            {
                "cores": count,
                "mode": plan.mode,
                "gpu_buffer_size": plan.buffers[0],
                "cpu_buffer_size": plan.buffers[1],
                "predicted_s": plan.epoch_s["collective"],
                "random_split_s": {f"{ratio:g}": round(seconds, 4) for ratio, seconds in tried.items()},
                "random_split_best": best,
            }
        )
    rows = measure(contestants, runs, warmup=0)
    medians = {row["name"]: row["median"] for row in rows}
    for cell in cells:
        cell["measured_s"] = {way: medians[row_name(way, cell["cores"])] for way in WAYS}
        cell["error"] = round(cell["measured_s"]["collective"] / cell["predicted_s"] - 1, 4)
        cell["utilisation"] = {way: utilisation[row_name(way, cell["cores"])] for way in WAYS}
    return rows, cells


def used(timeline: Timeline, seconds: float | None = None) -> dict[str, float]:
    """Return how many workers, and which parts of the time PCIe and the GPU, were busy."""
    seconds = timeline.makespan if seconds is None else seconds
    workers = sum(item.end - item.start for item in timeline.intervals if item.resource == "CPU")
    # The GPU's batching goes over PCIe as well, whether or not the timeline says so.
    reads = [replace(item, resource="PCIe") for item in timeline.intervals if item.stage in ("gpu_batching", "uva")]
    bus = Timeline([*timeline.intervals, *reads]).busy("PCIe")
    busy = {"CPU": workers, "PCIe": bus, "GPU": timeline.busy("GPU")}
    return {resource: round(value / seconds, 3) for resource, value in busy.items()}


def simulated_epochs() -> list[dict[str, Any]]:
    """Return whole epochs of UK, in seconds, against the number of cores (figure 8), beside the paper's."""
    found = []
    for cores in range(2, 18, 2):
        plan = Dispatcher(UK.times(cores), GPU_BUFFER, num_batches=UK.num_batches).plan()
        names = {"collective": "collective", "CPU-only": "cpu", "GPU-only": "gpu"}
        epochs = {way: round(plan.epoch_s[name], 3) for way, name in names.items()}
        cell = {
            "cores": cores,
            "mode": plan.mode,
            "buffers": plan.buffers,
            "simulated_s": epochs,
            "rounds": plan.rounds,
        }
        cell["rounds"] = plan.rounds
        found.append({**cell, "paper_s": UK.epochs} if cores == UK.cores else cell)
    return found


def simulated_utilisation() -> dict[str, Any]:
    """Return the utilisation on the paper's machine (table 5), beside the paper's."""
    times = UK.times(UK.cores)
    plans = {
        "collective": Dispatcher(times, GPU_BUFFER, num_batches=UK.num_batches).plan(),
        "CPU-only": CollectivePlan("cpu", 1, 2 * times.cpu_workers),
        "GPU-only": CollectivePlan("gpu", 1, 0),
    }
    simulated = {way: used(simulate_dual_buffer(times, plan, UK.num_batches).timeline) for way, plan in plans.items()}
    paper = {way: dict(zip(("cores", "PCIe bandwidth", "GPU"), UK.utilisation[way], strict=True)) for way in plans}
    return {"simulated, PCIe by time": simulated, "paper": paper}


def planning_time() -> dict[str, Any]:
    """Return what dispatching and simulating cost, of a core of this machine, against the simulated epoch (table 8)."""
    seconds = []
    for cores in range(2, 18, 2):
        start = time.process_time()
        plan = Dispatcher(UK.times(cores), GPU_BUFFER, num_batches=UK.num_batches).plan()
        seconds.append(time.process_time() - start)
    epoch = plan.epoch_s["collective"]
    measuring = 2 * 20 * epoch / UK.num_batches  # 20 mini-batches of each route, which are trained all the same
    return {
        "dispatcher_s": {"median": round(statistics.median(seconds), 4), "max": round(max(seconds), 4)},
        "epochs until planned, 20 measurements each": round((max(seconds) + measuring) / plan.epoch_s["collective"], 3),
        "paper_epochs": round(PAPER_PLANNING, 2),
    }


def hit_rates(nodes: int, edges: int, batch_size: int) -> tuple[Tensor, float]:
    """Sample mini-batches and return which part of the reads hits a cache of the hottest rows.

    Returns:
        float64 ``[nodes]``: with the first 1, 2, … rows of highest out-degree; and the distinct rows of a mini-batch.
    """
    graph = CSCGraph.from_csc(*power_law_graph(nodes, edges, seed=0))
    counts = count_accesses(graph, torch.arange(nodes), [15, 10, 5], batch_size, num_batches=8)
    reads = counts.features[hottest(graph.out_degrees, nodes)].double().cumsum(0)
    return reads / reads[-1], float(reads[-1]) / 8


def simulated_buffers(nodes: int, edges: int) -> dict[str, Any]:
    """Return epochs against the size of the GPU's buffer, of whose memory the cache gets the rest (figure 9).

    Memory and sizes are the paper's: 24 GB for the cache and the buffer, 149.7 MB a mini-batch, 53 GB of topology and
    features. How many reads a cache of that part of them hits is measured on a synthetic graph, with mini-batches that
    are as small beside it.

    Args:
        nodes: Of the graph.
        edges: Likewise.
    """
    hits, _ = hit_rates(nodes, edges, batch_size=max(1, nodes // 40_000))
    times = PAPERS.times(PAPERS.cores)

    def missed(size: int) -> tuple[int, float]:
        cache_rows = int(nodes * max(0.0, 24.0 - 0.1497 * size) / 53.0)
        return cache_rows, 1.0 - (float(hits[cache_rows - 1]) if cache_rows else 0.0)

    points = []
    for size in (1, 2, 4, 8, 10, 16, 32, 64, 128):
        cache_rows, misses = missed(size)
        uva = times.uva.mean * misses / missed(GPU_BUFFER)[1]
        changed = replace(times, uva=Duration(uva, uva * SPREAD))
        plan = Dispatcher(changed, size, num_batches=PAPERS.num_batches).plan()
        points.append(
            {
                "gpu_buffer_size": size,
                "cpu_buffer_size": plan.buffers[1],
                "mode": plan.mode,
                "cache_rows": cache_rows,
                "missed": round(misses, 4),
                "simulated_s": round(plan.epoch_s["collective"], 3),
            }
        )
    return {"setting": PAPERS.name, "nodes": nodes, "edges": edges, "points": points, "paper_s at 10": 17.02}


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot epochs of ``benchmarks.collective`` against cores, and against the GPU's buffer."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: list[tuple[str, str, dict[str, dict[float, float]]]] = []
    figures = result.get("figures", {})
    if figures:
        for name, key in (("figure 8, stages sleep", "measured_s"), ("figure 8, simulated", "simulated_s")):
            ways: dict[str, dict[float, float]] = {}
            for cell in figures[name]:
                for way, seconds in cell[key].items():
                    ways.setdefault(way, {})[cell["cores"]] = seconds
            panels.append((name, "CPU cores", ways))
        splits = {f"{cell['cores']} cores": {float(r): s for r, s in cell["random_split_s"].items()}
                  for cell in figures["figure 8, stages sleep"]}  # fmt: skip
        panels.append(("random split, stages sleep", "part of the CPU", splits))
        points = figures["figure 9, simulated"]["points"]
        by_size = {point["gpu_buffer_size"]: point["simulated_s"] for point in points}
        panels.append(("figure 9, simulated", "GPU buffer", {"collective": by_size}))
    for model in dict.fromkeys(cell["model"] for cell in result.get("cells", [])):
        ways = {}
        for cell in result["cells"]:
            for row in cell["rows"] if cell["model"] == model else []:
                ways.setdefault(row["name"].split(f", {model}")[0], {})[cell["cores"]] = row["median"]
        panels.append((f"figure 8, {model}", "CPU cores", ways))
    for model, swept in result.get("figure 9", {}).items():
        by_size = {point["gpu_buffer_size"]: point["seconds"] for point in swept["points"]}
        panels.append((f"figure 9, {model}", "GPU buffer", {"collective": by_size}))
    figure, axes = pyplot.subplots(1, max(1, len(panels)), figsize=(4.5 * max(1, len(panels)), 3.5),
                                   layout="constrained", squeeze=False)  # fmt: skip
    for axis, (title, across, lines) in zip(axes[0], panels, strict=False):
        for label, values in lines.items():
            axis.plot(list(values), list(values.values()), marker="o", markersize=3, label=label)
        seen = [value for values in lines.values() for value in values.values()]
        top = min(1.1 * max(seen), 4 * min(seen)) if seen else None  # CPU-only with two cores is far off
        axis.set(title=title, xlabel=across, ylabel="s per epoch", ylim=(0, top))
        if across == "GPU buffer":
            axis.set_xscale("log", base=2)
        if lines:
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
