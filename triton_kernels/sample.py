"""Multi-hop neighbor sampling on a GPU, in two modes with the result of ``lightning_gnn.ops.sample.reference``.

``fused`` samples hop by hop in one cooperative launch. ``persistent`` samples from a task queue without barriers
between hops, then orders the result (PGSampler). The host synchronizes once per batch, and once per scratch growth.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from lightning_gnn.triton_kernels import hops
from lightning_gnn.triton_kernels.emit import THREADS, emit_kernel
from lightning_gnn.triton_kernels.hops import hop_kernel
from lightning_gnn.triton_kernels.queue import FIRST_LEVEL, queue_kernel

INTERPRETED = not isinstance(hop_kernel, JITFunction)  # TRITON_INTERPRET is set: programs run sequentially on the CPU
REGISTER_FANOUTS = (5, 10, 15)  # kernels are compiled for the next larger one; above, O(k) hashes per edge
UNTOUCHED = 2**63 - 1
_FIRST_STAMP = 2 ** (63 - hops.STAMP_SHIFT.value) - 2
LARGEST = 2**31 - 2**16
_MOST_PREPARED = 32  # shapes of batches whose launches are kept

Words = np.ndarray[Any, np.dtype[np.int64]]
Sample = tuple[Tensor, Tensor, Tensor, "Tensor | None", list[int], list[int]]


class CachedLists(Protocol):
    """Interface to ``lightning_gnn.features.hot_cache.CachedAdjacency``."""

    offset: Tensor  # start of each node's cached list, or -1, int64 [num_nodes], on the device
    cached_indices: Tensor  # concatenated cached lists, of the dtype of indices, on the device


class Shards(Protocol):
    """Interface to ``lightning_gnn.gpu_sampling.shards.PeerShards``: shards of ``indices`` on several GPUs."""

    addresses: Tensor  # address of each shard, readable from the device, int64 [n], on the device
    num_rows: int
    shift: int  # log2 of the entries per round-robin block


class DeviceSampler:
    """Base of device samplers: reused scratch memory, batch stamps, mutual exclusion, and cooperative launches."""

    START_EDGES = 1 << 22
    PROGRAMS_PER_SM = 4

    def __init__(
        self,
        device: torch.device,
        num_programs: int | None,
        num_warps: int,
        programs_per_sm: int = PROGRAMS_PER_SM,
        start_edges: int = START_EDGES,
    ) -> None:
        self.device, self.num_programs, self.num_warps = device, num_programs, num_warps
        self.programs_per_sm = programs_per_sm
        self._start_capacity = start_edges
        self._stamp: int = _FIRST_STAMP + 1
        self._buffers: dict[str, Tensor] = {}
        self._prepared: dict[tuple[object, ...], Prepared] = {}  # by the shape of batches; all use the buffers
        self._programs: dict[tuple[object, ...], int] = {}
        self._lock = threading.RLock()  # a bulk that is too large is sampled again in halves
        self._stream: Any = None
        self._host_control = self.host_words(hops.CONTROL_SIZE)
        self._host_sizes = self.host_words(hops.SIZES_SIZE)
        self._pending: PendingLaunch | None = None
        self.share = 1.0  # fraction of the GPU's resident programs per launch; below 1 leaves room for training

    def host_words(self, size: int) -> Tensor:
        """Return int64 zeros ``[size]`` in host memory, pinned for a GPU's asynchronous copies."""
        return torch.zeros(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a sampler on {self.device} cannot be copied or sent to another process: create it there, or use worker "
            "threads or num_workers=0"
        )

    @property
    def scratch_bytes(self) -> int:
        """Size of the allocated scratch memory in bytes."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def _allocate(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def scratch(self, name: str, size: int, dtype: torch.dtype, fill: int | None = None) -> Tensor:
        """Return the named buffer, reallocated if it is too small; ``fill`` initializes a new allocation."""
        if name not in self._buffers or self._buffers[name].numel() < size:
            old = self._buffers.pop(name, None)
            if old is not None and old.device.type == "cuda":  # this stream may still read an earlier batch
                old.record_stream(torch.cuda.current_stream(old.device))
            self._prepared.clear()
            self._buffers[name] = self._allocate(max(size, 1), dtype)
            if fill is not None:
                self._buffers[name].fill_(fill)
        return self._buffers[name]

    def next_stamp(self) -> int:
        """Return the stamp of the next batch; stamps count down, and all words are cleared when they run out."""
        self._stamp -= 1
        if self._stamp < 1:
            self._stamp = _FIRST_STAMP
            for name, buffer in self._buffers.items():
                if name in ("state", "slot_state", "node_table", "queue", "totals"):
                    buffer.fill_(0 if name in ("queue", "totals") else UNTOUCHED)
        return self._stamp

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Enter the sampler's device; launches wait for earlier calls that used another stream."""
        # Triton launches on the current CUDA device.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            stream = self.current_stream()
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream
            yield

    def current_stream(self) -> Any:
        """Return the stream for launches; None if launches are synchronous."""
        return torch.accelerator.current_stream(self.device) if self.device.type == "cuda" else None

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock the scratch memory for a launch, after copying a pending mini-batch out of it."""
        with self._lock:
            if self._pending is not None:
                stream = self._pending.stream
                with torch.cuda.stream(stream) if stream else contextlib.nullcontext(), self.on_device():
                    self._pending.flush()
            with self.on_device():
                yield

    def fetch(self, words: Tensor) -> AsyncHostCopy:
        """Copy int64 words to the host asynchronously; the next call reuses the host memory."""
        if self._host_sizes.numel() < words.numel():
            self._host_sizes = self.host_words(2 * words.numel())
        host = self._host_sizes[: words.numel()]
        host.copy_(words, non_blocking=True)
        stream = self.current_stream()
        return AsyncHostCopy(host, None if stream is None else stream.record_event())

    def larger(self, needed: int, capacity: int, bound: int, limit: int, num_seeds: int) -> int:
        """Return a capacity of at least ``needed`` edges, also for later batches; later hops may need more."""
        if needed > limit:
            raise ValueError(f"a batch of {num_seeds} seeds has at least {needed} edges; the limit is {limit}")
        capacity = min(bound, limit, max(needed + needed // 4, 2 * capacity))
        self._start_capacity = max(self._start_capacity, capacity)
        return capacity

    def most_programs(self) -> int:
        """Return the maximum number of programs of a launch."""
        if self.num_programs is not None:
            return self.num_programs
        if INTERPRETED:
            return 2
        return self._num_sms * self.programs_per_sm

    @functools.cached_property
    def l2_bytes(self) -> int:
        """Size of the device's L2 cache in bytes; a CPU has no limit."""
        on_gpu = self.device.type == "cuda"
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size) if on_gpu else LARGEST

    @functools.cached_property
    def _num_sms(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def fit_grid(self, kernel: Any, variant: tuple[object, ...], args: tuple[Any, ...], options: dict[str, Any]) -> int:
        """Return the number of programs of a cooperative launch, from the registers of the compiled kernel."""
        if self.num_programs is not None or INTERPRETED:
            return self.most_programs()
        if variant not in self._programs:
            compiled = kernel.warmup(*args, grid=(1,), **options)
            compiled._init_handles()  # loads the binary, after which the number of registers is known
            registers = getattr(compiled, "n_regs", None) or 255
            threads = 32 * self.num_warps
            resident = torch.cuda.get_device_properties(self.device).max_threads_per_multi_processor // threads
            # Every GPU holds 65,536 registers and at least 16 programs per multiprocessor.
            per_sm = min(65536 // (-(-registers // 8) * 8 * threads), resident, 16, self.programs_per_sm)
            self._programs[variant] = max(1, per_sm) * self._num_sms
        return max(1, int(self._programs[variant] * self.share))

    def split_phases(self, first: int, end: int, programs: int) -> list[tuple[int, int]]:
        """Return the phase range of each launch: a single launch, but one per phase under the interpreter."""
        # The interpreter runs programs sequentially, so several programs would deadlock at a grid barrier.
        return [(i, i + 1) for i in range(first, end)] if INTERPRETED and programs > 1 else [(first, end)]


class Launch:
    """A kernel with its arguments; later launches skip Triton's binding of arguments, which takes about 40 us."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any], changing: tuple[int, ...]) -> None:
        self.kernel, self.args, self.options, self.changing = kernel, args, options, changing
        self._compiled: Any = None
        if isinstance(kernel, JITFunction):
            # Triton selects the variant for the types and the alignment of these arguments; changed ones must have the
            # same. It converts pinned tensors at each launch, as a GPU may have another address for their memory.
            self._compiled = kernel.warmup(*args, grid=(1,), **options)
            constants = (options.get(param.name, param.default) for param in kernel.params[len(args) :])
            self._arguments = [
                arg.data_ptr() if isinstance(arg, Tensor) and not arg.is_pinned() else arg
                for arg in (*args, *constants)
            ]

    def __call__(self, programs: int, *changed: Any) -> None:
        """Launch with new values of the changing arguments."""
        args = list(self.args if self._compiled is None else self._arguments)
        for at, arg in zip(self.changing, changed, strict=True):
            args[at] = arg
        if self._compiled is None:
            self.kernel[(programs,)](*args, **self.options)
        else:
            self._compiled[(programs, 1, 1)](*args)


class TritonNeighborSampler(DeviceSampler):
    """Samples mini-batches of one homogeneous graph. Thread-safe; calls share scratch memory and run one at a time."""

    # Scratch memory: 8 bytes per node of the graph (12 if persistent); 12 bytes per edge a batch may have (16 in graphs
    # of 2^31 edges and more) and 8 per node; if persistent, 8 + 8 * max(fanouts) per task; if disjoint, none per node
    # of the graph, but 36 to 68 more per edge; if hashed, 32 per edge that a batch can have instead of 8 per node of
    # the graph. It starts with room for start_edges edges and grows on demand.

    QUEUE_MODES: tuple[str, ...] = ("persistent",)

    def __init__(
        self,
        indptr: Tensor,  # CSC offsets, int64 [num_nodes + 1], on the device or in pinned host memory
        indices: Tensor,  # source nodes, int32 or int64 [num_edges], on the device or in pinned host memory
        *,
        mode: str = "fused",  # or "persistent": the queue, unless disjoint, with fanouts that it supports
        fetch_size: int = 128,  # tasks that a program claims at a time
        num_programs: int | None = None,  # per launch; None: as many as can be resident at once
        num_warps: int = 8,
        programs_per_sm: int = 4,  # upper limit of resident programs per multiprocessor, if num_programs is None
        start_edges: int = DeviceSampler.START_EDGES,  # edges per launch that the first scratch memory has room for
        every_hop: bool = False,  # sample a node in every hop from its first on; excludes disjoint and bulk samples
        device: torch.device | str | None = None,  # None: the device of indices, or the accelerator if they are pinned
        cached: CachedLists | None = None,  # cached hot adjacency lists on the device, read instead of indices
        shards: Shards | None = None,  # shards of all GPUs, if indices is only this GPU's shard; excludes cached
    ) -> None:
        if indptr.numel() > LARGEST:
            raise ValueError(f"the graph has {indptr.numel() - 1} nodes, but this sampler numbers them in 31 bits")
        place = torch.device(device) if device is not None else device_of(indices)
        super().__init__(place, num_programs, num_warps, programs_per_sm, start_edges)
        self.cached = cached is not None
        offset, hot = (indptr, indices) if cached is None else (cached.offset, cached.cached_indices)
        self.graph = (indptr, indices, offset, hot)
        self.num_nodes, self.num_edges = indptr.numel() - 1, indices.numel()
        self.shards: dict[str, int] = {}
        if shards is not None and shards.addresses.numel() > 1:
            self.num_edges, self._peer_shards = shards.num_rows, shards  # keeps the other GPUs' memory mapped
            self.graph = (indptr, indices, indptr, shards.addresses)
            self.shards = {"SHARDS": shards.addresses.numel(), "SHIFT": shards.shift}
        self.mode, self.fetch_size, self.every_hop = mode, fetch_size, every_hop

    def sample(
        self,
        seeds: Tensor,  # nodes of the graph, not checked, int32 or int64 [batch_size]; duplicates are allowed
        fanouts: Sequence[int],  # in-edges to pick per node and hop; -1 takes all
        key: int,  # the batch key, signed 64-bit
        replace: bool = False,
        disjoint: bool = False,
        first_tree: int = 0,  # position of the first seed in the whole mini-batch, not negative; used if disjoint
    ) -> Sample:
        """Sample in-neighbors of the seeds, hop by hop, and return them as :data:`Sample`."""
        with self.exclusive():
            self.share = 1.0
            batch = self.batch(seeds, fanouts, key, replace, disjoint, first_tree)
            batch.start()
            return batch.finish()[0]

    def begin(self, batch: Batch, share: float = 1.0) -> PendingLaunch:
        """Launch a batch asynchronously on the current stream."""
        with self.exclusive():
            self.share = share
            batch.start()
            self._pending = PendingLaunch(self, batch)
            return self._pending

    def batch(
        self,
        seeds: Tensor,
        fanouts: Sequence[int],
        key: int,
        replace: bool = False,
        disjoint: bool = False,
        first_tree: int = 0,
    ) -> Batch:
        """Create the batch that :meth:`begin` launches; arguments as for :meth:`sample`."""
        on_device = seeds.to(self.device).contiguous()
        return self._batch(on_device, check_fanouts(fanouts), key, replace, disjoint, first_tree)

    def _batch(
        self, seeds: Tensor, fanouts: list[int], key: int, replace: bool, disjoint: bool, first_tree: int
    ) -> Batch:
        return Batch(self, seeds, fanouts, key, replace, disjoint, first_tree)

    def outputs(self, nodes: int, edges: int, disjoint: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Allocate nodes, edge_index, edges and trees of a mini-batch, int64, at multiples of 16 bytes."""
        # One allocation per mini-batch, which costs less than four, and not per bulk: a mini-batch that is kept or
        # pickled does not contain the others.
        even_nodes, even_edges = nodes + nodes % 2, edges + edges % 2
        memory = self._allocate(even_nodes + 2 * edges + even_edges + nodes * disjoint, torch.int64)
        edge = even_nodes + 2 * edges
        return (
            memory.as_strided((nodes,), (1,)),
            memory.as_strided((2, edges), (edges, 1), even_nodes),
            memory.as_strided((edges,), (1,), edge),
            memory.as_strided((nodes,), (1,), edge + even_edges) if disjoint else None,
        )


class AsyncHostCopy(NamedTuple):
    """Asynchronous copy of words to the host."""

    words: Tensor  # destination, int64 [n]
    completion: Any  # event recorded after the copy; None if the copy is complete

    def is_complete(self) -> bool:
        """Whether :meth:`read` would return without waiting."""
        return self.completion is None or bool(self.completion.query())

    def array(self) -> Words:
        """Wait for the copy and return its words; the next :meth:`DeviceSampler.fetch` overwrites them."""
        if self.completion is not None:
            self.completion.synchronize()
        return self.words.numpy()

    def read(self) -> list[int]:
        """Wait for the copy and return its words."""
        return [int(word) for word in self.array().tolist()]


class PendingLaunch:
    """Mini-batches launched by ``begin``; they leave the scratch memory before the sampler's next launch."""

    def __init__(self, sampler: TritonNeighborSampler, batch: Batch) -> None:
        self.stream = sampler.current_stream()  # stream of the launch and of its output
        self._sampler, self._batch = sampler, batch
        self._samples: list[Sample] | None = None

    def is_ready(self) -> bool:
        """Whether :meth:`end` would return without waiting."""
        return self._samples is not None or self._batch.fetched.is_complete()

    def end(self) -> list[Sample]:
        """Return the sample of each mini-batch, for use on the stream of the launch."""
        if self._samples is None:
            with self._sampler.exclusive():  # flushes the pending launch
                pass
        assert self._samples is not None
        return self._samples

    def flush(self) -> None:
        """Copy the batch out of the scratch memory, on ``stream``; callers must hold the sampler's lock."""
        self._sampler._pending = None
        self._samples = self._batch.finish()


@dataclass(eq=False)
class Batch:
    """One mini-batch while it is being sampled."""

    sampler: TritonNeighborSampler  # owner of the graph and the scratch memory
    seeds: Tensor  # on the sampler's device, contiguous; otherwise as for TritonNeighborSampler.sample
    fanouts: list[int]  # one per hop
    key: int
    replace: bool
    disjoint: bool  # one tree per seed
    first_tree: int  # position of the first seed in the whole mini-batch
    parts: int = 1  # number of mini-batches in the launch

    def __post_init__(self) -> None:
        sampler = self.sampler
        self.num_seeds, self.num_hops = self.seeds.numel(), len(self.fanouts)
        self.num_sizes = hops.SIZES_SIZE + (2 * self.parts * (self.num_hops + 1) if self.parts > 1 else 0)
        small = [fanout for fanout in self.fanouts if 0 <= fanout <= REGISTER_FANOUTS[-1]]
        self.K = next(k for k in REGISTER_FANOUTS if k >= max(small, default=0))
        self.bound, self.queue_slots = self._bounds()
        if self.disjoint and sampler.every_hop:
            raise ValueError("every_hop=True excludes disjoint=True")
        possible = not (self.disjoint or sampler.every_hop) and queue_supports(self.fanouts)
        possible = possible and self.queue_slots <= LARGEST
        self.fetch_size = max(1, min(sampler.fetch_size, self.queue_slots))
        self.queued = possible and sampler.mode in sampler.QUEUE_MODES
        # Two slots of 16 bytes per edge: at most half of them are used, as a node has an edge or is a seed.
        words, slots = 8 * self.parts * sampler.num_nodes, 32 * self.bound
        self.hashed = not (self.disjoint or self.queued) and slots <= sampler.l2_bytes < words
        self.limit = LARGEST >> 2 if self.disjoint else LARGEST  # the hash table has two to four slots per position
        self.capacity = min(self.bound, self.limit, max(sampler._start_capacity, self.num_seeds))

    def _bounds(self) -> tuple[int, int]:
        """Return upper bounds of the batch's edge positions and queue slots."""
        graph = self.sampler.num_edges * (self.num_seeds if self.disjoint else self.parts)
        rows, positions, slots = self.num_seeds, self.num_seeds, self.num_seeds
        for hop, fanout in enumerate(self.fanouts):
            # A duplicated seed is expanded twice; in later hops, each node is expanded once, unless it is in every hop.
            again = hop == 0 or self.sampler.every_hop
            largest = self.num_seeds * self.sampler.num_edges if again else graph
            edges = largest if fanout < 0 else rows * fanout
            if not self.replace:
                edges = min(edges, largest)
            positions += edges
            if self.sampler.every_hop:
                rows = min(rows + edges, self.num_seeds + self.sampler.num_nodes)
            else:
                rows = edges if self.disjoint else min(edges, self.parts * self.sampler.num_nodes)
            slots += rows if hop + 1 < self.num_hops else 0  # a node is pushed at most once per hop
        return positions, slots

    def grow(self, needed: int) -> None:
        """Raise the capacity to at least ``needed`` edge positions."""
        self.capacity = self.sampler.larger(needed, self.capacity, self.bound, self.limit, self.num_seeds)
        del self.scratch  # so that each array is freed before its successor is allocated

    def finish(self) -> list[Sample]:
        """Wait for the sizes and return the samples of the started launch."""
        while needed := int((sizes := self.fetched.array())[hops.NEEDED.value]):
            self.grow(needed)
            self.start()
        return [self.emit(sizes)]

    def start(self) -> None:
        """Launch the sampling into the scratch memory and the copy of its sizes, ``fetched``."""
        s = self.sampler
        shape = (
            self.capacity, self.num_seeds, self.seeds.dtype, *self.fanouts, self.replace, self.disjoint,
            self.hashed, self.parts,
        )  # fmt: skip
        if shape not in s._prepared:
            prepared = Prepared(self)
            if len(s._prepared) == _MOST_PREPARED:
                s._prepared.clear()
            s._prepared[shape] = prepared
        self.scratch = scratch = s._prepared[shape]
        if self.disjoint:
            scratch.table.fill_(-1)
        # Free for reuse: the sizes of the last batch were read, so the copy of its words has ended.
        words = s._host_control.numpy()
        words[:] = scratch.parameters
        words[hops.STAMP.value], words[hops.KEY.value] = s.next_stamp(), self.key
        words[hops.FIRST_TREE.value] = self.first_tree
        self.write_control(words)
        scratch.control.copy_(s._host_control, non_blocking=True)
        self.launch()
        self.fetched = s.fetch(scratch.sizes)

    def write_control(self, words: Any) -> None:
        """Add to the kernel's control words, int64 ``[hops.CONTROL_SIZE]``."""

    @property
    def phases(self) -> int:
        """Number of phases of the kernel."""
        first = FIRST_LEVEL.value if self.queued else 0
        return int(first + hops.PHASES.value * (self.num_hops + 1) + (self.parts > 1))

    def launch(self, first: int = 0, end: int | None = None) -> None:
        """Launch the cooperative kernel that samples into the scratch memory: phases ``[first, end)``, or all after."""
        s, sampling = self.sampler, self.scratch.sampling
        kind = "queue" if self.queued else "hop"
        variant = (kind, self.disjoint, self.parts > 1, self.hashed, self.K, self.seeds.dtype)
        programs = s.fit_grid(sampling.kernel, variant, sampling.args, sampling.options)
        for begin, stop in s.split_phases(first, self.phases if end is None else end, programs):
            sampling(programs, self.seeds, begin, stop)

    def arguments(self, a: Prepared) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arrays and options for launching a kernel that runs phases: the queue's or that of the hops."""
        s = self.sampler
        options = {
            "CACHED": s.cached, "K": self.K, "R": 32 * s.num_warps, "T": 32 * s.num_warps, "num_warps": s.num_warps
        } | s.shards  # fmt: skip
        if self.queued:
            return (
                *s.graph, self.seeds, a.control, a.state, a.nodes, a.rowptr, a.src, a.eid, a.col, a.queue, a.stage,
                a.ticket_of, self.queue_slots, self.fetch_size, a.sizes, a.totals,
            ), options | {"CHUNK": chunk_size(self.K)}  # fmt: skip
        return (
            *s.graph, self.seeds, a.control, a.state, a.nodes, a.trees, a.rowptr, a.src, a.eid, a.col, a.table, a.slots,
            a.sizes, a.totals,
        ), options | {"DISJOINT": self.disjoint, "BULK": self.parts > 1, "HASHED": self.hashed}  # fmt: skip

    def emit(self, sizes: Words) -> Sample:
        """Copy the batch out of the scratch memory."""
        nodes_at = sizes[: self.num_hops + 2].tolist()
        edges_at = sizes[hops.EDGES.value + 1 : hops.EDGES.value + 2 + self.num_hops].tolist()
        num_nodes, num_edges = nodes_at[-1], edges_at[-1] - self.num_seeds
        node, edge_index, edge, trees = self.sampler.outputs(num_nodes, num_edges, self.disjoint)
        programs = -(-max(num_nodes, num_edges) // THREADS)
        trees_out = node if trees is None else trees
        self.scratch.emission(programs, node, trees_out, edge_index, edge, num_nodes, num_edges)
        node_counts = [b - a for a, b in pairwise(nodes_at)]
        edge_counts = [b - a for a, b in pairwise(edges_at)]
        return node, edge_index, edge, trees, node_counts, edge_counts

    def emit_launch(self, scratch: Prepared) -> Launch:
        """Prepare the launch of :meth:`emit`."""
        a, out = scratch, scratch.sizes  # any int64 array in place of the outputs
        args = (a.state, a.nodes, a.trees, a.src, a.eid, a.col, out, out, out, out, self.num_seeds, 0, 0)
        options = {"DISJOINT": self.disjoint, "T": THREADS, "num_warps": THREADS // 32}
        return Launch(emit_kernel, args, options, (6, 7, 8, 9, 11, 12))


class Prepared:
    """Scratch memory for batches of one shape, and the launches that use it."""

    def __init__(self, batch: Batch) -> None:
        s, capacity, queued = batch.sampler, batch.capacity, batch.queued
        words_of_nodes = batch.parts * s.num_nodes
        most_nodes = capacity if batch.disjoint else min(capacity, words_of_nodes + batch.num_seeds)
        self.src = s.scratch("src", capacity, torch.int32)
        self.col = s.scratch("col", capacity, torch.int32)
        self.eid = s.scratch("eid", capacity, torch.int32 if s.num_edges < 2**31 else torch.int64)
        self.nodes = s.scratch("nodes", most_nodes, torch.int32)
        self.rowptr = s.scratch("rowptr", most_nodes + 1, torch.int32)
        self.sizes = s.scratch("sizes", batch.num_sizes, torch.int64)[: batch.num_sizes]
        self.control = s.scratch("control", hops.CONTROL_SIZE, torch.int64)
        self.totals = s.scratch("totals", 2 * triton.cdiv(capacity, 32 * s.num_warps), torch.int64, 0)
        self.trees, self.table, self.slots = self.nodes, self.sizes, 1
        if batch.disjoint:
            self.slots = triton.next_power_of_2(2 * capacity)
            self.trees = s.scratch("trees", most_nodes, torch.int32)
            self.table = s.scratch("table", self.slots, torch.int64)[: self.slots]
            self.state = s.scratch("slot_state", self.slots, torch.int64, UNTOUCHED)
        elif batch.hashed:
            self.slots = 2 * batch.bound
            self.table = s.scratch("node_table", self.slots, torch.int64, UNTOUCHED)
            self.state = s.scratch("slot_state", self.slots, torch.int64, UNTOUCHED)
        else:
            self.state = s.scratch("state", words_of_nodes, torch.int64, UNTOUCHED)
        if queued:
            self.queue = s.scratch("queue", batch.queue_slots, torch.int64, 0)
            self.stage = s.scratch("stage", batch.queue_slots * 2 * batch.K, torch.int32)
            self.ticket_of = s.scratch("ticket_of", s.num_nodes, torch.int32)
        # Control words of a batch that starts, including its counters.
        self.parameters = np.zeros(hops.CONTROL_SIZE, np.int64)
        self.parameters[hops.NUM_SEEDS.value : hops.CAPACITY.value + 1] = (
            batch.num_seeds, 0, batch.replace, batch.num_hops, capacity
        )  # fmt: skip
        self.parameters[hops.NUM_NODES.value], self.parameters[hops.NUM_BATCHES.value] = s.num_nodes, batch.parts
        self.parameters[hops.WORK.value] = (batch.num_seeds << 32) | batch.num_seeds  # the seeds are the first tasks
        self.parameters[hops.FANOUT.value : hops.FANOUT.value + batch.num_hops] = batch.fanouts
        args, options = batch.arguments(self)
        options |= {"launch_cooperative_grid": True} | ({} if queued else {"EVERY": s.every_hop})
        kernel, at = queue_kernel if queued else hop_kernel, len(args)
        self.sampling = Launch(kernel, (*args, 0, 0), options, (4, at, at + 1))  # seeds and the range of phases
        self.emission = batch.emit_launch(self)


def check_fanouts(fanouts: Sequence[int]) -> list[int]:
    """Return the fanouts as ints; raise a ValueError if the kernels do not support so many hops."""
    if len(fanouts) > hops.MAX_HOPS:
        raise ValueError(f"fanouts specify {len(fanouts)} hops, but this sampler supports at most {hops.MAX_HOPS}")
    return [int(fanout) for fanout in fanouts]


def queue_supports(fanouts: Sequence[int]) -> bool:
    """Return whether the queue supports these fanouts: non-increasing, each -1 or at most 15."""
    as_numbers = [float("inf") if fanout < 0 else fanout for fanout in fanouts]
    shrinking = all(a >= b for a, b in pairwise(as_numbers))
    return shrinking and all(fanout <= REGISTER_FANOUTS[-1] for fanout in fanouts)


def chunk_size(K: int) -> int:
    """Return the number of in-edges, of K, that the queue gathers at a time: all, or equal chunks of at most 10."""
    return int(triton.cdiv(K, triton.cdiv(K, 10)))


def device_of(indices: Tensor) -> torch.device:
    """Return the device that samples a graph: that of ``indices``, or the accelerator for pinned memory."""
    if indices.device.type != "cpu" or not isinstance(hop_kernel, JITFunction):
        return indices.device
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not indices.is_pinned():
        raise ValueError("the Triton sampler needs the graph on a GPU, or in pinned memory on a machine with a GPU")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
