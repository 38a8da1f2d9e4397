"""An independent discrete-event simulation of a node: the judge of ``benchmarks.hyscale.node_planner``.

Every thread, link and trainer is a process. It shares no code with the planner's own simulation but the schedule, and
cores are a resource: if there are more threads than cores, the threads take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any

from lightning_gnn.collective.batch_schedule import BatchSchedule
from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling

Wait = float | str
"""Seconds to wait, or the name of the event to wait for."""
Process = Generator[Wait, None, None]
Seconds = Callable[[str, int], float]  # of a stage of a mini-batch
_SOURCES = {"sample_accelerator": None, "sample": "sample_accelerator", "load": "sample", "dma": "load"}
"""The stages of a trainer without collective batching; each mini-batch comes from another one."""
TURN_S = 1e-3
"""Seconds for which a thread keeps a core that others wait for."""


class Events:
    """Processes and their virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Process]] = []
        self._asleep: dict[str, list[Process]] = {}
        self._count = 0

    def start(self, process: Process) -> None:
        """Start or continue a process now."""
        self._later(0.0, process)

    def happens(self, what: str) -> None:
        """Continue the processes that wait for an event."""
        for process in self._asleep.pop(what, []):
            self._later(0.0, process)

    def run(self) -> None:
        """Run until nothing happens anymore."""
        while self._events:
            self.now, _, process = heappop(self._events)
            wait = next(process, None)
            if isinstance(wait, str):
                self._asleep.setdefault(wait, []).append(process)
            elif wait is not None:
                self._later(wait, process)

    def _later(self, seconds: float, process: Process) -> None:
        self._count += 1
        heappush(self._events, (self.now + seconds, self._count, process))


