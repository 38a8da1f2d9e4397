"""Time per mini-batch while workers prepare the next ones on the same cores."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rhythm:
    """Seconds from one mini-batch to the next, and their lower bounds."""

    seconds: float  # the maximum of the bounds
    training: float  # bound by the training thread, if it does not share its cores
    preparing: float  # bound by the workers, if they do not share their cores
    cores: float  # bound by all cores, if they are never idle

    @property
    def bound(self) -> str:
        """The largest bound: ``"training"``, ``"preparing"`` or ``"cores"``."""
        return max(("training", "preparing", "cores"), key=lambda name: float(getattr(self, name)))


def rhythm(preparation_s: float, workers: int, step_s: float, serial_step_s: float, cores: int) -> Rhythm:
    """Predict the time per mini-batch from the thread-seconds of preparing it and the seconds of a training step."""
    if not workers:
        return Rhythm(preparation_s + step_s, preparation_s + step_s, 0.0, 0.0)
    preparing = preparation_s / min(workers, cores)
    busy = (preparation_s + max(step_s, serial_step_s)) / cores
    return Rhythm(max(step_s, preparing, busy), step_s, preparing, busy)
