"""Dynamic resource management of hybrid training (HyScale-GNN, section IV-A): replanning from measured stage times.

Where algorithm 1 moves one unit of work per iteration (``published.py``), this manager plans again by the closed forms
of ``planner/relaxation.py``, with the costs that the last iterations show. Damping, justified by
``benchmarks/hyscale/resource_manager.py``: a dead band that narrows with more measurements, and undoing useless moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from statistics import median
from typing import Any, NamedTuple

from lightning_gnn.hyscale.planner.costs import FREE, NodeCosts
from lightning_gnn.hyscale.planner.relaxation import best_seeds, candidates, resource_seconds
from lightning_gnn.hyscale.resource_manager.decisions import STAGE_NAMES, Decision, Recorder, describe_change, format_ms
from lightning_gnn.hyscale.resource_manager.estimates import Estimate, Measurements
from lightning_gnn.hyscale.resource_manager.mapping import Cost, IterationTimes, TaskMapping

MIN_SAMPLING_SHARE = 0.01
"""Minimum sampling share of the CPU and of the accelerators while the sampling is balanced."""
DEAD_BAND = 0.12
"""Minimum relative gain of a change after one measurement; after n measurements, ``DEAD_BAND / sqrt(n)``."""
TRIAL = 5
"""Iterations with the CPU trainers that are compared with as many without them; the first of each is ignored."""
MIN_HYBRID_GAIN = 0.03
"""Minimum relative gain of an iteration's time for which the CPU trainers are kept."""
LEFT_OUT_INTERVAL = 8
"""Iterations between plans once the CPU trainers are left out."""
_UNMEASURED = Cost(1e6, 1.0)
"""Cost of a trainer that has not been measured: it gets no seeds."""


def measured_costs(now: Estimate) -> NodeCosts:
    """Return the costs of a node as estimated from its last iterations."""
    mapping, times = now.mapping, now.times
    sampler, loader, trainer = mapping.threads
    total, cpu = mapping.total, mapping.cpu_trainers
    share = 0.0 if mapping.buffers is not None else mapping.accelerator_sampling
    costs = [_UNMEASURED if cost is None else cost for cost in now.costs]
    load = Cost(0.0, (times.load or 0.0) * loader / total)
    on_accelerator = None
    if share and times.sample_accelerator:
        count = len(mapping.seeds) - cpu
        on_accelerator = Cost(0.0, times.sample_accelerator * count / (share * total))
    return NodeCosts(
        cores=sum(mapping.threads),  # the threads are what there is to distribute
        sample=Cost(0.0, (times.sample_cpu or 0.0) * sampler / total / (1 - share if share < 1 else 1.0)),
        load=lambda threads: load.scaled(1 / threads),
        train_cpu=lambda threads: tuple(cost.scaled(trainer / threads) for cost in costs[:cpu]),
        train=tuple(costs[cpu:]),
        transfer=Cost(0.0, times.transfer / max((1, *mapping.seeds[cpu:]))) if times.transfer else FREE,
        sample_accelerator=on_accelerator,
        takes_turns=False,  # the measured steps of an accelerator include the time that its sampling costs them
    )


def replan(now: Estimate, keeps_threads: bool = False, cpu_trains: bool = True) -> tuple[TaskMapping, float, float]:
    """Return the best mapping for the estimated costs, its seconds per iteration, and those of the current one."""
    mapping = now.mapping
    total, cpu = mapping.total, mapping.cpu_trainers
    costs = measured_costs(now if cpu_trains else replace(now, costs=(*(None,) * cpu, *now.costs[cpu:])))
    if keeps_threads:
        found = best_seeds(costs, False, total, cpu, mapping.threads)
    else:
        found = candidates(costs, total, cpu, sum(mapping.threads))[0]
    share = mapping.accelerator_sampling if mapping.buffers is not None else found.mapping.accelerator_sampling
    if costs.sample_accelerator is not None:  # a side without measurements could not be balanced
        share = min(max(share, MIN_SAMPLING_SHARE), 1 - MIN_SAMPLING_SHARE)
    current = max(resource_seconds(costs, False, mapping.seeds, mapping.threads, mapping.accelerator_fraction))
    target = replace(found.mapping, accelerator_sampling=share, buffers=mapping.buffers)
    return target, found.seconds, current