class JudgedNode:
    """A node with cores, trainers and an all-reduce after each iteration."""

    def __init__(self, cores: int, threads: int, trainers: int, iterations: int, sync: float) -> None:
        self._take_turns = threads > cores
        self.events, self.iterations = Events(), iterations
        self._free_cores, self._trainers, self._sync = cores, trainers, sync
        self._arrived, self._iteration = 0, 0
        self.ends: list[float] = []  # of the iterations

    def seconds(self) -> float:
        """Run, and return the seconds of an iteration once the pipelines are full."""
        self.events.run()
        first = self.iterations // 4
        assert len(self.ends) == self.iterations, "deadlock"
        return (self.ends[-1] - self.ends[first - 1]) / (self.iterations - first)

    def add_collective(
        self, name: str, buffers: tuple[int, int, int, int], workers: int, seconds: Seconds, margin: int
    ) -> None:
        """Add an accelerator with the two routes of collective batching."""
        on_gpu, on_cpu, lead, row = buffers
        schedule = BatchSchedule(self.iterations + margin, on_gpu, on_cpu, workers, lead, row)
        state: dict[str, Any] = {"sent": [], "arrived": set(), "pcie": False}
        for _ in range(workers if on_cpu else 0):
            self.events.start(self._worker(name, schedule, seconds))
        self.events.start(self._link(name, state, seconds))
        self.events.start(self._train_collective(name, schedule, state, seconds))

    def add_staged(
        self,
        name: str,
        threads: tuple[int, int],
        seconds: Seconds,
        in_flight: int,
        fraction: float,
        takes_turns: bool,
        trainer: int = 0,
    ) -> None:
        """Add a trainer with HyScale-GNN's stages, of which an accelerator samples a fraction of the mini-batches.

        ``in_flight`` is the maximum number of mini-batches in all stages. ``trainer`` is the number of CPU threads that
        train, 0 on an accelerator.
        """
        state: dict[str, Any] = {"next": 0, "in_flight": 0, "most": in_flight, **{stage: [] for stage in _SOURCES}}

        def here(number: int) -> bool:
            return AcceleratorSampling.should_sample(number, fraction)

        for stage, count in (("sample_accelerator", 1), ("sample", threads[0]), ("load", threads[1]), ("dma", 1)):
            for _ in range(count):
                self.events.start(self._stage(name, stage, state, seconds, here))
        self.events.start(
            self._train_staged(name, state, seconds, here if takes_turns else lambda number: False, trainer)
        )

    # -- processes

    def _core(self, seconds: float, threads: int = 1) -> Process:
        """Run a job for as long as it takes on a core for each of its threads, or longer if others need the cores."""
        if not self._take_turns:
            yield seconds
            return
        left = seconds * threads
        while left > 0:
            while not self._free_cores:
                yield "core"
            taken = min(threads, self._free_cores)
            self._free_cores -= taken
            turn = min(left / taken, TURN_S)
            yield turn
            left -= taken * turn + 1e-12
            self._free_cores += taken
            self.events.happens("core")

    def _worker(self, name: str, schedule: BatchSchedule, seconds: Seconds) -> Process:
        while True:
            while (number := schedule.claim()) is None:
                yield f"{name} room"
            yield from self._core(seconds("cpu_batching", number))
            schedule.ready(number)
            self.events.happens(f"{name} ready")

    def _link(self, name: str, state: dict[str, Any], seconds: Seconds) -> Process:
        while True:
            while not state["sent"] or state["pcie"]:
                yield f"{name} pcie"
            number = state["sent"].pop(0)
            state["pcie"] = True
            yield seconds("dma", number)
            state["pcie"] = False
            state["arrived"].add(number)
            self.events.happens(f"{name} pcie")
            self.events.happens(f"{name} arrival")

    def _train_collective(self, name: str, schedule: BatchSchedule, state: dict[str, Any], seconds: Seconds) -> Process:
        trained = 0
        while trained < self.iterations:
            step = schedule.next()
            self.events.happens(f"{name} room")
            if step.kind == "wait":
                yield f"{name} ready"
            elif step.kind == "transfer":
                state["sent"].append(step.number)
                self.events.happens(f"{name} pcie")
            elif step.kind == "batch":
                while state["pcie"] or state["sent"]:
                    yield f"{name} arrival"
                state["pcie"] = True
                yield seconds("gpu_batching", step.number) + seconds("uva", step.number)
                state["pcie"] = False
                self.events.happens(f"{name} pcie")
            else:
                while step.route == "cpu" and step.number not in state["arrived"]:
                    yield f"{name} arrival"
                yield seconds("model", step.number)
                yield from self._all_reduce()
                trained += 1

    def _stage(
        self, name: str, stage: str, state: dict[str, Any], seconds: Seconds, here: Callable[[int], bool]
    ) -> Process:
        source = _SOURCES[stage]
        while True:
            if source is None:
                while state["in_flight"] >= state["most"] or state["next"] == self.iterations:
                    yield f"{name} room"
                number, state["next"] = state["next"], state["next"] + 1
                state["in_flight"] += 1
            else:
                while not state[source]:
                    yield f"{name} {source}"
                number = min(state[source])
                state[source].remove(number)
            if stage == "dma":
                yield seconds("dma", number)
            elif stage == "sample_accelerator":
                if here(number):
                    yield seconds("gpu_batching", number)
            elif stage == "load" or not here(number):
                yield from self._core(seconds(stage, number))
            state[stage].append(number)
            self.events.happens(f"{name} {stage}")

    def _train_staged(
        self, name: str, state: dict[str, Any], seconds: Seconds, here: Callable[[int], bool], trainer: int
    ) -> Process:
        for number in range(self.iterations):
            while number not in state["dma"]:
                yield f"{name} dma"
            state["dma"].remove(number)
            state["in_flight"] -= 1
            self.events.happens(f"{name} room")
            step = seconds("model", number)
            if trainer:
                yield from self._core(step, trainer)
            else:
                yield step + (seconds("gpu_batching", number) if here(number) else 0.0)
            yield from self._all_reduce()

    def _all_reduce(self) -> Process:
        self._arrived += 1
        iteration = self._iteration
        if self._arrived < self._trainers:
            while self._iteration == iteration:
                yield "all-reduce"
            return
        yield self._sync
        self._arrived, self._iteration = 0, iteration + 1
        self.ends.append(self.events.now)
        self.events.happens("all-reduce")
