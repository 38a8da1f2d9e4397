"""Orders of an epoch's seeds, available as one tensor of which mini-batches are slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SequentialSampler
from typing_extensions import override

from lightning_gnn.loading.batch import Positions
from lightning_gnn.ops.hashing import batch_key
from lightning_gnn.runtime.lightning import (
    DistributedSamplerWrapper,
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)


class _TensorOrder(ABC):
    """Mixin for samplers whose order is available as a tensor."""

    @abstractmethod
    def positions(self) -> Tensor:
        """Return this rank's seed indices for the current epoch, int64 ``[num_samples]``."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions().tolist())


class TrainingOrder(_TensorOrder, DistributedSampler[int]):
    """Torch's ``DistributedSampler`` with its order also available as a tensor; Lightning sets its epoch."""

    @override
    def positions(self) -> Tensor:
        order = _shuffle(self, self.seed + self.epoch)
        if order.numel() < self.total_size:
            order = order.repeat(-(-self.total_size // max(order.numel(), 1)))
        return order[self.rank : self.total_size : self.num_replicas]


class OwnSeedsOrder(_TensorOrder, DistributedSampler[int]):
    """Assigns each rank the seeds that it owns; ranks with fewer seeds repeat their first ones."""

    def __init__(self, owner: Tensor, **options: Any) -> None:
        super().__init__(range(owner.numel()), **options)  # type: ignore[arg-type]
        # owner is the rank of each seed, integer [num_seeds].
        counts = torch.bincount(owner.long(), minlength=self.num_replicas)
        if without := (counts == 0).nonzero().view(-1).tolist():
            raise ValueError(
                f"rank {without[0]} of {self.num_replicas} has no training seeds in its part of the graph; use "
                "order='global' or fewer ranks, or partition the graph again with its current training seeds"
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
    """Visits each seed once per epoch even if the number of ranks changes within the epoch.

    A step takes ``batch_size`` seeds per rank. The last step splits the remaining seeds, and :meth:`weight` corrects
    the loss; a rank without seeds takes one with weight 0.
    """

    def __init__(
        self, num_seeds: int, batch_size: int, history: Sequence[tuple[int, int]] = (), **options: Any
    ) -> None:
        super().__init__(range(num_seeds), **options)  # type: ignore[arg-type]
        self.batch_size = batch_size
        self.history = list(history)  # earlier steps of this epoch, as (number of steps, seeds per step over all ranks)
        self.steps_before = sum(steps for steps, _ in self.history)
        self.seeds_before = sum(steps * seeds for steps, seeds in self.history)
        self.whole_steps, self.rest = divmod(max(num_seeds - self.seeds_before, 0), batch_size * self.num_replicas)
        if self.drop_last:
            self.rest = 0
        self.num_samples = (self.steps_before + self.whole_steps) * batch_size + (
            max(self._last_step_seeds, 1) if self.rest else 0
        )

    @property
    def _last_step_seeds(self) -> int:
        """Number of this rank's seeds in the last step."""
        return self.rest * (self.rank + 1) // self.num_replicas - self.rest * self.rank // self.num_replicas

    def positions(self) -> Tensor:
        """Return this rank's seed indices for the current epoch; steps already completed are zeros."""
        order = _shuffle(self, self.seed + self.epoch)[self.seeds_before :]
        end = self.whole_steps * self.batch_size * self.num_replicas
        own_batches = order[:end].view(self.whole_steps, self.num_replicas, self.batch_size)[:, self.rank].flatten()
        last = order[end : end + self.rest]
        begin = self.rest * self.rank // self.num_replicas
        own_last = last[begin : begin + self._last_step_seeds] if self._last_step_seeds else last[:1]
        return torch.cat([torch.zeros(self.steps_before * self.batch_size, dtype=torch.int64), own_batches, own_last])

    def weight(self, number: int) -> float:
        """Return the loss weight of this rank's mini-batch, which corrects for averaging over ranks equally."""
        if number < self.steps_before + self.whole_steps or not self.rest:
            return 1.0
        return self._last_step_seeds * self.num_replicas / self.rest


class EvaluationOrder(_TensorOrder, UnrepeatedDistributedSampler):  # type: ignore[misc]
    """Visits each seed once, in the same mini-batches every epoch, so that scores of epochs are comparable."""

    def set_epoch(self, epoch: int) -> None:
        """Ignore the epoch, so that the order stays the same."""

    @override
    def positions(self) -> Tensor:
        return _shuffle(self, self.epoch)[self.rank :: self.num_replicas]


_ORDERS = (TrainingOrder, EvaluationOrder, OwnSeedsOrder, ElasticOrder)


class UnshardedOrder(Sampler[int]):
    """Order of a loader created without a Trainer; Lightning and Fabric can still shard it with :meth:`sharded`."""

    def __init__(self, make: Callable[[int, int], DistributedSampler[int]]) -> None:
        self.make = make
        self.order = make(1, 0)

    @property
    def epoch(self) -> int:
        """Epoch of the order."""
        return self.order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the order."""
        self.order.set_epoch(epoch)

    def sharded(self, num_replicas: int, rank: int) -> DistributedSampler[int]:
        """Return the order of one rank."""
        order = self.make(num_replicas, rank)
        order.set_epoch(self.epoch)
        return order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


def sharded_order(sampler: object) -> object:
    """Return this rank's order if Lightning or Fabric has wrapped an :class:`UnshardedOrder`, else the sampler."""
    if isinstance(sampler, DistributedSamplerWrapper | UnrepeatedDistributedSamplerWrapper):
        wrapped = sampler.dataset._sampler  # type: ignore[attr-defined]
        if isinstance(wrapped, UnshardedOrder):
            return wrapped.sharded(sampler.num_replicas, sampler.rank)
    return sampler


def unwrap_order(batch_sampler: object) -> None:
    """Replace Lightning's wrapper in a batch sampler by our order, which is available as a tensor."""
    order = sharded_order(getattr(batch_sampler, "sampler", None))
    if isinstance(order, UnshardedOrder):
        order = order.order
    # For prediction, Lightning also wraps the batch sampler and copies its attributes.
    for each in (batch_sampler, getattr(batch_sampler, "_batch_sampler", None)):
        if getattr(each, "sampler", order) is not order:
            vars(each)["sampler"] = order  # Lightning's hooks would record setattr and repeat it


def mini_batches(
    batch_sampler: Iterable[Positions], first: int = 0, device: torch.device | None = None
) -> Iterator[Positions]:
    """Yield the seed indices of each mini-batch from ``first`` on, int64 ``[batch_size]``.

    If the order is available as a tensor, they are slices of it on ``device``; otherwise the sampler yields them.
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
        # Copy, so that a stored or saved batch does not keep the tensor of all seeds alive.
        yield order.narrow(0, begin, min(size, end - begin)).clone()


def as_positions(index: Positions) -> Positions:
    """Return a copy of seed indices, int64 ``[n]``, as a sampler may modify them afterwards."""
    if isinstance(index, Tensor):
        return index.clone()
    if type(index) not in (list, tuple):
        return index
    # Six times faster than torch.tensor.
    return torch.from_numpy(np.array(index, dtype=np.int64)) if len(index) else torch.empty(0, dtype=torch.int64)


def _whole_order(batch_sampler: object) -> Tensor | None:
    """Return the order of an epoch as a tensor, or None if only iteration can determine it."""
    if type(batch_sampler) is not BatchSampler:
        return None
    sampler = batch_sampler.sampler
    if isinstance(sampler, _TensorOrder) and type(sampler) in _ORDERS:
        return sampler.positions()
    return torch.arange(len(sampler)) if type(sampler) is SequentialSampler else None


def _shuffle(sampler: DistributedSampler[int], seed: int) -> Tensor:
    size = len(sampler.dataset)  # type: ignore[arg-type]
    if not sampler.shuffle:
        return torch.arange(size)
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
