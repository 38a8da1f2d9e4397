"""Dynamic resource management of hybrid training (HyScale-GNN, section IV-A): algorithm 1, made to stand noise.

The paper's lines 1 to 32 are :func:`find_remedy`. It leaves open how far to move: here ``balance_work`` goes to where
the last 20 measurements of each task say that both sides take equally long, and threads move with their work. Added, as
``benchmarks/hyscale/resource_manager.py`` justifies: one move at a time; a dead band that narrows with time; the
other remedy where the paper's gains nothing; moves back that gained nothing; no seeds for CPU trainers that do not pay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any, Literal, NamedTuple

from lightning_gnn.hyscale.resource_manager.decisions import STAGE_NAMES, Decision, Recorder, difference, milliseconds
from lightning_gnn.hyscale.resource_manager.estimates import Estimate, Measurements
from lightning_gnn.hyscale.resource_manager.mapping import (
    CPU_TASKS,
    STEP_FIELDS,
    IterationTimes,
    Stage,
    TaskMapping,
    split_evenly,
)

TAKES_OVER: Mapping[Stage, Stage] = {"accelerator": "train_cpu", "sample_accelerator": "sample_cpu"}
"""The CPU task that takes work from a stage of the accelerators if it gets threads."""
LEAST_SHARE = 0.01
"""Of the sampling, on either side, while it may move."""
SURE = 0.12
"""The dead band: part of the slowest stage's time that a gain by one measurement must exceed; by n, sqrt(n) less."""


class Remedy(NamedTuple):
    """What algorithm 1 calls for."""

    # ``balance_work`` shares work out again between the processors of the two stages; ``balance_thread`` takes threads
    # from the first for the second; ``none`` where there is no other CPU task to take them from
    kind: Literal["balance_work", "balance_thread", "none"]
    first: Stage
    second: Stage
    bottleneck: Stage


def find_remedy(times: Mapping[Stage, float]) -> Remedy:
    """Return what algorithm 1 does about the slowest stage."""
    # Lines 23 and 31 of the paper take threads from the fastest of all stages, which may be an accelerator's: here it
    # is the fastest CPU task. Of two equal times, the one that line 2 names first counts as the slower.
    if not times:
        raise ValueError("there is no stage time to find a bottleneck in")
    by_time = sorted((stage for stage in STEP_FIELDS if stage in times), key=lambda stage: -times[stage])  # line 2
    bottleneck, fastest = by_time[0], by_time[-1]
    second = by_time[-2] if len(by_time) > 1 else fastest
    samplers: tuple[Stage, Stage] = ("sample_cpu", "sample_accelerator")
    trainers: tuple[Stage, Stage] = ("train_cpu", "accelerator")

    if bottleneck == "sample_accelerator":  # lines 11 and 12
        return Remedy("balance_work", *samplers, bottleneck)
    if bottleneck == "accelerator":  # lines 13 and 14
        return Remedy("balance_work", *trainers, bottleneck)
    if bottleneck == "sample_cpu" and _leads("sample_accelerator", "accelerator", fastest, second):  # lines 18 to 21
        return Remedy("balance_work", *samplers, bottleneck)
    if bottleneck == "train_cpu" and _leads("accelerator", "sample_accelerator", fastest, second):  # lines 26 to 29
        return Remedy("balance_work", *trainers, bottleneck)
    fastest_cpu_task = [stage for stage in by_time if stage in CPU_TASKS][-1]  # lines 7 and 8
    kind: Literal["balance_thread", "none"] = "none" if fastest_cpu_task == bottleneck else "balance_thread"
    return Remedy(kind, fastest_cpu_task, bottleneck, bottleneck)  # lines 16, 23, 31


def _leads(partner: Stage, other: Stage, fastest: Stage, second: Stage) -> bool:
    """Whether the accelerator's stage of the same kind is the fastest, or follows the accelerator's other one."""
    return fastest == partner or (fastest == other and second == partner)


def gain(now: Estimate, mapping: TaskMapping) -> float:
    """Return by what part another mapping would shorten the slowest of the stages that it changes."""
    # Not the slowest of all: of two stages that are equally slow, one must be eased first.
    before, after = now.stages, now.under(mapping).stages
    changed = [stage for stage in {*before, *after} if before.get(stage) != after.get(stage)]
    old = max((before.get(stage, 0.0) for stage in changed), default=0.0)
    new = max((after.get(stage, 0.0) for stage in changed), default=0.0)
    if not old or max(after.values()) > max(before.values()):
        return 0.0
    return 1 - new / old


