"""Dynamic resource management of hybrid training (HyScale-GNN, section IV-A).

A :class:`BalanceController` on every rank splits seeds and threads. After each iteration, its policy observes the stage
times and decides on the mapping: :class:`DynamicResourceManager` plans again by the closed forms of ``plan.py``,
:class:`PublishedResourceManager` is algorithm 1, and :class:`ReplayedDecisions` repeats a recorded log.
"""

from __future__ import annotations

import copy
import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from typing_extensions import override

from lightning_gnn.collective.plan import StageTimes
from lightning_gnn.hyscale.costs import (
    CPU_TASKS,
    STAGE_NAMES,
    STAGES,
    UNMEASURED,
    Cost,
    IterationTimes,
    Measurements,
    NodeCosts,
    Stage,
    TaskMapping,
    iteration,
    split_seeds,
    stages,
)
from lightning_gnn.hyscale.options import TrainerSet, is_adaptive, measurements_decide, replays
from lightning_gnn.hyscale.plan import NodePlanner, best_seeds, candidates
from lightning_gnn.hyscale.staged_prefetcher import BatchShare
from lightning_gnn.runtime.files import LARGEST_JSON, read_json, read_text
from lightning_gnn.runtime.lightning import rank_zero_info, rank_zero_warn
from lightning_gnn.runtime.timeline import StepTimer
from lightning_gnn.runtime.urls import cached_path, local_path

MIN_SAMPLING_SHARE = 0.01
"""Minimum sampling share of the CPU and of the accelerators while the sampling is balanced."""
DEAD_BAND = 0.12
"""Minimum relative gain of a change after one measurement; after n measurements, ``DEAD_BAND / sqrt(n)``."""
TRIAL = 5
"""Iterations before and after a change that are compared; the first of each is ignored."""
CPU_TRIAL = 10
"""Iterations that are compared without and with CPU trainers, unless :data:`TRIAL` show a clear difference."""
MIN_HYBRID_GAIN = 0.03
"""Minimum relative gain of an iteration's time for which the CPU trainers are kept."""
STEP_FRACTION = 1 / 32
"""Fraction of an iteration's seeds, or of the sampling, that one ``balance_work`` of algorithm 1 moves."""


# -- decisions and their log


@dataclass(frozen=True)
class Decision:
    """A policy's decision: the mapping to use from now on, and the reason."""

    mapping: TaskMapping
    explanation: str
    # ``start``, ``plan``, ``balance_work``, ``balance_thread``, ``undo``, ``hold``; of the CPU trainers: ``bring_in``
    # after the accelerators alone have been measured, ``leave_out``
    action: str = "hold"
    observation: int = 0
    changed: bool = False  # whether the mapping differs from the previous one

    def __str__(self) -> str:
        return f"{self.observation}: {self.action}: {self.explanation}"

    def to_json(self) -> str:
        """Return the decision as one line of JSON, the format of a decision log."""
        state = {"observation": self.observation, "action": self.action, "mapping": self.mapping.to_dict()}
        return json.dumps({**state, "explanation": self.explanation})


def read_decisions(lines: Iterable[str]) -> list[Decision]:
    """Read a decision log, lines of :meth:`Decision.to_json`; blank lines are skipped."""
    decisions: list[Decision] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            state = read_json(line)
            mapping, explanation = TaskMapping.from_dict(state["mapping"]), str(state["explanation"])
            decision = Decision(mapping, explanation, str(state["action"]), int(state["observation"]), changed=True)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of the decision log is not a decision: {error}") from error
        # A plan for the whole node may replace another decision of the same observation.
        if decisions and decision.observation + (decision.action == "plan") <= decisions[-1].observation:
            raise ValueError(
                f"line {number} of the decision log is observation {decision.observation}, but the line before is "
                f"{decisions[-1].observation}: the log of one run must be in order"
            )
        decisions.append(decision)
    return decisions


def read_decision_log(path: str | Path) -> list[Decision]:
    """Read the decision log at a path or an address."""
    return read_decisions(read_text(cached_path(path), LARGEST_JSON).splitlines())


def wanted_sampling(wanted: str | float, drm: bool | str | Path) -> str | float:
    """Return the accelerators' sampling share: the user's setting, or the largest share in a replayed log."""
    # The result is "auto", a share, or 0 if "auto" cannot be measured.
    if not replays(drm):
        return 0.0 if wanted == "auto" and not measurements_decide() else wanted
    return max((decision.mapping.accelerator_sampling for decision in read_decision_log(drm)), default=0.0)


