"""The two means of HyScale-GNN's resource manager (section IV-A): share work out anew, or move threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lightning_gnn.hyscale.bottleneck import Remedy
from lightning_gnn.hyscale.estimates import Estimate
from lightning_gnn.hyscale.mapping import CPU_TASKS, Mapping, Stage
from lightning_gnn.hyscale.split import TrainerCost, split_evenly_in_time, whole_seeds

Means = tuple[str, Callable[[], Mapping]]
"""The name of an action, and what finds the mapping it leads to."""

_LEAST_SHARE = 0.01


def gain(estimate: Estimate, mapping: Mapping) -> float:
    """Return by what part another mapping would shorten the slowest of the stages that it changes.

    Not the slowest of all: of two stages that are equally slow, one must be eased first. If the slowest of all takes
    longer for it, the gain is none.
    """
    before, after = estimate.stages, estimate.under(mapping).stages()
    changed = [stage for stage in {*before, *after} if before.get(stage) != after.get(stage)]
    old = max((before.get(stage, 0.0) for stage in changed), default=0.0)
    new = max((after.get(stage, 0.0) for stage in changed), default=0.0)
    if not old or max(after.values()) > max(before.values()):
        return 0.0
    return 1 - new / old


def remedies(estimate: Estimate, remedy: Remedy, may_move: Callable[[Stage, Stage], bool]) -> list[Means]:
    """Return what to try against the slowest stage, the paper's remedy first.

    Where that gains nothing (no thread is left to move, say) the paper's algorithm would stand still: then the other
    one is next, if there is one. Before they ask others for threads, CPU trainers are balanced among themselves.

    Args:
        estimate: What the stages cost now.
        remedy: What algorithm 1 says.
        may_move: Whether threads may be moved from a task to another one.
    """
    slowest = remedy.bottleneck

    def threads() -> Mapping:
        donors = [task for task in thread_donors(estimate, slowest) if may_move(task, slowest)]
        return balance_thread(estimate, donors, slowest)

    def share() -> Mapping:
        return (balance_sampling if slowest.startswith("sample") else balance_work)(estimate)

    def among_cpus() -> Mapping:
        return balance_cpu_trainers(estimate)

    if slowest in ("accelerator", "sample_accelerator"):
        return [("balance_work", share)]
    if slowest == "load":
        return [("balance_thread", threads)]
    if remedy.kind == "balance_work":
        return [("balance_work", share), ("balance_thread", threads)]
    means: list[Means] = [("balance_thread", threads), ("balance_work", share)]
    return [("balance_cpu_trainers", among_cpus), *means] if slowest == "train_cpu" else means


def balance_work(estimate: Estimate) -> Mapping:
    """Share the seeds out anew among all trainers that have some, so that all are done at the same time."""
    return _shared_out(estimate, estimate.costs)


def balance_cpu_trainers(estimate: Estimate) -> Mapping:
    """Share the seeds of the CPU trainers out anew among themselves."""
    inside = estimate.mapping.cpu_trainers
    costs = [cost if index < inside else None for index, cost in enumerate(estimate.costs)]
    return _shared_out(estimate, costs)


def accelerators_alone(estimate: Estimate) -> Mapping:
    """Give all seeds to the accelerators, so that all are done at the same time."""
    mapping = estimate.mapping
    costs = [None if index < mapping.cpu_trainers else cost for index, cost in enumerate(estimate.costs)]
    cpu = mapping.cpu_trainers
    emptied = replace(mapping, seeds=(0,) * cpu + mapping.seeds[cpu:])
    return _shared_out(replace(estimate, mapping=emptied), costs, mapping.total)


def balance_sampling(estimate: Estimate) -> Mapping:
    """Share the sampling out anew between the CPU and the accelerators."""
    mapping, times = estimate.mapping, estimate.times
    share = mapping.accelerator_sampling
    if not times.sample_cpu or not times.sample_accelerator:
        return mapping
    on_cpu, there = (1 - share) / times.sample_cpu, share / times.sample_accelerator
    target = there / (there + on_cpu)
    return replace(mapping, accelerator_sampling=min(max(target, _LEAST_SHARE), 1 - _LEAST_SHARE))


def balance_thread(estimate: Estimate, donors: Iterable[Stage], receiver: Stage) -> Mapping:
    """Move threads to a CPU task from the first of some others whose loss is less than the gain.

    The number is such that both would take equally long if time were the inverse of threads. Every task keeps one.

    Args:
        estimate: What the stages cost now.
        donors: Tasks to take them from, in order of preference.
        receiver: The task that gets them.

    Returns:
        The mapping, unchanged if there is none to gain from.
    """
    mapping, stages = estimate.mapping, estimate.stages
    to = CPU_TASKS.index(receiver)
    for donor in donors:
        source = CPU_TASKS.index(donor)
        spare = mapping.threads[source] - _least_threads(mapping, source)
        if donor == receiver or spare < 1:
            continue
        slow, fast = stages[receiver] * mapping.threads[to], stages.get(donor, 0.0) * mapping.threads[source]
        equal = (slow * mapping.threads[source] - fast * mapping.threads[to]) / (slow + fast)
        threads = list(mapping.threads)
        moved = min(spare, max(1, round(equal)))
        threads[source] -= moved
        threads[to] += moved
        candidate = replace(mapping, threads=(threads[0], threads[1], threads[2]))
        if gain(estimate, candidate) > 0:
            return candidate
    return mapping


def thread_donors(estimate: Estimate, receiver: Stage) -> list[Stage]:
    """Return the CPU tasks that could give threads: an idle trainer's first, then from the fastest to the slowest."""
    stages = estimate.stages
    idle: list[Stage] = ["train_cpu"] if not estimate.mapping.cpu_seeds else []
    return idle + sorted((task for task in CPU_TASKS if task in stages and task != receiver), key=stages.__getitem__)


def moved_threads(old: Mapping, new: Mapping) -> tuple[Stage, Stage]:
    """Return which CPU task lost threads, and which one got them."""
    changes = [after - before for before, after in zip(old.threads, new.threads, strict=True)]
    return CPU_TASKS[changes.index(min(changes))], CPU_TASKS[changes.index(max(changes))]


def _least_threads(mapping: Mapping, task: int) -> int:
    if CPU_TASKS[task] != "train_cpu":
        return 1
    wanted = mapping.cpu_trainers if mapping.cpu_seeds else min(1, mapping.cpu_trainers)
    return min(mapping.threads[task], wanted)


def _shared_out(estimate: Estimate, costs: Sequence[TrainerCost | None], total: int | None = None) -> Mapping:
    """Return the mapping with the seeds of those trainers that have a cost shared out anew."""
    mapping = estimate.mapping
    bounded = [None if cost is None else TrainerCost(cost.overhead, cost.per_seed, 1) for cost in costs]
    concerned = [index for index, cost in enumerate(bounded) if cost is not None]
    present = sum(mapping.seeds[index] for index in concerned)
    if total is None:
        total = present
    if len(concerned) < 2 and total == present:
        return mapping
    accelerators = [index for index in concerned if index >= mapping.cpu_trainers]
    target = split_evenly_in_time(total, bounded, accelerators, estimate.transfer_per_seed)
    found = whole_seeds(total, target, bounded)
    seeds = tuple(now if cost is None else new for now, new, cost in zip(mapping.seeds, found, bounded, strict=True))
    return replace(mapping, seeds=seeds)
