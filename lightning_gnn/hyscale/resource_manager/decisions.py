"""Decisions of a resource manager: readable log messages, and JSON lines for a replay."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_gnn.hyscale.costs import IterationTimes, TaskMapping
from lightning_gnn.runtime.files import read_json


@dataclass(frozen=True)
class Decision:
    """A resource manager's decision: the mapping to use from now on, and the reason."""

    mapping: TaskMapping
    explanation: str
    action: str = (
        # ``start``, ``plan``, ``balance_work``, ``balance_thread``, ``undo`` (threads go back), ``hold``; of the CPU
        # trainers: ``take_out`` (for a trial), ``bring_back``, ``leave_out``
        "hold"
    )
    observation: int = 0
    changed: bool = False  # whether the mapping differs from the previous one

    def __str__(self) -> str:
        return f"{self.observation}: {self.action}: {self.explanation}"

    def to_json(self) -> str:
        """Return the decision as one line of JSON, the format of a decision log."""
        return json.dumps(
            {
                "observation": self.observation,
                "action": self.action,
                "mapping": self.mapping.to_dict(),
                "explanation": self.explanation,
            }
        )


def read_decisions(lines: Iterable[str]) -> list[Decision]:
    """Read a decision log, lines of :meth:`Decision.to_json`; blank lines are skipped."""
    decisions: list[Decision] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            state = read_json(line)
            decision = Decision(
                TaskMapping.from_dict(state["mapping"]),
                str(state["explanation"]),
                str(state["action"]),
                int(state["observation"]),
                changed=True,
            )
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


class Recorder:
    """Base class of resource managers: holds the current mapping and a log of the decisions that changed it."""

    def __init__(self, mapping: TaskMapping) -> None:
        self.mapping = mapping
        self.log: list[Decision] = [Decision(mapping, f"start with {mapping}", "start", 0, True)]
        """The decisions that changed the mapping, starting with the initial one."""
        self._number = 0

    def _hold(self, explanation: str) -> Decision:
        """Return a decision that keeps the mapping."""
        return Decision(self.mapping, explanation, "hold", self._number)

    def _change(self, mapping: TaskMapping, action: str, explanation: str) -> Decision:
        """Set and log a new mapping, and return the decision."""
        self.mapping = mapping
        self.log.append(Decision(mapping, explanation, action, self._number, True))
        return self.log[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines all further decisions, and the log, as lists, dicts and numbers."""
        return {
            "mapping": self.mapping.to_dict(),
            "log": [decision.to_json() for decision in self.log],
            "number": self._number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raise ValueError if it is for other work."""
        mapping = TaskMapping.from_dict(state["mapping"])
        self.mapping.check_same_work(mapping)
        self.mapping, self.log, self._number = mapping, read_decisions(state["log"]), int(state["number"])


class ReplayedDecisions:
    """Replaces a :class:`~lightning_gnn.hyscale.DynamicResourceManager` and replays recorded decisions."""

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
        self._numbers = [decision.observation for decision in self._decisions]
        self._number = 0

    @property
    def mapping(self) -> TaskMapping:
        """The current mapping."""
        return self._decision_at(self._number).mapping

    @property
    def log(self) -> tuple[Decision, ...]:
        """The decisions so far that changed the mapping, starting with the initial one."""
        return tuple(self._decisions[: bisect_right(self._numbers, self._number)])

    def observe(self, times: IterationTimes) -> Decision:
        """Return the decision recorded for this observation; the times are ignored."""
        self._number += 1
        decision = self._decision_at(self._number)
        if decision.observation == self._number:
            return decision
        return Decision(decision.mapping, "replayed: no change", observation=self._number)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of observations replayed so far."""
        return {"observation": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved number of observations."""
        self._number = int(state["observation"])

    def _decision_at(self, number: int) -> Decision:
        return self._decisions[bisect_right(self._numbers, number) - 1]


def describe_change(old: TaskMapping, new: TaskMapping) -> str:
    """Return a short description of the changes between two mappings."""
    changes = []
    if old.seeds != new.seeds:
        changes.append(f"seeds {_join_with_slashes(old.seeds)} -> {_join_with_slashes(new.seeds)}")
    if old.threads != new.threads:
        changes.append(f"threads {_join_with_slashes(old.threads)} -> {_join_with_slashes(new.threads)}")
    if old.accelerator_sampling != new.accelerator_sampling:
        changes.append(f"sampled on accelerators {old.accelerator_sampling:.1%} -> {new.accelerator_sampling:.1%}")
    return ", ".join(changes) or "no change"


def format_ms(seconds: float) -> str:
    """Format a time in format_ms."""
    return f"{1e3 * seconds:.3g} ms"


def _join_with_slashes(numbers: Iterable[int]) -> str:
    return "/".join(map(str, numbers))
