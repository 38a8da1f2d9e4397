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

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from lightning_gnn.triton_kernels import hops
from lightning_gnn.triton_kernels.emit import emit_kernel
from lightning_gnn.triton_kernels.hops import hop_kernel
from lightning_gnn.triton_kernels.queue import FIRST_LEVEL, queue_kernel

MODES = ("fused", "persistent")
WARPS = (1, 2, 4, 8, 16, 32)
INTERPRETED = not isinstance(hop_kernel, JITFunction)  # TRITON_INTERPRET is set: programs run sequentially on the CPU
REGISTER_FANOUTS = (5, 10, 15, 20, 25, 32)  # kernels are compiled for the next larger one; above, O(k^2) hashes
UNTOUCHED = 2**63 - 1
_FIRST_STAMP = 2 ** (63 - hops.STAMP_SHIFT.value) - 2
LARGEST = 2**31 - 2**16

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
        self, device: torch.device, num_programs: int | None, num_warps: int, programs_per_sm: int = PROGRAMS_PER_SM
    ) -> None:
        if num_warps not in WARPS:
            raise ValueError(f"num_warps is {num_warps}; choose one of {', '.join(map(str, WARPS))}")
        if programs_per_sm < 1:
            raise ValueError(f"programs_per_sm must be at least 1, but is {programs_per_sm}")
        self.device, self.num_programs, self.num_warps = device, num_programs, num_warps
        self.programs_per_sm = programs_per_sm
        self._start_capacity = self.START_EDGES
        self._stamp: int = _FIRST_STAMP + 1
        self._buffers: dict[str, Tensor] = {}
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
            self._buffers[name] = self._allocate(max(size, 1), dtype)
            if fill is not None:
                self._buffers[name].fill_(fill)
        return self._buffers[name]

    def next_stamp(self) -> int:
        """Return the stamp of the next batch; stamps count down, and all words are cleared when they run out."""
        self._stamp -= 1
        if self._stamp < 1:
            self._stamp = _FIRST_STAMP
            for name, fill in (("state", UNTOUCHED), ("slot_state", UNTOUCHED), ("queue", 0), ("totals", 0)):
                if name in self._buffers:
                    self._buffers[name].fill_(fill)
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
                with self._pending.stream or contextlib.nullcontext(), self.on_device():
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

    def most_programs(self) -> int:
        """Return the maximum number of programs of a launch."""
        if self.num_programs is not None:
            return self.num_programs
        if INTERPRETED:
            return 2
        return self._num_sms * self.programs_per_sm

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


class TritonNeighborSampler(DeviceSampler):
    """Samples mini-batches of one homogeneous graph. Thread-safe; calls share scratch memory and run one at a time."""

    # Scratch memory: 8 bytes per node of the graph (12 if persistent); 12 bytes per edge a batch may have (16 in graphs
    # of 2^31 edges and more) and 8 per node; if persistent, 8 + 8 * max(fanouts) per task; if disjoint, none per node
    # of the graph, but 36 to 68 more per edge. It starts with room for START_EDGES edges and grows on demand.

    MODES: tuple[str, ...] = MODES
    QUEUE_MODES: tuple[str, ...] = ("persistent",)

    def __init__(
        self,
        indptr: Tensor,  # CSC offsets, int64 [num_nodes + 1], on the device or in pinned host memory
        indices: Tensor,  # source nodes, int32 or int64 [num_edges], on the device or in pinned host memory
        *,
        mode: str = "fused",  # one of MODES; disjoint samples, and fanouts that queue_supports rejects, run hop by hop
        fetch_size: int = 128,  # tasks that a program claims at a time
        num_programs: int | None = None,  # per launch; None: as many as can be resident at once
        num_warps: int = 4,
        programs_per_sm: int = 4,  # upper limit of resident programs per multiprocessor, if num_programs is None
        every_hop: bool = False,  # sample a node in every hop from its first on; excludes disjoint and bulk samples
        device: torch.device | str | None = None,  # None: the device of indices, or the accelerator if they are pinned
        cached: CachedLists | None = None,  # cached hot adjacency lists on the device, read instead of indices
        shards: Shards | None = None,  # shards of all GPUs, if indices is only this GPU's shard; excludes cached
    ) -> None:
        if mode not in self.MODES:
            raise ValueError(f"unknown sampling mode {mode!r}; choose one of {', '.join(self.MODES)}")
        if fetch_size < 1:
            raise ValueError(f"fetch_size is {fetch_size}, but a program must claim at least 1 task")
        if indptr.numel() > LARGEST:
            raise ValueError(f"the graph has {indptr.numel() - 1} nodes, but this sampler numbers them in 31 bits")
        place = torch.device(device) if device is not None else device_of(indices)
        super().__init__(place, num_programs, num_warps, programs_per_sm)
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


