"""Threads that run compiled shares side by side, outside the GIL.

Not numba's own parallel loops: their workqueue layer dies when two threads call it, their OpenMP layer is a second
OpenMP beside torch's, whose idle threads spin on the cores that torch's need, and a process forked after its first use
is killed. These threads sleep between calls, may be called from any thread, and are made anew in a forked child.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock

from numba.core.compiler_lock import global_compiler_lock

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_size = 0


def run_all(shares: Sequence[Callable[[], object]]) -> None:
    """Run every share once, the first in the calling thread, and wait; shares must not wait for one another."""
    if len(shares) == 1:
        shares[0]()
        return
    with _lock:
        # Under the lock, so that no other caller replaces the pool in between.
        pool = _threads(len(shares) - 1)
        others = [pool.submit(share) for share in shares[1:]]
    try:
        shares[0]()
    finally:
        wait(others)
    for other in others:
        other.result()


def _threads(count: int) -> ThreadPoolExecutor:
    global _pool, _size
    if _pool is None or _size < count:
        if _pool is not None:
            _pool.shutdown(wait=False)  # what was submitted still runs
        _pool, _size = ThreadPoolExecutor(count, "lightning-gnn-worker"), count
    return _pool


def _forget() -> None:
    global _lock, _pool, _size
    _lock, _pool, _size = Lock(), None, 0  # a fork copies no threads
    global_compiler_lock.release()  # type: ignore[no-untyped-call]


if hasattr(os, "register_at_fork"):
    # The wait is for a thread that compiles (or loads what was compiled): its lock would stay locked in the child, a
    # worker process of PyG's loaders say, which would then hang at its first call.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=_forget,
    )
