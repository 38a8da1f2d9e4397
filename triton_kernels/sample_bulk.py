"""Bulk sampling: one launch samples several mini-batches, with the same hop in parallel, so they share each barrier.

Each mini-batch is bit-identical to that of :meth:`TritonNeighborSampler.sample`. The host synchronizes once per launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.triton_kernels import hops
from lightning_gnn.triton_kernels.emit import OWN_EDGES, ROW, THREADS, emit_bulk_kernel
from lightning_gnn.triton_kernels.sample import (
    LARGEST,
    Batch,
    Launch,
    Prepared,
    Sample,
    TritonNeighborSampler,
    Words,
    check_fanouts,
)


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
        bulk = joined(sampler, torch.cat(list(seeds)), [own.numel() for own in seeds], fanouts, keys, replace)
        bulk.start()
        return bulk.finish()


def joined(
    sampler: TritonNeighborSampler,
    seeds: Tensor,  # of all mini-batches, one after another
    sizes: Sequence[int],  # number of seeds of each mini-batch
    fanouts: Sequence[int],
    keys: Sequence[int],
    replace: bool,
) -> Bulk:
    """Create the batch that ``sampler.begin`` launches for several mini-batches."""
    on_device = seeds.to(sampler.device, non_blocking=True)
    starts = [0, *accumulate(sizes)]
    return Bulk(sampler, on_device, check_fanouts(fanouts), 0, replace, False, 0, len(sizes), keys, starts)


@dataclass(eq=False)
class Bulk(Batch):  # type: ignore[misc]
    """Several mini-batches while one launch samples them; see :class:`Batch`."""

    keys: Sequence[int] = ()
    starts: list[int] = field(default_factory=list)  # offset of each mini-batch in seeds, and their total number

    def write_control(self, words: Any) -> None:
        """Add the key and the first seed of each mini-batch."""
        words[hops.KEYS.value : hops.KEYS.value + self.parts] = self.keys
        words[hops.STARTS.value : hops.STARTS.value + self.parts] = self.starts[:-1]

    def finish(self) -> list[Sample]:
        """Wait for the sizes and return the samples of the started launch."""
        while needed := int((sizes := self.fetched.array())[hops.NEEDED.value]):
            if needed > self.limit:
                break
            self.grow(needed)
            self.start()
        if not needed:
            return self.emit_all(sizes)
        half = self.parts // 2  # sample in two halves: a single launch would exceed the maximum number of edges
        own = [self.seeds[a:b] for a, b in pairwise(self.starts)]
        return [
            sample
            for part in (slice(half), slice(half, None))
            for sample in sample_bulk(self.sampler, own[part], self.fanouts, self.keys[part], self.replace)
        ]

    def emit_all(self, sizes: Words) -> list[Sample]:
        """Copy the mini-batches out of the scratch memory."""
        levels, parts, s = self.num_hops + 1, self.parts, self.sampler
        num_nodes, last_edge = int(sizes[hops.NODES.value + levels]), int(sizes[hops.EDGES.value + levels])
        # First node and first edge of each (level, mini-batch), ordered by level, then by mini-batch, and the ends.
        at = np.empty((2, levels * parts + 1), np.int64)
        own = sizes[hops.PARTS.value : hops.PARTS.value + (2 * levels - 1) * parts]
        at[0, :-1], at[1, :parts], at[1, parts:-1] = own[: levels * parts], self.starts[:-1], own[levels * parts :]
        at[:, -1] = num_nodes, last_edge
        counts = np.diff(at).reshape(2, levels, parts)
        counts[1, 0] = 0  # level 0 consists of seeds, not edges
        ends = counts.cumsum(1)
        table, of_rows = self.scratch.host_table.numpy(), parts * ROW.value  # free for reuse, as the control words
        rows = table[:of_rows].reshape(parts, ROW.value)
        table[of_rows:].reshape(counts.shape)[:] = ends - counts - at[:, :-1].reshape(counts.shape)
        outputs = [s.outputs(*totals) for totals in ends[:, -1].T.tolist()]
        rows[:, : OWN_EDGES.value] = [[out.data_ptr() for out in own[:3]] for own in outputs]
        rows[:, OWN_EDGES.value] = ends[1, -1]
        self.scratch.on_device.copy_(self.scratch.host_table, non_blocking=True)
        num_edges = last_edge - self.num_seeds
        self.scratch.emission(-(-max(num_nodes, num_edges) // THREADS), num_nodes, num_edges)
        by_part = zip(outputs, counts[0].T.tolist(), counts[1, 1:].T.tolist(), strict=True)
        return [(*own, nodes, edges) for own, nodes, edges in by_part]

    def emit_launch(self, scratch: Prepared) -> Launch:
        """Prepare the launch of :meth:`emit_all`, and its table."""
        a, s = scratch, self.sampler
        a.host_table = s.host_words(self.parts * (ROW.value + 2 * (self.num_hops + 1)))
        a.on_device = s.scratch("table of a bulk", a.host_table.numel(), torch.int64)[: a.host_table.numel()]
        args = (a.control, a.sizes, a.state, a.nodes, a.src, a.eid, a.col, a.on_device, self.num_seeds, 0, 0)
        options = {"HASHED": self.hashed, "T": THREADS, "num_warps": THREADS // 32}
        return Launch(emit_bulk_kernel, args, options, (9, 10))
