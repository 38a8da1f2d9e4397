"""Loaders whose mini-batches a GPU samples and gathers, and which are born there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from lightning_gnn.nn.sampled_edges import remember
from lightning_gnn.ops.sample.definition import check_seeds
from lightning_gnn.persistent.ahead import Ahead
from lightning_gnn.runtime.devices import sent
from lightning_gnn.runtime.timeline import profiled
from lightning_gnn.sampling.deferred_edges import apply_now, deferred
from lightning_gnn.sampling.loader import Prepared, Task, ThreadedLinkLoader, ThreadedNodeLoader
from lightning_gnn.sampling.look_ahead import ReadInTurn


@dataclass(eq=False)
class Begun:
    """Mini-batches that the GPU samples, in one launch.

    Args:
        samples: What the sampler has begun.
        ids: Of each, the positions of its seeds on the device, int64 ``[batch_size]``.
    """

    samples: Any
    keys: list[int]
    ids: list[Tensor]

    def is_ready(self) -> bool:
        """Whether to end them would not wait."""
        return bool(self.samples.is_ready())


class _OnDevice:
    """Mixed into a loader: no tensor of a mini-batch is left for Lightning's transfer, which would wait."""

    def __init__(self, *args: Any, device: torch.device, prefetch: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device, self.prefetch = device, prefetch

    def _join(self, out: SamplerOutput | HeteroSamplerOutput) -> tuple[Any, dict[tuple[Any, str], Tensor]]:
        batch, left = super()._join(out)  # type: ignore[misc]
        batch = apply_now(batch, self._sent)
        if self.samples_alone:  # type: ignore[attr-defined]
            remember(batch)
        return batch, left

    def _sent(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cpu and not value.requires_grad:
            return sent(value, self.device)
        return value

    @property
    def can_begin(self) -> bool:
        """Whether it can begin with a mini-batch and wait for it later."""
        return False

    def pipeline(self, epoch: int, first: int) -> Ahead | ReadInTurn:
        """Return an iterator over the mini-batches of an epoch that are left.

        Where rows lie on disk, mini-batches are sampled one by one, far ahead, and wait in the host's memory.
        """
        tasks, after = self.tasks(epoch, first), self._tasks_after(epoch)  # type: ignore[attr-defined]
        look_ahead = self.look_ahead(tasks, first, after)  # type: ignore[attr-defined]
        if look_ahead is not None:
            return ReadInTurn(look_ahead, Ahead(self, look_ahead, self.prefetch, look_ahead.prepare))
        where = self.device if self.can_begin else None
        return Ahead(self, self.tasks(epoch, first, where), self.prefetch)  # type: ignore[attr-defined]


class DeviceNodeLoader(_OnDevice, ThreadedNodeLoader):
    """The mini-batches of :class:`~lightning_gnn.sampling.ThreadedNodeLoader`, sampled and gathered by a GPU.

    Args:
        *args: The graph, and a :class:`PersistentNeighborSampler`.
        prefetch: Mini-batches prepared beyond the one that is trained on, on a stream of their own; 0 prepares them in
            turn with training.
        bulk: Mini-batches that are sampled in one launch, if memory and the kind of sampling allow
            (``PersistentNeighborSampler.bulk_size``); features are gathered for one at a time, when it is its turn.
    """

    def __init__(self, *args: Any, bulk: int = 8, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bulk = bulk
        self._there: tuple[Tensor, Tensor | None] | None = None

    @property
    def can_begin(self) -> bool:
        """Whether it can begin with a mini-batch and wait for it later."""
        return not self.in_training_thread and self.node_sampler.can_begin and self.input_data.time is None

    @property
    def bulk_size(self) -> int:
        """How many mini-batches :meth:`begin` is to be given at a time."""
        return int(self.node_sampler.bulk_size(self.bulk))

    def begin(self, tasks: Sequence[Task], share: float = 1.0) -> Begun:
        """Launch the sampling of mini-batches on the current stream; nobody waits."""
        seeds, ids = zip(*(self._on_device(index) for _, _, index in tasks), strict=True)
        keys = [self.key_of(task) for task in tasks]
        return Begun(self.node_sampler.begin(seeds, keys, share), keys, list(ids))

    def _on_device(self, index: Any) -> tuple[Tensor, Tensor]:
        """Return seeds, and their names, for positions."""
        if self._there is None:
            nodes = check_seeds(self.input_data.node, self.node_sampler.graph.num_nodes)
            names = self.input_data.input_id
            self._there = nodes.to(self.device), None if names is None else names.to(self.device)
        if isinstance(index, Tensor) and not index.is_cpu:
            nodes, names = self._there
            return nodes.index_select(0, index), index if names is None else names.index_select(0, index)
        inputs = self.input_data[index]  # of a user's own sampler: positions may be out of range
        if inputs.node.dim() != 1:
            raise ValueError(f"seeds must have one dimension, but have the shape {list(inputs.node.shape)}")
        return sent(inputs.node, self.device), sent(inputs.input_id, self.device)

    @profiled("sampling")
    def end(self, begun: Begun) -> list[Callable[[], Prepared]]:
        """Return the mini-batches that were begun on the current stream, each of which is yet to be gathered."""
        start = time.perf_counter()
        with deferred(self.defers_edges):
            outs = self.node_sampler.end(begun.samples)
        share = (time.perf_counter() - start) / len(outs)
        for out, ids in zip(outs, begun.ids, strict=True):
            out.metadata = (ids, None)
        return [partial(self._gathered, out, key, share) for out, key in zip(outs, begun.keys, strict=True)]

    def _gathered(self, out: SamplerOutput, key: int, sampling_s: float) -> Prepared:
        prepared = self.load(out, key)
        prepared.cost.sampling_s = sampling_s
        return prepared


class DeviceLinkLoader(_OnDevice, ThreadedLinkLoader):
    """The mini-batches of :class:`~lightning_gnn.sampling.ThreadedLinkLoader`, sampled and gathered by a GPU."""
