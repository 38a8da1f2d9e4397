"""The loader of a GPU's sampler: mini-batches are sampled several at a time, and handed out one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning_gnn.runtime.timeline import profiled
from lightning_gnn.sampling.loader import Positions, Prepared, Task, ThreadedNodeLoader


class BulkNodeLoader(ThreadedNodeLoader):
    """A :class:`ThreadedNodeLoader` over a :class:`PersistentNeighborSampler`, with the same mini-batches.

    Features are gathered for one mini-batch at a time, when it is its turn.

    Args:
        *args: As for :class:`ThreadedNodeLoader`.
        bulk: Mini-batches that are sampled at a time, if memory and the kind of sampling allow
            (``PersistentNeighborSampler.bulk_size``); at the end of an epoch fewer.
        **kwargs: As there; there are no worker threads.
    """

    def __init__(self, *args: Any, bulk: int = 8, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bulk = bulk

    def pipeline(self, tasks: Iterator[Task]) -> Iterator[Prepared]:
        """Yield the prepared mini-batches of some tasks."""
        bulk = 1 if self.in_training_thread else self.node_sampler.bulk_size(self.bulk)
        if bulk == 1:
            yield from super().pipeline(tasks)
        while group := list(islice(tasks, bulk)):
            start = time.perf_counter()
            keys = [self.key_of(task) for task in group]
            sampled = self._sample_many([index for _, _, index in group], keys)
            share = (time.perf_counter() - start) / len(group)
            while sampled:  # one that has been handed out is the consumer's alone
                prepared = self.load(sampled.pop(0), keys.pop(0))
                prepared.cost.sampling_s = share
                yield prepared

    @profiled("sampling")
    def _sample_many(self, indices: list[Positions], keys: list[int]) -> list[Any]:
        made: list[Any] = self.node_sampler.sample_many([self.input_data[index] for index in indices], keys)
        return made
