"""What it is worth to plan collective batching anew while it runs, where others take the CPU away.

The loader is the real one, with its threads, buffers, measurements and planner; preparing and training only sleep, as
long as the paper's tables say (machine B, UK, GraphSAGE, halved), so the cores of this machine do not matter.
After the second epoch the CPU's workers take several times as long. One contestant plans anew when an epoch parts from
its plan, one keeps its plan, and one had been told beforehand: the limit. Seconds are those of the last two epochs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch_geometric.data import Data

from benchmarks.collective_simulated import UK
from benchmarks.harness import compare, measure, parse, publish
from benchmarks.machine import machine
from lightning_gnn.collective.dispatcher import Dispatcher
from lightning_gnn.collective.loader import CollectiveLoader
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.routes import HostBatch
from lightning_gnn.sampling.loader import Prepared, Task, ThreadedNodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler

SIZES = {"batches": (220, 20), "cores": (8, 3), "slower": (4, 4)}
SCALE = 0.5
BEFORE, AFTER, COUNTED = 2, 4, 2
"""Epochs before the disturbance and after it, and how many of the last are measured."""


class SleepingRoute(ThreadedNodeLoader):
    """Prepares in the training thread, and sleeps for as long as a GPU would take."""

    durations: StageTimes

    def prepare(self, task: Task, stage_ends: Callable[[], None] = lambda: None) -> Prepared:
        """Return a mini-batch, after both of the stages."""
        stages = iter((0.0, self.durations.gpu_batching.mean, self.durations.uva.mean))

        def sleep() -> None:
            time.sleep(next(stages))
            stage_ends()

        return super().prepare(task, sleep)


class SleepingLoader(CollectiveLoader):
    """Prepares in threads that sleep."""

    cpu_s = 0.0

    def prepare_on_host(self, task: Task) -> HostBatch:
        """Return a mini-batch, after as long as a CPU worker takes."""
        time.sleep(self.cpu_s)
        return super().prepare_on_host(task)


def plan_for(times: StageTimes, num_batches: int) -> CollectivePlan:
    """Return the plan for epochs of the given stages."""
    return Dispatcher(times, num_batches=num_batches).plan()


def slowed(times: StageTimes, factor: float) -> StageTimes:
    """Return the stages when the CPU's workers take longer, and all without spread, as they sleep."""
    means = {name: getattr(times, name).mean for name in ("dma", "gpu_batching", "uva", "model")}
    durations = {name: Duration(mean) for name, mean in means.items()}
    return StageTimes(Duration(factor * times.cpu_batching.mean), **durations, cpu_workers=times.cpu_workers)


def epochs(times: StageTimes, slower: float, num_batches: int, plan: CollectivePlan, replan: bool) -> list[float]:
    """Return the seconds of each epoch.

    Args:
        times: What the stages take at first.
        slower: By how much longer the CPU's workers take after :data:`BEFORE` epochs.
        num_batches: Mini-batches of an epoch.
        plan: To begin with.
        replan: Whether to plan anew.
    """
    data = Data(x=torch.zeros(num_batches, 1), edge_index=torch.zeros(2, 0, dtype=torch.int64))
    sampler = NeighborSampler(data, [1])
    options = {"batch_size": 1}
    route = SleepingRoute(data, sampler, **options)
    route.durations = times
    loader = SleepingLoader(
        data, sampler, route=route, plan=plan, replan=replan, num_workers=times.cpu_workers, **options
    )
    seconds = []
    for number in range(BEFORE + AFTER):
        loader.cpu_s = times.cpu_batching.mean * (slower if number >= BEFORE else 1.0)
        start = time.perf_counter()
        for _ in loader:
            time.sleep(times.model.mean)
        seconds.append(time.perf_counter() - start)
    loader.close()
    return seconds


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("collective_disturbed", __doc__, SIZES, argv, runs=3)
    described = machine()
    times = slowed(UK.times(args.cores, SCALE), 1.0)
    first, best = (plan_for(slowed(times, factor), args.batches) for factor in (1.0, args.slower))
    all_epochs: dict[str, list[list[float]]] = {}

    def contestant(name: str, plan: CollectivePlan, replan: bool) -> Callable[[], float]:
        def call() -> float:
            found = epochs(times, args.slower, args.batches, plan, replan)
            all_epochs.setdefault(name, []).append([round(seconds, 3) for seconds in found])
            return sum(found[-COUNTED:]) / COUNTED

        return call

    ours, kept, limit = "planned anew", "the plan kept", "planned for it beforehand"
    calls: dict[str, Callable[[], float] | None] = {
        ours: contestant(ours, first, True),
        kept: contestant(kept, first, False),
        limit: contestant(limit, best, False),
    }
    rows = measure({name: call for name, call in calls.items() if args.only in name}, args.runs)
    what = f"An epoch while CPU workers take {args.slower}x as long"
    result = {
        "benchmark": "collective_disturbed",
        "title": f"Collective batching, stages asleep, disturbed, {args.cores} cores, {args.batches} mini-batches",
        "unit": "s per epoch",
        "settings": {**args.sizes, "scale": SCALE, "epochs before and after": [BEFORE, AFTER], "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [
            compare(rows, f"{what}, planned anew against the plan kept", [ours], [kept], False, by_rounds=True),
            compare(rows, f"{what}, planned anew against planned beforehand", [ours], [limit], False, by_rounds=True),
        ],
        "extra": {"epochs of each run, s": all_epochs, "plans": {"at first": str(first), "beforehand": str(best)}},
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
