"""Algorithm 1 of HyScale-GNN as published: which stage to ease, and by which of its two means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_gnn.hyscale.mapping import CPU_TASKS, STAGES, Stage


@dataclass(frozen=True)
class Remedy:
    """What algorithm 1 calls for.

    Args:
        kind: ``balance_work`` shares work out anew between the processors of the two stages; ``balance_thread`` takes
            threads from the first for the second; ``none`` where there is no other CPU task to take them from.
        first: The first argument in the paper.
        second: The second.
        bottleneck: The slowest stage.
    """

    kind: Literal["balance_work", "balance_thread", "none"]
    first: Stage
    second: Stage
    bottleneck: Stage


def find_remedy(times: Mapping[Stage, float]) -> Remedy:
    """Return what algorithm 1 does about the slowest stage.

    Stages that do not exist are left out of the sort. In lines 23 and 31 the paper takes threads from the fastest of
    all stages, which may be one of an accelerator: there it is the fastest CPU task. Of two equal times, the one that
    line 2 names first counts as the slower.

    Args:
        times: Seconds of each stage that exists, as returned by
            :meth:`~lightning_gnn.hyscale.mapping.IterationTimes.stages`.

    Raises:
        ValueError: No stage.
    """
    if not times:
        raise ValueError("there is no stage time to find a bottleneck in")
    by_time = sorted((stage for stage in STAGES if stage in times), key=lambda stage: -times[stage])
    bottleneck, fastest = by_time[0], by_time[-1]
    second = by_time[-2] if len(by_time) > 1 else fastest
    samplers: tuple[Stage, Stage] = ("sample_cpu", "sample_accelerator")
    trainers: tuple[Stage, Stage] = ("train_cpu", "accelerator")

    if bottleneck == "sample_accelerator":
        return Remedy("balance_work", *samplers, bottleneck)
    if bottleneck == "accelerator":
        return Remedy("balance_work", *trainers, bottleneck)
    if bottleneck == "sample_cpu" and _leads("sample_accelerator", "accelerator", fastest, second):
        return Remedy("balance_work", *samplers, bottleneck)
    if bottleneck == "train_cpu" and _leads("accelerator", "sample_accelerator", fastest, second):
        return Remedy("balance_work", *trainers, bottleneck)
    fastest_cpu_task = [stage for stage in by_time if stage in CPU_TASKS][-1]
    kind: Literal["balance_thread", "none"] = "none" if fastest_cpu_task == bottleneck else "balance_thread"
    return Remedy(kind, fastest_cpu_task, bottleneck, bottleneck)


def _leads(partner: Stage, other: Stage, fastest: Stage, second: Stage) -> bool:
    """Whether the accelerator's stage of the same kind is the fastest, or follows the accelerator's other one."""
    return fastest == partner or (fastest == other and second == partner)
