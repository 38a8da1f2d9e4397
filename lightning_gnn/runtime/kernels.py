"""Kernels that numba compiles on first use, and a line for those who wait for it.

Files with such kernels import this one first: numba refuses to import them where it finds no folder to keep them in.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numba
from numba.core import event

from lightning_gnn.runtime.store import say_once

_said = False
_count = 0


def kernel_folder() -> Path:
    """Return the folder in or below which numba keeps this package's kernels."""
    path = Path(str(numba.njit(cache=True)(_nothing).stats.cache_path)).absolute()
    return path.parents[1] if path.name == "__pycache__" else path.parent


def num_compiled() -> int:
    """Return the number of kernels that this process compiled because they were not in the folder."""
    return _count


def _nothing() -> None:
    """Stand for a kernel."""


def _keep() -> None:
    """Where numba finds no folder, let each process compile for itself, in a folder that it removes."""
    try:
        kernel_folder()
        return
    except RuntimeError:
        folder = tempfile.mkdtemp(prefix="lightning-gnn-kernels-")
    os.environ["NUMBA_CACHE_DIR"] = folder  # processes that it starts use it too
    numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]
    atexit.register(_remove, folder, os.getpid())
    say_once(
        f"compiled kernels cannot be kept: neither {Path(__file__).parents[1]} nor the user's cache folder can be "
        "written to. Each run compiles them again, which takes seconds; set NUMBA_CACHE_DIR to a folder that can be "
        "written to"
    )


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


class _Listener(event.Listener):
    """Called by numba when it compiles a kernel that is not cached; prints a line once, on a terminal."""

    def on_start(self, event: event.Event) -> None:
        global _count, _said
        kernel = event.data["dispatcher"]
        if not str(kernel.py_func.__module__).startswith("lightning_gnn.") or kernel.stats.cache_path is None:
            return
        _count += 1
        if _said:
            return
        _said = True
        from pytorch_lightning.utilities import rank_zero_only

        if getattr(rank_zero_only, "rank", 0) in (0, None) and (sys.stderr.isatty() or "ipykernel" in sys.modules):
            print("compiling kernels…", file=sys.stderr, flush=True)

    def on_end(self, event: event.Event) -> None:
        """Nothing to do."""


_keep()
event.register("numba:compile", _Listener())  # type: ignore[no-untyped-call]
