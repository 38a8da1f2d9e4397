"""Sampling of a graph whose edges lie in parts that no kernel reads: between two launches of a hop, the host fetches.

The first launch of a hop picks in-edges, the second bids for their sources, which somebody has brought to the device
meanwhile. The result is that of one launch for all hops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.triton_kernels.hops import BARRIER, EDGES, FETCHED, PHASES, PICKED, hop_kernel
from lightning_gnn.triton_kernels.sample import Batch, TritonNeighborSampler
from lightning_gnn.triton_kernels.sample_bulk import Bulk, most_batches


class FetchingSampler(TritonNeighborSampler):  # type: ignore[misc]
    """Sample mini-batches, one at a time or in bulks; each launch calls ``fetch`` once a hop, also for no edges.

    So processes that fetch from each other stay in step, also if one has fewer mini-batches in a bulk than the others.
    Memory is taken for as many edges as fanouts allow.

    Args:
        indptr: Offsets in CSC order, int64 ``[num_nodes + 1]``, on the device.
        num_edges: Of the graph.
        fetch: From positions of edges in CSC order, int64 ``[n]`` on the device, to their sources, int32 or int64
            ``[n]``, there too.
        device: Where to sample.
        **options: Further ones of :class:`TritonNeighborSampler`.

    Raises:
        ValueError: A graph of 2^31 nodes or more, or ``mode="persistent"``, as the queue takes no turns.
    """

    MODES = ("fused",)
    QUEUE_MODES = ()

    def __init__(
        self, indptr: Tensor, num_edges: int, fetch: Callable[[Tensor], Tensor], device: torch.device, **options: Any
    ) -> None:
        super().__init__(indptr, indptr.new_empty(0, dtype=torch.int32), device=device, **options)
        self.num_edges, self.fetch_sources = num_edges, fetch

    def _batch(
        self, seeds: Tensor, fanouts: list[int], key: int, replace: bool, disjoint: bool, first_tree: int
    ) -> Batch:
        return _FetchedBatch(self, seeds, fanouts, key, replace, disjoint, first_tree)

    def most_together(self, num_seeds: int, fanouts: Sequence[int], replace: bool) -> int:
        """Return how many mini-batches of so many seeds have room in the memory with which samplers begin."""
        alone = self.batch(torch.empty(num_seeds, dtype=torch.int64), fanouts, 0, replace)
        return int(max(1, min(most_batches(self), self.START_EDGES // max(alone.bound, 1))))


class _Fetched(Batch):  # type: ignore[misc]
    sampler: FetchingSampler

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound > self.limit:
            raise ValueError(
                f"{self.num_seeds} seeds with fanouts {self.fanouts} may have {self.bound} edges, but {self.limit} fit "
                "where sources are fetched hop by hop; take smaller fanouts, or topology='pinned'"
            )
        self.capacity = self.bound  # to begin again with more would fetch more often than others do

    def launch_hops(self) -> None:
        args, options = self.hop_arguments()
        options["launch_cooperative_grid"] = True
        fetched = self.sampler.scratch("fetched", self.capacity, torch.int32)
        graph: Sequence[Any] = (*args[:3], fetched)
        for level in range(self.num_hops + 1):
            first = PHASES.value * level
            if level:
                self._run((*graph, *args[4:]), options | {"SHARDS": PICKED.value}, first, first + 1)
                begin, end = self.sizes[EDGES.value + level : EDGES.value + level + 2].tolist()
                fetched[begin:end] = self.sampler.fetch_sources(self.eid[begin:end].to(torch.int64))
            splits = self.parts > 1 and level == self.num_hops
            self._run((*graph, *args[4:]), options | {"SHARDS": FETCHED.value}, first, first + PHASES.value + splits)

    def _run(self, args: tuple[Any, ...], options: dict[str, Any], first: int, end: int) -> None:
        variant = ("hop", self.disjoint, self.parts > 1, options["SHARDS"], self.K, self.seeds.dtype)
        programs = self.sampler.resident(hop_kernel, variant, (*args, first, end), options)
        self.control[BARRIER.value] = 0  # arrivals are counted from the beginning of a launch
        for begin, stop in self.sampler.ranges(first, end, programs):
            hop_kernel[(programs,)](*args, begin, stop, **options)


class _FetchedBatch(_Fetched):
    """One mini-batch."""


class _FetchedBulk(_Fetched, Bulk):  # type: ignore[misc]
    """Several side by side."""


FetchingSampler.BULK = _FetchedBulk
