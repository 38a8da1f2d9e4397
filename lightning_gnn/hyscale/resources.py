"""Dynamic resource management of hybrid training (HyScale-GNN, section IV-A): algorithm 1, damped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median
from typing import Any

from lightning_gnn.hyscale.balance import accelerators_alone, balance_work, gain, moved_threads, remedies
from lightning_gnn.hyscale.bottleneck import Remedy, find_remedy
from lightning_gnn.hyscale.damping import LONGER, LOOK, REMEMBERED, SETTLED, SURE, Damping
from lightning_gnn.hyscale.decisions import STAGE_NAMES, Decision, difference, milliseconds, read_decisions
from lightning_gnn.hyscale.estimates import Costs, Estimate, Measurement
from lightning_gnn.hyscale.mapping import IterationTimes, Mapping, Stage


@dataclass
class _Trial:
    """Another mapping for some iterations, to be compared with the one before."""

    hybrid: bool
    back: Mapping
    seconds: float
    error: float


@dataclass
class _Moved:
    """Threads that were moved for a stage, the slowest, which took so long and should be faster now."""

    back: Mapping
    stage: Stage
    before: float
    predicted: float


class DynamicResourceManager:
    """Ease the slowest stage after each iteration (algorithm 1), the batch and the number of threads constant.

    Where the paper's remedy gains nothing, since no thread is left to move, the other one is tried. CPU trainers that
    do not help get no seeds, and are brought back on probation. How it is damped: :class:`Damping`.

    Args:
        mapping: The mapping to begin with.
        num_threads: CPU threads of all tasks; by default those of the mapping.
        damping: How carefully it acts.

    Raises:
        ValueError: The mapping's threads are not ``num_threads`` together.
    """

    def __init__(self, mapping: Mapping, num_threads: int | None = None, damping: Damping | None = None) -> None:
        if num_threads is not None and sum(mapping.threads) != num_threads:
            raise ValueError(f"the mapping has {sum(mapping.threads)} threads, but num_threads={num_threads}")
        self.mapping = mapping
        self.damping = damping or Damping()
        self.log: list[Decision] = [Decision(mapping, f"start with {mapping}", "start", 0, True)]
        """The decisions that changed the mapping, the start first."""
        self._number = 0
        self._history: deque[Measurement] = deque(maxlen=REMEMBERED)
        self._costs = Costs(self.damping.history)
        self._changed: str | None = None
        self._look_from = 0
        self._finding = ""
        self._in_flight: deque[Mapping] = deque([mapping], maxlen=self.damping.lag + 1)
        self._act_from = 0
        self._moved: _Moved | None = None
        self._blocked: dict[tuple[str, str], int] = {}
        self._trial: _Trial | None = None
        self._next_trial = 4 * (self.damping.lag + self.damping.window)
        self._patience = self.damping.patience
        self._hybrid = mapping

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
        decision = self._decide() if reason is None else self._hold(reason)
        if decision.changed:
            self.mapping = self._in_flight[-1] = decision.mapping
            self._act_from = self._number + self.damping.lag + 1
            self.log.append(decision)
        return decision

    def _remember(self, times: IterationTimes, mapping: Mapping) -> str | None:
        """Add a measurement; return why it does not count, or None."""
        if (len(times.train_cpu), len(times.trainers)) != (mapping.cpu_trainers, len(mapping.seeds)):
            raise ValueError(
                f"times of {len(times.train_cpu)} CPU trainers and {len(times.train_accelerator)} accelerators, but "
                f"the mapping has {mapping.cpu_trainers} and {len(mapping.seeds) - mapping.cpu_trainers}"
            )
        if times.seeds is not None and times.seeds != mapping.seeds:
            if len(times.seeds) != len(mapping.seeds):
                raise ValueError(f"times for seeds {times.seeds}, but there are {len(mapping.seeds)} trainers")
            whole, part = mapping.total, sum(times.seeds)
            if part < whole / 2:
                return f"only {part} of {whole} seeds: does not count"
            seeds = tuple(max(1, round(n * whole / part)) if n else 0 for n in times.seeds)
            mapping, times = replace(mapping, seeds=seeds), times.scaled(whole / part)
        for index, (seconds, seeds_there) in enumerate(zip(times.trainers, mapping.seeds, strict=True)):
            if seeds_there and not seconds:
                return f"no time of trainer {index}, which has seeds: does not count"
        measurement = Measurement(mapping, times)
        changed = self._costs.add(measurement, self._history)
        self._history.append(measurement)
        if changed is not None:
            self._forget(changed)
        return None

    def _near(self) -> list[Measurement]:
        return [measurement for measurement in self._history if measurement.is_near(self.mapping)]

    def _decide(self) -> Decision:
        damping = self.damping
        if self._trial is not None:
            return self._judge(self._trial)
        if self._number < self._act_from:
            return self._hold(f"wait {self._act_from - self._number} more for the last change to show")
        if self._number < self._look_from:
            return self._hold(self._finding)
        measured = self._costs.fewest(self.mapping)
        if measured < damping.window:
            return self._hold(f"{measured} of {damping.window} measurements of this mapping")
        now = self._estimate()
        undone = self._undo(now)
        if undone is not None:
            return undone
        remedy = find_remedy(now.stages)
        cause = f"{STAGE_NAMES[remedy.bottleneck]} is the slowest stage, {milliseconds(now.bottleneck)}"
        if self._changed is not None:
            cause = f"{self._changed} runs at another speed; {cause}"
            self._changed = None
        for action, means in remedies(now, remedy, self._may_move):
            decision = self._attempt(now, action, means, cause)
            if decision is not None:
                if action == "balance_thread":
                    slowest = now.under(decision.mapping).stages()[remedy.bottleneck]
                    self._moved = _Moved(self.mapping, remedy.bottleneck, now.bottleneck, slowest)
                return decision
        decision = self._try_out(now, remedy)
        if decision is not None:
            return decision
        self._finding = f"{cause}; nothing would shorten it by {self._threshold(now):.1%}"
        self._look_from = self._number + min(max(measured // LOOK, 1), LOOK)
        return self._hold(self._finding)

    def _estimate(self) -> Estimate:
        return self._costs.estimate(self.mapping, self._history[-1].times)

    def _attempt(self, now: Estimate, action: str, means: Callable[[], Mapping], cause: str) -> Decision | None:
        """Return the decision to do it, or None if it gains too little."""
        target = means()
        if action == "balance_work" and now.mapping.cpu_seeds and now.mapping.accelerator_seeds and self._is_settled():
            alone = accelerators_alone(now)
            if self._pointless(now, target, alone):
                self._hybrid = target
                self._put_off()
                text = f"{cause}; the CPU trainers do not help: {self._predicted(now, alone)}"
                return Decision(alone, text, "take_out", self._number, True)
        if target == now.mapping or gain(now, target) <= self._threshold(now):
            return None
        return Decision(target, f"{cause}; {self._predicted(now, target)}", action, self._number, True)

    def _pointless(self, now: Estimate, hybrid: Mapping, alone: Mapping) -> bool:
        """Whether accelerators alone would train as fast as together with the CPU, and all be faster than now."""
        together, single = now.under(hybrid).propagation, now.under(alone).propagation
        return single <= together * (1 + self.damping.worth) and gain(now, alone) > self._threshold(now)

    def _is_settled(self) -> bool:
        """Whether enough is measured to take the CPU trainers out, which are not missed soon if that was wrong."""
        return self._costs.fewest(self.mapping) >= SETTLED * self.damping.window

    def _threshold(self, now: Estimate) -> float:
        return max(self.damping.dead_band, SURE * now.error)

    @staticmethod
    def _predicted(now: Estimate, mapping: Mapping) -> str:
        return f"{difference(now.mapping, mapping)}, predicted {milliseconds(now.under(mapping).bottleneck)}"

    def _undo(self, now: Estimate) -> Decision | None:
        """Move threads back if they brought less than half of what was predicted, and no more of them that way."""
        moved, self._moved = self._moved, None
        if moved is None or moved.back.seeds != self.mapping.seeds:
            return None
        seconds = now.stages.get(moved.stage, 0.0)
        slower = now.bottleneck > moved.before * (1 + self._threshold(now))
        if not slower and seconds <= (moved.before + moved.predicted) / 2:
            return None
        self._blocked[moved_threads(moved.back, self.mapping)] = self._number + self.damping.patience
        text = f"{STAGE_NAMES[moved.stage]} takes {milliseconds(seconds)}, before {milliseconds(moved.before)}"
        if slower:
            text = f"{text}, and the slowest stage {milliseconds(now.bottleneck)}"
        text = f"{text}: {difference(self.mapping, moved.back)}"
        return Decision(moved.back, text, "undo", self._number, True)

    def _may_move(self, source: Stage, to: Stage) -> bool:
        return self._number >= self._blocked.get((source, to), 0)

    def _put_off(self) -> None:
        self._next_trial = self._number + self._patience
        self._patience *= 2

    def _try_out(self, now: Estimate, remedy: Remedy) -> Decision | None:
        """Begin a trial: accelerators alone, or CPU trainers that are out."""
        mapping = self.mapping
        if self._number < self._next_trial or not mapping.cpu_trainers or not mapping.accelerator_seeds:
            return None
        iteration, error = self._iteration(self._near()[-self._costs.fewest(mapping) :])
        seconds = iteration or now.bottleneck
        if not mapping.cpu_seeds:
            if remedy.bottleneck != "accelerator" or not self._hybrid.cpu_seeds:
                return None
            self._trial = _Trial(True, mapping, seconds, error)
            text = f"the CPU trainers on probation, against {milliseconds(seconds)} without them"
            text = f"{text}: {difference(mapping, self._hybrid)}"
            return Decision(self._hybrid, text, "bring_back", self._number, True)
        alone = accelerators_alone(now)
        lost = now.under(alone).bottleneck / now.bottleneck - 1
        if iteration is None or lost >= self.damping.doubtful:
            return None
        self._trial = _Trial(False, mapping, seconds, error)
        self._hybrid = mapping
        text = (
            f"a trial without the CPU trainers, against {milliseconds(seconds)} with them: {difference(mapping, alone)}"
        )
        return Decision(alone, text, "take_out", self._number, True)

    def _judge(self, trial: _Trial) -> Decision:
        """End a trial when enough is measured."""
        since = self._number - self._act_from + 1
        near = self._near()[-since:] if since > 0 else []
        if len(near) < self.damping.trial:
            return self._hold(f"trial: {len(near)} of {self.damping.trial} measurements")
        now = self._estimate()
        iteration, error = self._iteration(near)
        seconds = iteration or now.bottleneck
        unclear = abs(seconds - trial.seconds) < 2 * sqrt(error * error + trial.error * trial.error)
        if unclear and len(near) < min(LONGER * self.damping.trial, REMEMBERED):
            return self._hold(f"trial: {len(near)} measurements do not tell {milliseconds(seconds)} from before")
        self._trial = None
        if trial.hybrid:  # its split may be out of date: what counts is what the best one promises
            seconds += min(0.0, now.under(balance_work(now)).bottleneck - now.bottleneck)
        with_cpu, without = (seconds, trial.seconds) if trial.hybrid else (trial.seconds, seconds)
        helps = with_cpu < without * (1.0 if unclear else 1 - self.damping.worth)
        text = f"{milliseconds(with_cpu)} with the CPU trainers, {milliseconds(without)} without"
        if helps == trial.hybrid:
            self._patience = self.damping.patience
        self._put_off()
        if helps == trial.hybrid:
            return self._hold(f"{text}: it stays so")
        action = "bring_back" if helps else "take_out"
        return Decision(trial.back, f"{text}: {difference(self.mapping, trial.back)}", action, self._number, True)

    @staticmethod
    def _iteration(measurements: list[Measurement]) -> tuple[float | None, float]:
        """Return the median time of an iteration, and its standard error by the median deviation from it."""
        known = [measured.times.iteration for measured in measurements if measured.times.iteration is not None]
        if not known:
            return None, 0.0
        middle = median(known)
        return middle, 1.2533 * 1.4826 * median(abs(seconds - middle) for seconds in known) / sqrt(len(known))

    def _forget(self, changed: str) -> None:
        """Begin anew after a speed has changed."""
        self._changed = changed
        self._look_from = 0
        self._blocked.clear()
        self._moved = None
        self._patience = self.damping.patience
        if not self.mapping.cpu_seeds:
            self._next_trial = self._number

    def _hold(self, explanation: str) -> Decision:
        return Decision(self.mapping, explanation, "hold", self._number)

    def state_dict(self) -> dict[str, Any]:
        """Return all that its next decisions depend on, as plain lists, dicts and numbers."""
        return {
            "mapping": self.mapping.to_dict(),
            "hybrid": self._hybrid.to_dict(),
            "in_flight": [mapping.to_dict() for mapping in self._in_flight],
            "history": [[entry.mapping.to_dict(), entry.times.to_dict()] for entry in self._history],
            "log": [decision.to_json() for decision in self.log],
            "costs": self._costs.state(),
            "changed": self._changed,
            "number": self._number,
            "act_from": self._act_from,
            "look_from": self._look_from,
            "finding": self._finding,
            "next_trial": self._next_trial,
            "patience": self._patience,
            "moved": None if self._moved is None else {**vars(self._moved), "back": self._moved.back.to_dict()},
            "blocked": [[*pair, until] for pair, until in self._blocked.items()],
            "trial": None if self._trial is None else {**vars(self._trial), "back": self._trial.back.to_dict()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: It belongs to other trainers or another batch size.
        """
        mapping = Mapping.from_dict(state["mapping"])
        found, expected = (
            (each.total, each.cpu_trainers, len(each.seeds), sum(each.threads), each.accelerator_sampling > 0)
            for each in (mapping, self.mapping)
        )
        if found != expected:
            raise ValueError(f"the saved state is for {mapping}, which does not fit {self.mapping}")
        self.mapping, self._hybrid = mapping, Mapping.from_dict(state["hybrid"])
        self._in_flight.clear()
        self._in_flight.extend(map(Mapping.from_dict, state["in_flight"]))
        self._history.clear()
        for entry, times in state["history"]:
            self._history.append(Measurement(Mapping.from_dict(entry), IterationTimes.from_dict(times)))
        self._costs.load_state(state["costs"])
        self.log = read_decisions(state["log"])
        self._changed, self._finding, self._look_from = state["changed"], state["finding"], state["look_from"]
        self._number, self._act_from = state["number"], state["act_from"]
        self._next_trial, self._patience = state["next_trial"], state["patience"]
        moved, trial = state["moved"], state["trial"]
        self._moved = None if moved is None else _Moved(**{**moved, "back": Mapping.from_dict(moved["back"])})
        self._blocked = {(source, to): until for source, to, until in state["blocked"]}
        self._trial = None if trial is None else _Trial(**{**trial, "back": Mapping.from_dict(trial["back"])})