def _no_seconds() -> tuple[deque[float], deque[float]]:
    return deque(maxlen=TRIAL), deque(maxlen=TRIAL)


class _Move(NamedTuple):
    """A move of threads that is undone unless iterations get faster."""

    previous: TaskMapping
    seconds: float  # of the slowest stage before the change


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
        self._in_flight: deque[TaskMapping] = deque([mapping], maxlen=lag + 1)
        self._measured = Measurements()
        self._last: IterationTimes | None = None
        self._act_from = 0
        self._pending_move: _Move | None = None
        self._blocked_until = 0
        self._planned_with: tuple[int, list[float]] = (0, [])  # measurements and stage times of the last planning
        # Seconds of iterations without and with CPU trainers; the mapping to return to; whether CPU trainers pay.
        self._seconds = _no_seconds()
        self._before_trial: TaskMapping | None = None
        self._cpu_pays: bool | None = None if 0 < mapping.cpu_trainers < len(mapping.seeds) else True

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
        decision = self._hold(reason) if isinstance(reason, str) else self._try_without_cpu(times, reason)
        if decision.changed:
            self._in_flight[-1] = decision.mapping
            self._act_from = self._number + len(self._in_flight)
        return decision

    @property
    def leaves_out_cpu(self) -> bool:
        """Whether the trial showed that the CPU trainers do not pay: they get no seeds any more."""
        return self._cpu_pays is False

    def costs(self) -> NodeCosts | None:
        """Return the costs that the last iterations show; None before any."""
        return None if self._last is None else measured_costs(self._measured.estimate(self.mapping, self._last))

    def adopt(self, mapping: TaskMapping) -> Decision:
        """Change to a mapping that was planned from a profile, and return the decision."""
        cause = f"planned from the profile: {mapping}"
        self._in_flight[-1] = mapping
        self._act_from = self._number + len(self._in_flight)
        self._pending_move, self._planned_with = None, (0, [])
        self._seconds, self._before_trial = _no_seconds(), None
        self._cpu_pays = None if 0 < mapping.cpu_trainers < len(mapping.seeds) else True
        return self._change(mapping, "plan", cause)

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
        self._last = times
        return times

    def _try_without_cpu(self, times: IterationTimes, last: IterationTimes) -> Decision:
        """Compare iterations with and without the CPU trainers once, which no stage time shows; then decide."""
        mapping, seconds = self.mapping, self._seconds
        if self._cpu_pays is not None or (self._before_trial is None and times.iteration is None):
            return self._decide(last)
        for each in {mapping, self._before_trial or mapping}:  # those of the trial are still in preparation at first
            if times.iteration is not None and times.seeds == each.seeds:
                seconds[each.cpu_seeds > 0].append(times.iteration)
        if self._before_trial is not None:
            if len(seconds[0]) < TRIAL:
                return self._hold("a trial without the CPU trainers")
            alone, together = (median(list(each)[1:] or [0.0]) for each in seconds)
            self._cpu_pays = together < (1 - MIN_HYBRID_GAIN) * alone
            cause = f"{format_ms(alone)} an iteration without the CPU trainers, {format_ms(together)} with them"
            action, target = ("bring_back", self._before_trial) if self._cpu_pays else ("leave_out", mapping)
            return self._change(target, action, f"{cause}; {describe_change(mapping, target)}")
        if self._number - self.log[-1].observation < TRIAL or not mapping.cpu_seeds:
            decision = self._decide(last)
            if decision.changed:
                self._seconds = _no_seconds()
            return decision
        now = self._measured.estimate(mapping, last)
        if not now.count:
            return self._hold("not every task of this mapping has been measured")
        self._before_trial, self._pending_move = mapping, None
        target, _, _ = replan(now, cpu_trains=False)
        return self._change(target, "take_out", f"a trial; {describe_change(mapping, target)}")

    def _decide(self, last: IterationTimes) -> Decision:
        if self.leaves_out_cpu and self._number % LEFT_OUT_INTERVAL:
            return self._hold("CPU trainers are left out, and planning would slow the accelerators down")
        if self._number < self._act_from:
            return self._hold(f"wait {self._act_from - self._number} more until the last change takes effect")
        now = self._measured.estimate(self.mapping, last)
        if not now.count:
            return self._hold("not every task of this mapping has been measured")
        undone = self._undo(now)
        if undone is not None:
            return undone
        slowest = max(now.stages, key=now.stages.__getitem__)
        cause = f"{STAGE_NAMES[slowest]} is the slowest stage, {format_ms(now.bottleneck)}"
        threshold = DEAD_BAND / sqrt(now.count)
        # Planning takes milliseconds: only where twice as many measurements, or other times, can change its result.
        count, before = self._planned_with
        seconds = [each or 0.0 for each in (*now.stages.values(), *now.times.trainers)]
        is_unchanged = all(abs(new - old) <= threshold * old for new, old in zip(seconds, before, strict=False))
        if now.count < 2 * count and is_unchanged:
            return self._hold(f"{cause}; planned for it already")
        self._planned_with = now.count, seconds
        # A useless move of threads before the trial could not be undone in time.
        keeps_threads = (self._cpu_pays is None and last.iteration is not None) or self._number < self._blocked_until
        target, predicted, current = replan(now, keeps_threads, self._cpu_pays is not False)
        if target == self.mapping or predicted >= (1 - threshold) * current:
            return self._hold(f"{cause}; no change would shorten it by {threshold:.1%}")
        if target.threads != self.mapping.threads:
            self._pending_move = _Move(self.mapping, now.bottleneck)
        self._planned_with = 0, []
        action = "balance_work" if target.threads == self.mapping.threads else "balance_thread"
        change = f"{describe_change(now.mapping, target)}, predicted {format_ms(predicted)}"
        return self._change(target, action, f"{cause}; {change}")

    def _undo(self, now: Estimate) -> Decision | None:
        """Undo the last move of threads if it had no gain, and move none until twice as many observations."""
        moved, self._pending_move = self._pending_move, None
        if moved is None or now.bottleneck < moved.seconds:
            return None
        self._blocked_until = 2 * self._number
        cause = f"an iteration takes {format_ms(now.bottleneck)}, before {format_ms(moved.seconds)}"
        return self._change(moved.previous, "undo", f"{cause}; {describe_change(now.mapping, moved.previous)}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines all further decisions, as lists, dicts and numbers."""
        moved = self._pending_move
        return {
            **super().state_dict(),
            "in_flight": [mapping.to_dict() for mapping in self._in_flight],
            "history": self._measured.state(),
            "act_from": self._act_from,
            "moved": None if moved is None else [moved.previous.to_dict(), moved.seconds],
            "blocked_until": self._blocked_until,
            "planned_with": list(self._planned_with),
            "trial": [*map(list, self._seconds), self._before_trial and self._before_trial.to_dict(), self._cpu_pays],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raise ValueError if it is for other work."""
        super().load_state_dict(state)
        self._in_flight.clear()
        self._in_flight.extend(map(TaskMapping.from_dict, state["in_flight"]))
        self._measured.load_state(state["history"])
        # A checkpoint from before the trial existed keeps its CPU trainers.
        without, together, before, self._cpu_pays = state.get("trial", ([], [], None, True))
        self._seconds = deque(without, TRIAL), deque(together, TRIAL)
        self._before_trial = None if before is None else TaskMapping.from_dict(before)
        move, self._blocked_until = state["moved"], int(state["blocked_until"])
        self._act_from = state["act_from"]
        self._planned_with = int(state["planned_with"][0]), list(state["planned_with"][1])
        self._pending_move = None if move is None else _Move(TaskMapping.from_dict(move[0]), float(move[1]))
