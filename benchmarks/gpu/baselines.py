"""What the GPU sampler is measured against: the same phases and the same samples, launched in other ways.

- ``no_queue``: the queue's discovery with a program per claim, as the hardware schedules them (PGSampler, figure 10).
- ``hop_by_hop``: launches per hop and a host synchronisation after each, as frameworks do.
- ``launches``: the same launches without the synchronisations; what a graph of launches would hold.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from lightning_gnn.triton_kernels import sample
from lightning_gnn.triton_kernels.hashing import Array, Scalar
from lightning_gnn.triton_kernels.hops import EDGES, NEEDED, PHASES, level_phase
from lightning_gnn.triton_kernels.queue import FIND_TICKETS, discover
from lightning_gnn.triton_kernels.sample import Batch, TritonNeighborSampler, chunk_size

MODES = (*sample.MODES, "no_queue", "hop_by_hop", "launches")


@triton.jit(do_not_specialize=["seeds", "slots", "level"])
def phase_kernel(
    indptr: Array, indices: Array, offset: Array, hot: Array, seeds: Array, control: Array, state: Array, nodes: Array,
    trees: Array, rowptr: Array, src: Array, eid: Array, col: Array, table: Array, slots: Scalar,
    sizes: Array, totals: Array, level: Scalar, PHASE: tl.constexpr, DISJOINT: tl.constexpr, BULK: tl.constexpr,
    CACHED: tl.constexpr, K: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
) -> None:  # fmt: skip
    """Run one phase of one level: between two launches of a stream lies a barrier."""
    level_phase(indptr, indices, offset, hot, seeds, control, state, nodes, trees, rowptr, src, eid, col, table,
                slots, src, src, sizes, totals, level, tl.program_id(0), tl.num_programs(0), PHASE,
                DISJOINT, BULK, CACHED, False, K, R, T)  # fmt: skip


@triton.jit(do_not_specialize=["seeds", "queue_slots", "fetch_size"])
def discover_kernel(
    indptr: Array, indices: Array, offset: Array, hot: Array, seeds: Array, control: Array, state: Array, queue: Array,
    stage: Array, queue_slots: Scalar, fetch_size: Scalar,
    CACHED: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
) -> None:  # fmt: skip
    """Discover without the queue's balancing: one claim per program, a program for each claim.

    Claims are numbered as programs start, so that a program only ever waits for programs that run already, in whatever
    order the hardware starts them.
    """
    discover(indptr, indices, offset, hot, seeds, control, state, queue, stage, queue_slots, fetch_size,
             True, CACHED, K, CHUNK, R)  # fmt: skip


class BaselineSampler(TritonNeighborSampler):
    """A sampler that knows the baselines too; ``mode`` is one of this file's ``MODES``."""

    MODES = MODES
    QUEUE_MODES = ("persistent", "no_queue")

    def _batch(self, *args: Any) -> Batch:
        return _Baseline(self, *args)


class _Baseline(Batch):
    def launch(self) -> None:
        if self.sampler.mode in ("hop_by_hop", "launches"):
            self._launch_phases()
        elif self.sampler.mode == "no_queue" and self.queued:
            self._launch_claims()
        else:
            super().launch()

    def _launch_phases(self) -> None:
        with_host = self.sampler.mode == "hop_by_hop"
        args, options = self.hop_arguments()
        programs = most = self.sampler.most_programs()
        edges = self.num_seeds
        for level in range(self.num_hops + 1):
            if with_host:  # it knows how many edges there are, and launches no more programs than they need
                programs = max(1, min(most, triton.cdiv(edges, options["T"])))
            for phase in range(PHASES.value):
                phase_kernel[(programs,)](*args, level, PHASE=phase, **options)
            if with_host and level < self.num_hops:
                sizes = self.sizes.tolist()  # the host synchronisation of the baseline
                if sizes[NEEDED.value]:
                    return
                edges = sizes[EDGES.value + level + 2] - sizes[EDGES.value + level + 1]

    def _launch_claims(self) -> None:
        s = self.sampler
        discover_kernel[(triton.cdiv(self.queue_slots, self.fetch_size),)](
            *s.graph, self.seeds, self.control, self.state, self.queue, self.stage, self.queue_slots, self.fetch_size,
            CACHED=s.cached, K=self.K, CHUNK=chunk_size(self.K), R=32 * s.num_warps, num_warps=s.num_warps,
        )  # fmt: skip
        self.launch_queue(FIND_TICKETS.value)
