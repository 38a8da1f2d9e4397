"""Time on a GPU: whole calls by the wall clock, kernels by events.

Triton needs tens of microseconds to launch a kernel. On an idle GPU, events around a launch would include this host
time. A short spin kernel keeps the GPU busy until the launch is queued, so that the events measure the kernel alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.autograd import DeviceType

_SPIN_CYCLES = 500_000
"""About 0.3 ms, which is longer than a launch."""


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: str
    at: float
    """Time of the host's call, in us."""
    us: float
    """Duration on the device in us, or 0 if not timed."""


class Clock:
    """Times calls on one device; on a CPU, where kernels are interpreted, by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def now(self) -> float:
        """Synchronize the device and return the wall clock in us."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() * 1e6

    def wall(self, call: Callable[[], Any]) -> float:
        """Return the us of a call, including its work on the device."""
        start = self.now()
        call()
        return self.now() - start

    def device(self, call: Callable[[], Any]) -> float:
        """Return the device time in us of a call that does not synchronize."""
        elapsed = self._queued(call)
        return elapsed()

    def launches(self, call: Callable[[], Any], modules: Sequence[ModuleType], timed: bool = True) -> list[Launch]:
        """Record the launches of the modules' kernels in a call."""
        noted: list[tuple[str, float, Callable[[], float]]] = []
        with self._watched(modules, noted, timed):
            call()
            self.now()
        return [Launch(kernel, at, elapsed()) for kernel, at, elapsed in noted]

    def _queued(self, call: Callable[[], Any]) -> Callable[[], float]:
        if not self.on_gpu:
            us = self.wall(call)
            return lambda: us
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SPIN_CYCLES)
        begin.record()
        call()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return begin.elapsed_time(end) * 1e3

        return elapsed

    @contextlib.contextmanager
    def _watched(self, modules: Sequence[ModuleType], noted: list, timed: bool) -> Iterator[None]:
        def launch(name: str, run: Callable[[], Any]) -> None:
            at = time.perf_counter() * 1e6
            if timed:
                noted.append((name, at, self._queued(run)))
            else:
                noted.append((name, at, lambda: 0.0))
                run()

        with contextlib.ExitStack() as stack:
            for module in modules:
                if hasattr(module, "Launch"):  # prepared launches, which hold their kernels
                    call = module.Launch.__call__

                    def called(self: Any, *args: Any, call: Callable[..., Any] = call) -> None:
                        launch(self.kernel.__name__, lambda: call(self, *args))

                    stack.enter_context(mock.patch.object(module.Launch, "__call__", called))
                    continue
                for name, kernel in [*vars(module).items()]:
                    if name.endswith("_kernel"):
                        stack.enter_context(mock.patch.object(module, name, _Watched(kernel, name, launch)))
            yield


class _Watched:
    """A kernel whose launches are recorded."""

    def __init__(self, kernel: Any, name: str, launch: Callable[[str, Callable[[], Any]], None]) -> None:
        self._kernel, self._name, self._launch = kernel, name, launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._launch(self._name, lambda: self._kernel[grid](*args, **options))


def busy(call: Callable[[], float], device: torch.device) -> tuple[float, float, int]:
    """Return the result of a call, the us in which kernels ran, several at a time counted once, and their number."""
    activities, on_gpu = torch.profiler.ProfilerActivity, device.type == "cuda"
    activity, kind = (activities.CUDA, DeviceType.CUDA) if on_gpu else (activities.CPU, DeviceType.CPU)
    with torch.profiler.profile(activities=[activity]) as seen:
        result = call()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == kind and not getattr(event, "is_user_annotation", False)  # those span kernels
    )
    total, last = 0.0, 0.0
    for start, end in spans:
        total, last = total + max(0.0, end - max(start, last)), max(last, end)
    return result, total, len(spans)


def failure(error: Exception) -> str:
    """Describe an error in one short line, without paths of this machine."""
    lines = str(error).splitlines() or [""]
    words = [word for word in lines[0].split() if "/" not in word]
    return f"{type(error).__name__}: {' '.join(words)[:200]}"


def rounds(
    contestants: dict[str, Callable[[int], float]], runs: int, least: dict[str, int] | None = None
) -> dict[str, Any]:
    """Call the contestants round by round, so that drift of the machine affects all of them equally."""
    least = least or {}
    figures: dict[str, Any] = {name: [] for name in contestants}
    for turn in range(runs):
        for name, contestant in contestants.items():
            seen = figures[name]
            if isinstance(seen, str) or (turn >= least.get(name, runs) and sum(seen) > 5e5):
                continue
            try:
                seen.append(contestant(turn))
            except Exception as error:  # such as out of memory; the others continue
                figures[name] = failure(error)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    return figures