def describe_change(old: TaskMapping, new: TaskMapping) -> str:
    """Return a short description of the changes between two mappings."""
    changes = []
    for name, before, after in (("seeds", old.seeds, new.seeds), ("threads", old.threads, new.threads)):
        if before != after:
            changes.append(f"{name} {'/'.join(map(str, before))} -> {'/'.join(map(str, after))}")
    if old.accelerator_sampling != new.accelerator_sampling:
        changes.append(f"sampled on accelerators {old.accelerator_sampling:.1%} -> {new.accelerator_sampling:.1%}")
    return ", ".join(changes) or "no change"


def format_ms(seconds: float) -> str:
    """Format a time in milliseconds."""
    return f"{1e3 * seconds:.3g} ms"


# -- policies


class Policy(ABC):
    """Decides on the mapping after each iteration; the same times lead to the same decisions on all ranks."""

    def __init__(self, mapping: TaskMapping) -> None:
        self.mapping = mapping
        self.log: list[Decision] = [Decision(mapping, f"start with {mapping}", "start", 0, True)]
        """The decisions that changed the mapping, starting with the initial one."""
        self._number = 0

    @abstractmethod
    def observe(self, times: IterationTimes) -> Decision:
        """Process the times of one iteration and return a decision."""

    def _hold(self, explanation: str) -> Decision:
        """Return a decision that keeps the mapping."""
        return Decision(self.mapping, explanation, "hold", self._number)

    def _change(self, mapping: TaskMapping, action: str, cause: str) -> Decision:
        """Set and log a new mapping, and return the decision."""
        explanation = f"{cause}; {describe_change(self.mapping, mapping)}"
        self.mapping = mapping
        self.log.append(Decision(mapping, explanation, action, self._number, True))
        return self.log[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines all further decisions, and the log, as lists, dicts and numbers."""
        log = [decision.to_json() for decision in self.log]
        return {"mapping": self.mapping.to_dict(), "log": log, "number": self._number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raise ValueError if it is for other work."""
        mapping = TaskMapping.from_dict(state["mapping"])
        self.mapping.check_same_work(mapping)
        self.mapping, self.log, self._number = mapping, read_decisions(state["log"]), int(state["number"])


class ReplayedDecisions(Policy):
    """Policy that repeats recorded decisions, whatever the times."""

    def __init__(self, decisions: Iterable[Decision]) -> None:
        self._decisions = list(decisions)
        if not self._decisions or self._decisions[0].observation != 0:
            raise ValueError("a decision log must begin with the initial mapping, observation 0")
        first = self._decisions[0].mapping
        for decision in self._decisions:
            mapping = decision.mapping
            if (mapping.total, len(mapping.seeds)) != (first.total, len(first.seeds)):
                raise ValueError(
                    f"observation {decision.observation} of the decision log has {mapping.total} seeds for "
                    f"{len(mapping.seeds)} trainers, but the first has {first.total} for {len(first.seeds)}"
                )
        super().__init__(first)
        self._continue_after(0)

    @override
    def observe(self, times: IterationTimes) -> Decision:
        self._continue_after(self._number + 1)
        return self.log[-1] if self.log[-1].observation == self._number else self._hold("replayed: no change")

    def _continue_after(self, number: int) -> None:
        """Set the mapping and the log to those after a number of observations."""
        self._number, self.log = number, [each for each in self._decisions if each.observation <= number]
        self.mapping = self.log[-1].mapping

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"observation": self._number}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._continue_after(int(state["observation"]))


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


