"""What the planner of collective batching is worth: against the authors', each processor alone, and trying everything.

Settings are drawn: stage times over one and a half decades each, 1 to 31 CPU workers, spreads of 0 to 30 %, epochs of
100 to 400 mini-batches. Every plan is judged by its mean makespan over epochs that no planner has seen, the same for
all, in a discrete-event simulation of its own: processes that hand events to a queue, not the library's clock. "Trying
everything" is the best of a grid over both buffers, the lead and the row, chosen on other epochs than it is judged on,
else the best of many would be luck. The authors' planner and schedule train mini-batches as they are ready; ours keeps
their order. "Without turns" is our planner as it would be without rows and a beginning of their own. Where the authors'
come within half a percent of ours, or are better, both are judged again, on more epochs and on those alone. Where more
than a percent remains, a search of ten times as many plans tells what order costs, and what a short search.
Nothing is timed but the planning itself, by the processor's clock.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from multiprocessing import get_context
from typing import Any, Protocol
from unittest.mock import patch

from benchmarks.collective_published import DualBuffer, published_plan
from benchmarks.harness import parse, publish
from benchmarks.machine import machine
from lightning_gnn.collective import dispatcher
from lightning_gnn.collective.dispatcher import Dispatcher, initial_ratio, relaxed_time
from lightning_gnn.collective.plan import STAGES, CollectivePlan, Duration, Mode, StageTimes
from lightning_gnn.collective.reorder_buffer import ReorderBuffer, Step
from lightning_gnn.collective.simulate import drawn_durations

SIZES = {
    "settings": (1000, 3),
    "exhaustive": (24, 1),
    "ablated": (200, 1),
    "processes": (2, 1),
    "judged": (6, 1),
    "again": (24, 2),
    "shown": (2, 1),
}
SPREADS = (0.0, 0.05, 0.1, 0.2, 0.3)
WORKERS = (1, 2, 3, 4, 7, 11, 15, 31)
GPU_BUFFER = 10
GRID = {
    "gbs": (1, 2, 5, 10),
    "cbs": (1, 4, 16, 32),
    "lead": (0.5, 0.75, 1.0, 1.25, 1.6, 2.5),
    "row": (0.0, 1.0, 1.3),
}
NEAR, OVER = 0.995, 1.01

Wait = float | str
"""Seconds, or the name of what has to happen."""


class Schedule(Protocol):
    """What decides."""

    def claim(self) -> int | None:
        """Give a CPU worker its next mini-batch."""

    def ready(self, number: int) -> None:
        """Take one that is finished."""

    def next(self) -> Step:
        """Decide the training thread's next step."""


@dataclass
class Node:
    """A machine whose parts are processes: CPU workers, PCIe, and the training thread with its GPU.

    Args:
        schedule: Decides.
        workers: On the CPU.
        seconds: Of a stage of a mini-batch.
    """

    schedule: Schedule
    workers: int
    seconds: Callable[[str, int], float]
    now: float = 0.0
    cpu_lag: float = 0.0
    gpu_lag: float = 0.0
    flushes: int = 0
    _events: list[tuple[float, int, Generator[Wait]]] = field(default_factory=list)
    _asleep: dict[str, list[Generator[Wait]]] = field(default_factory=dict)
    _count: int = 0
    _sent: list[int] = field(default_factory=list)
    _arrived: set[int] = field(default_factory=set)
    _pcie: bool = False
    _working: int = 0

    def makespan(self) -> float:
        """Return the seconds until the training thread is done."""
        for process in [self._worker() for _ in range(self.workers)] + [self._link()]:
            self._advance(process)
        thread = self._training_thread()
        self._advance(thread)
        while self._events and thread.gi_frame is not None:
            self.now, _, process = heappop(self._events)
            self._advance(process)
        return self.now

    def _advance(self, process: Generator[Wait]) -> None:
        wait = next(process, None)
        if isinstance(wait, str):
            self._asleep.setdefault(wait, []).append(process)
        elif wait is not None:
            self._count += 1
            heappush(self._events, (self.now + wait, self._count, process))

    def _happens(self, what: str) -> None:
        for process in self._asleep.pop(what, []):
            self._advance(process)

    def _worker(self) -> Generator[Wait]:
        while True:
            while (number := self.schedule.claim()) is None:
                yield "room"
            self._working += 1
            yield self.seconds("cpu_batching", number)
            self._working -= 1
            self.schedule.ready(number)
            for process in self._asleep.pop("ready", []):  # once this worker has taken its next one
                self._count += 1
                heappush(self._events, (self.now, self._count, process))

    def _link(self) -> Generator[Wait]:
        while True:
            while not self._sent or self._pcie:
                yield "pcie"
            number = self._sent.pop(0)
            self._pcie = True
            yield self.seconds("dma", number)
            self._pcie = False
            self._arrived.add(number)
            self._happens("pcie")
            self._happens("arrival")

    def _training_thread(self) -> Generator[Wait]:
        phase = ""
        while (step := self.schedule.next()).kind != "end":
            self._happens("room")
            phase_now = getattr(self.schedule, "phase", "")
            self.flushes += phase_now == "flushing" != phase
            phase, begun = phase_now, self.now
            if step.kind == "wait":
                yield "ready"
                self.cpu_lag += self.now - begun
            elif step.kind == "transfer":
                self._sent.append(step.number)
                self._happens("pcie")
            elif step.kind == "batch":
                while self._pcie or self._sent:
                    yield "arrival"
                self._pcie = True
                idle = self.workers - self._working if getattr(self.schedule, "cpu_blocked", False) else 0
                yield self.seconds("gpu_batching", step.number) + self.seconds("uva", step.number)
                self.gpu_lag += (self.now - begun) * idle / self.workers
                self._pcie = False
                self._happens("pcie")
            else:
                while step.route == "cpu" and step.number not in self._arrived:
                    yield "arrival"
                yield self.seconds("model", step.number)


