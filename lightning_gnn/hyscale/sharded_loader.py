"""One rank's seeds of every mini-batch, of this package's loaders or of the user's own (HyScale-GNN, section III)."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from math import inf
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler
from torch_geometric.data.data import BaseData

from lightning_gnn.hyscale.staged_prefetcher import BatchShare, StagedBatching
from lightning_gnn.hyscale.transfer import Transfer
from lightning_gnn.loading.batch import Batch, BatchTask, Positions
from lightning_gnn.loading.prefetch import ThreadPrefetcher
from lightning_gnn.runtime.precision import converted

Split = Callable[[int, int], tuple[int, int]]
"""From how many seeds a mini-batch has, and its number in the epoch, to this rank's: the first, and one after the
last."""


def split_seeds(num_seeds: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Cut seeds into consecutive ranges in proportion to weights."""
    # Integers that add up to num_seeds are met exactly; each weight that is not 0 gets a seed, if there are enough.
    whole = sum(weights)
    cuts, before = [0], 0.0
    for weight in weights:
        before += weight
        cuts.append(min(num_seeds, int(num_seeds * before / whole + 0.5)))
    cuts[-1] = num_seeds
    sizes = [stop - start for start, stop in pairwise(cuts)]
    for place, weight in enumerate(weights):
        most = max(range(len(sizes)), key=sizes.__getitem__)
        if weight and not sizes[place] and sizes[most] > 1:
            sizes[place], sizes[most] = 1, sizes[most] - 1
    stops = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


class ShardedBatchSampler:
    """A batch sampler that yields this rank's seeds of every mini-batch of another one."""

    def __init__(
        self,
        loader: DataLoader[Batch],  # the loader whose batch sampler it is
        split: Split,  # returns which seeds are this rank's
        shard: int = 0,  # which part of a mini-batch that is
        first_batch: Callable[[], int] = lambda: 0,  # returns how many mini-batches of the epoch to leave out
        num_batches: Callable[[], float] = lambda: inf,
        on_epoch: Callable[[int], object] = lambda first: None,
        rank: int | None = None,  # of this process, None where it is alone
    ) -> None:
        # Functions are passed for what the trainer decides later, such as the first mini-batch of a resumed epoch.
        self.batches = cast(BatchSampler, loader.batch_sampler)
        self.split = split
        self.shard = shard
        self.first_batch = first_batch
        self.num_batches = num_batches
        self.on_epoch = on_epoch
        # Shares and generator states belong to the present epoch.
        self.shares: deque[BatchShare] = deque()
        """Of the slices that were yielded and whose mini-batches have not come yet."""
        self.order_state: Tensor | None = None
        """State of torch's generator from which the order of the present epoch was drawn; None if it follows from the
        epoch."""
        self.resumed: tuple[Tensor, Tensor] | None = None
        """From which the order of a resumed epoch is to be drawn, and the generator's state with which to go on."""
        self._rank = rank
        # A sampler that shares out seeds as well would leave each rank with a part of its part.
        sampler = getattr(self.batches, "sampler", None)
        if rank is not None and isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ValueError(
                f"the loader's {type(sampler).__name__} shares the seeds out among {sampler.num_replicas} processes, "
                "but hyscale shares out every mini-batch itself: leave it out, or set num_replicas=1, rank=0"
            )
        # Other samplers draw their order from torch's generator, whose state must then be saved to resume.
        follows = isinstance(sampler, (SequentialSampler, DistributedSampler))
        self._drawn = not (follows and type(self.batches) is BatchSampler)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def is_sized(self) -> bool:
        """Whether the number of mini-batches is known."""
        return hasattr(self.batches, "__len__")

    def __getattr__(self, name: str) -> Any:
        """Be like the batch sampler otherwise: batch_size, drop_last, sampler."""
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator[Positions]:
        return (task.seeds for task in self.tasks(0))

    def tasks(self, epoch: int) -> Iterator[BatchTask]:
        """Yield this rank's part of each mini-batch of an epoch, and note its share of it."""
        self.shares.clear()
        first, last = self.first_batch(), self.num_batches()
        self.on_epoch(first)
        for number, seeds in enumerate(self._order(first, None if last == inf else int(last))):
            if number >= first:
                yield self._shard_of(epoch, number, seeds)

    def upcoming(self, epoch: int, first: int) -> Iterator[BatchTask] | None:
        """Return this rank's parts from a mini-batch on, as far as they are known now; None where order is drawn."""
        if self._drawn:
            return None
        last = self.num_batches()
        order = islice(enumerate(self.batches), first, None if last == inf else int(last))
        return (self._cut(epoch, number, seeds, *self.split(len(seeds), number)) for number, seeds in order)

    def _shard_of(self, epoch: int, number: int, seeds: list[int]) -> BatchTask:
        start, stop = self.split(len(seeds), number)
        self.shares.append(BatchShare(number, stop - start, len(seeds)))
        return self._cut(epoch, number, seeds, start, stop)

    def _cut(self, epoch: int, number: int, seeds: list[int], start: int, stop: int) -> BatchTask:
        if stop > start:
            return BatchTask(epoch, number, seeds[start:stop], start, self.shard)
        return BatchTask(epoch, number, seeds[:1], 0, self.shard)  # a rank without seeds runs its step on one

    def _order(self, first: int, last: int | None) -> Iterator[list[int]]:
        """Yield the seeds of each mini-batch before the last."""
        if not self._drawn:
            return islice(self.batches, last)
        resumed, self.resumed = self.resumed, None
        if resumed is not None and first:
            torch.set_rng_state(resumed[0])
        self.order_state = torch.get_rng_state()
        order: list[list[int]] = []
        if self._rank in (None, 0):
            order = [list(index) for index in islice(self.batches, last)]
        if self._rank is not None:
            # With the stream after it, so that what hooks draw is the same on all ranks again.
            message: list[Any] = [order, torch.get_rng_state()]
            dist.broadcast_object_list(message, 0)
            order = message[0]
            torch.set_rng_state(message[1])
        if resumed is not None and first:
            torch.set_rng_state(resumed[1])
        return iter(order)


