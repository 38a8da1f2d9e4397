"""Cache folder of numba kernels, and a message while they or GPU kernels are compiled.

Modules with cached kernels import this one first: numba refuses to define them without a writable cache folder.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

import numba
from numba.core import event

from lightning_gnn.runtime.store import say_once

_count = 0


def kernel_folder() -> Path:
    """Return the folder in or below which numba caches this package's kernels."""
    path = Path(str(numba.njit(cache=True)(_nothing).stats.cache_path)).absolute()
    return path.parents[1] if path.name == "__pycache__" else path.parent


def num_compiled() -> int:
    """Return the number of kernels that this process compiled because they were not cached."""
    return _count


def _nothing() -> None:
    """Serve as a kernel of which numba computes the cache path."""


def _ensure_cache_folder() -> None:
    """Use a temporary cache folder, removed at exit, if numba finds no writable one."""
    try:
        kernel_folder()
        return
    except RuntimeError:
        folder = tempfile.mkdtemp(prefix="lightning-gnn-kernels-")
    os.environ["NUMBA_CACHE_DIR"] = folder  # for subprocesses
    numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]
    atexit.register(_remove, folder, os.getpid())
    say_once(
        f"compiled kernels cannot be cached: neither {Path(__file__).parents[1]} nor the user's cache folder can be "
        "written to. Each run compiles them again, which takes seconds; set NUMBA_CACHE_DIR to a writable folder"
    )


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


def say_when_compiling() -> None:
    """Count the kernels that Triton compiles because they are not cached; print a message if one takes 3 s."""
    from triton import knobs

    timers = threading.local()  # of each compiling thread

    def begin(**compilation: object) -> None:
        timers.own = threading.Timer(3, _say, ["compiling GPU kernels (once)…"])
        timers.own.daemon = True
        timers.own.start()

    def end(*, cache_hit: bool, **compilation: object) -> None:
        global _count
        _count += not cache_hit
        timers.own.cancel()

    if knobs.runtime.jit_cache_hook is None and knobs.compilation.listener is None:  # else a profiler's
        knobs.runtime.jit_cache_hook, knobs.compilation.listener = begin, end


@cache
def _say(message: str) -> None:
    """Print a message on rank 0, once."""
    from lightning_gnn.runtime.lightning import rank_zero_only

    if getattr(rank_zero_only, "rank", 0) in (0, None):
        print(message, file=sys.stderr, flush=True)


class _Listener(event.Listener):
    """Counts the kernels that numba compiles; prints a message for the first one, on a terminal or in a notebook."""

    def on_start(self, event: event.Event) -> None:
        global _count
        kernel = event.data["dispatcher"]
        if not str(kernel.py_func.__module__).startswith("lightning_gnn.") or kernel.stats.cache_path is None:
            return
        _count += 1
        if sys.stderr.isatty() or "ipykernel" in sys.modules:
            _say("compiling kernels…")

    def on_end(self, event: event.Event) -> None:
        """Do nothing; numba requires the method."""


_ensure_cache_folder()
event.register("numba:compile", _Listener())  # type: ignore[no-untyped-call]
