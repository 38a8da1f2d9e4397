"""How long an accelerator works on a step."""

from __future__ import annotations

from typing import Any

import torch


class StepClock:
    """Times an accelerator's steps by events, which are read once they are done, so that nothing waits for them.

    Where a backend has no events, the time is that of the thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[Any, Any]] = []
        self._started: Any = None
        self._last: float | None = None
        try:
            self._event().synchronize()
            self._works = True
        except (NotImplementedError, RuntimeError):
            self._works = False

    def _event(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def start(self) -> None:
        """Mark the begin of a step in the stream of the present thread."""
        self._started = self._event() if self._works else None

    def stop(self) -> None:
        """Mark its end."""
        if self._started is not None:
            self._pairs.append((self._started, self._event()))
            self._started = None

    def read(self, own: float) -> float:
        """Return the seconds of the latest step that is known to be done.

        Args:
            own: What the thread took, for as long as nothing is known.
        """
        while self._pairs and self._pairs[0][1].query():
            start, stop = self._pairs.pop(0)
            self._last = start.elapsed_time(stop) / 1000
        return own if self._last is None else self._last