class ShardedDataLoader:
    """A torch ``DataLoader`` of any kind, whose mini-batches are made of this rank's seeds."""

    def __init__(
        self,
        loader: DataLoader[Batch],  # has a batch sampler over a dataset with positions
        batches: ShardedBatchSampler,
        on_batch: Callable[[BatchShare], None],  # called with the share of each mini-batch before it is handed out
        staged: StagedBatching | None = None,
        transfer: Transfer | None = None,
        dtype: torch.dtype | None = None,  # what floating attributes are converted to
    ) -> None:
        self.loader: Any = copy.copy(loader)
        vars(self.loader)["batch_sampler"] = batches  # DataLoader refuses to have it set, but reads it at each epoch
        self.loader.in_order = True  # each share belongs to its mini-batch
        self.batches, self.staged, self.transfer = batches, staged, transfer
        if staged is not None:
            self.loader.prefetcher, self.loader.first_batch = staged, None  # the batch sampler begins there itself
        self._on_batch, self._dtype = on_batch, dtype

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        made: Iterator[Batch] = iter(self.loader)
        if self.transfer is not None:
            made = ThreadPrefetcher(self._moved, made, 1, 2)
        held = deque[Batch]()  # no variable of this frame holds a mini-batch while it is trained on
        while self._put_next(made, held):
            yield held.pop()

    def _put_next(self, made: Iterator[Batch], held: deque[Batch]) -> bool:
        for batch in made:
            held.append(converted(batch, self._dtype) if self.staged is not None else batch)
            self._on_batch(self.batches.shares.popleft())
            return True
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def resize(self, threads: tuple[int, int]) -> None:
        """Change the threads of Sampling and Feature Loading, also of an epoch under way; others' stay as they are."""
        if self.staged is not None:
            self.staged.resize(threads)

    def close(self) -> list[str]:
        """Stop preparing and join the threads; return the names of those that hang. Others' are left to the loader."""
        return [] if self.staged is None else self.staged.close()

    def _moved(self, batch: Batch) -> Batch:
        assert self.transfer is not None
        return self.transfer(converted(batch, self._dtype)) if isinstance(batch, BaseData) else batch


class UnshardedDataLoader:
    """A loader whose mini-batches cannot be shared out: rank 0 has all of each, the others have no seeds."""

    def __init__(self, loader: Any, on_batch: Callable[[BatchShare], None], rank: int) -> None:
        self.loader = loader
        self._on_batch = on_batch
        self._seeds = int(rank == 0)

    def __len__(self) -> int:
        return len(self.loader)  # raises TypeError where the loader has none, as Lightning expects it

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.loader):
            self._on_batch(BatchShare(number, self._seeds, 1))
            yield batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def can_be_cut(loader: object) -> bool:
    """Whether a loader's mini-batches are made of positions in a dataset, of which each rank can take some."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )
