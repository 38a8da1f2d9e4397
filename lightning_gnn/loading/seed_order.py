"""The order of an epoch's seeds as one tensor, which mini-batches are slices of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSampler, UnrepeatedDistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SequentialSampler
from typing_extensions import override

from lightning_gnn.loading.batch import Positions
from lightning_gnn.ops.hashing import batch_key


class _TensorOrder(ABC):
    """An order of positions that can be had as a tensor."""

    @abstractmethod
    def positions(self) -> Tensor:
        """Return this process's positions in the present epoch, int64 ``[num_samples]``."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions().tolist())


class TrainingOrder(_TensorOrder, DistributedSampler[int]):
    """Torch's ``DistributedSampler``, to which Lightning gives the epoch, with its order as a tensor too."""

    @override
    def positions(self) -> Tensor:
        order = _shuffled(self, self.seed + self.epoch)
        if order.numel() < self.total_size:
            order = order.repeat(-(-self.total_size // max(order.numel(), 1)))
        return order[self.rank : self.total_size : self.num_replicas]


class OwnSeedsOrder(_TensorOrder, DistributedSampler[int]):
    """Each process goes over seeds of its own, and where it has fewer than another, over its first ones once more."""

    def __init__(self, owner: Tensor, **options: Any) -> None:
        super().__init__(range(owner.numel()), **options)  # type: ignore[arg-type]
        # owner: which process has each seed, integer [num_seeds]
        counts = torch.bincount(owner.long(), minlength=self.num_replicas)
        if without := (counts == 0).nonzero().view(-1).tolist():
            raise ValueError(
                f"rank {without[0]} of {self.num_replicas} has no training seeds in its part of the graph; use "
                "order='global', fewer ranks, or partition the graph again with the seeds it is trained on"
            )
        self.owner = owner
        self.num_samples = int(counts.min() if self.drop_last else counts.max())
        self.total_size = self.num_samples * self.num_replicas

    @override
    def positions(self) -> Tensor:
        own = (self.owner == self.rank).nonzero().view(-1)
        if self.shuffle:
            key = batch_key(self.seed, self.rank, epoch=self.epoch) % 2**62
            own = own[torch.randperm(own.numel(), generator=torch.Generator().manual_seed(key))]
        return own.repeat(-(-self.num_samples // own.numel()))[: self.num_samples]


class ElasticOrder(_TensorOrder, DistributedSampler[int]):
    """Each seed once per epoch for any number of processes, which may change within it: it counts in seeds.

    A step takes ``batch_size`` seeds per process; the last one the rest, by :meth:`weight`, one of no weight at least.
    """

    def __init__(
        self, num_seeds: int, batch_size: int, history: Sequence[tuple[int, int]] = (), **options: Any
    ) -> None:
        super().__init__(range(num_seeds), **options)  # type: ignore[arg-type]
        self.batch_size = batch_size
        self.history = list(history)  # steps of this epoch that other numbers of processes took, and seeds of each
        self.steps_before = sum(steps for steps, _ in self.history)
        self.seeds_before = sum(steps * seeds for steps, seeds in self.history)
        self.whole_steps, self.rest = divmod(max(num_seeds - self.seeds_before, 0), batch_size * self.num_replicas)
        if self.drop_last:
            self.rest = 0
        self.num_samples = (self.steps_before + self.whole_steps) * batch_size + (
            max(self._share, 1) if self.rest else 0
        )

    @property
    def _share(self) -> int:
        """How many seeds of the last step this process has."""
        return self.rest * (self.rank + 1) // self.num_replicas - self.rest * self.rank // self.num_replicas

    def positions(self) -> Tensor:
        """Return this process's positions in the present epoch; those of steps that others have taken are zeros."""
        order = _shuffled(self, self.seed + self.epoch)[self.seeds_before :]
        taken = self.whole_steps * self.batch_size * self.num_replicas
        mine = order[:taken].view(self.whole_steps, self.num_replicas, self.batch_size)[:, self.rank].flatten()
        last = order[taken : taken + self.rest]
        begin = self.rest * self.rank // self.num_replicas
        own = last[begin : begin + self._share] if self._share else last[:1]
        return torch.cat([torch.zeros(self.steps_before * self.batch_size, dtype=torch.int64), mine, own])

    def weight(self, number: int) -> float:
        """Return what the loss of this process's mini-batch must be multiplied with, as processes weigh the same."""
        if number < self.steps_before + self.whole_steps or not self.rest:
            return 1.0
        return self._share * self.num_replicas / self.rest


class EvaluationOrder(_TensorOrder, UnrepeatedDistributedSampler):  # type: ignore[misc]
    """Each seed once, and the same mini-batches in each epoch, so that scores of different epochs compare."""

    def set_epoch(self, epoch: int) -> None:
        """Leave the order as it is."""

    @override
    def positions(self) -> Tensor:
        return _shuffled(self, self.epoch)[self.rank :: self.num_replicas]


_ORDERS = (TrainingOrder, EvaluationOrder, OwnSeedsOrder, ElasticOrder)


class UnshardedOrder(Sampler[int]):
    """The order of a loader that no Trainer has asked for; Lightning and Fabric still shard it, by :meth:`sharded`."""

    def __init__(self, make: Callable[[int, int], DistributedSampler[int]]) -> None:
        self.make = make
        self.order = make(1, 0)

    @property
    def epoch(self) -> int:
        """The epoch whose order it is."""
        return self.order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order it is."""
        self.order.set_epoch(epoch)

    def sharded(self, num_replicas: int, rank: int) -> DistributedSampler[int]:
        """Return the order of one of several ranks."""
        order = self.make(num_replicas, rank)
        order.set_epoch(self.epoch)
        return order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


def sharded_order(sampler: object) -> object:
    """Return this rank's order where Lightning or Fabric has wrapped an unsharded one, else the sampler."""
    if isinstance(sampler, DistributedSamplerWrapper | UnrepeatedDistributedSamplerWrapper):
        wrapped = sampler.dataset._sampler  # type: ignore[attr-defined]
        if isinstance(wrapped, UnshardedOrder):
            return wrapped.sharded(sampler.num_replicas, sampler.rank)
    return sampler


def unwrap_order(batch_sampler: object) -> None:
    """Let a batch sampler go over our own order, which can be cut as a tensor, instead of a wrapper around it."""
    order = sharded_order(getattr(batch_sampler, "sampler", None))
    if isinstance(order, UnshardedOrder):
        order = order.order
    # To predict, Lightning wraps the batch sampler, too, and copies its attributes.
    for each in (batch_sampler, getattr(batch_sampler, "_batch_sampler", None)):
        if getattr(each, "sampler", order) is not order:
            vars(each)["sampler"] = order  # Lightning repeats on a new object what setattr does within its hooks


def mini_batches(
    batch_sampler: Iterable[Positions], first: int = 0, device: torch.device | None = None
) -> Iterator[Positions]:
    """Yield the positions of each mini-batch's seeds, int64 ``[batch_size]``; a user's own as they are, one by one.

    Where the order is known as a tensor they are cut from it, and may lie on another ``device`` than the CPU.
    """
    order = _whole_order(batch_sampler)
    if order is None:
        yield from (as_positions(index) for index in islice(batch_sampler, first, None))
        return
    if device is not None:
        order = order.to(device)
    assert isinstance(batch_sampler, BatchSampler)
    size = batch_sampler.batch_size
    end = order.numel() - order.numel() % size if batch_sampler.drop_last else order.numel()
    for begin in range(first * size, end, size):
        # A copy: a batch that is kept, or saved, is not to hold all seeds.
        yield order.narrow(0, begin, min(size, end - begin)).clone()


def as_positions(index: Positions) -> Positions:
    """Return a copy of positions that a sampler may go on to change, int64 ``[n]``."""
    if isinstance(index, Tensor):
        return index.clone()
    if type(index) not in (list, tuple):
        return index
    # A sixth of what torch.tensor takes.
    return torch.from_numpy(np.array(index, dtype=np.int64)) if len(index) else torch.empty(0, dtype=torch.int64)


def _whole_order(batch_sampler: object) -> Tensor | None:
    """Return the order of an epoch, if it is sure to be what iteration would give; else None."""
    if type(batch_sampler) is not BatchSampler:
        return None
    sampler = batch_sampler.sampler
    if isinstance(sampler, _TensorOrder) and type(sampler) in _ORDERS:
        return sampler.positions()
    return torch.arange(len(sampler)) if type(sampler) is SequentialSampler else None


def _shuffled(sampler: DistributedSampler[int], seed: int) -> Tensor:
    size = len(sampler.dataset)  # type: ignore[arg-type]
    if not sampler.shuffle:
        return torch.arange(size)
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