class PublishedResourceManager(Policy):
    """Policy that relieves the slowest stage of the last iteration by one step: exactly algorithm 1, lines 1 to 32."""

    # Interpretation of points that the paper leaves open. Step size (section IV-A): 1/32 of the iteration's seeds or of
    # the sampling, or one thread, without a dead band. Frequency: after every iteration, using only its times. Trainers
    # (lines 14, 27, 29): the slowest one of the bottleneck's type gives seeds to the fastest one of the other type, and
    # retains at least one. Donor of threads (lines 23, 31): the fastest CPU task, as in line 16; each task and each CPU
    # trainer retains one thread. A remedy without anything to move leaves the mapping unchanged.

    @override
    def observe(self, times: IterationTimes) -> Decision:
        self._number += 1
        self.mapping.check(times)
        stages = times.stages()
        if not stages:
            return self._hold("no times")
        remedy = find_remedy(stages)
        target = self.mapping
        if remedy.kind == "balance_thread":
            target = self._balance_thread(remedy.first, remedy.second)
        elif remedy.kind == "balance_work" and remedy.first == "sample_cpu":
            target = self._balance_sampling(remedy.bottleneck)
        elif remedy.kind == "balance_work":
            target = self._balance_work(times, remedy.bottleneck)
        cause = f"{STAGE_NAMES[remedy.bottleneck]} is the slowest stage, {format_ms(stages[remedy.bottleneck])}"
        if target == self.mapping:
            return self._hold(f"{cause}; nothing can be moved")
        return self._change(target, remedy.kind, cause)

    def _balance_work(self, times: IterationTimes, bottleneck: Stage) -> TaskMapping:
        """Move seeds from the slowest trainer of the bottleneck's type to the fastest of the other type."""
        mapping, cpu = self.mapping, self.mapping.cpu_trainers
        groups = [range(cpu), range(cpu, len(mapping.seeds))]
        slow_group, fast_group = groups if bottleneck == "train_cpu" else reversed(groups)
        seconds = [time or 0.0 for time in times.trainers]
        donors = [index for index in slow_group if mapping.seeds[index] > 1]
        if not donors or not fast_group:
            return mapping
        donor, receiver = max(donors, key=seconds.__getitem__), min(fast_group, key=seconds.__getitem__)
        seeds = list(mapping.seeds)
        moved = min(max(1, round(STEP_FRACTION * mapping.total)), seeds[donor] - 1)
        seeds[donor] -= moved
        seeds[receiver] += moved
        return replace(mapping, seeds=tuple(seeds))

    def _balance_sampling(self, bottleneck: Stage) -> TaskMapping:
        """Move a step of the sampling away from the bottleneck."""
        share = self.mapping.accelerator_sampling
        if not share:
            return self.mapping
        share += STEP_FRACTION if bottleneck == "sample_cpu" else -STEP_FRACTION
        return replace(self.mapping, accelerator_sampling=_clamp_sampling(share))

    def _balance_thread(self, donor: Stage, receiver: Stage) -> TaskMapping:
        """Move one thread if the donor has a spare one."""
        mapping = self.mapping
        threads = list(mapping.threads)
        least = max(1, mapping.cpu_trainers) if donor == "train_cpu" else 1
        if threads[CPU_TASKS.index(donor)] <= least:
            return mapping
        threads[CPU_TASKS.index(donor)] -= 1
        threads[CPU_TASKS.index(receiver)] += 1
        return replace(mapping, threads=(threads[0], threads[1], threads[2]))


@dataclass(frozen=True)
class Estimate:
    """What the last iterations show under a mapping."""

    mapping: TaskMapping
    costs: NodeCosts[Cost]
    count: int  # measurements under this mapping of the task with the fewest

    @cached_property
    def times(self) -> IterationTimes:
        """Estimated stage times."""
        return stages(self.costs, self.mapping)

    def best(self, keeps_threads: bool = False) -> tuple[TaskMapping, float]:
        """Return the best mapping for the estimated costs, and its seconds per iteration."""
        mapping, costs = self.mapping, self.costs
        total, cpu = mapping.total, mapping.cpu_trainers
        if keeps_threads:
            found = best_seeds(costs, False, total, cpu, mapping.threads)
        else:
            found = candidates(costs, total, cpu, sum(mapping.threads))[0]
        share = mapping.accelerator_sampling if mapping.buffers is not None else found.mapping.accelerator_sampling
        if costs.sample_accelerator is not None:  # a side without measurements could not be balanced
            share = _clamp_sampling(share)
        return replace(found.mapping, accelerator_sampling=share, buffers=mapping.buffers), found.seconds


def _clamp_sampling(share: float) -> float:
    return min(max(share, MIN_SAMPLING_SHARE), 1 - MIN_SAMPLING_SHARE)


class _Move(NamedTuple):
    """A change that is undone if iterations get slower."""

    previous: TaskMapping
    seconds: float  # of the slowest stage before the change
    times: list[float]  # of stages and trainers that the change was planned with


class _Alone(NamedTuple):
    """The accelerators without CPU trainers, as measured before these were brought in."""

    mapping: TaskMapping
    seconds: float  # of an iteration


