"""How carefully the resource manager acts on what it measures."""

from __future__ import annotations

from dataclasses import dataclass

REMEMBERED = 40
"""Measurements that are kept."""


@dataclass(frozen=True)
class Damping:
    """What keeps noise from making the mapping swing.

    A mapping is changed when at least ``window`` measurements of it are there, by medians over the last ``history`` of
    them, not before its predecessor's have left the pipeline, and only if the prediction shortens the slowest stage
    by more than ``dead_band`` and more than the measurements' standard error. The step goes to the predicted optimum
    where that is far off (over 10 %), else half the way. If threads were moved and the slowest stage became slower,
    they are moved back; if that brought less than half of what was predicted, no more of them are moved that way for
    ``patience`` observations.

    Args:
        lag: Depth of the pipeline: observations until a new mapping shows in the times.
        window: Fewest measurements to act on.
        history: Most measurements to act on.
        dead_band: Fewest gain to act for.
        worth: The CPU trainers are kept if they shorten an iteration by more than this.
        doubtful: If by less than this, accelerators alone are tried for ``trial`` iterations (only where
            :attr:`IterationTimes.iteration` is known: what the trainers cost one another shows in no stage).
        trial: Measurements of a trial.
        patience: Observations until CPU trainers that were taken out, or kept, are tried again; doubles each time.

    Raises:
        ValueError: A number out of range.
    """

    lag: int = 2
    window: int = 3
    history: int = 32
    dead_band: float = 0.02
    worth: float = 0.01
    doubtful: float = 0.25
    trial: int = 5
    patience: int = 200

    def __post_init__(self) -> None:
        if self.lag < 0 or not 1 <= self.window <= self.history <= REMEMBERED or not 1 <= self.trial <= REMEMBERED:
            raise ValueError(f"lag must be >= 0, and 1 <= window <= history <= {REMEMBERED}, as trial: {self}")
        if not (0 <= self.dead_band < 1 and 0 <= self.worth < 1 and self.doubtful >= 0 and self.patience >= 1):
            raise ValueError(f"dead_band and worth must be in [0, 1), doubtful >= 0, patience >= 1: {self}")