def balance_work(now: Estimate) -> TaskMapping:
    """Share the seeds out so that all trainers are done at the same time; CPU trainers that do not pay get none."""
    # A CPU trainer without seeds gets some again by what it took when it had some.
    mapping = now.mapping
    split = partial(split_evenly, mapping.total, group_per_seed=now.transfer_per_seed)
    there = range(mapping.cpu_trainers, len(mapping.seeds))
    if sum(cost is not None for cost in now.costs) < 2:
        return mapping
    shared = replace(mapping, seeds=split(now.costs, there))
    if not shared.accelerator_seeds or 1 not in shared.seeds[: mapping.cpu_trainers]:
        return shared  # one that pays is done as late as the others, with more than the one seed that each gets
    alone = replace(
        mapping, seeds=split([cost if index in there else None for index, cost in enumerate(now.costs)], there)
    )
    together, single = now.under(shared).times.propagation, now.under(alone).times.propagation
    return alone if single <= together else shared


def balance_sampling(now: Estimate) -> TaskMapping:
    """Share the sampling out again between the CPU and the accelerators."""
    mapping, times = now.mapping, now.times
    share = mapping.accelerator_sampling
    if not times.sample_cpu or not times.sample_accelerator:
        return mapping
    on_cpu, there = (1 - share) / times.sample_cpu, share / times.sample_accelerator
    target = there / (there + on_cpu)
    return replace(mapping, accelerator_sampling=min(max(target, LEAST_SHARE), 1 - LEAST_SHARE))


def balance_thread(now: Estimate, donor: Stage, receiver: Stage) -> Iterator[TaskMapping]:
    """Yield mappings with 1, 2, 4, ... threads of a CPU task moved to another, their work shared out again."""
    mapping, source, to = now.mapping, CPU_TASKS.index(donor), CPU_TASKS.index(receiver)
    spare, count = mapping.threads[source] - (mapping.cpu_trainers if donor == "train_cpu" else 1), 1
    while count <= spare:
        threads = list(mapping.threads)
        threads[source] -= count
        threads[to] += count
        moved = now.under(replace(mapping, threads=(threads[0], threads[1], threads[2])))
        shared = balance_work(moved) if "train_cpu" in (donor, receiver) else moved.mapping
        yield replace(shared, accelerator_sampling=balance_sampling(moved).accelerator_sampling)
        count = spare if count < spare < 2 * count else 2 * count


class _Move(NamedTuple):
    """A move of threads that is judged by what is measured after it: the way back, and what the stage took before."""

    back: TaskMapping
    seconds: float
    stage: Stage


