"""How carefully the resource manager acts on what it measures."""

from __future__ import annotations

from dataclasses import dataclass

REMEMBERED = 40
"""Measurements that are kept one by one."""
SURE = 0.7
"""A gain counts if it is more than so many standard errors of the slowest stage's time."""
SETTLED = 4
"""CPU trainers that do not help are taken out after that many times the fewest measurements to act on."""
LONGER = 3
"""A trial that shows no clear difference is drawn out, up to that many times its measurements; then all stays."""
LOOK = 8
"""Where n measurements showed nothing to gain, one looks again n / 8 measurements later, but at the most 8 later."""


@dataclass(frozen=True)
class Damping:
    """What keeps noise from making the mapping swing.

    A mapping is changed when at least ``window`` measurements of each trainer and stage are there, not before the last
    change has left the pipeline, and only if the prediction shortens the slowest stage by more than ``dead_band`` and
    more than 0.7 of its standard error. The prediction is by all that was measured since the speeds changed last
    (:class:`~lightning_gnn.hyscale.running_cost.RunningCost`), so that it gets the surer the longer nothing changes.
    If threads were moved and brought less than half of what was predicted, or made the slowest stage slower, they are
    moved back, and no more of them are moved that way for ``patience`` observations.

    Args:
        lag: Depth of the pipeline: observations until a new mapping shows in the times.
        window: Fewest measurements to act on.
        history: Older measurements fade out exponentially, over this many.
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
    history: int = 100
    dead_band: float = 0.015
    worth: float = 0.01
    doubtful: float = 0.25
    trial: int = 5
    patience: int = 200

    def __post_init__(self) -> None:
        if self.lag < 0 or not 1 <= self.window <= self.history or not 1 <= self.trial <= REMEMBERED:
            raise ValueError(f"lag must be >= 0, 1 <= window <= history, 1 <= trial <= {REMEMBERED}: {self}")
        if not (0 <= self.dead_band < 1 and 0 <= self.worth < 1 and self.doubtful >= 0 and self.patience >= 1):
            raise ValueError(f"dead_band and worth must be in [0, 1), doubtful >= 0, patience >= 1: {self}")
