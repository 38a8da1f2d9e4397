"""An ordered pipeline: worker threads prepare items ahead of the one who uses them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Task = TypeVar("Task")
Item = TypeVar("Item")


class OrderedPipeline(Generic[Task, Item]):
    """Yield ``prepare(task)`` for each task, in order, with some of them prepared ahead by threads.

    An exception in a worker is raised at the item that it belongs to, with the worker's traceback. Closing early, or
    dropping the iterator, cancels what has not begun and joins the threads.

    Args:
        tasks: What to prepare; consumed in the caller's thread.
        prepare: Makes an item; must be safe to call from several threads.
        num_threads: How many threads; 0 prepares in the caller's thread, when asked.
        ahead: How many items may be under way or ready at once.
    """

    def __init__(
        self, tasks: Iterable[Task], prepare: Callable[[Task], Item], num_threads: int = 0, ahead: int = 2
    ) -> None:
        self._tasks = iter(tasks)
        self._prepare = prepare
        self._waiting: deque[Future[Item]] = deque()
        self._pool = ThreadPoolExecutor(num_threads, "lightning-gnn-batch") if num_threads else None
        self._process = os.getpid()
        for _ in range(max(ahead, num_threads)):
            self._submit()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._pool is None:
            return self._prepare(next(self._tasks))
        check_process(self._process)
        if not self._waiting:
            self.close()
            raise StopIteration
        future = self._waiting.popleft()
        try:
            item = future.result()
        except BaseException:
            self.close()
            raise
        self._submit()
        return item

    def close(self) -> None:
        """Cancel what has not begun and wait for the threads to end."""
        self._tasks = iter(())
        self._waiting.clear()
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __del__(self) -> None:
        self.close()

    def _submit(self) -> None:
        if self._pool is None:
            return
        try:
            task = next(self._tasks)
        except StopIteration:
            return
        self._waiting.append(self._pool.submit(self._prepare, task))


def check_process(process: int) -> None:
    """Refuse to wait for threads that another process has.

    Args:
        process: The id of the process that started them.

    Raises:
        RuntimeError: This process is a fork of it.
    """
    if os.getpid() != process:
        raise RuntimeError(
            f"this iterator belongs to process {process}, whose threads prepare its mini-batches; process "
            f"{os.getpid()} is a fork of it, which has no threads: begin a new iterator there, iter(loader)"
        )
