"""Multi-hop neighbour sampling on a GPU, in four ways with one result.

- ``fused``: hop by hop in one cooperative launch, with grid barriers between the phases.
- ``persistent``: a task queue without barriers between hops, then the ordering, in one launch (PGSampler).
- ``no_queue``: the same discovery with a program per claim, as the hardware schedules them (the paper's figure 10).
- ``hop_by_hop``: launches per hop and a host synchronisation after each, as frameworks do.
- ``launches``: the same launches without the synchronisations; what a graph of launches would hold.

The result is that of ``lightning_gnn.ops.sample.reference``, exactly. Apart from ``hop_by_hop`` there is one host
synchronisation per batch, for the sizes of the output (and one more for each time the scratch memory has to grow).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from lightning_gnn.triton_kernels.hops import emit_kernel, hop_kernel
from lightning_gnn.triton_kernels.phases import CONTROL_SIZE, MAX_HOPS, SIZES_SIZE, STAMP_BITS
from lightning_gnn.triton_kernels.queue import QUEUE_PHASES, discover_kernel, queue_kernel

MODES = ("fused", "persistent", "no_queue", "hop_by_hop", "launches")
INTERPRETED = not isinstance(hop_kernel, JITFunction)
"""Whether ``TRITON_INTERPRET`` was set when Triton was imported: programs then run one after another, on the CPU."""

REGISTER_FANOUTS = (5, 10, 15, 20, 25, 32)
"""Kernels are compiled for the next of these; larger fanouts cost O(k^2) hashes per row instead of O(k)."""

_CONTROL_FANOUT, _CONTROL_WORK, _SIZES_EDGES, _SIZES_NEEDED = 64, 48, 40, 80
_UNTOUCHED = 2**63 - 1
_FIRST_STAMP = 2**STAMP_BITS - 2
_LARGEST = 2**31 - 2**16

Sample = tuple[Tensor, Tensor, Tensor, "Tensor | None", "list[int]", "list[int]"]


class CachedLists(Protocol):
    """What the sampler needs of ``lightning_gnn.graph.cache.CachedAdjacency``.

    Args:
        offset: Where the copy of a node's list begins, or -1, int64 ``[num_nodes]``, on the device.
        cached_indices: The copies, one after another, of the dtype of ``indices``, on the device.
    """

    offset: Tensor
    cached_indices: Tensor


class TritonNeighborSampler:
    """Sample mini-batches of one graph; its scratch memory is allocated once and reused.

    Scratch memory: 8 bytes per node of the graph (12 if ``persistent`` or ``no_queue``); 16 bytes per edge a batch may
    have (20 in graphs of 2^31 edges and more) and 8 per node it may have; if ``persistent`` or ``no_queue``, ``8 + 8 *
    max(fanouts)`` per task; if disjoint, no bytes per node of the graph, but 36 to 68 more per edge. The edges a batch
    may have are bounded by its fanouts and the graph; memory is taken for up to ``START_EDGES`` of them, and for more
    when a batch has more. Calls take turns, and are ordered on the stream that is current; the output is the caller's.

    Args:
        indptr: Offsets in CSC order, int64 ``[num_nodes + 1]``, on the device or in pinned host memory.
        indices: Source nodes, int32 or int64 ``[num_edges]``, on the device or in pinned host memory.
        mode: One of ``MODES``. Disjoint sampling, growing fanouts and fanouts above 32, which the queue cannot do, run
            hop by hop in one launch if it is ``persistent`` or ``no_queue``.
        fetch_size: Tasks that a program claims at a time; at least 1.
        num_programs: Programs per launch; by default as many as are resident at once.
        num_warps: Warps per program.
        device: Where to sample; by default where ``indices`` is, or the accelerator if it is in pinned memory.
        cached: Copies of hot adjacency lists on the device, read instead of ``indices``.

    Raises:
        ValueError: An unknown mode, a fetch size below 1, or a graph of 2^31 nodes or more.
    """

    START_EDGES = 1 << 22
    PROGRAMS_PER_SM = 4

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        *,
        mode: str = "fused",
        fetch_size: int = 32,
        num_programs: int | None = None,
        num_warps: int = 4,
        device: torch.device | str | None = None,
        cached: CachedLists | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"unknown sampling mode {mode!r}; choose one of {', '.join(MODES)}")
        if fetch_size < 1:
            raise ValueError(f"fetch_size is {fetch_size}, but a program must claim at least 1 task")
        if indptr.numel() > _LARGEST:
            raise ValueError(f"the graph has {indptr.numel() - 1} nodes, but this sampler numbers them in 31 bits")
        self.cached = cached is not None
        offset, hot = (indptr, indices) if cached is None else (cached.offset, cached.cached_indices)
        self.graph = (indptr, indices, offset, hot)
        self.num_nodes, self.num_edges = indptr.numel() - 1, indices.numel()
        self.mode, self.fetch_size, self.num_programs, self.num_warps = mode, fetch_size, num_programs, num_warps
        self.device = torch.device(device) if device is not None else _device_of(indices)
        self._start = self.START_EDGES
        self._stamp = _FIRST_STAMP + 1
        self._buffers: dict[str, Tensor] = {}
        self._programs: dict[tuple, int] = {}
        self._sms: int | None = None
        self._lock = threading.Lock()
        self._stream: torch.Stream | None = None
        self._host_control = torch.zeros(CONTROL_SIZE, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def __reduce__(self):
        raise TypeError(
            f"a sampler on {self.device} cannot be copied or sent to another process: make it there, or use worker "
            "threads or num_workers=0"
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory held at present."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def sample(
        self,
        seeds: Tensor,
        fanouts: Sequence[int],
        key: int,
        replace: bool = False,
        disjoint: bool = False,
        first_tree: int = 0,
    ) -> Sample:
        """Sample in-neighbours of the seeds, hop by hop.

        Args:
            seeds: Nodes of the graph, not checked, int32 or int64 ``[batch_size]``; duplicates are allowed.
            fanouts: In-edges to pick per node and hop; -1 takes all.
            key: The batch key, signed 64-bit.
            replace: Draw with replacement.
            disjoint: One tree per seed, which shares no node with the others.
            first_tree: Position of the first seed in the whole mini-batch, not negative; matters if disjoint.

        Returns:
            ``node`` ``[n]``, ``edge_index`` ``[2, m]``, ``edge`` ``[m]``, ``batch`` ``[n]`` (None unless disjoint), all
            int64 on the device; nodes per hop, seeds first, and edges per hop.

        Raises:
            ValueError: More than 30 hops, or a sample of more than 2^31 edges (2^29 if disjoint).
        """
        fanouts = [int(fanout) for fanout in fanouts]
        if len(fanouts) > MAX_HOPS:
            raise ValueError(f"there are {len(fanouts)} hops, but this sampler does at most {MAX_HOPS}")
        if not seeds.numel():
            empty = torch.empty(0, dtype=torch.int64, device=self.device)
            trees = empty.clone() if disjoint else None
            no_edges = [0] * len(fanouts)
            return empty, empty.new_empty(2, 0), empty.clone(), trees, [0, *no_edges], no_edges
        with self._lock, self._on_device():
            seeds = seeds.to(self.device).contiguous()
            batch = _Batch(self, seeds, fanouts, key, replace, disjoint, first_tree)
            sizes = batch.run()
            while sizes[_SIZES_NEEDED]:
                batch.grow(sizes[_SIZES_NEEDED])
                sizes = batch.run()
            return batch.emit(sizes)

    def _allocate(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def _scratch(self, name: str, size: int, dtype: torch.dtype, fill: int | None = None) -> Tensor:
        """Return the buffer of a name, larger than before if need be; ``fill`` initialises what is allocated."""
        if name not in self._buffers or self._buffers[name].numel() < size:
            old = self._buffers.pop(name, None)
            if old is not None and old.device.type == "cuda":  # an earlier batch may still be read on this stream
                old.record_stream(torch.cuda.current_stream(old.device))
            self._buffers[name] = self._allocate(max(size, 1), dtype)
            if fill is not None:
                self._buffers[name].fill_(fill)
        return self._buffers[name]

    def _next_stamp(self) -> int:
        self._stamp -= 1
        if self._stamp < 1:
            self._stamp = _FIRST_STAMP
            for name, fill in (("state", _UNTOUCHED), ("slot_state", _UNTOUCHED), ("queue", 0)):
                if name in self._buffers:
                    self._buffers[name].fill_(fill)
        return self._stamp

    @contextlib.contextmanager
    def _on_device(self):
        """Launch on the sampler's device, after what an earlier call may still do on another stream."""
        if self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device):  # Triton launches on the current CUDA device
            stream = torch.accelerator.current_stream()
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream
            yield

    def _most_programs(self) -> int:
        if self.num_programs is not None:
            return self.num_programs
        if INTERPRETED:
            return 2
        return self._num_sms() * self.PROGRAMS_PER_SM

    def _num_sms(self) -> int:
        if self._sms is None:
            self._sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return self._sms

    def _resident(self, kernel, variant: tuple, args: tuple, options: dict) -> int:
        """Return how many programs a cooperative launch may have, from the registers of the compiled kernel."""
        if self.num_programs is not None or INTERPRETED:
            return self._most_programs()
        if variant not in self._programs:
            compiled = kernel.warmup(*args, grid=(1,), **options)
            compiled._init_handles()  # loads the binary: the driver tells the registers
            registers = getattr(compiled, "n_regs", None) or 255
            threads = 32 * self.num_warps
            per_sm = min(65536 // (-(-registers // 8) * 8 * threads), 1024 // threads, self.PROGRAMS_PER_SM)
            self._programs[variant] = max(1, per_sm) * self._num_sms()
        return self._programs[variant]


class _Batch:
    """One mini-batch on its way through a sampler."""

    def __init__(self, sampler, seeds, fanouts, key, replace, disjoint, first_tree):
        self.sampler, self.seeds, self.fanouts = sampler, seeds, fanouts
        self.key, self.replace, self.disjoint, self.first_tree = key, replace, disjoint, first_tree
        self.num_seeds, self.num_hops = seeds.numel(), len(fanouts)
        small = [fanout for fanout in fanouts if 0 <= fanout <= REGISTER_FANOUTS[-1]]
        self.K = next(k for k in REGISTER_FANOUTS if k >= max(small, default=0))
        self.mode = sampler.mode
        self.bound, self.queue_slots = self._bounds()
        queued = not disjoint and queue_can(fanouts) and self.queue_slots <= _LARGEST
        if self.mode in ("persistent", "no_queue") and not queued:
            self.mode = "fused"
        self.limit = _LARGEST >> 2 if disjoint else _LARGEST  # the hash table has two to four slots for each
        self.capacity = min(self.bound, self.limit, max(sampler._start, self.num_seeds))

    def _bounds(self) -> tuple[int, int]:
        """Bound the edge positions and the queue slots that the batch can take."""
        graph = self.sampler.num_edges * (self.num_seeds if self.disjoint else 1)
        rows, positions, slots = self.num_seeds, self.num_seeds, self.num_seeds
        for hop, fanout in enumerate(self.fanouts):
            # A seed given twice is expanded twice; from then on, a node once.
            largest = self.num_seeds * self.sampler.num_edges if hop == 0 else graph
            edges = largest if fanout < 0 else rows * fanout
            if not self.replace:
                edges = min(edges, largest)
            positions += edges
            rows = edges if self.disjoint else min(edges, self.sampler.num_nodes)
            slots += rows if hop + 1 < self.num_hops else 0  # a node is pushed at most once for each hop
        return positions, slots

    def grow(self, needed: int) -> None:
        """Make room for a batch that needs at least so many edge positions; later hops may need more."""
        if needed > self.limit:
            raise ValueError(f"a batch of {self.num_seeds} seeds has at least {needed} edges, but {self.limit} may fit")
        self.capacity = min(self.bound, self.limit, max(needed + needed // 4, 2 * self.capacity))
        self.sampler._start = max(self.sampler._start, self.capacity)

    def run(self) -> list[int]:
        """Sample into the scratch memory; return the sizes, after the batch's host synchronisation."""
        s = self.sampler
        most_nodes = self.capacity if self.disjoint else min(self.capacity, s.num_nodes + self.num_seeds)
        self.src = s._scratch("src", self.capacity, torch.int32)
        self.col = s._scratch("col", self.capacity, torch.int32)
        self.mark = s._scratch("mark", self.capacity, torch.int32)
        self.eid = s._scratch("eid", self.capacity, torch.int32 if s.num_edges < 2**31 else torch.int64)
        self.nodes = s._scratch("nodes", most_nodes, torch.int32)
        self.rowptr = s._scratch("rowptr", most_nodes + 1, torch.int32)
        self.sizes = s._scratch("sizes", SIZES_SIZE, torch.int64)
        self.control = s._scratch("control", CONTROL_SIZE, torch.int64)
        self.counts = s._scratch("counts", 2 * s._most_programs(), torch.int64)
        self.trees, self.table, self.slots = self.nodes, self.sizes, 1
        if self.disjoint:
            self.slots = triton.next_power_of_2(2 * self.capacity)
            self.trees = s._scratch("trees", most_nodes, torch.int32)
            self.table = s._scratch("table", self.slots, torch.int64)
            self.table[: self.slots].fill_(-1)
            self.state = s._scratch("slot_state", self.slots, torch.int64, _UNTOUCHED)
        else:
            self.state = s._scratch("state", s.num_nodes, torch.int64, _UNTOUCHED)
        host = s._host_control  # not in use: the last batch ended with a synchronisation
        words = host.numpy()
        words[:] = 0
        words[:6] = (s._next_stamp(), self.num_seeds, self.key, self.replace, self.num_hops, self.capacity)
        words[6] = self.first_tree
        words[_CONTROL_WORK] = (self.num_seeds << 32) | self.num_seeds
        words[_CONTROL_FANOUT : _CONTROL_FANOUT + self.num_hops] = self.fanouts
        self.control.copy_(host, non_blocking=True)
        if self.mode in ("persistent", "no_queue"):
            self._run_queue()
        elif self.mode == "fused":
            self._run_hops(range(1), fused=True)
        else:
            self._run_hops(range(self.num_hops + 1), fused=False)
        return self.sizes.tolist()

    def _run_hops(self, levels: range, fused: bool) -> None:
        s = self.sampler
        tile = 64 * s.num_warps
        args = (
            *s.graph, self.seeds, self.control, self.state, self.nodes, self.trees, self.rowptr, self.src,
            self.eid, self.col, self.mark, self.table, self.slots, self.sizes, self.counts,
        )  # fmt: skip
        most = s._most_programs()
        options = {
            "DISJOINT": self.disjoint, "CACHED": s.cached, "K": self.K, "R": 32 * s.num_warps, "T": tile,
            "P": triton.next_power_of_2(most), "num_warps": s.num_warps,
        }  # fmt: skip
        end = 3 * (self.num_hops + 1)
        if fused:
            cooperative = {**options, "WHAT": -1, "launch_cooperative_grid": True}
            variant = ("hop", self.disjoint, self.K, self.seeds.dtype)
            programs = s._resident(hop_kernel, variant, (*args, 0, end), cooperative)
            # The interpreter runs programs one after another: several cannot meet at a barrier.
            for begin, stop in [(0, end)] if programs == 1 or not INTERPRETED else [(i, i + 1) for i in range(end)]:
                hop_kernel[(programs,)](*args, begin, stop, **cooperative)
            return
        edges = self.num_seeds
        for level in levels:
            programs = min(most, triton.cdiv(edges, tile)) or 1 if self.mode == "hop_by_hop" else most
            for what in range(3):
                begin = 3 * level + what
                hop_kernel[(programs,)](*args, begin, begin + 1, WHAT=what, **options)
            if self.mode == "hop_by_hop" and level < self.num_hops:
                sizes = self.sizes.tolist()  # the host synchronisation of the baseline
                if sizes[_SIZES_NEEDED]:
                    return
                edges = sizes[_SIZES_EDGES + level + 2] - sizes[_SIZES_EDGES + level + 1]

    def _run_queue(self) -> None:
        s = self.sampler
        fetch_size = min(s.fetch_size, self.queue_slots)
        queue = s._scratch("queue", self.queue_slots, torch.int64, 0)
        stage = s._scratch("stage", self.queue_slots * 2 * self.K, torch.int32)
        ticket_of = s._scratch("ticket_of", s.num_nodes, torch.int32)
        tile = {
            "CACHED": s.cached, "K": self.K, "CHUNK": chunk_size(self.K), "R": 32 * s.num_warps,
            "num_warps": s.num_warps,
        }  # fmt: skip
        args = (
            *s.graph, self.seeds, self.control, self.state, self.nodes, self.rowptr, self.src, self.eid, self.col,
            self.mark, queue, stage, ticket_of, self.queue_slots, fetch_size, self.sizes, self.counts,
        )  # fmt: skip
        options = {
            **tile, "FUSED": True, "T": 64 * s.num_warps, "P": triton.next_power_of_2(s._most_programs()),
            "launch_cooperative_grid": True,
        }  # fmt: skip
        first, end = 0, QUEUE_PHASES + 3 * (self.num_hops + 1)
        if self.mode == "no_queue":
            grid = (triton.cdiv(self.queue_slots, fetch_size),)
            discover_kernel[grid](
                *s.graph, self.seeds, self.control, self.state, queue, stage, self.queue_slots, fetch_size,
                **tile,
            )  # fmt: skip
            first = 1
        programs = s._resident(queue_kernel, ("queue", self.K, self.seeds.dtype), (*args, first, end), options)
        together = [(first, end)] if programs == 1 or not INTERPRETED else [(i, i + 1) for i in range(first, end)]
        for begin, stop in together:
            queue_kernel[(programs,)](*args, begin, stop, **options)

    def emit(self, sizes: list[int]) -> Sample:
        """Copy the batch out of the scratch memory."""
        nodes_at = sizes[: self.num_hops + 2]
        edges_at = sizes[_SIZES_EDGES + 1 : _SIZES_EDGES + 2 + self.num_hops]
        num_nodes, num_edges = nodes_at[-1], edges_at[-1] - self.num_seeds
        made = {"dtype": torch.int64, "device": self.sampler.device}
        node, edge_index, edge = (torch.empty(shape, **made) for shape in (num_nodes, (2, num_edges), num_edges))
        batch = torch.empty(num_nodes, **made) if self.disjoint else None
        emit_kernel[(triton.cdiv(max(num_nodes, num_edges), 1024),)](
            self.state, self.nodes, self.trees, self.src, self.eid, self.col, node, node if batch is None else batch,
            edge_index, edge, self.num_seeds, num_nodes, num_edges, DISJOINT=self.disjoint, T=1024,
        )  # fmt: skip
        node_counts = [b - a for a, b in pairwise(nodes_at)]
        edge_counts = [b - a for a, b in pairwise(edges_at)]
        return node, edge_index, edge, batch, node_counts, edge_counts


def queue_can(fanouts: Sequence[int]) -> bool:
    """Tell whether the queue samples these fanouts: they never grow, and each is -1 or at most 32."""
    as_numbers = [float("inf") if fanout < 0 else fanout for fanout in fanouts]
    shrinking = all(a >= b for a, b in pairwise(as_numbers))
    return shrinking and all(fanout <= REGISTER_FANOUTS[-1] for fanout in fanouts)


def chunk_size(K: int) -> int:
    """Return how many of K in-edges the queue gathers at a time: all, or even chunks of at most 10."""
    return triton.cdiv(K, triton.cdiv(K, 10))


def _device_of(indices: Tensor) -> torch.device:
    if indices.device.type != "cpu" or not isinstance(hop_kernel, JITFunction):
        return indices.device
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not indices.is_pinned():
        raise ValueError("the Triton sampler needs the graph on a GPU, or in pinned memory on a machine with a GPU")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
