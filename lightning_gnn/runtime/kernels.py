"""Kernels that numba compiles on first use: kept where they can be, and a word to whoever waits for them.

Whatever holds such kernels imports this file first: numba refuses to import them where it finds no folder to keep them
in.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numba
from numba.core import event

from lightning_gnn.runtime.store import say_once

_kept = False
_said = False
_count = 0


def kernel_folder() -> Path:
    """Return the folder in or below which numba keeps this package's kernels."""
    path = Path(str(numba.njit(cache=True)(_nothing).stats.cache_path)).absolute()
    return path.parents[1] if path.name == "__pycache__" else path.parent


def num_compiled() -> int:
    """Return how many kernels this process has compiled because it did not find them."""
    return _count


def _keep() -> None:
    """Find a folder, or let each process compile for itself, in a folder that it removes; that is said once."""
    global _kept
    wanted, package = os.environ.get("NUMBA_CACHE_DIR"), Path(__file__).parents[1]
    try:
        found = kernel_folder()
    except RuntimeError:
        _use(tempfile.mkdtemp(prefix="lightning-gnn-kernels-"))
        tried = f"{wanted}, {package}" if wanted else str(package)
        say_once(
            f"compiled kernels cannot be kept: neither {tried} nor the user's cache folder can be written to. Each run "
            "compiles them anew, which takes seconds; set NUMBA_CACHE_DIR to a folder that can be written to"
        )
        return
    _kept = True
    if wanted and found != Path(wanted).absolute():
        say_once(
            f"NUMBA_CACHE_DIR={wanted} cannot be written to; compiled kernels are kept in {found} instead, unless you "
            "give another folder"
        )


def _nothing() -> None:
    """Stand for a kernel."""


def _use(folder: str) -> None:
    """Let numba keep kernels in a folder until this process ends; processes that it starts use it too."""
    owner = os.getpid()
    os.environ["NUMBA_CACHE_DIR"] = folder
    numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]

    def remove() -> None:
        if os.getpid() == owner:  # not in a fork
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


class _Listener(event.Listener):
    """Told by numba whenever it compiles what it has not found, one kernel at a time."""

    def on_start(self, event: Any) -> None:
        global _count, _said
        kernel = event.data["dispatcher"]
        if not str(kernel.py_func.__module__).startswith("lightning_gnn.") or kernel.stats.cache_path is None:
            return
        _count += 1
        if not _said:
            _said = True
            _tell()

    def on_end(self, event: Any) -> None:
        """Nothing to do."""


def _tell() -> None:
    """Say what takes so long, if somebody is there to read it."""
    from pytorch_lightning.utilities import rank_zero_only

    if getattr(rank_zero_only, "rank", 0) in (0, None) and (sys.stderr.isatty() or "ipykernel" in sys.modules):
        often = "once" if _kept else "for this process"
        print(f"compiling kernels ({often})…", file=sys.stderr, flush=True)


_keep()
event.register("numba:compile", _Listener())  # type: ignore[no-untyped-call]
