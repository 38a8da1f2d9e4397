"""Tables sharded across the GPUs of a machine: each GPU stores a shard, and reads the other shards in place.

The GPUs map each other's memory (torch's symmetric memory), and kernels read through a table of shard addresses.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn.ops.gather.definition import check_index
from lightning_gnn.ops.gather.triton import gather_from_shards
from lightning_gnn.runtime.lightning import rank_zero_warn
from lightning_gnn.runtime.shared_arrays import which_machine

T = TypeVar("T")
log = logging.getLogger(__name__)
ROW_SHIFT, LIST_SHIFT = 0, 10
"""log2 of the round-robin block size, in feature rows and in adjacency list entries. Hot rows are often adjacent, e.g.
in graphs sorted by degree, so single rows balance the load; lists are read contiguously, so they need larger blocks."""
_ROWS_PER_COPY = 1 << 18


@dataclass(frozen=True)
class BlockCyclicLayout:
    """Layout of a sharded table: blocks of ``2^shift`` rows are distributed round-robin."""

    num_rows: int
    num_shards: int
    shift: int = ROW_SHIFT

    @property
    def size(self) -> int:
        """Capacity of each shard in rows."""
        blocks = -(-self.num_rows // (1 << self.shift))
        return -(-blocks // self.num_shards) << self.shift

    def rows_of(self, shard: int) -> Iterator[tuple[int, Tensor]]:
        """Yield chunks of a shard: the index of the first row in the shard, and the table's rows, int64, in order."""
        for start in range(0, self.size, _ROWS_PER_COPY):
            local = torch.arange(start, min(start + _ROWS_PER_COPY, self.size))
            block = (local >> self.shift) * self.num_shards + shard
            rows = (block << self.shift) | (local & ((1 << self.shift) - 1))
            yield start, rows[rows < self.num_rows]  # only rows at the end of a shard can be missing

    def copy_shard(self, table: Tensor, shard: int, out: Tensor) -> None:
        """Copy the rows of a shard from a host table ``[num_rows, num_columns]`` to ``out`` ``[size, num_columns]``."""
        for start, rows in self.rows_of(shard):
            out[start : start + rows.numel()] = table.index_select(0, rows).to(out.device)


@dataclass(frozen=True, eq=False)
class PeerShards:
    """Table sharded across the memories of several GPUs, each of which can read all shards."""

    layout: BlockCyclicLayout
    local: Tensor  # this GPU's shard, [size, num_columns]
    addresses: Tensor  # addresses of all shards as mapped by this device, int64 [num_shards], on the device
    mapping: object = None  # keeps the memory of the other GPUs mapped

    @property
    def num_rows(self) -> int:
        """Number of rows of the table."""
        return self.layout.num_rows

    @property
    def shift(self) -> int:
        """Return log2 of the rows per round-robin block."""
        return self.layout.shift

    def take(self, index: Tensor, out: Tensor, scales: Tensor | None = None) -> None:
        """Gather rows with one kernel; ``index`` is int64 or int32 ``[n]`` on the device, and not checked."""
        gather_from_shards(self.local, self.addresses, self.num_rows, self.shift, index, out, scales)


class ShardedTable:
    """Node or edge features sharded across the GPUs of a machine, with the interface of a ``FeatureTable``."""

    cache = None
    cache_rows = 0

    def __init__(self, shards: PeerShards, scales: Tensor | None = None) -> None:
        self.shards, self.scales = shards, scales  # scales of all rows of an int8 table, float32 [num_rows]
        self.num_nodes, self.num_features = shards.num_rows, shards.local.size(1)
        self.dtype = shards.local.dtype if scales is None else torch.float32  # dtype of gathered rows

    def gather(self, n_id: Tensor, out: Tensor | None = None, check: bool = False) -> Tensor:
        """Gather the rows of nodes on the device of ``n_id``; arguments as for ``FeatureTable.gather``."""
        if out is None:
            out = torch.empty((n_id.numel(), self.num_features), dtype=self.dtype, device=n_id.device)
        if check and n_id.numel():
            check_index(n_id, self.num_nodes)
        self.shards.take(n_id, out, self.scales)
        return out

    def __repr__(self) -> str:
        return f"{type(self).__name__}(local shard {list(self.shards.local.shape)} of {self.num_nodes} rows)"


