"""A machine with sleeping stages: collective batching and its peers with real threads and the durations of the paper.

Nothing computes, so the number of real cores does not matter. A sleep that overshoots shortens the thread's next one.
``benchmarks.papers.morphgl`` solves the durations from the paper's tables.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.harness import Rows, measure
from benchmarks.papers.morphgl import GPU_BUFFER, SHARES, RandomSplit, solve, used
from lightning_gnn.collective.batch_schedule import Schedule
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.plan import PREPARATION_STAGES, CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.simulate import draw_durations
from lightning_gnn.runtime.timeline import Interval, Resource, Timeline

SETTING = "an RTX 3090 with 8 cores, UK"
WAYS = ("collective", "CPU-only", "GPU-only", "random split")
ASLEEP = "stages sleep"


def paper_times(cores: int, scale: float = 1.0) -> StageTimes:
    """Return the stage times for a number of cores (at least 2), multiplied by ``scale``."""
    stages = [getattr(solve(("GraphSAGE", "UK", "B")), stage) for stage in PREPARATION_STAGES]
    return StageTimes(*(Duration(scale * each.mean, scale * each.spread) for each in stages), cpu_workers=cores - 1)


def row_name(way: str, cores: int) -> str:
    """Return the name of a sleeping contestant."""
    ours = "ours, " if way == "collective" else ""
    return f"{ours}{way}, {ASLEEP}" + ("" if way == "GPU-only" else f", {cores} cores")


class SleepingMachine:
    """CPU workers, a PCIe link and a GPU, simulated by threads that sleep for the durations of the stages."""

    def __init__(self, times: StageTimes, num_batches: int) -> None:
        self.times = times
        self.num_batches = num_batches
        self.timeline = Timeline()
        self._drawn = draw_durations(times, num_batches, seed=0)
        self._owed = threading.local()
        self._pcie = threading.Lock()  # shared by the GPU's reads and transfers
        self._workers = threading.Condition()
        self._finished = False

    def run(self, schedule: Schedule) -> Timeline:
        """Train an epoch under a schedule."""
        arrivals: dict[int, Future[None]] = {}
        with self._working(schedule), ThreadPoolExecutor(1) as link:
            while True:
                with self._workers:
                    step = schedule.next()
                    while step.kind == "wait":
                        self._workers.wait()
                        step = schedule.next()
                    self._workers.notify_all()
                if step.kind == "end":
                    return self.timeline
                if step.kind == "batch":
                    self._batch(step.number)
                elif step.kind == "transfer":
                    arrivals[step.number] = link.submit(self._transfer, step.number)
                else:
                    if step.route == "cpu":
                        arrivals.pop(step.number).result()
                    self._train(step.number)

    @contextmanager
    def _working(self, schedule: Schedule) -> Iterator[None]:
        def work(lane: int) -> None:
            while True:
                with self._workers:
                    while (number := schedule.claim()) is None:
                        if self._finished:
                            return
                        self._workers.wait()
                self._prepare(number, lane)
                with self._workers:
                    schedule.ready(number)
                    self._workers.notify_all()

        with ThreadPoolExecutor(self.times.cpu_workers) as pool:
            running = [pool.submit(work, lane) for lane in range(self.times.cpu_workers)]
            try:
                yield
            finally:
                with self._workers:
                    self._finished = True
                    self._workers.notify_all()
                for worker in running:
                    worker.result()

    def _prepare(self, number: int, lane: int) -> None:
        self._sleep("CPU", "cpu_batching", number, lane)

    def _transfer(self, number: int) -> None:
        with self._pcie:
            self._sleep("PCIe", "dma", number)

    def _batch(self, number: int) -> None:
        """Sample and gather a mini-batch on the GPU, both over PCIe."""
        with self._pcie:
            for stage in ("gpu_batching", "uva"):
                reads = self._sleep("GPU", stage, number)
                self.timeline.intervals.append(replace(reads, resource="PCIe"))

    def _train(self, number: int) -> None:
        self._sleep("GPU", "model", number)

    def _sleep(self, resource: Resource, stage: str, number: int, lane: int = 0) -> Interval:
        start = time.perf_counter()
        seconds = self._drawn(stage, number) - getattr(self._owed, "seconds", 0.0)
        time.sleep(max(0.0, seconds))
        end = time.perf_counter()
        self._owed.seconds = end - start - seconds
        interval = Interval(resource, stage, number, start, end, lane)
        self.timeline.intervals.append(interval)
        return interval


def sleep(cores: Sequence[int], num_batches: int, slower: int, runs: int) -> tuple[Rows, list[dict[str, Any]]]:
    """Measure the four contestants on :class:`SleepingMachine`, for each number of cores.

    The ratios of the random split are tried once each, in ascending order, until the workers alone would need 1.5 times
    the best epoch; the best ratio is then measured in the rounds.
    """
    contestants: dict[str, Callable[[], float] | None] = {}
    cells: list[dict[str, Any]] = []
    utilisation: dict[str, dict[str, float]] = {}

    def contestant(name: str, times: StageTimes, create: Callable[[], Schedule]) -> Callable[[], float]:
        def call() -> float:
            machine, schedule = SleepingMachine(times, num_batches), create()
            start = time.perf_counter()
            timeline = machine.run(schedule)
            seconds = time.perf_counter() - start
            utilisation[name] = used(timeline, seconds)
            return seconds

        return call

    for count in cores:
        times = paper_times(count, 1 / slower)
        workers = times.cpu_workers
        plan = Dispatcher(times, GPU_BUFFER, num_batches=num_batches).plan()
        plans = {
            "collective": plan,
            "CPU-only": CollectivePlan("cpu", 1, 2 * workers, times=times),
            "GPU-only": CollectivePlan("gpu", 1, 0),
        }
        ways: dict[str, Callable[[], Schedule]] = {
            way: partial(each.create_schedule, num_batches, workers) for way, each in plans.items()
        }
        tried: dict[float, float] = {}
        for ratio in SHARES:
            if tried and ratio * num_batches * times.cpu > 1.5 * min(tried.values()):
                break
            tried[ratio] = contestant("", times, partial(RandomSplit, ratio, num_batches, workers))()
        best = min(tried, key=lambda ratio: tried[ratio])
        ways["random split"] = partial(RandomSplit, best, num_batches, workers)
        for way, create in ways.items():
            name = row_name(way, count)
            contestants.setdefault(name, contestant(name, times, create))
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


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot the epochs of ``benchmarks.collective.epochs`` over cores, and over the GPU's buffer size."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: list[tuple[str, str, dict[str, dict[float, float]]]] = []
    ways: dict[str, dict[float, float]] = {}
    for cell in result.get("asleep", []):
        for way, seconds in cell["measured_s"].items():
            ways.setdefault(way, {})[cell["cores"]] = seconds
    if ways:
        panels.append(("figure 8, stages sleep", "CPU cores", ways))
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
        top = min(1.1 * max(seen), 4 * min(seen)) if seen else None  # CPU-only with two cores is off the scale
        axis.set(title=title, xlabel=across, ylabel="s per epoch", ylim=(0, top))
        if across == "GPU buffer":
            axis.set_xscale("log", base=2)
        if lines:
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
