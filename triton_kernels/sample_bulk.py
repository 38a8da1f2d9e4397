"""Bulk sampling: one launch samples several mini-batches, with the same hop in parallel, so they share each barrier.

Each mini-batch is bit-identical to that of :meth:`TritonNeighborSampler.sample`. The host synchronizes once per launch.
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
from lightning_gnn.triton_kernels.sample import LARGEST, Batch, Sample, TritonNeighborSampler, check_fanouts


def most_batches(sampler: TritonNeighborSampler) -> int:
    """Return the maximum number of mini-batches per launch: 31 bits of node numbers; one for the queue or every hop."""
    if sampler.mode in sampler.QUEUE_MODES or sampler.every_hop:
        return 1
    return int(min(hops.MAX_BATCHES, LARGEST // max(sampler.num_nodes, 1)))


def sample_bulk(
    sampler: TritonNeighborSampler,
    seeds: Sequence[Tensor],
    fanouts: Sequence[int],
    keys: Sequence[int],
    replace: bool = False,
) -> list[Sample]:
    """Sample several mini-batches with a key each, in as few launches as possible; all seeds have the same dtype."""
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
    """Join mini-batches into one batch for ``sampler.begin``; arguments as for sample_bulk."""
    starts = np.cumsum([0, *(own.numel() for own in seeds)]).tolist()
    all_seeds = torch.cat(list(seeds)).to(sampler.device, non_blocking=True)
    return Bulk(sampler, all_seeds, check_fanouts(fanouts), 0, replace, False, 0, len(seeds), keys, starts)


@dataclass(eq=False)
class Bulk(Batch):  # type: ignore[misc]
    """Several mini-batches while one launch samples them; see :class:`Batch`."""

    keys: Sequence[int] = ()
    starts: list[int] = field(default_factory=list)  # offset of each mini-batch in seeds, and their total number

    def write_control(self, words: Any) -> None:
        """Add the size of the graph, and the key and first seed of each mini-batch."""
        words[hops.NUM_NODES.value], words[hops.NUM_BATCHES.value] = self.sampler.num_nodes, self.parts
        words[hops.KEYS.value : hops.KEYS.value + self.parts] = self.keys
        words[hops.STARTS.value : hops.STARTS.value + self.parts] = self.starts[:-1]

    def finish(self) -> list[Sample]:
        """Wait for the sizes and return the samples of the started launch."""
        sizes = self.fetched.read()
        while (needed := sizes[hops.NEEDED.value]) and needed <= self.limit:
            self.grow(needed)
            self.start()
            sizes = self.fetched.read()
        if not needed:
            return self.emit_all(sizes)
        half = self.parts // 2  # sample in two halves: a single launch would exceed the maximum number of edges
        own = [self.seeds[a:b] for a, b in pairwise(self.starts)]
        return [
            sample
            for part in (slice(half), slice(half, None))
            for sample in sample_bulk(self.sampler, own[part], self.fanouts, self.keys[part], self.replace)
        ]

    def emit_all(self, sizes: list[int]) -> list[Sample]:
        """Copy the mini-batches out of the scratch memory."""
        levels, parts, device = self.num_hops + 1, self.parts, self.sampler.device
        words = np.array(sizes)
        num_nodes, last_edge = int(words[hops.NODES.value + levels]), int(words[hops.EDGES.value + levels])
        node_at = words[hops.PARTS.value :][: levels * parts]
        edge_at = np.concatenate(
            [self.starts[:-1], words[hops.PARTS.value + levels * parts :][: self.num_hops * parts]]
        )
        # Count from one (level, mini-batch) to the next; they are ordered by level, then by mini-batch.
        node_counts = np.diff(node_at, append=num_nodes).reshape(levels, parts)
        edge_counts = np.diff(edge_at, append=last_edge).reshape(levels, parts)
        edge_counts[0] = 0  # level 0 consists of seeds, not edges
        table = self.sampler.host_words(parts * ROW.value + 2 * levels * parts)
        rows = table.numpy()[: parts * ROW.value].reshape(parts, ROW.value)
        shifts = table.numpy()[parts * ROW.value :].reshape(2, levels, parts)
        for own, at, counts in zip(shifts, (node_at, edge_at), (node_counts, edge_counts), strict=True):
            own[:] = np.cumsum(counts, 0) - counts - at.reshape(levels, parts)
        # Allocate the outputs of each mini-batch, and write their addresses to the table.
        samples: list[Sample] = []
        for part in range(parts):
            nodes, edges = node_counts[:, part].tolist(), edge_counts[1:, part].tolist()
            node = torch.empty(sum(nodes), dtype=torch.int64, device=device)
            edge_index = torch.empty(2, sum(edges), dtype=torch.int64, device=device)
            edge = torch.empty(sum(edges), dtype=torch.int64, device=device)
            row = rows[part]
            row[NODE_OUT.value], row[EDGE_INDEX_OUT.value] = node.data_ptr(), edge_index.data_ptr()
            row[EDGE_OUT.value], row[OWN_EDGES.value] = edge.data_ptr(), sum(edges)
            samples.append((node, edge_index, edge, None, nodes, edges))
        on_device = self.sampler.scratch("table of a bulk", table.numel(), torch.int64)
        on_device[: table.numel()].copy_(table, non_blocking=True)
        num_edges = last_edge - self.num_seeds
        emit_bulk_kernel[(triton.cdiv(max(num_nodes, num_edges), 512),)](
            self.control, self.sizes, self.state, self.nodes, self.src, self.eid, self.col, on_device,
            self.num_seeds, num_nodes, num_edges, T=512,
        )  # fmt: skip
        return samples
