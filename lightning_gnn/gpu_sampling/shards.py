"""Tables whose rows are dealt out to the GPUs of a machine: each holds a part, and reads the others' where they lie.

The GPUs map each other's memory (torch's symmetric memory), and kernels read through a table of addresses.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lightning_gnn.ops.gather.definition import check_index
from lightning_gnn.ops.gather.triton import gather_from_shards
from lightning_gnn.runtime.shared_arrays import which_machine

T = TypeVar("T")
ROW_SHIFT, LIST_SHIFT = 0, 10
"""Logarithms of how many rows, and how many entries of adjacency lists, each GPU gets in turn: those that are read much
are often neighbors, as in orders by degree, and what all lists hold is read side by side where all of it is taken."""
_BLOCK = 1 << 18


@dataclass(frozen=True)
class BlockCyclicLayout:
    """Rows that are dealt out in blocks of ``2^shift``, in turn."""

    num_rows: int
    num_shards: int
    shift: int = ROW_SHIFT

    @property
    def size(self) -> int:
        """Rows for which each has room."""
        blocks = -(-self.num_rows // (1 << self.shift))
        return -(-blocks // self.num_shards) << self.shift

    def rows_of(self, shard: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a shard in order, int64, and the place of the first of them, some at a time."""
        for start in range(0, self.size, _BLOCK):
            place = torch.arange(start, min(start + _BLOCK, self.size))
            block = (place >> self.shift) * self.num_shards + shard
            rows = (block << self.shift) | (place & ((1 << self.shift) - 1))
            yield start, rows[rows < self.num_rows]  # what is missing are the last ones

    def deal(self, table: Tensor, shard: int, out: Tensor) -> None:
        """Copy the rows of a shard from a table ``[num_rows, num_columns]`` on the host to ``[size, num_columns]``."""
        for start, rows in self.rows_of(shard):
            out[start : start + rows.numel()] = table.index_select(0, rows).to(out.device)


@dataclass(frozen=True, eq=False)
class PeerShards:
    """A table in the memories of several GPUs, each of which reads all of it."""

    dealt: BlockCyclicLayout
    local: Tensor  # the own part, [size, num_columns]
    addresses: Tensor  # of all parts, as this process's device knows them, int64 [num_shards], there
    held: object = None  # whatever keeps the others' memory mapped

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return self.dealt.num_rows

    @property
    def shift(self) -> int:
        """Logarithm of the rows that each gets in turn."""
        return self.dealt.shift

    def take(self, index: Tensor, out: Tensor, scales: Tensor | None = None) -> None:
        """Gather rows by one kernel, for int64 or int32 ``[n]`` on the device, which are not checked."""
        gather_from_shards(self.local, self.addresses, self.num_rows, self.shift, index, out, scales)


class ShardedTable:
    """Node or edge features of which each GPU of a machine holds a part; what loaders ask of a ``FeatureTable``."""

    cache = None
    cache_rows = 0

    def __init__(self, shards: PeerShards, scales: Tensor | None = None) -> None:
        self.shards, self.scales = shards, scales  # of an int8 table those of all rows, float32 [num_rows], there
        self.num_nodes, self.num_features = shards.num_rows, shards.local.size(1)
        self.dtype = shards.local.dtype if scales is None else torch.float32  # of gathered rows

    def gather(self, n_id: Tensor, out: Tensor | None = None, check: bool = False) -> Tensor:
        """Copy the rows of some nodes to where ``n_id`` is; arguments as for ``FeatureTable.gather``."""
        if out is None:
            out = torch.empty((n_id.numel(), self.num_features), dtype=self.dtype, device=n_id.device)
        if check and n_id.numel():
            check_index(n_id, self.num_nodes)
        self.shards.take(n_id, out, self.scales)
        return out

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shards.local.shape)} of {self.num_nodes} rows here)"