class AsyncHostCopy(NamedTuple):
    """Asynchronous copy of words to the host."""

    words: Tensor  # destination, int64 [n]
    completion: Any  # event recorded after the copy; None if the copy is complete

    def is_complete(self) -> bool:
        """Whether :meth:`read` would return without waiting."""
        return self.completion is None or bool(self.completion.query())

    def read(self) -> list[int]:
        """Wait for the copy and return its words."""
        if self.completion is not None:
            self.completion.synchronize()
        return [int(word) for word in self.words.tolist()]


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
        """Raise the capacity to at least ``needed`` edge positions; later hops may need more."""
        if needed > self.limit:
            num_seeds = self.num_seeds
            raise ValueError(f"a batch of {num_seeds} seeds has at least {needed} edges; the limit is {self.limit}")
        self.capacity = min(self.bound, self.limit, max(needed + needed // 4, 2 * self.capacity))
        self.sampler._start_capacity = max(self.sampler._start_capacity, self.capacity)

    def finish(self) -> list[Sample]:
        """Wait for the sizes and return the samples of the started launch."""
        sizes = self.fetched.read()
        while needed := sizes[hops.NEEDED.value]:
            self.grow(needed)
            self.start()
            sizes = self.fetched.read()
        return [self.emit(sizes)]

    def start(self) -> None:
        """Launch the sampling into the scratch memory and the copy of its sizes, ``fetched``."""
        s = self.sampler
        words_of_nodes = self.parts * s.num_nodes
        most_nodes = self.capacity if self.disjoint else min(self.capacity, words_of_nodes + self.num_seeds)
        self.src = s.scratch("src", self.capacity, torch.int32)
        self.col = s.scratch("col", self.capacity, torch.int32)
        self.eid = s.scratch("eid", self.capacity, torch.int32 if s.num_edges < 2**31 else torch.int64)
        self.nodes = s.scratch("nodes", most_nodes, torch.int32)
        self.rowptr = s.scratch("rowptr", most_nodes + 1, torch.int32)
        self.sizes = s.scratch("sizes", self.num_sizes, torch.int64)
        self.control = s.scratch("control", hops.CONTROL_SIZE, torch.int64)
        self.totals = s.scratch("totals", 2 * triton.cdiv(self.capacity, 64 * s.num_warps), torch.int64, 0)
        self.trees, self.table, self.slots = self.nodes, self.sizes, 1
        if self.disjoint:
            self.slots = triton.next_power_of_2(2 * self.capacity)
            self.trees = s.scratch("trees", most_nodes, torch.int32)
            self.table = s.scratch("table", self.slots, torch.int64)
            self.table[: self.slots].fill_(-1)
            self.state = s.scratch("slot_state", self.slots, torch.int64, UNTOUCHED)
        else:
            self.state = s.scratch("state", words_of_nodes, torch.int64, UNTOUCHED)
        if self.queued:
            self.queue = s.scratch("queue", self.queue_slots, torch.int64, 0)
            self.stage = s.scratch("stage", self.queue_slots * 2 * self.K, torch.int32)
            self.ticket_of = s.scratch("ticket_of", s.num_nodes, torch.int32)
        host = s._host_control  # free for reuse: the sizes of the last batch were read, so its control copy has ended
        words = host.numpy()
        words[:] = 0  # including the counters
        words[:6] = (s.next_stamp(), self.num_seeds, self.key, self.replace, self.num_hops, self.capacity)
        words[6] = self.first_tree
        words[hops.WORK.value] = (self.num_seeds << 32) | self.num_seeds  # the seeds are tasks from the start
        words[hops.FANOUT.value : hops.FANOUT.value + self.num_hops] = self.fanouts
        self.write_control(words)
        self.control.copy_(host, non_blocking=True)
        self.launch()
        self.fetched = s.fetch(self.sizes[: self.num_sizes])

    def write_control(self, words: Any) -> None:
        """Add to the kernel's control words, int64 ``[hops.CONTROL_SIZE]``."""

    def launch(self) -> None:
        """Launch the kernels that sample into the scratch memory."""
        if self.queued:
            self.launch_queue()
        else:
            self.launch_hops()

    def hop_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arrays and options for launching a kernel that runs phases."""
        s = self.sampler
        args = (
            *s.graph, self.seeds, self.control, self.state, self.nodes, self.trees, self.rowptr, self.src,
            self.eid, self.col, self.table, self.slots, self.sizes, self.totals,
        )  # fmt: skip
        options = {
            "DISJOINT": self.disjoint, "BULK": self.parts > 1, "CACHED": s.cached, "K": self.K, "R": 32 * s.num_warps,
            "T": 64 * s.num_warps, "num_warps": s.num_warps, **s.shards,
        }  # fmt: skip
        return args, options

    def launch_hops(self) -> None:
        """Launch all hops as one cooperative kernel."""
        args, options = self.hop_arguments()
        options |= {"launch_cooperative_grid": True, "EVERY": self.sampler.every_hop}
        end = hops.PHASES.value * (self.num_hops + 1) + (self.parts > 1)
        variant = ("hop", self.disjoint, self.parts > 1, self.K, self.seeds.dtype)
        programs = self.sampler.fit_grid(hop_kernel, variant, (*args, 0, end), options)
        for begin, stop in self.sampler.split_phases(0, end, programs):
            hop_kernel[(programs,)](*args, begin, stop, **options)

    def launch_queue(self, first: int = 0) -> None:
        """Launch the queue and the ordering as one cooperative kernel, starting at phase ``first``."""
        s = self.sampler
        args = (
            *s.graph, self.seeds, self.control, self.state, self.nodes, self.rowptr, self.src, self.eid, self.col,
            self.queue, self.stage, self.ticket_of, self.queue_slots, self.fetch_size, self.sizes, self.totals,
        )  # fmt: skip
        options = {
            "CACHED": s.cached, "K": self.K, "CHUNK": chunk_size(self.K), "R": 32 * s.num_warps,
            "T": 64 * s.num_warps, "num_warps": s.num_warps,
            "launch_cooperative_grid": True, **s.shards,
        }  # fmt: skip
        end = FIRST_LEVEL.value + hops.PHASES.value * (self.num_hops + 1)
        programs = s.fit_grid(queue_kernel, ("queue", self.K, self.seeds.dtype), (*args, first, end), options)
        for begin, stop in s.split_phases(first, end, programs):
            queue_kernel[(programs,)](*args, begin, stop, **options)

    def emit(self, sizes: list[int]) -> Sample:
        """Copy the batch out of the scratch memory."""
        nodes_at = sizes[: self.num_hops + 2]
        edges_at = sizes[hops.EDGES.value + 1 : hops.EDGES.value + 2 + self.num_hops]
        num_nodes, num_edges = nodes_at[-1], edges_at[-1] - self.num_seeds
        device = self.sampler.device
        node = torch.empty(num_nodes, dtype=torch.int64, device=device)
        edge_index = torch.empty(2, num_edges, dtype=torch.int64, device=device)
        edge = torch.empty(num_edges, dtype=torch.int64, device=device)
        batch = torch.empty(num_nodes, dtype=torch.int64, device=device) if self.disjoint else None
        emit_kernel[(triton.cdiv(max(num_nodes, num_edges), 1024),)](
            self.state, self.nodes, self.trees, self.src, self.eid, self.col, node, node if batch is None else batch,
            edge_index, edge, self.num_seeds, num_nodes, num_edges, DISJOINT=self.disjoint, T=1024,
        )  # fmt: skip
        node_counts = [b - a for a, b in pairwise(nodes_at)]
        edge_counts = [b - a for a, b in pairwise(edges_at)]
        return node, edge_index, edge, batch, node_counts, edge_counts


def check_fanouts(fanouts: Sequence[int]) -> list[int]:
    """Return the fanouts as ints; raise a ValueError if the kernels do not support so many hops."""
    if len(fanouts) > hops.MAX_HOPS:
        raise ValueError(f"fanouts specify {len(fanouts)} hops, but this sampler supports at most {hops.MAX_HOPS}")
    return [int(fanout) for fanout in fanouts]


def queue_supports(fanouts: Sequence[int]) -> bool:
    """Return whether the queue supports these fanouts: non-increasing, each -1 or at most 32."""
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
