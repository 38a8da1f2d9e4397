"""Online profiling of the stages of collective batching during training (MorphGL, section 4.2.1)."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median, pstdev

from lightning_gnn.collective.plan import PREPARATION_STAGES, Duration, StageTimes
from lightning_gnn.runtime.timeline import Timestamp, is_reached, seconds_between

_OUTLIER_FACTOR = 3.0  # longer durations, in medians, include other work: compilation, validation, checkpoints
_MIN_MEASUREMENTS = 3  # sufficient measurements per stage after a complete epoch
_MAX_STORED = 256  # latest measurements stored per stage, unless more are requested


class Profiler:
    """Collects durations of the five stages until they suffice for planning.

    Device durations are read after they have completed, without synchronization. With several ranks, the model step
    includes waiting for other ranks.
    """

    def __init__(self, num_measurements: int = 20, cpu_workers: int = 1, warm_up: int = 3) -> None:
        if num_measurements < 1:
            raise ValueError(f"profile_batches must be at least 1, but is {num_measurements}")
        self.num_measurements = num_measurements  # per stage, after warm-up
        self.cpu_workers = cpu_workers
        self.warm_up = warm_up  # number of ignored first measurements, at most half of all
        self.epochs = 0  # number of epochs started while measuring
        maxlen = max(_MAX_STORED, 2 * (num_measurements + warm_up + cpu_workers))
        self._seconds: dict[str, deque[float]] = {stage: deque(maxlen=maxlen) for stage in PREPARATION_STAGES}
        self._pending: deque[tuple[str, Timestamp, Timestamp]] = deque()

    def add(self, stage: str, start: Timestamp, end: Timestamp) -> None:
        """Record the start and end of a stage. Thread-safe."""
        self._pending.append((stage, start, end))

    def seconds(self, stage: str) -> list[float]:
        """Return the durations of a stage in order, without warm-up and outliers."""
        self.collect()
        values = list(self._seconds[stage])
        first = max(self.warm_up, self.cpu_workers) if stage == "cpu_batching" else self.warm_up
        values = values[min(first, len(values) // 2) :]
        limit = _OUTLIER_FACTOR * median(values) if values else 0.0
        return [value for value in values if value <= limit]

    def enough(self) -> bool:
        """Return whether the measurements suffice for planning; fewer are required after the first epoch."""
        least = self.num_measurements if self.epochs <= 1 else min(_MIN_MEASUREMENTS, self.num_measurements)
        return all(self.count(stage) >= least for stage in PREPARATION_STAGES)

    def stage_times(self) -> StageTimes | None:
        """Return means and spreads; None if a stage has no measurements."""
        if not all(map(self.count, PREPARATION_STAGES)):
            return None
        return StageTimes(**{stage: self.duration(stage) for stage in PREPARATION_STAGES}, cpu_workers=self.cpu_workers)

    def count(self, stage: str) -> int:
        """Return the number of durations of a stage, without warm-up and outliers."""
        return len(self.seconds(stage))

    def duration(self, stage: str) -> Duration:
        """Return mean and spread of a stage, which must have measurements."""
        values = self.seconds(stage)
        return Duration(fmean(values) or (1e-9 if stage == "model" else 0.0), pstdev(values))

    def pop(self) -> dict[str, float]:
        """Remove and return the oldest duration of each stage that has one."""
        self.collect()
        return {stage: seconds.popleft() for stage, seconds in self._seconds.items() if seconds}

    def collect(self) -> None:
        """Read the durations of completed device work; call it regularly, since pending timestamps accumulate."""
        while self._pending and is_reached(self._pending[0][2]):
            stage, start, end = self._pending.popleft()
            self._seconds[stage].append(seconds_between(start, end))
