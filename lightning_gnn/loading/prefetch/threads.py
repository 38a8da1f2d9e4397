"""Prefetching in threads, or preparation on demand without threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from lightning_gnn.loading.batch import PreparedBatch
from lightning_gnn.loading.prefetch.protocol import Prefetcher
from lightning_gnn.runtime.thread_pipeline import Item, StageFunction, StagePipeline


class ThreadPrefetcher(Prefetcher):
    """Yields ``prepare(task)`` for each task in order; threads prepare a bounded number of them ahead.

    An exception in a thread is raised at its task, with the thread's traceback. Closing or dropping the iterator
    cancels pending tasks; closing it, which the last mini-batch also does, joins the threads.

    Args:
        prepare: Prepares a mini-batch, such as ``MiniBatchPipeline.prepare``; called from several threads.
        tasks: Tasks to prepare; consumed in the caller's thread.
        num_threads: Number of threads; 0 prepares in the caller's thread, on demand.
        ahead: Maximum number of mini-batches in progress or ready; by default two per thread.
        on_close: Called after the threads have ended.

    Examples:
        >>> from lightning_gnn.loading.prefetch import ThreadPrefetcher
        >>> with ThreadPrefetcher(str, [1, 2, 3], num_threads=2) as prefetcher:
        ...     list(prefetcher)
        ['1', '2', '3']
    """

    def __init__(
        self,
        prepare: Callable[[Any], Any],
        tasks: Iterable[Any],
        num_threads: int = 0,
        ahead: int | None = None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self._tasks, self._prepare, self._on_close = iter(tasks), prepare, on_close
        self._stages: StagePipeline | None = None
        if num_threads:
            # Not a bound method, so that the threads do not keep this object alive.
            step: StageFunction = lambda value, task: prepare(task)  # noqa: E731
            bound = max((2 * num_threads if ahead is None else ahead) - num_threads, 0)
            self._stages = StagePipeline(
                [[("batch", step)]], [num_threads], bound, inf, begin=lambda: None, patience=inf, owner=self
            )
            self._items = (Item(None, task) for task in self._tasks)
            self._stages.fill(self._items)

    def __next__(self) -> PreparedBatch:
        try:
            if self._stages is None:
                return self._prepare(next(self._tasks))  # type: ignore[no-any-return]
            if (item := self._stages.pull(self._items)) is None:
                raise StopIteration
            if not self._stages.in_flight:
                self.close()  # the threads of an epoch end with its last mini-batch
        except BaseException:
            self.close()
            raise
        return item.value  # type: ignore[no-any-return]

    def close(self) -> None:
        """Cancel pending tasks and join the threads."""
        self._tasks = iter(())
        if self._stages is not None:
            self._items = (Item(None, task) for task in self._tasks)
            self._stages.close()
        self._on_close()
