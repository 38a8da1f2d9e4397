"""Time per mini-batch while workers prepare the next ones on the same cores, alone or in a network of machines."""

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


def rhythm(
    preparation_s: float,
    workers: int,
    step_s: float,
    serial_step_s: float,
    cores: int,
    *,
    waiting_s: float = 0.0,
    reducing_s: float = 0.0,
) -> Rhythm:
    """Predict the time per mini-batch from the thread-seconds of preparing it and the seconds of a training step.

    Args:
        serial_step_s: Seconds of a step with one thread, which is its work.
        waiting_s: Seconds in which preparing waits for the network, without a core.
        reducing_s: Seconds in which training waits for the network after a step.
    """
    training = step_s + reducing_s
    if not workers:
        training += preparation_s + waiting_s
        return Rhythm(training, training, 0.0, 0.0)
    preparing = max(preparation_s / min(workers, cores), (preparation_s + waiting_s) / workers)
    busy = (preparation_s + max(step_s, serial_step_s)) / cores
    return Rhythm(max(training, preparing, busy), training, preparing, busy)