@dataclass
class Setting:
    """Stage times, and an epoch's length.

    Args:
        times: Of the stages, with their spreads.
        num_batches: Of an epoch.
        spread: Part of the mean.
    """

    times: StageTimes
    num_batches: int
    spread: float

    @property
    def bound(self) -> float:
        """Seconds that no schedule falls below in a long epoch (equation 6)."""
        return self.num_batches * relaxed_time(initial_ratio(self.times), self.times)


def draw(source: random.Random) -> Setting:
    """Draw a setting; the model takes 10 ms."""

    def seconds(least: float, most: float) -> float:
        return 0.01 * math.exp(source.uniform(math.log(least), math.log(most)))

    spread, workers = source.choice(SPREADS), source.choice(WORKERS)
    cpu, dma, gpu, sampling = seconds(0.2, 8) * workers, seconds(0.02, 2), seconds(0.2, 5), source.random()
    means = (cpu, dma, gpu * sampling, gpu * (1 - sampling), 0.01)
    times = StageTimes(*(Duration(mean, spread * mean) for mean in means), cpu_workers=workers)
    return Setting(times, source.randrange(100, 400), spread)


def judged(setting: Setting, schedule: Callable[[], Schedule], seeds: range) -> float:
    """Return the mean makespan over epochs."""
    times, num_batches = setting.times, setting.num_batches
    return statistics.fmean(
        Node(schedule(), times.cpu_workers, drawn_durations(times, num_batches, seed)).makespan() for seed in seeds
    )


class WithoutTurns(Dispatcher):
    """Plans without rows, and without a beginning of their own."""

    def _plan(self, mode: Mode, on_cpu: float, on_gpu: float = 1, lead: float = 0, *_: float) -> CollectivePlan:
        return super()._plan(mode, on_cpu, on_gpu, lead)


def more_thorough(setting: Setting) -> CollectivePlan:
    """Return the plan of a search of ten times as many plans, compared on twice as many epochs."""
    names = {"ROUNDS": 10 * dispatcher.ROUNDS, "CANDIDATES": 40, "DRAWN": 8, "DRAWN_AGAIN": 32, "LEADERS": 12}
    with patch.multiple(dispatcher, **names):
        return Dispatcher(setting.times, GPU_BUFFER, num_batches=setting.num_batches).plan()


def contestants(
    setting: Setting, exhaustive: bool, ablated: bool, judge: range, again: range, shown: range
) -> tuple[dict[str, float], Any]:
    """Return the mean makespan of each planner's plan in the epochs to be judged by, and what ours did."""
    times, number, workers = setting.times, setting.num_batches, setting.times.cpu_workers
    start = time.process_time()
    plan = Dispatcher(times, GPU_BUFFER, num_batches=number).plan()
    planning = time.process_time() - start
    depth = max(GPU_BUFFER, 2 * workers)

    def ours(gbs: int, cbs: int, lead: int, row: int = 0, begin: int = 0) -> Callable[[], Schedule]:
        return lambda: ReorderBuffer(number, gbs, cbs, workers, lead, row, begin=begin)

    def as_planned(plan: CollectivePlan) -> Callable[[], Schedule]:
        return ours(*plan.buffers, plan.ahead, plan.row, plan.begin)

    def feedback(gbs: int, cbs: int) -> tuple[float, float, float]:
        means = {stage: getattr(times, stage).mean for stage in STAGES}
        node = Node(DualBuffer(number, gbs, cbs, workers), workers, lambda stage, _: means[stage])
        seconds, flushes = node.makespan(), max(1, node.flushes)
        return seconds, node.cpu_lag / flushes, node.gpu_lag / flushes

    published = published_plan(times, GPU_BUFFER, number, feedback)
    authors = lambda: DualBuffer(number, *published, workers)  # noqa: E731
    found = {
        "ours": judged(setting, as_planned(plan), judge),
        "the authors'": judged(setting, authors, judge),
        "the CPU alone": judged(setting, ours(0, depth, 0), judge),
        "the GPU alone": judged(setting, ours(1, 0, 0), judge),
    }
    if exhaustive:
        taken = times.cpu_batching.mean / (setting.bound / number)
        share = 1 / (1 + initial_ratio(times))
        grid = {(0, depth, 0, 0), (1, 0, 0, 0)}
        for gbs, cbs, factor, part in itertools.product(*GRID.values()):
            row = round(min(number, max(1.0, gbs * share / max(1e-3, 1 - share)) * part))
            for lead in (factor * taken + 1, factor * taken + 6, factor * (cbs + workers) / share):
                grid.add((gbs, cbs, max(1, min(number, math.ceil(lead))), row))
        best = min(grid, key=lambda sizes: judged(setting, ours(*sizes), shown))
        found["trying everything"] = judged(setting, ours(*best), judge)
    if ablated:
        without = WithoutTurns(times, GPU_BUFFER, num_batches=number).plan()
        found["without turns"] = judged(setting, as_planned(without), judge)
    about = {"rounds": plan.rounds, "planning_s": planning, "mode": plan.mode}
    if setting.spread and found["ours"] > NEAR * found["the authors'"]:
        about["again"] = judged(setting, as_planned(plan), again) / judged(setting, authors, again)
        if about["again"] > OVER:
            about["thorough"] = judged(setting, as_planned(more_thorough(setting)), again) / judged(
                setting, authors, again
            )
    return found, about


