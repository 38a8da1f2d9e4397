"""Dynamic resource management of hybrid training (HyScale-GNN, section IV-A): a noise-tolerant algorithm 1.

Lines 1 to 32 of the paper are :func:`find_remedy`. The paper does not specify how far to move: here ``balance_work``
equalizes both sides according to the last 20 measurements of each task, and threads move together with their work.
Additions, justified by ``benchmarks/hyscale/resource_manager.py``: one move at a time; a dead band that narrows with
more measurements; the other remedy if the paper's has no gain; undoing useless moves; no seeds for slow CPU trainers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any, Literal, NamedTuple

from lightning_gnn.hyscale.resource_manager.decisions import STAGE_NAMES, Decision, Recorder, describe_change, format_ms
from lightning_gnn.hyscale.resource_manager.estimates import Estimate, Measurements
from lightning_gnn.hyscale.resource_manager.mapping import (
    CPU_TASKS,
    STAGES,
    IterationTimes,
    Stage,
    TaskMapping,
    split_evenly,
)

TAKES_OVER: Mapping[Stage, Stage] = {"accelerator": "train_cpu", "sample_accelerator": "sample_cpu"}
"""Maps an accelerator stage to the CPU task that can take over its work with more threads."""
MIN_SAMPLING_SHARE = 0.01
"""Minimum sampling share of the CPU and of the accelerators while the sampling is balanced."""
DEAD_BAND = 0.12
"""Minimum relative gain of a move after one measurement; after n measurements, ``DEAD_BAND / sqrt(n)``."""


class Remedy(NamedTuple):
    """Action that algorithm 1 selects."""

    # ``balance_work`` redistributes work between the processors of both stages; ``balance_thread`` moves threads from
    # the first to the second stage; ``none`` if no other CPU task can donate threads
    kind: Literal["balance_work", "balance_thread", "none"]
    first: Stage
    second: Stage
    bottleneck: Stage


def find_remedy(times: Mapping[Stage, float]) -> Remedy:
    """Return the remedy of algorithm 1 for the slowest stage."""
    # Lines 23 and 31 of the paper take threads from the fastest stage, which may run on an accelerator: here they take
    # them from the fastest CPU task. Of two equal times, the stage listed first in line 2 counts as slower.
    if not times:
        raise ValueError("no stage times to find a bottleneck in")
    by_time = sorted((stage for stage in STAGES if stage in times), key=lambda stage: -times[stage])  # line 2
    bottleneck, fastest = by_time[0], by_time[-1]
    second = by_time[-2] if len(by_time) > 1 else fastest
    samplers: tuple[Stage, Stage] = ("sample_cpu", "sample_accelerator")
    trainers: tuple[Stage, Stage] = ("train_cpu", "accelerator")

    if bottleneck == "sample_accelerator":  # lines 11 and 12
        return Remedy("balance_work", *samplers, bottleneck)
    if bottleneck == "accelerator":  # lines 13 and 14
        return Remedy("balance_work", *trainers, bottleneck)
    if bottleneck == "sample_cpu" and _is_ahead("sample_accelerator", "accelerator", fastest, second):  # lines 18 to 21
        return Remedy("balance_work", *samplers, bottleneck)
    if bottleneck == "train_cpu" and _is_ahead("accelerator", "sample_accelerator", fastest, second):  # lines 26 to 29
        return Remedy("balance_work", *trainers, bottleneck)
    fastest_cpu_task = [stage for stage in by_time if stage in CPU_TASKS][-1]  # lines 7 and 8
    kind: Literal["balance_thread", "none"] = "none" if fastest_cpu_task == bottleneck else "balance_thread"
    return Remedy(kind, fastest_cpu_task, bottleneck, bottleneck)  # lines 16, 23, 31


def _is_ahead(partner: Stage, other: Stage, fastest: Stage, second: Stage) -> bool:
    """Whether the accelerator's counterpart is the fastest stage, or second to the accelerator's other stage."""
    return fastest == partner or (fastest == other and second == partner)


def relative_gain(now: Estimate, mapping: TaskMapping) -> float:
    """Return by what fraction another mapping would shorten the slowest of the stages that it changes."""
    # Not the slowest of all stages: of two equally slow stages, one must be relieved first.
    before, after = now.stages, now.under(mapping).stages
    changed = [stage for stage in {*before, *after} if before.get(stage) != after.get(stage)]
    old = max((before.get(stage, 0.0) for stage in changed), default=0.0)
    new = max((after.get(stage, 0.0) for stage in changed), default=0.0)
    if not old or max(after.values()) > max(before.values()):
        return 0.0
    return 1 - new / old


def balance_work(now: Estimate) -> TaskMapping:
    """Split the seeds so that all trainers finish together; CPU trainers that slow training down get none."""
    # A CPU trainer without seeds can get some again, based on its earlier measurements.
    mapping = now.mapping
    split = partial(split_evenly, mapping.total, group_per_seed=now.transfer_per_seed)
    accelerators = range(mapping.cpu_trainers, len(mapping.seeds))
    if sum(cost is not None for cost in now.costs) < 2:
        return mapping
    shared = replace(mapping, seeds=split(now.costs, accelerators))
    if not shared.accelerator_seeds or 1 not in shared.seeds[: mapping.cpu_trainers]:
        return shared  # every CPU trainer has more than the minimum of one seed, so all of them help
    costs = [cost if index in accelerators else None for index, cost in enumerate(now.costs)]
    without_cpu = replace(mapping, seeds=split(costs, accelerators))
    is_faster = now.under(without_cpu).times.propagation <= now.under(shared).times.propagation
    return without_cpu if is_faster else shared


def balance_sampling(now: Estimate) -> TaskMapping:
    """Split the sampling so that the CPU and the accelerators finish together."""
    mapping, times = now.mapping, now.times
    share = mapping.accelerator_sampling
    if not times.sample_cpu or not times.sample_accelerator:
        return mapping
    cpu_rate, accelerator_rate = (1 - share) / times.sample_cpu, share / times.sample_accelerator
    target = accelerator_rate / (accelerator_rate + cpu_rate)
    return replace(mapping, accelerator_sampling=min(max(target, MIN_SAMPLING_SHARE), 1 - MIN_SAMPLING_SHARE))


def balance_thread(now: Estimate, donor: Stage, receiver: Stage) -> Iterator[TaskMapping]:
    """Yield mappings with 1, 2, 4, ... threads of a CPU task moved to another, with rebalanced work."""
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
    """A move of threads that is undone unless ``stage`` gets faster."""

    previous: TaskMapping
    seconds: float  # of the stage before the move
    stage: Stage


class DynamicResourceManager(Recorder):
    """Relieve the slowest stage after each iteration (algorithm 1), with constant totals of seeds and threads.

    Deterministic: the same times lead to the same decisions.

    Args:
        mapping: The initial mapping.
        lag: Pipeline depth: the number of observations until the times reflect a new mapping.

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
        self._pending_move: _Move | None = None
        self._blocked: dict[Stage, int] = {}

    def observe(self, times: IterationTimes) -> Decision:
        """Process the times of one iteration and return a decision.

        Args:
            times: The iteration's times. Iterations with less than half the seeds are ignored.

        Raises:
            ValueError: The times are for other trainers.
        """
        self._number += 1
        old = self._in_flight[0]
        self._in_flight.append(self.mapping)
        reason = self._add_measurement(times, old)
        decision = self._hold(reason) if isinstance(reason, str) else self._decide(reason)
        if decision.changed:
            self._in_flight[-1] = decision.mapping
            self._act_from = self._number + len(self._in_flight)
        return decision

    def _add_measurement(self, times: IterationTimes, mapping: TaskMapping) -> str | IterationTimes:
        """Add a measurement and return it, or return the reason why it is ignored."""
        mapping.check(times)
        if times.seeds is not None and times.seeds != mapping.seeds:
            total, measured = mapping.total, sum(times.seeds)
            if measured < total / 2:
                return f"only {measured} of {total} seeds: ignored"
            seeds = tuple(max(1, round(n * total / measured)) if n else 0 for n in times.seeds)
            mapping, times = replace(mapping, seeds=seeds), times.scaled(total / measured)
        for index, (seconds, num_seeds) in enumerate(zip(times.trainers, mapping.seeds, strict=True)):
            if num_seeds and not seconds:
                return f"trainer {index} has seeds but no measured time: ignored"
        self._measured.add(mapping, times)
        return times

    def _decide(self, last: IterationTimes) -> Decision:
        if self._number < self._act_from:
            return self._hold(f"wait {self._act_from - self._number} more until the last change takes effect")
        now = self._measured.estimate(self.mapping, last)
        if not now.count:
            return self._hold("not every task of this mapping has been measured")
        undone = self._undo(now)
        if undone is not None:
            return undone
        remedy = find_remedy(now.stages)
        cause = f"{STAGE_NAMES[remedy.bottleneck]} is the slowest stage, {format_ms(now.bottleneck)}"
        threshold = DEAD_BAND / sqrt(now.count)
        for action, target in self._remedies(now, remedy):
            if relative_gain(now, target) > threshold:
                if action == "balance_thread":
                    self._pending_move = _Move(self.mapping, now.bottleneck, remedy.bottleneck)
                predicted = format_ms(now.under(target).bottleneck)
                return self._change(
                    target, action, f"{cause}; {describe_change(now.mapping, target)}, predicted {predicted}"
                )
        return self._hold(f"{cause}; no move would shorten it by {threshold:.1%}")

    def _remedies(self, now: Estimate, remedy: Remedy) -> Iterator[tuple[str, TaskMapping]]:
        """Yield actions with their mappings to relieve the slowest stage, the paper's remedy first."""
        # The paper's algorithm would get stuck if its remedy has no gain: then the other remedy follows.
        mapping, slowest = now.mapping, remedy.bottleneck
        share = balance_sampling(now) if slowest.startswith("sample") else balance_work(now)
        if remedy.kind == "balance_work":
            yield "balance_work", share
        receiver = TAKES_OVER.get(slowest, slowest)
        if self._number >= self._blocked.get(receiver, 0) and (receiver != "train_cpu" or mapping.cpu_seeds):
            donors = [task for task in CPU_TASKS if task != receiver]
            moves = [target for donor in donors for target in balance_thread(now, donor, receiver)]
            if moves:
                yield "balance_thread", max(moves, key=lambda target: relative_gain(now, target))
        if remedy.kind != "balance_work" and slowest != "load":
            yield "balance_work", share

    def _undo(self, now: Estimate) -> Decision | None:
        """Undo the last move of threads if it had no gain, and block that task until twice as many observations."""
        moved, self._pending_move = self._pending_move, None
        if moved is None or (seconds := now.stages.get(moved.stage, 0.0)) < moved.seconds:
            return None
        changes = [after - before for before, after in zip(moved.previous.threads, now.mapping.threads, strict=True)]
        self._blocked[CPU_TASKS[changes.index(max(changes))]] = 2 * self._number
        cause = f"{STAGE_NAMES[moved.stage]} takes {format_ms(seconds)}, before {format_ms(moved.seconds)}"
        return self._change(moved.previous, "undo", f"{cause}; {describe_change(now.mapping, moved.previous)}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines all further decisions, as lists, dicts and numbers."""
        moved = self._pending_move
        return {
            **super().state_dict(),
            "in_flight": [mapping.to_dict() for mapping in self._in_flight],
            "history": self._measured.state(),
            "act_from": self._act_from,
            "moved": None if moved is None else [moved.previous.to_dict(), moved.seconds, moved.stage],
            "blocked": self._blocked,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raise ValueError if it is for other work."""
        super().load_state_dict(state)
        self._in_flight.clear()
        self._in_flight.extend(map(TaskMapping.from_dict, state["in_flight"]))
        self._measured.load_state(state["history"])
        move, self._blocked = state["moved"], dict(state["blocked"])
        self._act_from = state["act_from"]
        self._pending_move = None if move is None else _Move(TaskMapping.from_dict(move[0]), float(move[1]), move[2])