class LocalMachine:
    """Processes of one machine that share tables, each with one GPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.obstacle = ""
        """Reason why tables cannot be sharded across these GPUs; empty if they can."""

    def share(self, table: Tensor, shift: int = ROW_SHIFT) -> PeerShards:
        """Shard a host table ``[num_rows, num_columns]`` across the GPUs. All ranks must call this."""
        layout = BlockCyclicLayout(table.size(0), self.size, shift)
        shape = (max(layout.size, 1), table.size(1))
        local, addresses, barrier, mapping = allocate_symmetric(shape, table.dtype, self)
        self.run_on_all(lambda: layout.copy_shard(table, self.rank, local))
        barrier()  # no rank may read before all shards are written
        return PeerShards(layout, local, torch.tensor(addresses, device=self.device), mapping)

    def gather(self, value: T) -> list[T]:
        """All-gather an object. All ranks of the machine must call this."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def run_on_all(self, step: Callable[[], T]) -> T:
        """Return a step's result; if it fails on a rank, fail on all. All ranks must call this."""
        error, result = None, None
        try:
            result = step()
        except Exception as caught:  # of any kind: the other ranks would wait for this one
            error = caught
        failed = self.gather(None if error is None else (isinstance(error, ValueError), f"{error}"))
        if first := next(filter(None, failed), None):
            raise (ValueError if first[0] else RuntimeError)(first[1]) from error
        return cast(T, result)

    def broadcast_first(self, make: Callable[[], T]) -> T:
        """Broadcast the result of rank 0's ``make``, or raise its error. All ranks must call this."""
        return cast(T, self.gather(self.run_on_all(lambda: make() if self.rank == 0 else None))[0])


def rendezvous_on_machine(device: torch.device | None) -> LocalMachine | None:
    """Group the ranks with a GPU by machine; None without a GPU. All ranks must call this."""
    ranks: list[Any] = [None] * dist.get_world_size()
    own = which_machine() or socket.gethostname()
    index = torch.cuda.device(device).idx if device is not None and device.type == "cuda" else None
    dist.all_gather_object(ranks, (own if device is not None else None, index))
    groups = {}
    for host, _ in ranks:  # every rank must create every group, in the same order
        if host is not None and host not in groups:
            groups[host] = dist.new_group([rank for rank, (other, _) in enumerate(ranks) if other == host])
    if device is None:
        return None
    machine = LocalMachine(groups[own], device)
    if machine.size > 1:
        # Check that the GPUs report peer access, and that it works.
        obstacle = find_obstacle(index, [other for host, other in ranks if host == own])
        machine.obstacle = next(filter(None, machine.gather(obstacle)), "")
        if not machine.obstacle and not all(machine.gather(verify_peer_reads(machine))):
            machine.obstacle = "the GPUs of this machine report peer access, but reads across them fail"
            rank_zero_warn(f"{machine.obstacle}: no table is sharded")
    return machine


def find_obstacle(device: int | None, devices: Sequence[int | None]) -> str:
    """Return why a GPU cannot map the memory of its machine's GPUs, given by CUDA index; empty if it can."""
    numbers = [number for number in devices if number is not None]
    if device is None or len(numbers) < len(devices):
        return "the ranks of this machine sample on the CPU, with Triton's interpreter"
    if len({*numbers}) < len(numbers) or max(numbers) >= torch.cuda.device_count():
        return "ranks of this machine share a GPU, or do not see all GPUs: CUDA_VISIBLE_DEVICES must list all of them"
    if all(torch.cuda.can_device_access_peer(device, other) for other in numbers if other != device):
        return ""
    return "the GPUs of this machine have no peer access, over NVLink or PCIe, to each other's memory"


def verify_peer_reads(machine: LocalMachine) -> bool:
    """Return whether a small sharded table reads back correctly. All ranks must call this."""
    table = torch.arange(3 * machine.size).view(-1, 1)
    try:
        shards = machine.share(table)
        out = torch.empty_like(table, device=machine.device)
        shards.take(table.view(-1).to(machine.device), out)
        return torch.equal(out.cpu(), table)
    except Exception as error:  # a failed share has failed on all ranks, and the caller gathers the result of the read
        log.debug(f"a sharded table cannot be read: {error}")
        return False


def allocate_symmetric(
    shape: Sequence[int], dtype: torch.dtype, machine: LocalMachine
) -> tuple[Tensor, list[int], Callable[[], None], object]:
    """Allocate symmetric memory: return the local tensor, all addresses, a barrier, and the mapping to retain."""
    import torch.distributed._symmetric_memory as memory

    local = machine.run_on_all(lambda: memory.empty(*shape, dtype=dtype, device=machine.device))
    handle = machine.run_on_all(lambda: memory.rendezvous(local, machine.group))
    parts = machine.run_on_all(lambda: [handle.get_buffer(rank, list(shape), dtype) for rank in range(machine.size)])

    def barrier() -> None:
        handle.barrier()
        torch.accelerator.synchronize(machine.device)

    return local, [part.data_ptr() for part in parts], barrier, handle