def summary(ratios: list[float]) -> dict[str, float]:
    """Return how ours stands against a peer: makespans over the peer's."""
    ordered = sorted(ratios)
    return {
        "settings": len(ratios),
        "geometric mean": round(statistics.geometric_mean(ratios), 4),
        "95th percentile": round(ordered[int(0.95 * (len(ordered) - 1))], 4),
        "worst": round(ordered[-1], 4),
        "more than 1 % slower": sum(ratio > 1.01 for ratio in ratios),
        "more than 2 % slower": sum(ratio > 1.02 for ratio in ratios),
        "more than 2 % faster": sum(ratio < 0.98 for ratio in ratios),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("collective_planner", __doc__, SIZES, argv)
    described = machine()
    sizes, source = args.sizes, random.Random(0)
    judge, shown = range(10_000, 10_000 + sizes["judged"]), range(20_000, 20_000 + sizes["shown"])
    again = range(30_000, 30_000 + sizes["again"])
    ratios: dict[str, list[float]] = {}
    by_spread: dict[float, list[float]] = {}
    planned, worst, order = [], [], []
    settings = [draw(source) for _ in range(sizes["settings"])]
    exhaustive = [number < sizes["exhaustive"] for number in range(len(settings))]
    ablated = [number < sizes["ablated"] for number in range(len(settings))]
    with ProcessPoolExecutor(sizes["processes"], get_context("fork")) as processes:
        each = processes.map(partial(contestants, judge=judge, again=again, shown=shown), settings, exhaustive, ablated)
        results = list(each)
    for number, (setting, (found, about)) in enumerate(zip(settings, results, strict=True)):
        planned.append(about)
        found["the better one alone"] = min(found["the CPU alone"], found["the GPU alone"])
        for name, seconds in found.items():
            if name != "ours":
                ratio = found["ours"] / seconds
                ratios.setdefault(name, []).append(about.get("again", ratio) if name == "the authors'" else ratio)
        by_spread.setdefault(setting.spread, []).append(ratios["the authors'"][-1])
        if "thorough" in about:
            order.append({"setting": number, "spread": setting.spread, "workers": setting.times.cpu_workers,
                          "ours": round(about["again"], 4), "thorough": round(about["thorough"], 4)})  # fmt: skip
        seconds = {name: round(value, 4) for name, value in found.items()}
        worst.append((found["ours"] / min(found.values()), number, {**seconds, "workers": setting.times.cpu_workers}))
    result = {
        "benchmark": "collective_planner",
        "title": "Planned epochs of collective batching against other planners, simulated",
        "unit": "makespan of ours over the peer's",
        "settings": {**sizes, "spreads": SPREADS, "workers": WORKERS, "gpu_buffer_size": GPU_BUFFER},
        "machine": described,
        "rows": [],
        "comparisons": [],
        "extra": {
            "against": {name: summary(values) for name, values in ratios.items()},
            "against the authors' by spread": {f"{key:g}": summary(by_spread[key]) for key in sorted(by_spread)},
            "over the authors' by more than 1 %, and with a search ten times as long": order,
            "rounds": {
                "median": statistics.median(a["rounds"] for a in planned),
                "most": max(a["rounds"] for a in planned),
            },
            "planning_s": {
                "median": round(statistics.median(a["planning_s"] for a in planned), 4),
                "most": round(max(a["planning_s"] for a in planned), 4),
            },
            "modes": {mode: sum(a["mode"] == mode for a in planned) for mode in ("collective", "cpu", "gpu")},
            "worst": [
                {"setting": number, **about} for _, number, about in sorted(worst, reverse=True, key=lambda w: w[0])[:5]
            ],
        },
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
