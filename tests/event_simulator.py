"""A simulated device: streams, events, allocator and page-locked memory, derived from the requests of the host.

Tensors are on the CPU and operators run immediately; only the order is simulated. Each operator, launch of Triton's
interpreter and copy counts as issued to the current stream. It happens after earlier work on this stream, events that
the stream has waited for, and everything that the host has waited for (vector clocks). A missing dependency is
therefore found at any timing. Time is simulated too, to detect waits of the host.

Reported in ``errors``:

- memory is used before the event of its last write, or written while another stream may still read it;
- memory returns to the allocator of one stream while another stream, which was not recorded, may use it;
- the host reads or writes memory that a stream may still use;
- memory of another GPU is read before its process has written it, or while it is not mapped, or is unmapped while in
  use. A kernel that gets a table of addresses counts as reading all memory in it.
"""

from collections import Counter
from contextlib import contextmanager
from weakref import finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = "host"


def merge_clocks(*clocks):
    return {name: max(clock.get(name, 0) for clock in clocks) for name in set().union(*clocks)}


class Event:
    """Clock of a stream at the time of recording."""

    def __init__(self, simulator, stream):
        self.simulator, self.clock, self.end = simulator, dict(stream.clock), stream.end
        self.stream = stream

    def query(self):
        if self.simulator.now < self.end:
            return False
        self.simulator.sync_host(self.clock)
        return True

    def synchronize(self):
        self.simulator.wait(self.end, self.stream.name)
        self.simulator.sync_host(self.clock)


class Stream:
    """Runs issued work in order."""

    def __init__(self, simulator, name):
        self.simulator, self.name, self.clock, self.end, self.issued = simulator, name, {}, 0.0, 0

    def record_event(self):
        return Event(self.simulator, self)

    def wait_event(self, event):
        self.clock, self.end = merge_clocks(self.clock, event.clock), max(self.end, event.end)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        self.record_event().synchronize()

    def __enter__(self):
        self.simulator.current.append(self)

    def __exit__(self, *error):
        self.simulator.current.pop()

    def issue(self, seconds):
        """Append an operator that takes ``seconds`` and return its number."""
        simulator = self.simulator
        simulator.now += simulator.launch_s
        self.end = max(self.end, simulator.now) + seconds
        self.clock = merge_clocks(self.clock, simulator.known)
        self.issued += 1
        self.clock[self.name] = self.issued
        return self.issued


