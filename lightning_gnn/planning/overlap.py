"""How long a mini-batch takes where some threads prepare the next ones while others train, on the same cores."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rhythm:
    """Seconds from one mini-batch to the next, and what they are for."""

    seconds: float  # the longest of the others
    training: float  # of the training thread, if nothing else needs its cores
    preparing: float  # of the workers, if nothing else needs theirs
    cores: float  # of all cores, if they are never idle

    @property
    def bound(self) -> str:
        """What sets it: ``"training"``, ``"preparing"`` or ``"cores"``."""
        return max(("training", "preparing", "cores"), key=lambda name: float(getattr(self, name)))


def rhythm(preparation_s: float, workers: int, step_s: float, serial_step_s: float, cores: int) -> Rhythm:
    """Return the rhythm of a training whose preparation runs ahead."""
    if not workers:
        return Rhythm(preparation_s + step_s, preparation_s + step_s, 0.0, 0.0)
    preparing = preparation_s / min(workers, cores)
    busy = (preparation_s + max(step_s, serial_step_s)) / cores
    return Rhythm(max(step_s, preparing, busy), step_s, preparing, busy)
