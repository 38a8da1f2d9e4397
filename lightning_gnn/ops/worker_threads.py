"""Thread pool that runs compiled tasks in parallel, outside the GIL.

Numba's parallel loops are not used. Their workqueue layer crashes if two threads call it. Their OpenMP layer adds a
second OpenMP to torch's: its idle threads spin on cores that torch needs, and a process forked after its first use is
killed. The threads of this pool sleep between calls. It is thread-safe, and a forked child creates a new pool.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock

from numba.core.compiler_lock import global_compiler_lock

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_size = 0


def run_all(tasks: Sequence[Callable[[], object]]) -> None:
    """Run every task once, the first in the calling thread, and wait; tasks must not wait for each other."""
    if len(tasks) == 1:
        tasks[0]()
        return
    with _lock:
        # The lock prevents another caller from replacing the pool before the tasks are submitted.
        pool = _get_pool(len(tasks) - 1)
        others = [pool.submit(task) for task in tasks[1:]]
    try:
        tasks[0]()
    finally:
        wait(others)
    for other in others:
        other.result()


def _get_pool(count: int) -> ThreadPoolExecutor:
    global _pool, _size
    if _pool is None or _size < count:
        if _pool is not None:
            _pool.shutdown(wait=False)  # tasks that were submitted still run
        _pool, _size = ThreadPoolExecutor(count, "lightning-gnn-worker"), count
    return _pool


def _reset_after_fork() -> None:
    global _lock, _pool, _size
    _lock, _pool, _size = Lock(), None, 0  # a fork does not copy threads
    global_compiler_lock.release()  # type: ignore[no-untyped-call]


if hasattr(os, "register_at_fork"):
    # Forking waits until no thread compiles or loads compiled code: a child forked meanwhile, such as a worker process
    # of PyG's loaders, would inherit a locked lock and hang at its first call.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=_reset_after_fork,
    )
