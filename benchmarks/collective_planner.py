"""What the planner of collective batching is worth: against the authors', each processor alone, and trying everything.

Settings are drawn: stage times over one and a half decades each, 1 to 31 CPU workers, spreads of 0 to 30 %, epochs of
100 to 400 mini-batches. Every plan is judged by its mean makespan over epochs that no planner has seen, the same for
all, in a discrete-event simulation of its own: processes that hand events to a queue, not the library's clock. "Brute
force" is the best of a grid over both buffers, with three leads, chosen on other epochs than it is judged on, else the
best of many would be luck. The authors' planner and schedule train mini-batches as they are ready; ours keeps their
order. "Without turns" is our planner as it would be without rows and a beginning of their own, "without cover" with
transfers that set out at any time, "without backup" with a GPU that waits for a late worker, "without stocks" with no
plans to begin with that let the CPU prepare far ahead; these in the first few settings, and in hard ones among ten
times as many: spreads of 20 % and more, and 7 workers and more. There all are judged on more epochs.
Where another comes within half a percent of ours, or is better, both are judged again, on more epochs and on those
alone. Where more than a percent remains, a search of ten times as many plans tells what order costs, and what a short
search. Nothing is timed but the planning itself, by the processor's clock.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

from benchmarks.collective_published import DualBuffer, published_plan
from benchmarks.harness import machine, parse, publish
from lightning_gnn.collective import dispatcher
from lightning_gnn.collective.dispatcher import Dispatcher, initial_ratio, relaxed_time
from lightning_gnn.collective.plan import STAGES, CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.reorder_buffer import Step
from lightning_gnn.collective.simulate import drawn_durations, makespan

SIZES = {
    "settings": (1000, 3),
    "ablated": (200, 20),
    "processes": (2, 1),
    "judged": (6, 1),
    "again": (16, 2),
    "shown": (2, 1),
}
SPREADS = (0.0, 0.05, 0.1, 0.2, 0.3)
WORKERS = (1, 2, 3, 4, 7, 11, 15, 31)
GPU_BUFFER = 10
GRID = {"gbs": (1, 2, 5, 10), "cbs": (1, 2, 4, 8, 16, 32)}
NEAR, OVER = 0.995, 1.01
OURS, AUTHORS, BEST = "ours", "the authors'", "the best of them"

Wait = float | str
"""Seconds, or the name of what has to happen."""


class Schedule(Protocol):
    """What decides."""

    def claim(self) -> int | None:
        """Give a CPU worker its next mini-batch."""

    def ready(self, number: int) -> object:
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
                while self._working and getattr(self.schedule, "over", False):
                    yield "ready"  # the last one waits for workers that are still at what nobody needs
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
    def hard(self) -> bool:
        """Whether many workers vary much, so that one is often late."""
        return self.spread >= 0.2 and self.times.cpu_workers >= 7

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

    def _plan(self, *sizes: Any, **others: Any) -> CollectivePlan:
        return replace(super()._plan(*sizes, **others), row=0, begin=0)


class WithoutCover(Dispatcher):
    """Plans with transfers that set out at any time."""

    def _plan(self, *sizes: Any, **others: Any) -> CollectivePlan:
        return replace(super()._plan(*sizes, **others), cover=1)


class WithoutBackup(Dispatcher):
    """Plans with a GPU that waits for a late worker."""

    def _plan(self, *sizes: Any, **others: Any) -> CollectivePlan:
        return replace(super()._plan(*sizes, **others), backup=False)


class WithoutStocks(Dispatcher):
    """Begins with no plans that have room for what the CPU prepares far ahead."""

    def _with_stocks(self, share: float, taken: float) -> list[CollectivePlan]:
        return []


WITHOUT: dict[str, type[Dispatcher]] = {
    "without stocks": WithoutStocks,
    "without turns": WithoutTurns,
    "without cover": WithoutCover,
    "without backup": WithoutBackup,
}


def more_thorough(setting: Setting) -> CollectivePlan:
    """Return the plan of a search of ten times as many plans, compared on twice as many epochs."""
    names = {"ROUNDS": 10 * dispatcher.ROUNDS, "CANDIDATES": 40, "FINALISTS": 12, "LEADERS": 12}
    names |= {"DRAWN": 8, "DRAWN_AGAIN": 8, "DRAWN_AT_LAST": 32}
    with patch.multiple(dispatcher, **names):
        return Dispatcher(setting.times, GPU_BUFFER, num_batches=setting.num_batches).plan()


def brute_force(setting: Setting, shown: range) -> CollectivePlan:
    """Return the best plan of the grid in the epochs that are shown."""
    times, number, workers = setting.times, setting.num_batches, setting.times.cpu_workers
    taken, share = times.cpu_batching.mean / (setting.bound / number), 1 / (1 + initial_ratio(times))
    plans = {CollectivePlan("cpu", 1, max(GPU_BUFFER, 2 * workers), times=times), CollectivePlan("gpu", 1, 0)}
    for gbs, cbs in itertools.product(*GRID.values()):
        for lead in (gbs + cbs, taken + 1, (cbs + workers) / share):
            plans.add(CollectivePlan("collective", gbs, cbs, lead=max(1, min(number, math.ceil(lead)))))
    epochs = [drawn_durations(times, number, seed) for seed in shown]
    return min(plans, key=lambda plan: sum(makespan(times, plan, number, epoch) for epoch in epochs))


def contestants(
    setting: Setting, ablated: bool, judge: range, again: range, shown: range
) -> tuple[dict[str, float], Any]:
    """Return the mean makespan of each planner's plan in the epochs to be judged by, and what ours did."""
    times, number, workers = setting.times, setting.num_batches, setting.times.cpu_workers
    start = time.process_time()
    plan = Dispatcher(times, GPU_BUFFER, num_batches=number).plan()
    planning = time.process_time() - start

    def feedback(gbs: int, cbs: int) -> tuple[float, float, float]:
        means = {stage: getattr(times, stage).mean for stage in STAGES}
        node = Node(DualBuffer(number, gbs, cbs, workers), workers, lambda stage, _: means[stage])
        seconds, flushes = node.makespan(), max(1, node.flushes)
        return seconds, node.cpu_lag / flushes, node.gpu_lag / flushes

    def planned(plan: CollectivePlan) -> Callable[[], Schedule]:
        return lambda: plan.schedule(number, workers)

    published = published_plan(times, GPU_BUFFER, number, feedback)
    schedules: dict[str, Callable[[], Schedule]] = {
        OURS: planned(plan),
        AUTHORS: lambda: DualBuffer(number, *published, workers),
        "the CPU alone": planned(CollectivePlan("cpu", 1, max(GPU_BUFFER, 2 * workers), times=times)),
        "the GPU alone": planned(CollectivePlan("gpu", 1, 0)),
        "brute force": planned(brute_force(setting, shown)),
    }
    peers = [name for name in schedules if name != OURS]
    if ablated:
        schedules |= {
            name: planned(planner(times, GPU_BUFFER, num_batches=number).plan()) for name, planner in WITHOUT.items()
        }
    found = {name: judged(setting, schedule, again if ablated else judge) for name, schedule in schedules.items()}
    ratios = {name: found[OURS] / seconds for name, seconds in found.items() if name != OURS}
    about = {"rounds": plan.rounds, "planning_s": planning, "mode": plan.mode, "seconds": dict(found)}
    if near := [name for name in peers if ratios[name] > NEAR] if setting.spread and not ablated else []:
        found |= {name: judged(setting, schedules[name], again) for name in (OURS, *near)}
        ratios |= {name: found[OURS] / found[name] for name in near}
    if setting.spread and max(ratios[name] for name in peers) > OVER:
        least = min(judged(setting, schedules[name], again) for name in peers)
        about["thorough"] = judged(setting, planned(more_thorough(setting)), again) / least
    if ablated:
        about["without"] = {name: found[name] / min(found[peer] for peer in peers) for name in (OURS, *WITHOUT)}
    return ratios, about


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
    paths = {
        "resume": "a file with what each setting came to, to go on from where it ends",
        "numbers": "of the settings to look at, such as 477,832, in place of all; each is ablated",
    }
    args = parse("collective_planner", __doc__, SIZES, argv, paths=paths)
    described = machine()
    sizes, source = args.sizes, random.Random(0)
    judge, shown = range(10_000, 10_000 + sizes["judged"]), range(20_000, 20_000 + sizes["shown"])
    again = range(30_000, 30_000 + sizes["again"])
    ratios: dict[str, list[float]] = {}
    by_spread: dict[float, list[float]] = {}
    without: dict[str, list[float]] = {}
    planned, over = [], []
    settings = [draw(source) for _ in range(sizes["settings"])]
    numbers = range(len(settings)) if args.numbers is None else [int(number) for number in args.numbers.split(",")]
    settings = [settings[number] for number in numbers]
    ablated = [
        args.numbers is not None or 10 * number < sizes["ablated"] or (number < sizes["ablated"] and setting.hard)
        for number, setting in enumerate(settings)
    ]
    results: list[tuple[dict[str, float], Any]] = []
    if args.resume is not None and Path(args.resume).exists():
        results = [tuple(json.loads(line)) for line in Path(args.resume).read_text().splitlines()][: len(settings)]
    with ProcessPoolExecutor(sizes["processes"], get_context("fork")) as processes:
        each = partial(contestants, judge=judge, again=again, shown=shown)
        done, kept = processes.map(each, settings[len(results) :], ablated[len(results) :]), args.resume
        for one in done:
            results.append(one)
            if kept is not None:
                with Path(kept).open("a") as file:
                    file.write(json.dumps(one) + "\n")
    for number, setting, (found, about) in zip(numbers, settings, results, strict=True):
        planned.append(about)
        found[BEST] = max(ratio for name, ratio in found.items() if name not in WITHOUT)
        for name, ratio in found.items():
            ratios.setdefault(name, []).append(ratio)
        by_spread.setdefault(setting.spread, []).append(found[BEST])
        for name, ratio in about.get("without", {}).items():
            without.setdefault(f"{name}, {'hard' if setting.hard else 'other'} settings", []).append(ratio)
        if found[BEST] > OVER:
            over.append({
                "setting": number, "spread": setting.spread, "workers": setting.times.cpu_workers,
                "num_batches": setting.num_batches, "mode": about["mode"], "ours": round(found[BEST], 4),
                "thorough": round(about.get("thorough", 1), 4),
                "seconds": {name: round(seconds, 4) for name, seconds in about["seconds"].items()},
            })  # fmt: skip
    result = {
        "benchmark": "collective_planner",
        "title": "Planned epochs of collective batching against other planners, simulated",
        "unit": "makespan of ours over the peer's",
        "settings": {
            **sizes,
            "numbers": args.numbers or "all",
            "spreads": SPREADS,
            "workers": WORKERS,
            "gpu_buffer_size": GPU_BUFFER,
        },
        "machine": described,
        "rows": [],
        "comparisons": [],
        "extra": {
            "against": {name: summary(values) for name, values in ratios.items()},
            "against the best of them by spread": {f"{key:g}": summary(by_spread[key]) for key in sorted(by_spread)},
            "more than 1 % slower, and with a search ten times as long": over,
            "against the best of them, without": {name: summary(values) for name, values in without.items()},
            "rounds": {
                "median": statistics.median(a["rounds"] for a in planned),
                "most": max(a["rounds"] for a in planned),
            },
            "planning_s": {
                "median": round(statistics.median(a["planning_s"] for a in planned), 4),
                "most": round(max(a["planning_s"] for a in planned), 4),
            },
            "modes": {mode: sum(a["mode"] == mode for a in planned) for mode in ("collective", "cpu", "gpu")},
        },
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
