"""Baselines of the GPU sampler: the same phases and the same samples, with other launch schemes.

- ``no_queue``: the queue's discovery with one program per claim, scheduled by the hardware (PGSampler, figure 10).
- ``hop_by_hop``: launches per hop and a host synchronization after each, as in other frameworks.
- ``launches``: the same launches without the synchronizations, as in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from lightning_gnn.gpu_sampling.sampler import MODES as SAMPLER_MODES
from lightning_gnn.triton_kernels.hashing import Array, Scalar
from lightning_gnn.triton_kernels.hops import EDGES, NEEDED, PHASES, level_phase
from lightning_gnn.triton_kernels.queue import FIND_TICKETS, discover
from lightning_gnn.triton_kernels.sample import Batch, TritonNeighborSampler, chunk_size

MODES = (*SAMPLER_MODES, "no_queue", "hop_by_hop", "launches")


@triton.jit(do_not_specialize=["seeds", "slots", "level"])
def phase_kernel(
    indptr: Array, indices: Array, offset: Array, hot: Array, seeds: Array, control: Array, state: Array, nodes: Array,
    trees: Array, rowptr: Array, src: Array, eid: Array, col: Array, table: Array, slots: Scalar,
    sizes: Array, totals: Array, level: Scalar, PHASE: tl.constexpr, DISJOINT: tl.constexpr, BULK: tl.constexpr,
    CACHED: tl.constexpr, K: tl.constexpr, R: tl.constexpr, T: tl.constexpr, HASHED: tl.constexpr = False,
) -> None:  # fmt: skip
    """Run one phase of one level; consecutive launches on a stream act as a barrier."""
    level_phase(indptr, indices, offset, hot, seeds, control, state, nodes, trees, rowptr, src, eid, col, table,
                slots, src, src, sizes, totals, level, tl.program_id(0), tl.num_programs(0), PHASE,
                DISJOINT, BULK, CACHED, False, K, R, T, HASHED=HASHED)  # fmt: skip


@triton.jit(do_not_specialize=["seeds", "queue_slots", "fetch_size"])
def discover_kernel(
    indptr: Array, indices: Array, offset: Array, hot: Array, seeds: Array, control: Array, state: Array, queue: Array,
    stage: Array, queue_slots: Scalar, fetch_size: Scalar,
    CACHED: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
) -> None:  # fmt: skip
    """Discover without the queue's load balancing: one program per claim.

    Claims are numbered in the order in which programs start, so that a program waits only for programs that are already
    running, whatever the hardware's order.
    """
    discover(indptr, indices, offset, hot, seeds, control, state, queue, stage, queue_slots, fetch_size,
             True, CACHED, K, CHUNK, R)  # fmt: skip


class BaselineSampler(TritonNeighborSampler):
    """A sampler that also supports the baselines; ``mode`` is one of this file's ``MODES``."""

    QUEUE_MODES = ("persistent", "no_queue")

    def _batch(self, *args: Any) -> Batch:
        return _Baseline(self, *args)


class _Baseline(Batch):
    def launch(self, first: int = 0, end: int | None = None) -> None:
        if self.sampler.mode in ("hop_by_hop", "launches"):
            self._launch_phases()
        elif self.sampler.mode == "no_queue" and self.queued:
            self._launch_claims()
        else:
            super().launch(first, end)

    def _launch_phases(self) -> None:
        with_host = self.sampler.mode == "hop_by_hop"
        args, options = self.arguments(self.scratch)
        programs = most = self.sampler.most_programs()
        edges = self.num_seeds
        for level in range(self.num_hops + 1):
            if with_host:  # the number of edges is known, so only the required programs are launched
                programs = max(1, min(most, triton.cdiv(edges, options["T"])))
            for phase in range(PHASES.value):
                phase_kernel[(programs,)](*args, level, PHASE=phase, **options)
            if with_host and level < self.num_hops:
                sizes = self.scratch.sizes.tolist()  # the host synchronization of the baseline
                if sizes[NEEDED.value]:
                    return
                edges = sizes[EDGES.value + level + 2] - sizes[EDGES.value + level + 1]

    def _launch_claims(self) -> None:
        s, a = self.sampler, self.scratch
        discover_kernel[(triton.cdiv(self.queue_slots, self.fetch_size),)](
            *s.graph, self.seeds, a.control, a.state, a.queue, a.stage, self.queue_slots, self.fetch_size,
            CACHED=s.cached, K=self.K, CHUNK=chunk_size(self.K), R=32 * s.num_warps, num_warps=s.num_warps,
        )  # fmt: skip
        super().launch(FIND_TICKETS.value)
