"""A node whose stages sleep in real threads: trainers, CPU workers, links and the all-reduce.

Nothing computes, so the number of real cores does not matter. A sleep that overshoots shortens the thread's next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks.collective.sleeping import SleepingMachine
from lightning_gnn.collective.batch_schedule import BatchSchedule
from lightning_gnn.collective.plan import PREPARATION_STAGES, Duration, StageTimes
from lightning_gnn.collective.simulate import draw_durations
from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling
from lightning_gnn.hyscale.costs import NodeCosts, TaskMapping
from lightning_gnn.hyscale.simulate import MIN_IN_FLIGHT

_STAGES = ("sample", "load", "dma")
StageSeconds = Callable[[NodeCosts, TaskMapping, int], dict[str, float]]


class SleepingNode:
    """Trains iterations under a mapping; all durations are multiplied by ``slower``."""

    def __init__(
        self, costs: NodeCosts, mapping: TaskMapping, iterations: int, slower: float, stage_seconds: StageSeconds
    ) -> None:
        self.costs, self.mapping, self.iterations, self.slower = costs, mapping, iterations, slower
        self._stage_seconds = stage_seconds
        self._owed = threading.local()

    def run(self) -> float:
        """Return the seconds of an iteration once the pipelines are full."""
        mapping, ends = self.mapping, list[float]()
        active = [index for index, seeds in enumerate(mapping.seeds) if seeds]

        def all_reduce() -> None:
            self._sleep(self.slower * self.costs.sync)
            ends.append(time.perf_counter())

        barrier = threading.Barrier(len(active), all_reduce)
        with ThreadPoolExecutor(len(active)) as trainers:
            running = []
            for index in active:
                is_collective = mapping.buffers is not None and index >= mapping.cpu_trainers
                train = self._train_collective if is_collective else self._train_staged
                running.append(trainers.submit(self._guard, barrier, train, index))
            for trainer in running:
                trainer.result()
        first = self.iterations // 4
        return (ends[self.iterations - 1] - ends[first - 1]) / (self.iterations - first)

    def _guard(self, barrier: threading.Barrier, train: Callable[[int, threading.Barrier], None], index: int) -> None:
        try:
            train(index, barrier)
        except BaseException:
            barrier.abort()
            raise

    def _train_collective(self, index: int, barrier: threading.Barrier) -> None:
        seconds = self._stage_seconds(self.costs, self.mapping, index)
        assert self.mapping.buffers is not None
        on_gpu, on_cpu, lead, row = self.mapping.buffers
        workers = sum(self.mapping.rank_threads(index)[:2])
        means = (self.slower * seconds[stage] for stage in PREPARATION_STAGES)
        times = StageTimes(*(Duration(mean, self.costs.spread * mean) for mean in means), cpu_workers=workers)
        machine = _Trainer(times, self.iterations, barrier)
        machine.run(BatchSchedule(self.iterations, on_gpu, on_cpu, workers, lead, row))

    def _train_staged(self, index: int, barrier: threading.Barrier) -> None:
        mapping, costs = self.mapping, self.costs
        seconds = self._stage_seconds(costs, mapping, index)
        is_cpu = index < mapping.cpu_trainers
        fraction = 0.0 if is_cpu else mapping.accelerator_fraction
        durations = {
            name: Duration(self.slower * mean, self.slower * costs.spread * mean) for name, mean in seconds.items()
        }
        nothing = Duration(0.0)
        drawn = draw_durations(
            StageTimes(*(durations.get(name, nothing) for name in ("sample", "load", "dma", "gpu_batching", "model"))),
            self.iterations,
            index,
        )
        names = dict(zip(("sample", "load", "dma", "gpu_batching", "model"), PREPARATION_STAGES, strict=True))

        def take(stage: str, number: int) -> float:
            return drawn(names[stage], number)

        in_flight = max(MIN_IN_FLIGHT, sum(mapping.threads))
        sampler, loader, _ = mapping.rank_threads(index)
        pools = {name: ThreadPoolExecutor(count) for name, count in zip(_STAGES, (sampler, loader, 1), strict=True)}
        pools["gpu_batching"] = ThreadPoolExecutor(1)

        def start(number: int) -> Future[None]:
            before: Future[None] | None = None
            for stage in _STAGES:
                there = stage == "sample" and AcceleratorSampling.should_sample(number, fraction)
                name = "gpu_batching" if there else stage
                before = pools[name].submit(self._after, before, take(name, number))
            assert before is not None
            return before

        try:
            ready = [start(number) for number in range(min(in_flight, self.iterations))]
            for number in range(self.iterations):
                ready[number].result()
                if number + in_flight < self.iterations:
                    ready.append(start(number + in_flight))
                there = AcceleratorSampling.should_sample(number, fraction) and costs.takes_turns
                self._sleep(take("model", number) + (take("gpu_batching", number) if there else 0.0))
                barrier.wait()
        finally:
            for pool in pools.values():
                pool.shutdown(cancel_futures=True)

    def _after(self, before: Future[None] | None, seconds: float) -> None:
        if before is not None:
            before.result()
        self._sleep(seconds)

    def _sleep(self, seconds: float) -> None:
        start = time.perf_counter()
        planned = seconds - getattr(self._owed, "seconds", 0.0)
        time.sleep(max(0.0, planned))
        self._owed.seconds = time.perf_counter() - start - planned


class _Trainer(SleepingMachine):
    """An accelerator that waits for the other trainers after each mini-batch."""

    def __init__(self, times: StageTimes, num_batches: int, barrier: threading.Barrier) -> None:
        super().__init__(times, num_batches)
        self._barrier = barrier

    def _train(self, number: int) -> None:
        super()._train(number)
        self._barrier.wait()
