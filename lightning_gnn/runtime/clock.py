"""Moments on the clock of a device, compared without stopping it."""

from __future__ import annotations

import time
from typing import Any

import torch

from lightning_gnn.runtime.transfer import works

Moment = Any
"""Seconds of ``time.perf_counter()``, or an event that a device has recorded or will record."""


class Clock:
    """Tells when work that has been queued on a device begins and ends; on the CPU it is ``time.perf_counter()``.

    Args:
        device: Whose clock. One without timed events is waited for at each moment.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events = device.type != "cpu" and works(self._probe)
        self._origin: tuple[Moment, float] | None = None

    def now(self, stream: Any = None) -> Moment:
        """Return the moment at which a stream, by default the current one, is done with what is queued on it."""
        if self._events:
            event = torch.Event(self.device, enable_timing=True)
            event.record(torch.accelerator.current_stream(self.device) if stream is None else stream)
            return event
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def anchor(self) -> None:
        """Lay the device's clock beside the host's; waits for the device."""
        if self._events:
            event = self.now()
            event.synchronize()
            self._origin = event, time.perf_counter()

    def host_seconds(self, moment: Moment) -> float:
        """Return a moment in seconds of ``time.perf_counter()``; waits for it."""
        if isinstance(moment, float):
            return moment
        if self._origin is None:
            self.anchor()
        assert self._origin is not None
        event, seconds = self._origin
        moment.synchronize()
        return seconds + event.elapsed_time(moment) / 1e3

    def _probe(self) -> None:
        start = torch.Event(self.device, enable_timing=True)
        start.record(torch.accelerator.current_stream(self.device))
        start.synchronize()
        start.elapsed_time(start)


def has_come(moment: Moment) -> bool:
    """Whether the device has reached a moment."""
    return isinstance(moment, float) or bool(moment.query())


def seconds_between(start: Moment, end: Moment) -> float:
    """Return the seconds from one moment to another of the same clock; both must have come."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
