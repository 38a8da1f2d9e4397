"""The planner of collective batching against the authors' planner, and each processor alone.

Settings are random: stage times over one and a half decades each, 1 to 31 CPU workers, spreads of 0 to 30 %, epochs of
100 to 400 mini-batches. Every plan is evaluated by its mean makespan over the same epochs, which no planner has seen,
in an independent discrete-event simulation that does not use the library's clock. The authors' planner and schedule
train mini-batches as soon as they are ready; ours retains their order. In hard settings (spreads from 20 %, 7 workers
or more), more epochs are simulated. Only the planning itself is timed, in CPU time.
"""

from __future__ import annotations

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
from typing import Any

from benchmarks.harness import machine, parse, publish
from lightning_gnn.collective.batch_schedule import Schedule
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.published import PublishedDispatcher
from lightning_gnn.collective.simulate import draw_durations

SIZES = {"settings": (1000, 3), "processes": (2, 1), "judged": (6, 1), "hard": (16, 2)}
SPREADS = (0.0, 0.05, 0.1, 0.2, 0.3)
WORKERS = (1, 2, 3, 4, 7, 11, 15, 31)
GPU_BUFFER = 10
OURS, AUTHORS, BEST = "ours", "the authors'", "the best of them"

Wait = float | str
"""Seconds to wait, or the name of the event to wait for."""


@dataclass
class Node:
    """A simulated machine with one process each for CPU workers, PCIe, and the training thread with its GPU.

    Args:
        schedule: The schedule to simulate.
        workers: Number of CPU workers.
        seconds: Returns the duration of a stage of a mini-batch.
    """

    schedule: Schedule
    workers: int
    seconds: Callable[[str, int], float]
    now: float = 0.0
    _events: list[tuple[float, int, Generator[Wait]]] = field(default_factory=list)
    _asleep: dict[str, list[Generator[Wait]]] = field(default_factory=dict)
    _count: int = 0
    _sent: list[int] = field(default_factory=list)
    _arrived: set[int] = field(default_factory=set)
    _pcie: bool = False

    def makespan(self) -> float:
        """Return the seconds until the training thread has finished."""
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
            yield self.seconds("cpu_batching", number)
            self.schedule.ready(number)
            for process in self._asleep.pop("ready", []):  # after this worker has claimed its next mini-batch
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
        while (step := self.schedule.next()).kind != "end":
            self._happens("room")
            if step.kind == "wait":
                yield "ready"
            elif step.kind == "transfer":
                self._sent.append(step.number)
                self._happens("pcie")
            elif step.kind == "batch":
                while self._pcie or self._sent:
                    yield "arrival"
                self._pcie = True
                yield self.seconds("gpu_batching", step.number) + self.seconds("uva", step.number)
                self._pcie = False
                self._happens("pcie")
            else:
                while step.route == "cpu" and step.number not in self._arrived:
                    yield "arrival"
                yield self.seconds("model", step.number)


@dataclass
class Setting:
    """Stage times and the length of an epoch.

    Args:
        times: Stage times with their spreads.
        num_batches: Number of mini-batches in an epoch.
        spread: Spread relative to the mean.
    """

    times: StageTimes
    num_batches: int
    spread: float

    @property
    def hard(self) -> bool:
        """Whether the setting has many workers and a large spread, so that one is often late."""
        return self.spread >= 0.2 and self.times.cpu_workers >= 7


def draw(source: random.Random) -> Setting:
    """Return a random setting; the model takes 10 ms."""

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
        Node(schedule(), times.cpu_workers, draw_durations(times, num_batches, seed)).makespan() for seed in seeds
    )


def contestants(setting: Setting, judge: range, hard: range) -> tuple[dict[str, float], CollectivePlan, float]:
    """Return each planner's mean makespan over the test epochs, our plan, and its planning time in seconds."""
    times, number, workers = setting.times, setting.num_batches, setting.times.cpu_workers
    start = time.process_time()
    plan = Dispatcher(times, GPU_BUFFER, num_batches=number).plan()
    planning = time.process_time() - start

    def planned(plan: CollectivePlan) -> Callable[[], Schedule]:
        return lambda: plan.create_schedule(number, workers)

    published = PublishedDispatcher(times, GPU_BUFFER, num_batches=number, schedule="paper").plan()
    schedules: dict[str, Callable[[], Schedule]] = {
        OURS: planned(plan),
        AUTHORS: planned(published),
        "the CPU alone": planned(CollectivePlan("cpu", 1, max(GPU_BUFFER, 2 * workers), times=times)),
        "the GPU alone": planned(CollectivePlan("gpu", 1, 0)),
    }
    epochs = hard if setting.hard else judge
    return {name: judged(setting, schedule, epochs) for name, schedule in schedules.items()}, plan, planning


def summary(ratios: list[float]) -> dict[str, float]:
    """Compare our makespans with a peer's, as ratios."""
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
    described, sizes, source = machine(), args.sizes, random.Random(0)
    settings = dict(enumerate(draw(source) for _ in range(sizes["settings"])))
    judge, hard = range(10_000, 10_000 + sizes["judged"]), range(30_000, 30_000 + sizes["hard"])
    ratios: dict[str, dict[int, float]] = {}
    plans, planning = [], []
    with ProcessPoolExecutor(sizes["processes"], get_context("fork")) as processes:
        found = processes.map(partial(contestants, judge=judge, hard=hard), settings.values())
        for number, (seconds, plan, planning_s) in zip(settings, found, strict=True):
            ours = seconds.pop(OURS)
            for name, peer in (seconds | {BEST: min(seconds.values())}).items():
                ratios.setdefault(name, {})[number] = ours / peer
            plans.append(plan)
            planning.append(planning_s)
    ordered = {name: sorted(values.items(), key=lambda item: -item[1]) for name, values in ratios.items()}
    result = {
        "benchmark": "collective_planner",
        "title": "Planned epochs of collective batching against other planners, simulated",
        "unit": "makespan of ours over the peer's",
        "settings": {
            **sizes,
            "settings": len(settings),
            "spreads": SPREADS,
            "workers": WORKERS,
            "gpu_buffer_size": GPU_BUFFER,
        },
        "machine": described,
        "rows": [],
        "comparisons": [],
        "extra": {
            "against": {name: summary(list(values.values())) for name, values in ratios.items()},
            **{
                f"against, in {kind} settings": {
                    name: summary([value for number, value in values.items() if settings[number].hard == is_hard])
                    for name, values in ratios.items()
                }
                for kind, is_hard in (("hard", True), ("other", False))
                if any(setting.hard == is_hard for setting in settings.values())
            },
            "worst settings": {name: {n: round(value, 4) for n, value in each[:5]} for name, each in ordered.items()},
            "rounds": {"most": max(plan.rounds for plan in plans)},
            "turns": sum(plan.row > 0 for plan in plans),
            "planning_s": {
                "median": round(statistics.median(planning), 4),
                "most": round(max(planning), 4),
            },
            "modes": {mode: sum(plan.mode == mode for plan in plans) for mode in ("collective", "cpu", "gpu")},
        },
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