class Memory:
    """Owner and last uses of a storage."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name
        self.written, self.read, self.recorded, self.freed = {}, {}, set(), False


class Simulator(TorchDispatchMode):
    """Observes the thread that enters it; the active one is ``at_work``.

    In simulated seconds, a launch takes ``launch_s`` of the host, kernels and operators the other two of the device.
    """

    at_work = None

    def __init__(self, launch_s=1.0, kernel_s=20.0, operator_s=1.0):
        super().__init__()
        self.launch_s, self.kernel_s, self.operator_s = launch_s, kernel_s, operator_s
        self.main = Stream(self, "main")
        self.current = [self.main]
        self.known, self.now = {}, 0.0
        self.memory, self.errors, self.waits, self.live = {}, [], [], Counter()
        self.streams = [self.main]
        self.paused = False
        self.mapped = {}
        """Memory of all parts of a table, by their addresses."""

    # -- replacements of library functions

    def new_stream(self, device=None, priority=0):
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self, device=None):
        return self.current[-1]

    def record_stream(self, tensor, stream):
        if isinstance(tensor, torch.Tensor) and (memory := self._find(tensor)) is not None:
            memory.recorded.add(stream.name)
        return tensor

    def make_allocator(self, deal, ranks):
        """Return a replacement of ``shards.allocate_symmetric``; ``deal(rank, part)`` writes the part of a peer."""

        def symmetric(shape, dtype, machine):
            with self.pause():
                parts = [torch.empty(shape, dtype=dtype) for _ in range(ranks)]
            others = []
            for rank, part in enumerate(parts):
                self._register(part, f"the part of rank {rank}", HOST)  # owned by no stream: unmapped at once
                if rank:
                    others.append(Stream(self, f"rank {rank}"))
                    with others[-1], self.pause():
                        deal(rank, part)
                        self.work([], [part], self.operator_s)
            addresses = [part.data_ptr() for part in parts]
            self.mapped[tuple(addresses)] = [self._find(part) for part in parts]

            def barrier():
                own = self.current[-1]
                for other in others:
                    own.wait_stream(other)
                own.synchronize()

            return parts[0], addresses, barrier, parts

        return symmetric

    @contextmanager
    def install(self, monkeypatch):
        """Replace the device for loaders and Triton samplers on the CPU."""
        from triton.runtime import interpreter

        from lightning_gnn.collective import routes
        from lightning_gnn.gpu_sampling import stream_prefetcher
        from lightning_gnn.triton_kernels.sample import DeviceSampler

        launch, numpy, tolist = interpreter.GridExecutor.__call__, torch.Tensor.numpy, torch.Tensor.tolist

        def launch_kernel(executor, *args, **kwargs):
            tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
            self.work(tensors, [tensor for tensor in tensors if self._find(tensor) is not None], self.kernel_s)
            with self.pause():
                return launch(executor, *args, **kwargs)

        def wrap_access(method, writes):
            def call(tensor, *args, **kwargs):
                if not self.paused:
                    self.host_access(tensor, writes)
                return method(tensor, *args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("new_stream", "current_stream", "record_stream"):
                patch.setattr(stream_prefetcher, name, getattr(self, name))
            for module in (stream_prefetcher, routes):
                patch.setattr(module, "on_stream", lambda stream: stream)
            patch.setattr(torch.cuda, "stream", lambda stream: stream)
            patch.setattr(DeviceSampler, "current_stream", lambda sampler: self.current_stream())
            patch.setattr(interpreter.GridExecutor, "__call__", launch_kernel)
            patch.setattr(torch.Tensor, "numpy", wrap_access(numpy, True))
            patch.setattr(torch.Tensor, "tolist", wrap_access(tolist, False))
            patch.setattr(Simulator, "at_work", self)
            with self:
                yield self

    # -- the host

    def wait(self, end, for_whom):
        if end > self.now:
            self.waits.append((for_whom, end - self.now))
            self.now = end

    def sync_host(self, clock):
        self.known = merge_clocks(self.known, clock)

    def host_access(self, tensor, writes):
        """Check an access of the host to memory at the current time."""
        memory = self._find(tensor)
        if memory is None:
            return
        for kind, uses in (("write", memory.written), ("read", memory.read if writes else {})):
            for name, number in uses.items():
                if self.known.get(name, 0) < number:
                    self.errors.append(f"the host looks into {memory.name}, but the {kind} of {name} may be to come")
        if writes:
            memory.written, memory.read = {}, {}

    @contextmanager
    def pause(self):
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    # -- the device

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return function(*args, **kwargs)
        on_device = self.current[-1] is not self.main or any(
            self._find(value) is not None for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
        )
        with self.pause():
            out = function(*args, **kwargs)
        if not on_device:
            return out
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        made = [value for value in tree_leaves(out) if isinstance(value, torch.Tensor)]
        if function is torch.ops.aten._local_scalar_dense.default:
            self.current[-1].synchronize()
            self.host_access(given[0], False)
            return out
        there = {value.untyped_storage().data_ptr() for value in given}
        fresh = [value for value in made if value.untyped_storage().data_ptr() not in there]
        for value in fresh:
            self._register(value, str(function))
        if fresh or function._schema.is_mutable:
            names = [argument.name for argument in function._schema.arguments if argument.is_write]
            positions = [i for i, argument in enumerate(function._schema.arguments) if argument.is_write]
            written = [args[i] for i in positions if i < len(args)] + [kwargs[name] for name in names if name in kwargs]
            self.work(given, [*fresh, *tree_leaves(written)], self.operator_s)
        return out

    def work(self, reads, writes, seconds):
        """Issue work of ``seconds`` to the current stream; written tensors not yet known belong to the host."""
        stream = self.current[-1]
        number = stream.issue(seconds)
        writes = [tensor for tensor in writes if isinstance(tensor, torch.Tensor)]
        for tensor in writes:
            if self._find(tensor) is None:
                self._register(tensor, "memory", HOST)
        seen = [(self._find(tensor), kind) for kind, used in (("reads", reads), ("writes", writes)) for tensor in used]
        seen += [(memory, "reads") for tensor in reads for memory in self._find_mapped(tensor)]
        for memory, kind in seen:
            if memory is None:
                continue
            if memory.freed:
                self.errors.append(f"{stream.name} {kind} {memory.name}, which is not mapped any more")
            for other, uses in (("written", memory.written), ("read", memory.read if kind == "writes" else {})):
                for name, before in uses.items():
                    if stream.clock.get(name, 0) < before:
                        self.errors.append(f"{stream.name} {kind} {memory.name}, which {name} may not have {other} yet")
            (memory.written if kind == "writes" else memory.read)[stream.name] = number

    def _find_mapped(self, tensor):
        """Return the memory that a table of addresses refers to."""
        if tensor.dtype != torch.int64 or tensor.numel() not in {len(addresses) for addresses in self.mapped}:
            return []
        with self.pause():
            return self.mapped.get(tuple(tensor.tolist()), [])

    def _find(self, tensor):
        return self.memory.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None

    def _register(self, tensor, name, owner=None):
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return
        owner = self.current[-1].name if owner is None else owner
        memory = self.memory[storage.data_ptr()] = Memory(owner, f"{name} {list(tensor.shape)}")
        self.live[owner] += storage.nbytes()
        finalize(storage, self._release, storage.data_ptr(), storage.nbytes(), memory).atexit = False

    def _release(self, address, size, memory):
        memory.freed = True
        self.live[memory.owner] -= size
        if self.memory.get(address) is memory:
            del self.memory[address]
        owner = next((stream for stream in self.streams if stream.name == memory.owner), None)
        for name, number in merge_clocks(memory.written, memory.read).items():
            if owner is None:
                safe = self.known.get(name, 0) >= number
            else:
                known = max(owner.clock.get(name, 0), self.known.get(name, 0))
                safe = name == owner.name or name in memory.recorded or known >= number
            if not safe:
                self.errors.append(f"{memory.name} of {memory.owner} is freed, but {name} may still use it")