class LocalMachine:
    """The processes of a machine that share tables, each with a GPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.obstacle = ""
        """Why no table can be dealt out to these GPUs; empty where one can."""

    def share(self, table: Tensor, shift: int = ROW_SHIFT) -> PeerShards:
        """Deal out a table ``[num_rows, num_columns]`` on the host, ``2^shift`` rows in turn; all must call it."""
        dealt = BlockCyclicLayout(table.size(0), self.size, shift)
        shape = (max(dealt.size, 1), table.size(1))
        local, addresses, barrier, held = symmetric(shape, table.dtype, self.device, self.group)
        dealt.deal(table, self.rank, local)
        barrier()  # no rank reads what is not written yet
        return PeerShards(dealt, local, torch.tensor(addresses, device=self.device), held)

    def gather(self, value: T) -> list[T]:
        """Return what each process gives."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def first(self, make: Callable[[], T]) -> T:
        """Return what the first process makes, or raise its error in all of them."""
        made: T | ValueError | None = None
        if self.rank == 0:
            try:
                made = make()
            except ValueError as error:
                made = error
        made = self.gather(made)[0]
        if isinstance(made, ValueError):
            raise made
        return cast(T, made)


def meet_on_machine(device: torch.device | None) -> LocalMachine | None:
    """Group each machine's ranks that have a GPU, and see whether these read each other's memory; None without one.

    Collective: every rank of the run must call this.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    own = which_machine() or socket.gethostname()
    index = torch.cuda.device(device).idx if device is not None and device.type == "cuda" else None
    dist.all_gather_object(everyone, (own if device is not None else None, index))
    groups = {}
    for where, _ in everyone:  # every rank makes every group, in the same order
        if where is not None and where not in groups:
            groups[where] = dist.new_group([rank for rank, (other, _) in enumerate(everyone) if other == where])
    if device is None:
        return None
    machine = LocalMachine(groups[own], device)
    if machine.size > 1:
        found = find_obstacle(index, [other for where, other in everyone if where == own])
        machine.obstacle = next(filter(None, machine.gather(found)), "")
        if not machine.obstacle and not all(machine.gather(reads_right(machine))):
            machine.obstacle = "the GPUs of this machine report peer access, but reads across them fail"
            rank_zero_warn(f"{machine.obstacle}: no table is sharded")
    return machine


def find_obstacle(device: int | None, devices: Sequence[int | None]) -> str:
    """Return why a GPU cannot map the memory of all GPUs of its machine, by their CUDA indices; empty if it can."""
    numbers = [number for number in devices if number is not None]
    if device is None or len(numbers) < len(devices):
        return "the ranks of this machine sample on the CPU, by Triton's interpreter"
    if len({*numbers}) < len(numbers) or max(numbers) >= torch.cuda.device_count():
        return "ranks of this machine share a GPU, or do not see each other's: CUDA_VISIBLE_DEVICES must list all"
    if all(torch.cuda.can_device_access_peer(device, other) for other in numbers if other != device):
        return ""
    return "the GPUs of this machine have no peer access, by NVLink or PCIe, to each other's memory"


def reads_right(machine: LocalMachine) -> bool:
    """Tell whether a small table that is dealt out comes back as it was; all processes must call it."""
    table = torch.arange(3 * machine.size).view(-1, 1)
    try:
        shards = machine.share(table)
        found = torch.empty_like(table, device=machine.device)
        shards.take(table.view(-1).to(machine.device), found)
        return torch.equal(found.cpu(), table)
    except (RuntimeError, ValueError):
        return False


def symmetric(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, list[int], Callable[[], None], object]:
    """Allocate as much on each GPU and map all: return the own part, all addresses, a barrier, what to keep."""
    import torch.distributed._symmetric_memory as memory

    local = memory.empty(*shape, dtype=dtype, device=device)
    handle = memory.rendezvous(local, group)
    parts = [handle.get_buffer(rank, list(shape), dtype) for rank in range(handle.world_size)]

    def barrier() -> None:
        handle.barrier()
        torch.accelerator.synchronize(device)

    return local, [part.data_ptr() for part in parts], barrier, handle
