"""Device clocks, and timelines of the stages of each mini-batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

import torch
from torch.profiler import record_function

from lightning_gnn.runtime.devices import works

Resource = Literal["CPU", "PCIe", "GPU"]
Timestamp = float | torch.Event
"""Seconds of ``time.perf_counter()``, or a device event that may not have been reached yet."""

P = ParamSpec("P")
T = TypeVar("T")


def profiled(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Label the calls of a function ``lightning_gnn::<name>`` in ``torch.profiler``. Thread-safe."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with record_function(f"lightning_gnn::{name}"):
                return function(*args, **kwargs)

        return run

    return decorate


class Clock:
    """Takes timestamps of work queued on a device by events; on the CPU it is ``time.perf_counter()``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_events = device.type != "cpu" and works(self._try_events)
        self._origin: tuple[torch.Event, float] | None = None

    def now(self, stream: torch.Stream | None = None) -> Timestamp:
        """Return the time at which a stream, by default the current one, completes the work queued so far."""
        if self.has_events:
            return self._event(stream)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def anchor(self) -> None:
        """Calibrate the device's clock against the host's; synchronizes the device's current stream."""
        if self.has_events:
            event = self._event()
            event.synchronize()
            self._origin = event, time.perf_counter()

    def host_seconds(self, timestamp: Timestamp) -> float:
        """Convert a timestamp to seconds of ``time.perf_counter()``; wait until it is reached."""
        if isinstance(timestamp, float):
            return timestamp
        if self._origin is None:
            self.anchor()
        assert self._origin is not None
        event, seconds = self._origin
        timestamp.synchronize()
        return seconds + seconds_between(event, timestamp)

    def _event(self, stream: torch.Stream | None = None) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device) if stream is None else stream)
        return event

    def _try_events(self) -> None:
        event = self._event()
        event.synchronize()
        event.elapsed_time(event)


def is_reached(timestamp: Timestamp) -> bool:
    """Return whether the device has completed the work before a timestamp."""
    return isinstance(timestamp, float) or bool(timestamp.query())


def seconds_between(start: Timestamp, end: Timestamp) -> float:
    """Return the seconds from one timestamp to another of the same clock; both must have been reached."""
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)  # type: ignore[arg-type]  # a clock's timestamps are all of one type
    return float(start.elapsed_time(end)) / 1e3


class StepTimer:
    """Times an accelerator's steps by events without synchronizing; without events, uses the host's times."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._steps: deque[tuple[Timestamp, Timestamp]] = deque()
        self._start: Timestamp | None = None
        self._end: Timestamp | None = None
        self._last: float | None = None

    def start(self) -> None:
        """Mark the start of a step, or of a part of it, on the current stream of the calling thread."""
        if self._start is None and self._clock.has_events:
            self._start = self._clock.now()

    def stop(self) -> None:
        """Mark the end of the step or part."""
        if self._start is not None:
            self._end = self._clock.now()

    def read(self, own: float) -> float:
        """End a step; return the seconds of the latest completed one, or ``own``, the host's, if none is known yet."""
        if self._start is not None and self._end is not None:
            self._steps.append((self._start, self._end))
        self._start = self._end = None
        while self._steps and is_reached(self._steps[0][1]):
            self._last = seconds_between(*self._steps.popleft())
        return own if self._last is None else self._last


@dataclass(frozen=True)
class Interval:
    """One stage of one mini-batch; times are seconds since the beginning."""

    resource: Resource
    stage: str  # such as "cpu_batching", "dma", "gpu_batching", "uva" or "model"
    batch: int  # the number of the mini-batch
    start: float
    end: float
    lane: int = 0  # index of the worker of the resource


@dataclass
class Timeline:
    """The intervals of all resources."""

    intervals: list[Interval] = field(default_factory=list)

    @property
    def end(self) -> float:
        """Seconds at which the last interval ends; 0 without intervals."""
        return max((interval.end for interval in self.intervals), default=0.0)


class Recorder:
    """Reports the times of stages to a callback, a timeline, both or neither."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.on_stage: Callable[[str, Timestamp, Timestamp], object] | None = None
        """Called with name, start and end of each stage, from any thread."""
        self.timeline: Timeline | None = None
        self._queued: deque[tuple[tuple[Resource, ...], str, int, Timestamp, Timestamp, int]] = deque()
        self._model: tuple[int, Timestamp] | None = None

    @property
    def active(self) -> bool:
        """Whether a callback or a timeline is set."""
        return self.on_stage is not None or self.timeline is not None

    def begin(self) -> None:
        """Calibrate the clock before an epoch if recording."""
        if self.active:
            self.clock.anchor()

    def now(self, stream: torch.Stream | None = None) -> Timestamp | None:
        """Return the clock's time if recording, else None."""
        return self.clock.now(stream) if self.active else None

    def add(
        self,
        resource: Resource | tuple[Resource, ...],
        stage: str,
        number: int,
        start: Timestamp | None,
        end: Timestamp | None,
        lane: int = 0,
    ) -> None:
        """Record a stage of a mini-batch. Thread-safe."""
        if start is None or end is None:
            return
        on_stage = self.on_stage  # the training thread may reset it concurrently
        if on_stage is not None:
            on_stage(stage, start, end)
        if self.timeline is not None:
            resources = resource if isinstance(resource, tuple) else (resource,)
            self._queued.append((resources, stage, number, start, end, lane))

    def begin_model(self, number: int) -> None:
        """Record the start of training on a mini-batch."""
        self._model = (number, self.clock.now()) if self.active else None

    def end_model(self) -> None:
        """Record the end of training on the mini-batch of :meth:`begin_model`."""
        model, self._model = self._model, None
        if model is not None:
            self.add("GPU", "model", *model, self.clock.now())

    def forget_model(self) -> None:
        """Discard the start of :meth:`begin_model`: other work has run since."""
        self._model = None

    def write(self) -> None:
        """Move the recorded stages to the timeline; waits for the device."""
        while self._queued and self.timeline is not None:
            resources, stage, number, start, end, lane = self._queued.popleft()
            seconds = self.clock.host_seconds(start), self.clock.host_seconds(end)
            self.timeline.intervals += [Interval(name, stage, number, *seconds, lane) for name in resources]
