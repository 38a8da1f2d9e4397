"""What the stages of collective batching take, measured on the training that is going on (MorphGL, section 4.2.1)."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median, pstdev

from lightning_gnn.collective.plan import PREPARATION_STAGES, Duration, StageTimes
from lightning_gnn.runtime.timeline import Timestamp, is_reached, seconds_between

_OUTLIER = 3.0  # what takes so many times the median was something else as well: compiling, a validation, a checkpoint
_LEAST = 3  # measurements of each stage that will do once an epoch is over
_RECENT = 256  # so many of each stage are kept, or those wanted if these are more


class Profiler:
    """Collects the durations of the five stages, until there are enough of each to plan with.

    Durations of a device are read when it has come so far, so nothing waits for it. Of several ranks, a step includes
    what this one waits for the others.
    """

    def __init__(self, num_measurements: int = 20, cpu_workers: int = 1, warm_up: int = 3) -> None:
        if num_measurements < 1:
            raise ValueError(f"profile_batches must be at least 1, but is {num_measurements}")
        self.num_measurements = num_measurements  # of each stage, after the first few
        self.cpu_workers = cpu_workers
        self.warm_up = warm_up  # first measurements that do not count, or half of them where there are few
        self.epochs = 0
        """Epochs that have begun while measuring."""
        kept = max(_RECENT, 2 * (num_measurements + warm_up + cpu_workers))
        self._seconds: dict[str, deque[float]] = {stage: deque(maxlen=kept) for stage in PREPARATION_STAGES}
        self._queued: deque[tuple[str, Timestamp, Timestamp]] = deque()

    def add(self, stage: str, start: Timestamp, end: Timestamp) -> None:
        """Note when a stage began and ended; may be called from any thread."""
        self._queued.append((stage, start, end))

    def seconds(self, stage: str) -> list[float]:
        """Return the durations of a stage that count, in the order in which they were measured."""
        self.collect()
        values = list(self._seconds[stage])
        first = max(self.warm_up, self.cpu_workers) if stage == "cpu_batching" else self.warm_up
        values = values[min(first, len(values) // 2) :]
        limit = _OUTLIER * median(values) if values else 0.0
        return [value for value in values if value <= limit]

    def enough(self) -> bool:
        """Whether to plan now: all has been measured, or one epoch is over and something of each stage is known."""
        least = self.num_measurements if self.epochs <= 1 else min(_LEAST, self.num_measurements)
        return all(self.count(stage) >= least for stage in PREPARATION_STAGES)

    def stage_times(self) -> StageTimes | None:
        """Return means and spreads; None as long as some stage has not been measured at all."""
        if not all(map(self.count, PREPARATION_STAGES)):
            return None
        return StageTimes(**{stage: self.duration(stage) for stage in PREPARATION_STAGES}, cpu_workers=self.cpu_workers)

    def count(self, stage: str) -> int:
        """Return how many durations of a stage count."""
        return len(self.seconds(stage))

    def duration(self, stage: str) -> Duration:
        """Return mean and spread of a stage, of which something has been measured."""
        values = self.seconds(stage)
        return Duration(fmean(values) or (1e-9 if stage == "model" else 0.0), pstdev(values))

    def collect(self) -> None:
        """Read what the device has done by now; to be called now and then, for what is not read stays there."""
        while self._queued and is_reached(self._queued[0][2]):
            stage, start, end = self._queued.popleft()
            self._seconds[stage].append(seconds_between(start, end))
