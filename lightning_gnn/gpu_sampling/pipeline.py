"""Loading pipeline for mini-batches that are sampled and gathered directly on the GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.loading.batch import Attribute, Batch, BatchTask, Positions, SampledBatch
from lightning_gnn.loading.collate import Allocator
from lightning_gnn.loading.pipeline import MiniBatchPipeline
from lightning_gnn.nn.sampled_edges import remember
from lightning_gnn.ops.sample.definition import check_seeds
from lightning_gnn.runtime.devices import to_device_async
from lightning_gnn.runtime.timeline import profiled
from lightning_gnn.sampling.deferred_edges import apply_now, deferred
from lightning_gnn.sampling.neighbor import Output


@dataclass(eq=False)
class PendingLaunch:
    """Mini-batches that the GPU is sampling in one launch."""

    tasks: list[BatchTask]
    samples: Any  # handle of the sampler's launch
    ids: Sequence[Tensor]  # seed positions of each mini-batch, int64 [batch_size], on the device

    def is_ready(self) -> bool:
        """Return whether :meth:`DevicePipeline.result` would return without waiting."""
        return bool(self.samples.is_ready())


class DevicePipeline(MiniBatchPipeline):
    """:class:`MiniBatchPipeline` on a GPU: whole mini-batches are on the device, so Lightning has nothing to copy."""

    def __init__(self, *args: Any, device: torch.device, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device = device
        self._device_seeds: tuple[Tensor, Tensor | None] | None = None

    def collate(self, out: Output, allocate: Allocator | None = None) -> tuple[Batch, dict[Attribute, Tensor]]:
        """Return PyG's mini-batch of a subgraph on the device, and the rows of trained tensors to gather later."""
        batch, deferred_rows = super().collate(out, allocate)
        batch = apply_now(batch, self._to_device)
        if self.has_own_sampler:
            remember(batch)
        return batch, deferred_rows

    @property
    def can_launch(self) -> bool:
        """Whether sampling can be launched asynchronously."""
        if self.has_edges or self.requires_main_thread or self.seeds.time is not None:
            return False
        return bool(self.sampler.can_begin)

    def launch(self, tasks: Sequence[BatchTask], share: float = 1.0) -> PendingLaunch:
        """Launch the sampling of at most ``bulk_size`` mini-batches asynchronously on the current stream."""
        seeds, ids = self._seeds_on_device([task.seeds for task in tasks])
        sizes, keys = [len(task.seeds) for task in tasks], [self.key(task) for task in tasks]
        samples = self.sampler.begin(seeds, sizes, keys, share, tasks[0].seed_offset)  # disjoint trees: one task
        return PendingLaunch(list(tasks), samples, torch.split(ids, sizes))

    @profiled("sampling")
    def result(self, launch: PendingLaunch) -> list[SampledBatch]:
        """Return the mini-batches of a launch, for use on the stream of the launch."""
        start = time.perf_counter()
        with deferred(self.defers_edges):
            outs = self.sampler.end(launch.samples)
        seconds = (time.perf_counter() - start) / len(outs)
        for out, ids in zip(outs, launch.ids, strict=True):
            out.metadata = (ids, None)
        return [SampledBatch(task, out, self.key(task), seconds) for task, out in zip(launch.tasks, outs, strict=True)]

    def _seeds_on_device(self, positions: list[Positions]) -> tuple[Tensor, Tensor]:
        """Return the seeds at the positions of mini-batches and their ids, one after another, on the device."""
        if self._device_seeds is None:
            nodes = check_seeds(self.seeds.node, self.sampler.graph.num_nodes)
            ids = self.seeds.input_id
            self._device_seeds = nodes.to(self.device), None if ids is None else ids.to(self.device)
        on_device = [own for own in positions if isinstance(own, Tensor) and not own.is_cpu]
        if len(on_device) == len(positions):
            at = torch.cat(on_device) if len(on_device) > 1 else on_device[0]
            nodes, ids = self._device_seeds
            return nodes.index_select(0, at), at if ids is None else ids.index_select(0, at)
        inputs = [self.seeds[own] for own in positions]  # a user's batch sampler: index on the CPU, which checks ranges
        for own in inputs:
            if own.node.dim() != 1:
                raise ValueError(f"seeds must have one dimension, but have the shape {list(own.node.shape)}")
        nodes, ids = (torch.cat([getattr(own, name) for own in inputs]) for name in ("node", "input_id"))
        return to_device_async(nodes, self.device), to_device_async(ids, self.device)

    def _to_device(self, value: Tensor) -> Tensor:
        if isinstance(value, Tensor) and value.is_cpu and not value.requires_grad:
            return to_device_async(value, self.device)
        return value
