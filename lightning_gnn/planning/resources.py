"""Dynamic resource management of hybrid training (HyScale-GNN, section IV-A): algorithm 1, damped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lightning_gnn.planning.balance import accelerators_alone, balance_work, gain, moved_threads, remedies
from lightning_gnn.planning.bottleneck import Remedy, find_remedy
from lightning_gnn.planning.damping import REMEMBERED, Damping
from lightning_gnn.planning.decisions import STAGE_NAMES, Decision, difference, milliseconds, read_decisions
from lightning_gnn.planning.estimates import Estimate, Measurement, estimate, has_jumped
from lightning_gnn.planning.mapping import IterationTimes, Mapping, Stage

_FAR_OFF = 0.1
"""A step that gains more than this is taken whole."""


@dataclass
class _Trial:
    """Another mapping for some iterations, to be compared with the one before."""

    hybrid: bool
    back: Mapping
    seconds: float


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
        self._in_flight: deque[Mapping] = deque([mapping], maxlen=self.damping.lag + 1)
        self._act_from = 0
        self._moved: tuple[Mapping, float, float] | None = None
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
        if times.seeds is not None:
            if len(times.seeds) != len(mapping.seeds):
                raise ValueError(f"times for seeds {times.seeds}, but there are {len(mapping.seeds)} trainers")
            whole, part = mapping.total, sum(times.seeds)
            if part < whole / 2:
                return f"only {part} of {whole} seeds: does not count"
            seeds = tuple(max(1, round(n * whole / part)) if n else 0 for n in times.seeds)
            mapping, times = replace(mapping, seeds=seeds), times.scaled(whole / part)
        missing = [index for index, n in enumerate(mapping.seeds) if n and not times.trainers[index]]
        if missing:
            return f"no time of trainer {missing[0]}, which has seeds: does not count"
        self._history.append(Measurement(mapping, times))
        return None

    def _near(self) -> list[Measurement]:
        return [measurement for measurement in self._history if measurement.is_near(self.mapping)]

    def _decide(self) -> Decision:
        damping = self.damping
        if self._trial is not None:
            return self._judge(self._trial)
        near = self._near()
        jumped = has_jumped(near)
        if jumped is not None:
            self._forget(jumped[1])
            near = self._near()
        if self._number < self._act_from:
            return self._hold(f"wait {self._act_from - self._number} more for the last change to show")
        if len(near) < damping.window:
            return self._hold(f"{len(near)} of {damping.window} measurements of this mapping")
        now = estimate(self.mapping, near[-damping.history :], self._history)
        undone = self._undo(now)
        if undone is not None:
            return undone
        remedy = find_remedy(now.times.stages())
        cause = f"{STAGE_NAMES[remedy.bottleneck]} is the slowest stage, {milliseconds(now.bottleneck)}"
        if jumped is not None:
            cause = f"{jumped[0]} runs at another speed; {cause}"
        for action, means in remedies(now, remedy, self._may_move):
            decision = self._attempt(now, action, means, cause)
            if decision is not None:
                if action == "balance_thread":
                    self._moved = self.mapping, now.bottleneck, now.under(decision.mapping).bottleneck
                return decision
        return self._try_out(now, remedy) or self._hold(
            f"{cause}; nothing would shorten it by {self._threshold(now):.1%}"
        )

    def _attempt(self, now: Estimate, action: str, means: Callable[[float], Mapping], cause: str) -> Decision | None:
        """Return the decision to do it, or None if it gains too little."""
        target = means(1.0)
        gained = gain(now, target)
        if action == "balance_work" and now.mapping.cpu_seeds and now.mapping.accelerator_seeds:
            alone, together = accelerators_alone(now), balance_work(now)
            if self._pointless(now, together, alone):
                self._hybrid = together
                self._put_off()
                text = f"{cause}; the CPU trainers do not help: {self._predicted(now, alone)}"
                return Decision(alone, text, "take_out", self._number, True)
        if gained <= self._threshold(now):
            return None
        mapping = target if gained > _FAR_OFF else means(0.5)
        if mapping == now.mapping:
            return None
        text = f"{cause}; {self._predicted(now, mapping)}"
        return Decision(mapping, text, action, self._number, True)

    def _pointless(self, now: Estimate, hybrid: Mapping, alone: Mapping) -> bool:
        """Whether accelerators alone would train as fast as together with the CPU, and all be faster than now."""
        together, single = now.under(hybrid).propagation, now.under(alone).propagation
        return single <= together * (1 + self.damping.worth) and gain(now, alone) > self._threshold(now)

    def _threshold(self, now: Estimate) -> float:
        return max(self.damping.dead_band, 1.5 * now.error)

    @staticmethod
    def _predicted(now: Estimate, mapping: Mapping) -> str:
        return f"{difference(now.mapping, mapping)}, predicted {milliseconds(now.under(mapping).bottleneck)}"

    def _undo(self, now: Estimate) -> Decision | None:
        """Move threads back if the slowest stage became slower, and no more of them if they brought little."""
        moved, self._moved = self._moved, None
        if moved is None or moved[0].seeds != self.mapping.seeds:
            return None
        back, before, predicted = moved
        if predicted < before * (1 - self._threshold(now)) and now.bottleneck > (before + predicted) / 2:
            self._blocked[moved_threads(back, self.mapping)] = self._number + self.damping.patience
        if now.bottleneck <= before * (1 + self._threshold(now)):
            return None
        text = f"the slowest stage takes {milliseconds(now.bottleneck)}, before {milliseconds(before)}"
        text = f"{text}: {difference(self.mapping, back)}"
        return Decision(back, text, "undo", self._number, True)

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
        seconds = now.times.iteration or now.bottleneck
        if not mapping.cpu_seeds:
            if remedy.bottleneck != "accelerator" or not self._hybrid.cpu_seeds:
                return None
            self._trial = _Trial(True, mapping, seconds)
            text = f"the CPU trainers on probation, against {milliseconds(seconds)} without them"
            text = f"{text}: {difference(mapping, self._hybrid)}"
            return Decision(self._hybrid, text, "bring_back", self._number, True)
        alone = accelerators_alone(now)
        lost = now.under(alone).bottleneck / now.bottleneck - 1
        if now.times.iteration is None or lost >= self.damping.doubtful:
            return None
        self._trial = _Trial(False, mapping, seconds)
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
        now = estimate(self.mapping, near)
        seconds = median(measurement.times.iteration or measurement.times.bottleneck for measurement in near)
        self._trial = None
        if trial.hybrid:  # its split may be out of date: what counts is what the best one promises
            seconds += min(0.0, now.under(balance_work(now)).bottleneck - now.bottleneck)
        with_cpu, without = (seconds, trial.seconds) if trial.hybrid else (trial.seconds, seconds)
        helps = with_cpu < without * (1 - self.damping.worth)
        text = f"{milliseconds(with_cpu)} with the CPU trainers, {milliseconds(without)} without"
        if helps == trial.hybrid:
            self._patience = self.damping.patience
        self._put_off()
        if helps == trial.hybrid:
            return self._hold(f"{text}: it stays so")
        action = "bring_back" if helps else "take_out"
        return Decision(trial.back, f"{text}: {difference(self.mapping, trial.back)}", action, self._number, True)

    def _forget(self, keep: int) -> None:
        """Begin anew after a speed has changed: keep the last few measurements only."""
        recent = list(self._history)[-keep:]
        self._history.clear()
        self._history.extend(recent)
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
            "number": self._number,
            "act_from": self._act_from,
            "next_trial": self._next_trial,
            "patience": self._patience,
            "moved": None if self._moved is None else [self._moved[0].to_dict(), *self._moved[1:]],
            "blocked": [[*pair, until] for pair, until in self._blocked.items()],
            "trial": None if self._trial is None else {**vars(self._trial), "back": self._trial.back.to_dict()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: It belongs to other trainers or another batch size.
        """
        mapping = Mapping.from_dict(state["mapping"])
        for name in ("total", "cpu_trainers"):
            if getattr(mapping, name) != getattr(self.mapping, name) or len(mapping.seeds) != len(self.mapping.seeds):
                raise ValueError(f"the saved state is for {mapping}, which does not fit {self.mapping}")
        self.mapping, self._hybrid = mapping, Mapping.from_dict(state["hybrid"])
        self._in_flight.clear()
        self._in_flight.extend(map(Mapping.from_dict, state["in_flight"]))
        self._history.clear()
        for entry, times in state["history"]:
            self._history.append(Measurement(Mapping.from_dict(entry), IterationTimes.from_dict(times)))
        self.log = read_decisions(state["log"])
        self._number, self._act_from = state["number"], state["act_from"]
        self._next_trial, self._patience = state["next_trial"], state["patience"]
        moved, trial = state["moved"], state["trial"]
        self._moved = None if moved is None else (Mapping.from_dict(moved[0]), *moved[1:])
        self._blocked = {(source, to): until for source, to, until in state["blocked"]}
        self._trial = None if trial is None else _Trial(**{**trial, "back": Mapping.from_dict(trial["back"])})
