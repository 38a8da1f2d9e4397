"""Dynamic resource management of hybrid training (HyScale-GNN, section IV-A): replanning from measured stage times.

Where algorithm 1 moves one unit of work per iteration (``published.py``), this manager plans again by the closed forms
of ``plan.py``, with the costs that the last iterations show. Damping, justified by
``benchmarks/hyscale/resource_manager.py``: a dead band that narrows with more measurements, and undoing every change
after which iterations are slower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from statistics import median
from typing import Any, NamedTuple

from lightning_gnn.hyscale.costs import (
    STAGE_NAMES,
    UNMEASURED,
    Cost,
    IterationTimes,
    Measurements,
    NodeCosts,
    TaskMapping,
    iteration,
    stages,
)
from lightning_gnn.hyscale.plan import best_seeds, candidates
from lightning_gnn.hyscale.resource_manager.decisions import Decision, Recorder, describe_change, format_ms

MIN_SAMPLING_SHARE = 0.01
"""Minimum sampling share of the CPU and of the accelerators while the sampling is balanced."""
DEAD_BAND = 0.12
"""Minimum relative gain of a change after one measurement; after n measurements, ``DEAD_BAND / sqrt(n)``."""
TRIAL = 5
"""Iterations before and after a change that are compared; the first of each is ignored."""
MIN_HYBRID_GAIN = 0.03
"""Minimum relative gain of an iteration's time for which the CPU trainers are kept."""
LEFT_OUT_INTERVAL = 8
"""Iterations between measurements once the CPU trainers are left out."""
_ADVICE = "(in further runs, cpu_trainers=0 also saves their processes)"


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


def replan(now: Estimate, keeps_threads: bool = False, cpu_trains: bool = True) -> tuple[TaskMapping, float, float]:
    """Return the best mapping for the estimated costs, its seconds per iteration, and those of the current one."""
    mapping, costs = now.mapping, now.costs
    total, cpu = mapping.total, mapping.cpu_trainers
    if not cpu_trains:
        costs = replace(costs, train_cpu=lambda threads: (UNMEASURED,) * cpu)
    if keeps_threads:
        found = best_seeds(costs, False, total, cpu, mapping.threads)
    else:
        found = candidates(costs, total, cpu, sum(mapping.threads))[0]
    share = mapping.accelerator_sampling if mapping.buffers is not None else found.mapping.accelerator_sampling
    if costs.sample_accelerator is not None:  # a side without measurements could not be balanced
        share = min(max(share, MIN_SAMPLING_SHARE), 1 - MIN_SAMPLING_SHARE)
    target = replace(found.mapping, accelerator_sampling=share, buffers=mapping.buffers)
    return target, found.seconds, iteration(costs, mapping)


class _Move(NamedTuple):
    """A change that is undone if iterations get slower."""

    previous: TaskMapping
    seconds: float  # of the slowest stage before the change
    times: list[float]  # of stages and trainers that the change was planned with


