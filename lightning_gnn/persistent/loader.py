"""Loaders whose mini-batches a GPU samples and gathers, and which are born there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from lightning_gnn.ops import batch_key
from lightning_gnn.ops.sample.definition import check_seeds
from lightning_gnn.persistent.ahead import Ahead
from lightning_gnn.runtime.devices import sent
from lightning_gnn.sampling.loader import Prepared, Task, ThreadedLinkLoader, ThreadedNodeLoader


@dataclass(eq=False)
class Begun:
    """A mini-batch that the GPU samples.

    Args:
        sample: What the sampler has begun.
        key: The key of the mini-batch.
        metadata: Positions of its seeds on the device, int64 ``[batch_size]``, and None: seeds have no times.
        start: When it was begun, in seconds.
    """

    sample: Any
    key: int
    metadata: tuple[Tensor, None]
    start: float

    def is_ready(self) -> bool:
        """Whether completing it would not wait."""
        return bool(self.sample.is_ready())


class _OnDevice:
    """Mixed into a loader: no tensor of a mini-batch is left for Lightning's transfer, which would wait."""

    device: torch.device

    def _join(self, out: SamplerOutput | HeteroSamplerOutput) -> tuple[Any, dict[tuple[Any, str], Tensor]]:
        batch, left = super()._join(out)  # type: ignore[misc]
        return batch.apply(self._sent), left

    def _sent(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cpu and not value.requires_grad:
            return sent(value, self.device)
        return value

    @property
    def can_begin(self) -> bool:
        """Whether it can begin with a mini-batch and wait for it later."""
        return False

    def pipeline(self, epoch: int, first: int) -> Ahead:
        """Return an iterator over the mini-batches of an epoch that are left."""
        depth: int = self.prefetch  # type: ignore[attr-defined]
        where = self.device if self.can_begin else None
        return Ahead(self, self.tasks(epoch, first, where), depth)  # type: ignore[attr-defined]


class DeviceNodeLoader(_OnDevice, ThreadedNodeLoader):
    """The mini-batches of :class:`~lightning_gnn.sampling.ThreadedNodeLoader`, sampled and gathered by a GPU.

    Args:
        *args: The graph, and a sampler on the GPU.
        device: The GPU.
        prefetch: Mini-batches prepared beyond the one that is trained on, on a stream of their own; 0 prepares them in
            turn with training.
        **kwargs: What :class:`~lightning_gnn.sampling.ThreadedNodeLoader` takes.
    """

    def __init__(self, *args: Any, device: torch.device, prefetch: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device, self.prefetch = device, prefetch
        self._there: tuple[Tensor, Tensor | None] | None = None

    @property
    def can_begin(self) -> bool:
        """Whether it can begin with a mini-batch and wait for it later."""
        return bool(getattr(self.node_sampler, "can_begin", False)) and self.input_data.time is None

    def begin(self, task: Task, share: float = 1.0) -> Begun:
        """Launch the sampling of a mini-batch on the current stream; nobody waits.

        Args:
            task: Its epoch, its number and the positions of its seeds, on the device or on the host.
            share: Of the GPU, how much the launch may fill.
        """
        epoch, number, index = task
        start = time.perf_counter()
        key = batch_key(self.seed, self.rank, self.loader_id, epoch, number)
        if self._there is None:
            nodes = check_seeds(self.input_data.node, self.node_sampler.graph.num_nodes)
            names = self.input_data.input_id
            self._there = nodes.to(self.device), None if names is None else names.to(self.device)
        if isinstance(index, Tensor) and not index.is_cpu:
            nodes, names = self._there
            ids, seeds = index if names is None else names.index_select(0, index), nodes.index_select(0, index)
        else:  # of a user's own sampler: they may be out of range
            inputs = self.input_data[index]
            ids, seeds = sent(inputs.input_id, self.device), sent(inputs.node, self.device)
        return Begun(self.node_sampler.begin(seeds, key, share), key, (ids, None), start)

    def complete(self, begun: Begun) -> Prepared:
        """Return a mini-batch that was begun on the current stream; waits for its sizes, unless it is ready."""
        began = time.perf_counter()
        out = self.node_sampler.end(begun.sample)
        out.metadata = begun.metadata
        sampled = time.perf_counter()
        prepared = self.load(out, begun.key)
        prepared.cost.sampling_s, prepared.cost.features_s = sampled - began, time.perf_counter() - sampled
        return prepared


class DeviceLinkLoader(_OnDevice, ThreadedLinkLoader):
    """The mini-batches of :class:`~lightning_gnn.sampling.ThreadedLinkLoader`, sampled and gathered by a GPU.

    Args:
        *args: The graph, and a sampler on the GPU.
        device: The GPU.
        prefetch: Not 0: they are prepared on a stream of their own, beside what has been queued for training.
        **kwargs: What :class:`~lightning_gnn.sampling.ThreadedLinkLoader` takes.
    """

    def __init__(self, *args: Any, device: torch.device, prefetch: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device, self.prefetch = device, prefetch
