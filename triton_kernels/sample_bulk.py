"""Several mini-batches in one launch: hop h of each beside hop h of the others, so that one barrier serves all of them.

Each is what :meth:`TritonNeighborSampler.sample` returns for it alone, bit for bit; there is one host synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from lightning_gnn.triton_kernels import hops
from lightning_gnn.triton_kernels.emit import EDGE_INDEX_OUT, EDGE_OUT, NODE_OUT, OWN_EDGES, ROW, emit_bulk_kernel
from lightning_gnn.triton_kernels.sample import LARGEST, Batch, Sample, TritonNeighborSampler, checked_hops


def most_batches(sampler: TritonNeighborSampler) -> int:
    """Return how many mini-batches a launch takes at most: their nodes are numbered in 31 bits; the queue takes one."""
    if sampler.mode in sampler.QUEUE_MODES:
        return 1
    return int(min(hops.MAX_BATCHES, LARGEST // max(sampler.num_nodes, 1)))


def sample_bulk(
    sampler: TritonNeighborSampler,
    seeds: Sequence[Tensor],
    fanouts: Sequence[int],
    keys: Sequence[int],
    replace: bool = False,
) -> list[Sample]:
    """Sample several mini-batches, whose seeds are of one dtype, with a key each, as many at a time as fit."""
    most = most_batches(sampler)
    if len(seeds) > most:
        return [
            sample
            for first in range(0, len(seeds), most)
            for sample in sample_bulk(
                sampler, seeds[first : first + most], fanouts, keys[first : first + most], replace
            )
        ]
    if len(seeds) < 2:
        return [sampler.sample(own, fanouts, key, replace) for own, key in zip(seeds, keys, strict=True)]
    with sampler.exclusive():
        sampler.share = 1.0
        bulk = joined(sampler, seeds, fanouts, keys, replace)
        bulk.start()
        return bulk.finish()


def joined(
    sampler: TritonNeighborSampler, seeds: Sequence[Tensor], fanouts: Sequence[int], keys: Sequence[int], replace: bool
) -> Bulk:
    """Return mini-batches as what ``sampler.begin`` launches; arguments as for sample_bulk."""
    starts = np.cumsum([0, *(own.numel() for own in seeds)]).tolist()
    together = torch.cat(list(seeds)).to(sampler.device, non_blocking=True)
    return Bulk(sampler, together, checked_hops(fanouts), 0, replace, False, 0, len(seeds), keys, starts)


@dataclass(eq=False)
class Bulk(Batch):  # type: ignore[misc]
    """Several mini-batches on their way through a sampler, as :class:`Batch` is one."""

    keys: Sequence[int] = ()
    starts: list[int] = field(default_factory=list)  # where the seeds of each begin in seeds, and where they end

    def describe(self, words: Any) -> None:
        """Add the size of the graph, and the keys and seeds of each."""
        words[hops.NUM_NODES.value], words[hops.NUM_BATCHES.value] = self.sampler.num_nodes, self.parts
        words[hops.KEYS.value : hops.KEYS.value + self.parts] = self.keys
        words[hops.STARTS.value : hops.STARTS.value + self.parts] = self.starts[:-1]

    def finish(self) -> list[Sample]:
        """Return the samples of what has been started; waits for the sizes."""
        sizes = self.fetched.read()
        while (needed := sizes[hops.NEEDED.value]) and needed <= self.limit:
            self.grow(needed)
            self.start()
            sizes = self.fetched.read()
        if not needed:
            return self.emit_all(sizes)
        half = self.parts // 2  # together they have more edges than can be numbered
        own = [self.seeds[a:b] for a, b in pairwise(self.starts)]
        return [
            sample
            for part in (slice(half), slice(half, None))
            for sample in sample_bulk(self.sampler, own[part], self.fanouts, self.keys[part], self.replace)
        ]

    def emit_all(self, sizes: list[int]) -> list[Sample]:
        """Copy the mini-batches out of the scratch memory."""
        levels, parts, device = self.num_hops + 1, self.parts, self.sampler.device
        where = np.array(sizes)
        num_nodes, last_edge = int(where[hops.NODES.value + levels]), int(where[hops.EDGES.value + levels])
        node_at = where[hops.PARTS.value :][: levels * parts]
        edge_at = np.concatenate(
            [self.starts[:-1], where[hops.PARTS.value + levels * parts :][: self.num_hops * parts]]
        )
        # From one (level, mini-batch) to the next: level by level, and in each by mini-batch.
        node_counts = np.diff(node_at, append=num_nodes).reshape(levels, parts)
        edge_counts = np.diff(edge_at, append=last_edge).reshape(levels, parts)
        edge_counts[0] = 0  # the seeds are no edges
        table = self.sampler.host_words(parts * ROW.value + 2 * levels * parts)
        rows = table.numpy()[: parts * ROW.value].reshape(parts, ROW.value)
        shifts = table.numpy()[parts * ROW.value :].reshape(2, levels, parts)
        for own, at, counts in zip(shifts, (node_at, edge_at), (node_counts, edge_counts), strict=True):
            own[:] = np.cumsum(counts, 0) - counts - at.reshape(levels, parts)
        made: list[Sample] = []
        for part in range(parts):
            nodes, edges = node_counts[:, part].tolist(), edge_counts[1:, part].tolist()
            node = torch.empty(sum(nodes), dtype=torch.int64, device=device)
            edge_index = torch.empty(2, sum(edges), dtype=torch.int64, device=device)
            edge = torch.empty(sum(edges), dtype=torch.int64, device=device)
            row = rows[part]
            row[NODE_OUT.value], row[EDGE_INDEX_OUT.value] = node.data_ptr(), edge_index.data_ptr()
            row[EDGE_OUT.value], row[OWN_EDGES.value] = edge.data_ptr(), sum(edges)
            made.append((node, edge_index, edge, None, nodes, edges))
        there = self.sampler.scratch("table of a bulk", table.numel(), torch.int64)
        there[: table.numel()].copy_(table, non_blocking=True)
        num_edges = last_edge - self.num_seeds
        emit_bulk_kernel[(triton.cdiv(max(num_nodes, num_edges), 512),)](
            self.control, self.sizes, self.state, self.nodes, self.src, self.eid, self.col, there,
            self.num_seeds, num_nodes, num_edges, T=512,
        )  # fmt: skip
        return made