class DynamicResourceManager(Recorder):
    """Replan from the times of the last iterations, with constant totals of seeds and threads.

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
        self._in_flight: deque[TaskMapping] = deque([mapping] * (lag + 1), lag + 1)
        self._measured = Measurements()
        self._is_measured = False
        self._act_from = 0
        self._move: _Move | None = None
        self._seconds = deque[float](maxlen=TRIAL), deque[float](maxlen=TRIAL)  # before and after the last change
        self._blocked: tuple[int, list[float]] = (0, [])  # until an observation; the times of the change undone
        self._planned_with: tuple[int, list[float]] = (0, [])  # measurements and stage times of the last planning
        is_mixed = 0 < mapping.cpu_trainers < len(mapping.seeds)
        self._cpu_pays: bool | None = (None if mapping.cpu_seeds else False) if is_mixed else True

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
        if self.leaves_out_cpu and self._number % LEFT_OUT_INTERVAL != 1:  # the first is measured
            return self._hold("CPU trainers are left out, and planning would slow the accelerators down")
        reason = self._add_measurement(times, old)
        if reason is not None:
            return self._hold(reason)
        if times.iteration is not None and times.seeds in (None, old.seeds):
            self._add_iteration(times.iteration, old)
        previous = self._move and self._move.previous
        decision = self._decide()
        if decision.changed:
            self._in_flight[-1] = decision.mapping
            self._act_from = self._number + len(self._in_flight)
            # A change on top of one that has not been judged is judged together with it.
            is_joint = self._move is not None and self._move.previous is previous
            self._seconds = self._seconds[0 if is_joint else 1], deque(maxlen=TRIAL)
        return decision

    @property
    def leaves_out_cpu(self) -> bool:
        """Whether CPU trainers get no seeds any more: they began without, so have no times, or the trial was lost."""
        return self._cpu_pays is False

    def costs(self) -> NodeCosts[Cost] | None:
        """Return the costs that the last iterations show; None before any."""
        return self._measured.costs(self.mapping) if self._is_measured else None

    def adopt(self, mapping: TaskMapping) -> Decision:
        """Change to a mapping that was planned from a profile, and return the decision."""
        cause = f"planned from the profile: {mapping}"
        self._in_flight[-1] = mapping
        self._act_from = self._number + len(self._in_flight)
        self._move, self._planned_with = None, (0, [])
        self._seconds = deque(maxlen=TRIAL), deque(maxlen=TRIAL)
        self._cpu_pays = None if 0 < mapping.cpu_trainers < len(mapping.seeds) else True
        return self._change(mapping, "plan", cause)

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
        self._is_measured = True
        return None

    def _add_iteration(self, seconds: float, mapping: TaskMapping) -> None:
        """Add the time of an iteration with the mapping before or after the last change."""
        # The first iterations without CPU trainers are too short: their mini-batches were prepared during longer ones.
        drain = len(self._in_flight) if self.log[-1].action == "take_out" else 0
        if mapping == self.mapping and self._number >= self._act_from + drain:
            self._seconds[1].append(seconds)
        elif self._move is not None and mapping == self._move.previous:  # is still in the pipeline after the change
            self._seconds[0].append(seconds)

    def _decide(self) -> Decision:
        is_timed = any(self._seconds)
        if self.log[-1].action == "take_out":
            return self._end_trial()
        if self._number < self._act_from:
            return self._hold(f"wait {self._act_from - self._number} more until the last change takes effect")
        now = Estimate(self.mapping, self._measured.costs(self.mapping), self._measured.count(self.mapping))
        if not now.count:
            return self._hold("not every task of this mapping has been measured")
        before, after = self._seconds
        is_judged = self._move is None or len(before) < 2 or len(after) == TRIAL
        if not is_judged:
            if len(after) < (TRIAL if self.log[-1].action == "bring_back" else 3):
                return self._hold("measure what the last change brought")
            clear = 1 + 2 * DEAD_BAND
            is_judged = min(list(after)[1:]) > clear * median(before) or max(after) * clear < median(before)
        if is_judged and (undone := self._undo(now)) is not None:
            return undone
        is_tried = self._cpu_pays is not None or not self.mapping.cpu_seeds
        if not is_tried and len(after) == TRIAL:
            return self._begin_trial(now)
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
        target, predicted, current = replan(now, is_blocked, self._cpu_pays is not False)
        if after and not is_tried and not target.cpu_seeds:  # such plans went back and forth with the estimates
            return self._begin_trial(now)
        if target == self.mapping or predicted >= (1 - threshold) * current:
            return self._hold(f"{cause}; no change would shorten it by {threshold:.1%}")
        if self._move is None:  # judged; otherwise both changes are judged together
            self._move = _Move(self.mapping, now.times.bottleneck, times)
        self._planned_with = 0, []
        action = "balance_work" if target.threads == self.mapping.threads else "balance_thread"
        change = f"{describe_change(now.mapping, target)}, predicted {format_ms(predicted)}"
        return self._change(target, action, f"{cause}; {change}")

    def _begin_trial(self, now: Estimate) -> Decision:
        """Take the CPU trainers out, since no stage time shows whether they pay."""
        target, _, _ = replan(now, cpu_trains=False)
        self._move, self._planned_with = _Move(self.mapping, now.times.bottleneck, []), (0, [])
        return self._change(target, "take_out", f"a trial; {describe_change(self.mapping, target)}")

    def _end_trial(self) -> Decision:
        """Leave the CPU trainers out if iterations with them are clearly slower; otherwise bring them back."""
        assert self._move is not None
        if len(self._seconds[1]) < TRIAL:
            return self._hold("a trial without the CPU trainers")
        together, alone = (median([*each][1:] or each) for each in self._seconds)
        self._cpu_pays = together < (1 + DEAD_BAND) * alone
        cause = f"{format_ms(alone)} an iteration without the CPU trainers, {format_ms(together)} with them"
        action, target = ("bring_back", self._move.previous) if self._cpu_pays else ("leave_out", self.mapping)
        if not self._cpu_pays:
            cause += f" {_ADVICE}"
        # The first iterations are slow while memory grows, so small differences are measured once more.
        is_clear = abs(together - alone) >= DEAD_BAND * alone
        self._move = None if is_clear else _Move(self.mapping, alone, [])
        return self._change(target, action, f"{cause}; {describe_change(self.mapping, target)}")

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
        is_trial = move.previous.cpu_seeds == 0 < self.mapping.cpu_seeds
        if after < (1 - MIN_HYBRID_GAIN if is_trial else 1 + margin) * before:
            return None
        self._blocked = 2 * self._number, move.times
        cause, action = f"an iteration takes {format_ms(after)}, before {format_ms(before)}", "undo"
        if is_trial:
            self._cpu_pays, cause, action = False, f"{cause} {_ADVICE}", "leave_out"
        return self._change(move.previous, action, f"{cause}; {describe_change(now.mapping, move.previous)}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines all further decisions, as lists, dicts and numbers."""
        move = self._move
        return {
            **super().state_dict(),
            "in_flight": [mapping.to_dict() for mapping in self._in_flight],
            "history": self._measured.state(),
            "act_from": self._act_from,
            "move": None if move is None else [move.previous.to_dict(), move.seconds, move.times],
            "blocked": list(self._blocked),
            "planned_with": list(self._planned_with),
            "seconds": [*map(list, self._seconds)],
            "cpu_pays": self._cpu_pays,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raise ValueError if it is for other work."""
        super().load_state_dict(state)
        self._in_flight.clear()
        self._in_flight.extend(map(TaskMapping.from_dict, state["in_flight"]))
        self._measured.load_state(state["history"])
        self._act_from = state["act_from"]
        move, (before, after) = state["move"], state["seconds"]
        self._move = None if move is None else _Move(TaskMapping.from_dict(move[0]), float(move[1]), list(move[2]))
        self._seconds, self._cpu_pays = (deque(before, TRIAL), deque(after, TRIAL)), state["cpu_pays"]
        self._blocked = int(state["blocked"][0]), list(state["blocked"][1])
        self._planned_with = int(state["planned_with"][0]), list(state["planned_with"][1])


def _are_equal(times: list[float], others: list[float], tolerance: float) -> bool:
    pairs = zip(times, others, strict=False)
    return len(times) == len(others) and all(abs(new - old) <= tolerance * old for new, old in pairs)
