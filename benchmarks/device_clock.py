"""Time on a GPU: of a whole call by the wall clock, of its kernels by events.

Triton takes tens of microseconds to launch a kernel, while an idle GPU waits, so that events around a launch count the
host too. A short spin on the GPU lets the launch queue up behind it: then they count the kernel.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

_SPIN_CYCLES = 500_000
"""About 0.3 ms: longer than a launch takes."""


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: str
    at: float
    """When the host called it, in us."""
    us: float
    """How long it ran, if that was asked for, else 0."""


class Clock:
    """Times calls on one device; on a CPU, where kernels are interpreted, everything by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def now(self) -> float:
        """Return the wall clock in us, once all work on the device is done."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() * 1e6

    def wall(self, call: Callable[[], Any]) -> float:
        """Return the us of a call with everything that it set going."""
        start = self.now()
        call()
        return self.now() - start

    def device(self, call: Callable[[], Any]) -> float:
        """Return the us that the device took for a call that does not wait for it."""
        elapsed = self._queued(call)
        return elapsed()

    def launches(self, call: Callable[[], Any], modules: Sequence[ModuleType], timed: bool = True) -> list[Launch]:
        """Note the launches that a call makes of the kernels in some modules."""
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
        kernels = [
            (module, name, kernel)
            for module in modules
            for name, kernel in vars(module).items()
            if name.endswith("_kernel")
        ]

        def launch(name: str, run: Callable[[], Any]) -> None:
            at = time.perf_counter() * 1e6
            if timed:
                noted.append((name, at, self._queued(run)))
            else:
                noted.append((name, at, lambda: 0.0))
                run()

        try:
            for module, name, kernel in kernels:
                setattr(module, name, _Watched(kernel, name, launch))
            yield
        finally:
            for module, name, kernel in kernels:
                setattr(module, name, kernel)


class _Watched:
    """A kernel whose launches are noted."""

    def __init__(self, kernel: Any, name: str, launch: Callable[[str, Callable[[], Any]], None]) -> None:
        self._kernel, self._name, self._launch = kernel, name, launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._launch(self._name, lambda: self._kernel[grid](*args, **options))


def failure(error: Exception) -> str:
    """Describe an error in one short line, without the paths of this machine."""
    lines = str(error).splitlines() or [""]
    words = [word for word in lines[0].split() if "/" not in word]
    return f"{type(error).__name__}: {' '.join(words)[:200]}"


def rounds(
    contestants: dict[str, Callable[[int], float]], runs: int, least: dict[str, int] | None = None
) -> dict[str, Any]:
    """Call the contestants in turn, round by round, so that a drift of the machine hits all of them alike."""
    least = least or {}
    figures: dict[str, Any] = {name: [] for name in contestants}
    for turn in range(runs):
        for name, contestant in contestants.items():
            seen = figures[name]
            if isinstance(seen, str) or (turn >= least.get(name, runs) and sum(seen) > 5e5):
                continue
            try:
                seen.append(contestant(turn))
            except Exception as error:  # out of memory, say: the others go on
                figures[name] = failure(error)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    return figures