class DynamicResourceManager(Policy):
    """Replan from the times of the last iterations, with constant totals of seeds and threads.

    No stage time shows whether CPU trainers slow the accelerators down. A run with both therefore starts with the
    accelerators alone. Once these are tuned, the CPU trainers are brought in, the mapping is tuned again, and if its
    iterations are not shorter, the CPU trainers are left out for good. Damping, justified by
    ``benchmarks/hyscale/resource_manager.py``: a dead band that narrows with more measurements, and undoing every
    change after which iterations are slower.

    Args:
        mapping: The mapping to start with, or to bring in after the accelerators alone have been measured.
        lag: Pipeline depth: the number of observations until the times reflect a new mapping.
        tries_cpu: Whether to measure the accelerators alone first, if CPU trainers and accelerators have seeds.

    Raises:
        ValueError: ``lag`` is negative.
    """

    def __init__(self, mapping: TaskMapping, lag: int = 2, tries_cpu: bool = True) -> None:
        if lag < 0:
            raise ValueError(f"lag must not be negative, but is {lag}")
        is_mixed = 0 < mapping.cpu_trainers < len(mapping.seeds)
        self.leaves_out_cpu = is_mixed and not mapping.cpu_seeds
        """Whether CPU trainers get no seeds any more: they began without, so have no times, or the trial was lost."""
        alone = mapping.without_cpu() if tries_cpu and is_mixed and mapping.cpu_seeds else mapping
        super().__init__(alone)
        self._planned: TaskMapping | None = None if alone is mapping else mapping
        self._alone: _Alone | None = None  # until the trial has ended
        self._in_flight: deque[TaskMapping] = deque([alone] * (lag + 1), lag + 1)
        self._measured = Measurements()
        self._act_from = 0
        self._move: _Move | None = None
        # of iterations before and after the last change
        self._seconds = deque[float](maxlen=CPU_TRIAL), deque[float](maxlen=CPU_TRIAL)
        self._blocked: tuple[int, list[float]] = (0, [])  # until an observation; the times of the change undone
        self._planned_with: tuple[int, list[float]] = (0, [])  # measurements and stage times of the last planning

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
        if (reason := self._add_measurement(times, old)) is not None:
            return self._hold(reason)
        if times.iteration is not None and times.seeds in (None, old.seeds):
            self._add_iteration(times.iteration, old)
        previous = self._move and self._move.previous
        decision = self._decide()
        if decision.changed:
            # A change on top of one that has not been judged is judged together with it.
            self._take_effect(is_joint=self._move is not None and self._move.previous is previous)
        return decision

    def costs(self) -> NodeCosts[Cost]:
        """Return the costs that the last iterations show."""
        costs = self._measured.costs(self.mapping)
        if self.leaves_out_cpu:
            costs = replace(costs, train_cpu=lambda threads: (UNMEASURED,) * self.mapping.cpu_trainers)
        return costs

    def adopt(self, mapping: TaskMapping) -> Decision:
        """Change to a mapping that was planned from a profile, and return the decision."""
        self._move, self._planned_with = None, (0, [])
        decision = self._change(mapping, "plan", f"planned from the profile: {mapping}")
        self._take_effect(is_joint=False)
        return decision

    def _take_effect(self, is_joint: bool) -> None:
        """Wait until the pipeline delivers mini-batches of the new mapping."""
        self._in_flight[-1] = self.mapping
        self._act_from = self._number + len(self._in_flight)
        self._seconds = self._seconds[0 if is_joint else 1], deque(maxlen=CPU_TRIAL)

    def _add_measurement(self, times: IterationTimes, mapping: TaskMapping) -> str | None:
        """Add a measurement, or return the reason why it is ignored."""
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
        return None

    def _add_iteration(self, seconds: float, mapping: TaskMapping) -> None:
        """Add the time of an iteration with the mapping before or after the last change."""
        if mapping == self.mapping and self._number >= self._act_from:
            self._seconds[1].append(seconds)
        elif self._move is not None and mapping == self._move.previous:  # is still in the pipeline after the change
            self._seconds[0].append(seconds)

    def _decide(self) -> Decision:
        if self._number < self._act_from:
            return self._hold(f"wait {self._act_from - self._number} more until the last change takes effect")
        before, after = self._seconds
        now = Estimate(self.mapping, self.costs(), self._measured.count(self.mapping))
        if not now.count:
            return self._hold("not every task of this mapping has been measured")
        is_judged = self._move is None or len(before) < 2 or len(after) >= TRIAL
        if not is_judged:
            if len(after) < 3:
                return self._hold("measure what the last change brought")
            clear = 1 + 2 * DEAD_BAND
            is_judged = min(list(after)[1:]) > clear * median(before) or max(after) * clear < median(before)
        if is_judged and (undone := self._undo(now)) is not None:
            return undone
        if len(after) >= TRIAL and (decision := self._continue_trial(median([*after][1:]), len(after))) is not None:
            return decision
        return self._replan(now, any(self._seconds))

    def _replan(self, now: Estimate, is_timed: bool) -> Decision:
        """Change to the best mapping for the estimated costs if it gains enough."""
        seconds = now.times.stages()
        slowest = max(seconds, key=seconds.__getitem__)
        cause = f"{STAGE_NAMES[slowest]} is the slowest stage, {format_ms(now.times.bottleneck)}"
        threshold = DEAD_BAND / sqrt(now.count)
        # Planning takes milliseconds: only where twice as many measurements, or other times, can change its result.
        count, earlier = self._planned_with
        times = [each or 0.0 for each in (*seconds.values(), *now.times.trainers)]
        if now.count < 2 * count and _are_equal(times, earlier, threshold):
            return self._hold(f"{cause}; planned for it already")
        until, undone_with = self._blocked
        is_blocked = self._number < until
        if is_blocked and is_timed and _are_equal(times, undone_with, DEAD_BAND):
            return self._hold(f"{cause}; a change for it brought nothing")
        self._planned_with = now.count, times
        target, predicted = now.best(is_blocked)
        if self._alone is not None and not target.cpu_seeds:
            if now.count < 3:  # first iterations compile
                return self._hold("measure the CPU trainers again, which seem too slow")
            return self._leave_out(self._alone, "CPU trainers are too slow for any seeds")
        if target == self.mapping or predicted >= (1 - threshold) * iteration(now.costs, self.mapping):
            return self._hold(f"{cause}; no change would shorten it by {threshold:.1%}")
        if self._move is None:  # judged; otherwise both changes are judged together
            self._move = _Move(self.mapping, now.times.bottleneck, times)
        self._planned_with = 0, []
        action = "balance_work" if target.threads == self.mapping.threads else "balance_thread"
        return self._change(target, action, f"{cause}, {format_ms(predicted)} predicted")

    def _continue_trial(self, seconds: float, count: int) -> Decision | None:
        """Bring the CPU trainers in once the accelerators alone are tuned, and keep them if that shortens iterations.

        Args:
            seconds: Median time of the last iterations, all with the current mapping.
            count: Number of these iterations.
        """
        if (planned := self._planned) is not None and count == CPU_TRIAL:
            self._planned, self._alone, self._planned_with = None, _Alone(self.mapping, seconds), (0, [])
            return self._change(planned, "bring_in", f"{format_ms(seconds)} an iteration without CPU trainers")
        if (alone := self._alone) is None:
            return None
        if seconds > (1 + 2 * DEAD_BAND) * alone.seconds or (
            count == CPU_TRIAL and seconds >= (1 - MIN_HYBRID_GAIN) * alone.seconds
        ):
            cause = f"{format_ms(alone.seconds)} an iteration without CPU trainers, {format_ms(seconds)} with them"
            return self._leave_out(alone, cause)
        if count == CPU_TRIAL:
            self._alone = None
        return None

    def _leave_out(self, alone: _Alone, cause: str) -> Decision:
        """Return to the accelerators alone."""
        self._alone, self._move, self._planned_with, self.leaves_out_cpu = None, None, (0, []), True
        return self._change(alone.mapping, "leave_out", f"{cause} (cpu_trainers=0 also saves their processes)")

    def _undo(self, now: Estimate) -> Decision | None:
        """Undo the last change if iterations got slower, and block it until times change or for a while.

        Without measured iterations, moves of threads are judged by the slowest stage.
        """
        move, self._move = self._move, None
        if move is None:
            return None
        before, after = (median(list(each)[1:] or [0.0]) for each in self._seconds)
        margin = DEAD_BAND / sqrt(TRIAL - 1)  # of medians of noisy times
        if not before or not after:
            before, after, margin = move.seconds, now.times.bottleneck, 0.0
            if move.previous.threads == self.mapping.threads:
                return None
        if after < (1 + margin) * before:
            return None
        self._blocked = 2 * self._number, move.times
        return self._change(move.previous, "undo", f"an iteration takes {format_ms(after)}, before {format_ms(before)}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines all further decisions, as lists, dicts and numbers."""
        move, alone = self._move, self._alone
        return {
            **super().state_dict(),
            "in_flight": [mapping.to_dict() for mapping in self._in_flight],
            "history": self._measured.state(),
            "act_from": self._act_from,
            "planned": None if self._planned is None else self._planned.to_dict(),
            "alone": None if alone is None else [alone.mapping.to_dict(), alone.seconds],
            "leaves_out_cpu": self.leaves_out_cpu,
            "move": None if move is None else [move.previous.to_dict(), move.seconds, move.times],
            "blocked": list(self._blocked),
            "planned_with": list(self._planned_with),
            "seconds": [*map(list, self._seconds)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raise ValueError if it is for other work."""
        super().load_state_dict(state)
        self._in_flight.clear()
        self._in_flight.extend(map(TaskMapping.from_dict, state["in_flight"]))
        self._measured.load_state(state["history"])
        self._act_from, self.leaves_out_cpu = state["act_from"], state["leaves_out_cpu"]
        planned, alone, move, (before, after) = (state[name] for name in ("planned", "alone", "move", "seconds"))
        self._planned = None if planned is None else TaskMapping.from_dict(planned)
        self._alone = None if alone is None else _Alone(TaskMapping.from_dict(alone[0]), float(alone[1]))
        self._move = None if move is None else _Move(TaskMapping.from_dict(move[0]), float(move[1]), list(move[2]))
        self._seconds = deque(before, CPU_TRIAL), deque(after, CPU_TRIAL)
        self._blocked = int(state["blocked"][0]), list(state["blocked"][1])
        self._planned_with = int(state["planned_with"][0]), list(state["planned_with"][1])


def _are_equal(times: list[float], others: list[float], tolerance: float) -> bool:
    pairs = zip(times, others, strict=False)
    return len(times) == len(others) and all(abs(new - old) <= tolerance * old for new, old in pairs)


# -- one rank


class StepReport(NamedTuple):
    """What a rank reports about its last iteration, in seconds; -1 for missing values."""

    seeds: float = -1.0
    sampled_on_accelerator: float = -1.0  # 1 if its accelerator sampled, 0 if the CPU did, -1 if it cannot
    sample: float = -1.0  # thread-seconds
    sample_accelerator: float = -1.0
    load: float = -1.0  # thread-seconds
    transfer: float = -1.0
    train: float = -1.0
    iteration: float = -1.0  # until the next iteration
    # stages of collective batching, each for one mini-batch
    cpu_batching: float = -1.0
    dma: float = -1.0
    gpu_batching: float = -1.0
    uva: float = -1.0

    @classmethod
    def of(cls, share: BatchShare | None, train: float = 0.0, iteration: float = -1.0) -> StepReport:
        """Return the report of an iteration; None: none was measured."""
        if share is None:
            return cls()
        stages = {name: seconds for name, seconds in share.seconds.items() if name in cls._fields}
        if share.sampled_on_accelerator is not None:
            stages["sampled_on_accelerator"] = float(share.sampled_on_accelerator)
        # A training thread that prepares the mini-batches on its GPU cannot train meanwhile.
        train += sum(share.seconds.get(name, 0.0) for name in ("prepare", "gpu_batching", "uva"))
        return cls(float(share.seeds), train=train, iteration=iteration, **stages)


class StageClock:
    """Measures one rank's time per iteration, excluding the time it waits for other ranks."""

    def __init__(self, device: torch.device) -> None:
        self._timer = None if device.type == "cpu" else StepTimer(device)
        self._share: BatchShare | None = None
        self._seconds = self._start = 0.0
        self.report = StepReport()
        """This rank's report about the last iteration."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Add the duration of the ``with`` block to this rank's step time."""
        start = time.perf_counter()
        if self._timer is not None:
            self._timer.start()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start
            if self._timer is not None:
                self._timer.stop()

    def next_iteration(self, share: BatchShare) -> None:
        """Finish the current iteration and start one with this share."""
        start, iteration = time.perf_counter(), -1.0
        if self._share is not None and share.number > self._share.number:  # otherwise an epoch has ended
            iteration = start - self._start
        train = self._seconds if self._timer is None else self._timer.read(self._seconds)
        self.report = StepReport.of(self._share, train, iteration)
        self._share, self._seconds, self._start = share, 0.0, start


class BalanceController:
    """Splits the seeds and threads of one node, and applies the decisions of its policy."""

    # Every rank of the node has a controller, which makes the same decisions from the same times. A decision takes
    # effect on all ranks at the first iteration that no rank can have started to prepare.

    def __init__(
        self,
        trainers: TrainerSet,
        mapping: TaskMapping,  # initial mapping, not changed if it was recorded
        drm: bool | str | Path,
        record: str | Path | None = None,
        ahead: int = 6,  # maximum number of iterations that a rank prefetches
        is_logging_rank: bool = True,
        on_stream: Sequence[bool] = (),  # per trainer: whether its GPU prepares its mini-batches, without CPU threads
        planner: NodePlanner | None = None,
    ) -> None:
        self.trainers = trainers
        self.ahead = ahead
        self.history: deque[tuple[IterationTimes, Decision | None]] = deque(maxlen=10_000)
        """Times of the last iterations with the decision after each: the timeline of the run."""
        self.iteration = 0
        """Number of iterations started."""
        self.planner = planner
        """Plans seeds, threads and collective batching from the first iterations; None if there is nothing to plan."""
        self.stage_times: StageTimes | None = None
        """The profile that collective batching was planned from."""
        self._log_path = None if record is None or not is_logging_rank else local_path(record)
        self._is_logging_rank = is_logging_rank
        self._uses_threads = [not each for each in on_stream] or [True] * len(trainers.devices)
        self.manager = _make_policy(drm, mapping, ahead, tries_cpu=planner is None)
        """Decides on the mapping; None: it is fixed."""
        self.first = mapping if self.manager is None or is_adaptive(drm) else self.manager.mapping
        """The initial mapping of the run, saved in checkpoints; a resumed run reuses it instead of measuring again."""
        try:
            self.first.check_same_trainers(mapping)
        except ValueError as error:
            raise ValueError(f"drm={drm}: {error}") from None
        begin = mapping if self.manager is None else self.manager.mapping
        self._timeline = deque([(0, begin)])  # mappings with the iteration in which each takes effect
        self._previous = begin
        if self.manager is not None:
            self._log_decision(self.manager.log[0])

    @property
    def current(self) -> TaskMapping:
        """The mapping of the current iteration."""
        return self._timeline[0][1]

    @property
    def mapping(self) -> TaskMapping:
        """The last mapping decided on, which may not have taken effect yet."""
        return self._timeline[-1][1]

    @property
    def only_accelerators(self) -> bool:
        """Whether the node has CPU trainers without any seeds in the current iteration."""
        return self.current.cpu_trainers > 0 and not self.current.cpu_seeds

    @property
    def leaves_out_cpu(self) -> bool:
        """Whether the CPU trainers get no seeds for the rest of the run."""
        manager = self.manager
        return self.planner is None and isinstance(manager, DynamicResourceManager) and manager.leaves_out_cpu

    def split(self, num_seeds: int, iteration: int) -> list[tuple[int, int]]:
        """Return each trainer's range of an iteration's seeds; iterations must not decrease between calls."""
        current = [mapping for begin, mapping in tuple(self._timeline) if begin <= iteration][-1]
        return split_seeds(num_seeds, current.seeds)

    def begin(self) -> None:
        """Start an iteration and apply the mapping planned for it."""
        self._previous = self.current
        while len(self._timeline) > 1 and self._timeline[1][0] <= self.iteration:
            self._timeline.popleft()
        if self.planner is not None and (mapping := self.planner.take(self.iteration)) is not None:
            self.stage_times, self.planner = self.planner.times, None
            if isinstance(self.manager, DynamicResourceManager):
                self._plan_change(self.manager.adopt(mapping))
            else:
                self._timeline[0] = (self._timeline[0][0], mapping)
        self.iteration += 1

    def observe(self, reports: Sequence[StepReport]) -> Decision | None:
        """Pass the ranks' reports about the previous iteration to the policy, and return its decision."""
        is_measured = all(report.seeds >= 0 for report in reports)
        if not is_measured and self.iteration <= 1:
            return None  # no iteration has been measured yet
        cpu, missing = self.trainers.num_cpu, (None,) * len(self.trainers.devices)
        # An iteration before a resume was not measured; observing it keeps a replay aligned.
        times = (
            self._compute_times(reports) if is_measured else IterationTimes(None, None, missing[:cpu], missing[cpu:])
        )
        decision = None
        if self.manager is not None:
            decision = self.manager.observe(times)
            if decision.changed:
                self._plan_change(decision)
        if is_measured:
            self.history.append((times, decision))
            if self.planner is not None:
                costs = self.manager.costs() if isinstance(self.manager, DynamicResourceManager) else None
                rows = [report._asdict() for report in reports[cpu:] if report.seeds > 0]
                self.planner.observe(rows, self.current, costs, self.iteration)
        return decision

    def _plan_change(self, decision: Decision) -> None:
        """Apply a decision at the first iteration that no rank can have started to prepare."""
        self._timeline.append((self.iteration + self.ahead, decision.mapping))
        self._log_decision(decision)

    def rank_threads(self, trainer: int) -> tuple[int, int, int]:
        """Return one rank's threads for sampling and feature loading, in proportion to its work, and for training."""
        return self.current.rank_threads(trainer, self._uses_threads)

    def _compute_times(self, reports: Sequence[StepReport]) -> IterationTimes:
        """Return the stage times of an iteration: for each stage, the longest of all ranks."""
        cpu, mapping = self.trainers.num_cpu, self._previous
        sample, load, on_accelerator = [], [], []
        for trainer, report in enumerate(reports):
            if report.seeds <= 0:
                continue
            sampling_threads, loading_threads, _ = mapping.rank_threads(trainer, self._uses_threads)
            fraction = mapping.sampled_fraction(trainer)
            # Either device samples a whole mini-batch: scale by its fraction to get the average per iteration.
            if report.sampled_on_accelerator > 0 and fraction:
                on_accelerator.append(report.sample_accelerator * fraction)
            elif report.sample >= 0:
                sample.append(report.sample / sampling_threads * (1 - fraction))
            if report.load >= 0:
                load.append(report.load / loading_threads)
        transfer = [report.transfer for report in reports[cpu:] if report.transfer >= 0 and report.seeds > 0]
        train = tuple(report.train if report.seeds > 0 else None for report in reports)
        return IterationTimes(
            sample_cpu=max(sample, default=None),
            sample_accelerator=max(on_accelerator, default=None),
            load=max(load, default=None),
            train_cpu=train[:cpu],
            train_accelerator=train[cpu:],
            transfer=max(transfer, default=None),
            seeds=tuple(int(report.seeds) for report in reports),
            iteration=reports[-1].iteration if reports[-1].iteration > 0 else None,  # of an accelerator, if any
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue with the same shares."""
        state = {"first": self.first.to_dict(), "iteration": self.iteration}
        if self.manager is None:
            return state
        timeline = [[begin, mapping.to_dict()] for begin, mapping in self._timeline]
        return {**state, "kind": type(self.manager).__name__, "manager": self.manager.state_dict(), "planned": timeline}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; planned mappings take effect at their original iterations."""
        if self.manager is None:
            self.iteration = int(state.get("iteration", 0))
        if self.manager is None or state.get("kind") != type(self.manager).__name__:
            return  # saved without a policy, or by another one: start over
        loaded = copy.deepcopy(self.manager)  # a failure below must not leave a partially loaded state
        try:
            loaded.load_state_dict(state["manager"])
            timeline = deque((int(begin), TaskMapping.from_dict(mapping)) for begin, mapping in state["planned"])
            iteration = int(state["iteration"])
        except (KeyError, TypeError, ValueError) as error:
            rank_zero_warn(f"hyscale rebalances: the saved state does not fit ({type(error).__name__}: {error})")
            return
        self.manager, self.iteration, self._timeline = loaded, iteration, timeline
        self._previous = self.current
        if self._log_path is not None:
            self._log_path.write_text("".join(f"{decision.to_json()}\n" for decision in self.manager.log))

    def _log_decision(self, decision: Decision) -> None:
        if not self._is_logging_rank:
            return
        rank_zero_info(f"hyscale: {decision}")
        if self._log_path is not None:
            try:
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                with self._log_path.open("w" if decision.observation == 0 else "a") as file:
                    file.write(decision.to_json() + "\n")
            except OSError as error:
                if decision.observation == 0:
                    raise  # training has not started yet
                rank_zero_warn(
                    f"{self._log_path} is incomplete from observation {decision.observation} on, so a replay would "
                    f"differ: {error}"
                )
                self._log_path = None


def _make_policy(drm: bool | str | Path, mapping: TaskMapping, ahead: int, tries_cpu: bool) -> Policy | None:
    """Return the policy that ``drm`` selects; None: the mapping is fixed."""
    if drm is False:
        return None
    if not is_adaptive(drm):
        return ReplayedDecisions(read_decision_log(str(drm)))
    if mapping.accelerator_sampling:  # both sides must sample a little, since others could not be balanced
        mapping = replace(mapping, accelerator_sampling=_clamp_sampling(mapping.accelerator_sampling))
    if drm == "paper":
        return PublishedResourceManager(mapping)
    return DynamicResourceManager(mapping, ahead + 1, tries_cpu)