class DynamicResourceManager(Recorder):
    """Ease the slowest stage after each iteration (algorithm 1), the batch and the number of threads constant.

    A pure state machine: the same times lead to the same decisions.

    Args:
        mapping: The mapping to begin with.
        lag: Depth of the pipeline: observations until a new mapping shows in the times.

    Raises:
        ValueError: ``lag`` is negative.
    """

    def __init__(self, mapping: TaskMapping, lag: int = 2) -> None:
        if lag < 0:
            raise ValueError(f"lag must not be negative, but is {lag}")
        super().__init__(mapping)
        self._in_flight: deque[TaskMapping] = deque([mapping], maxlen=lag + 1)
        self._measured = Measurements()
        self._act_from = 0
        self._moved: _Move | None = None
        self._blocked: dict[Stage, int] = {}

    def observe(self, times: IterationTimes) -> Decision:
        """Take in the times of one iteration and decide what to do from now on.

        Args:
            times: The iteration's times. Iterations with less than half the seeds do not count.

        Raises:
            ValueError: The times are not for these trainers.
        """
        self._number += 1
        old = self._in_flight[0]
        self._in_flight.append(self.mapping)
        reason = self._remember(times, old)
        decision = self._hold(reason) if isinstance(reason, str) else self._decide(reason)
        if decision.changed:
            self._in_flight[-1] = decision.mapping
            self._act_from = self._number + len(self._in_flight)
        return decision

    def _remember(self, times: IterationTimes, mapping: TaskMapping) -> str | IterationTimes:
        """Add a measurement; return it, or why it does not count."""
        mapping.check(times)
        if times.seeds is not None and times.seeds != mapping.seeds:
            whole, part = mapping.total, sum(times.seeds)
            if part < whole / 2:
                return f"only {part} of {whole} seeds: does not count"
            seeds = tuple(max(1, round(n * whole / part)) if n else 0 for n in times.seeds)
            mapping, times = replace(mapping, seeds=seeds), times.scaled(whole / part)
        for index, (seconds, seeds_there) in enumerate(zip(times.trainers, mapping.seeds, strict=True)):
            if seeds_there and not seconds:
                return f"no time of trainer {index}, which has seeds: does not count"
        self._measured.add(mapping, times)
        return times

    def _decide(self, last: IterationTimes) -> Decision:
        if self._number < self._act_from:
            return self._hold(f"wait {self._act_from - self._number} more for the last change to show")
        now = self._measured.estimate(self.mapping, last)
        if not now.count:
            return self._hold("not every task of this mapping has been measured")
        undone = self._undo(now)
        if undone is not None:
            return undone
        remedy = find_remedy(now.stages)
        cause = f"{STAGE_NAMES[remedy.bottleneck]} is the slowest stage, {milliseconds(now.bottleneck)}"
        threshold = SURE / sqrt(now.count)
        for action, target in self._remedies(now, remedy):
            if gain(now, target) > threshold:
                if action == "balance_thread":
                    self._moved = _Move(self.mapping, now.bottleneck, remedy.bottleneck)
                predicted = milliseconds(now.under(target).bottleneck)
                return self._change(
                    target, action, f"{cause}; {difference(now.mapping, target)}, predicted {predicted}"
                )
        return self._hold(f"{cause}; nothing would shorten it by {threshold:.1%}")

    def _remedies(self, now: Estimate, remedy: Remedy) -> Iterator[tuple[str, TaskMapping]]:
        """Yield what to try against the slowest stage, the paper's remedy first."""
        # Where the paper's gains nothing its algorithm would stand still: then the other one is next.
        mapping, slowest = now.mapping, remedy.bottleneck
        share = balance_sampling(now) if slowest.startswith("sample") else balance_work(now)
        if remedy.kind == "balance_work":
            yield "balance_work", share
        receiver = TAKES_OVER.get(slowest, slowest)
        if self._number >= self._blocked.get(receiver, 0) and (receiver != "train_cpu" or mapping.cpu_seeds):
            donors = [task for task in CPU_TASKS if task != receiver]
            moves = [target for donor in donors for target in balance_thread(now, donor, receiver)]
            if moves:
                yield "balance_thread", max(moves, key=lambda target: gain(now, target))
        if remedy.kind != "balance_work" and slowest != "load":
            yield "balance_work", share

    def _undo(self, now: Estimate) -> Decision | None:
        """Move threads back if they brought nothing, and none to that task until the run is twice as long."""
        moved, self._moved = self._moved, None
        if moved is None or (seconds := now.stages.get(moved.stage, 0.0)) < moved.seconds:
            return None
        changes = [after - before for before, after in zip(moved.back.threads, now.mapping.threads, strict=True)]
        self._blocked[CPU_TASKS[changes.index(max(changes))]] = 2 * self._number
        cause = f"{STAGE_NAMES[moved.stage]} takes {milliseconds(seconds)}, before {milliseconds(moved.seconds)}"
        return self._change(moved.back, "undo", f"{cause}; {difference(now.mapping, moved.back)}")

    def state_dict(self) -> dict[str, Any]:
        """Return all that its next decisions depend on, as plain lists, dicts and numbers."""
        moved = self._moved
        return {
            **super().state_dict(),
            "in_flight": [mapping.to_dict() for mapping in self._in_flight],
            "history": self._measured.state(),
            "act_from": self._act_from,
            "moved": None if moved is None else [moved.back.to_dict(), moved.seconds, moved.stage],
            "blocked": self._blocked,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        super().load_state_dict(state)
        self._in_flight.clear()
        self._in_flight.extend(map(TaskMapping.from_dict, state["in_flight"]))
        self._measured.load_state(state["history"])
        moved, self._blocked = state["moved"], dict(state["blocked"])
        self._act_from = state["act_from"]
        self._moved = None if moved is None else _Move(TaskMapping.from_dict(moved[0]), float(moved[1]), moved[2])
