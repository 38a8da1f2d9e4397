"""Tables whose rows are dealt out to the GPUs of a node: each holds a part, and reads the others' where they lie.

Where GPUs map each other's memory (torch's symmetric memory), kernels read through a table of addresses. Elsewhere
processes send each other rows (``exchange.py``).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lightning_gnn.ops import gather_rows
from lightning_gnn.ops.gather.definition import check_index
from lightning_gnn.ops.gather.triton import gather_from_shards
from lightning_gnn.persistent.exchange import Exchange
from lightning_gnn.runtime.shared_arrays import which_machine

T = TypeVar("T")
ROW_SHIFT, LIST_SHIFT = 0, 10
"""Logarithms of how many rows, and how many entries of adjacency lists, each GPU gets in turn: those that are read much
are often neighbours, as in orders by degree, and what all lists hold is read side by side where all of it is taken."""
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Dealt:
    """Rows that are dealt out in blocks of ``2^shift``, in turn.

    Args:
        num_rows: Of all.
        num_shards: To how many.
        shift: Logarithm of a block's rows.
    """

    num_rows: int
    num_shards: int
    shift: int = ROW_SHIFT

    @property
    def size(self) -> int:
        """Rows for which each has room."""
        blocks = -(-self.num_rows // (1 << self.shift))
        return -(-blocks // self.num_shards) << self.shift

    def owner(self, rows: Tensor) -> Tensor:
        """Return who has each of some rows, int64 ``[n]``."""
        return (rows >> self.shift) % self.num_shards

    def place(self, rows: Tensor) -> Tensor:
        """Return where it lies there, int64 ``[n]``."""
        block = torch.div(rows >> self.shift, self.num_shards, rounding_mode="floor")
        return (block << self.shift) | (rows & ((1 << self.shift) - 1))

    def rows_of(self, shard: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a shard in order, int64, and the place of the first of them, some at a time."""
        for start in range(0, self.size, _BLOCK):
            place = torch.arange(start, min(start + _BLOCK, self.size))
            block = (place >> self.shift) * self.num_shards + shard
            rows = (block << self.shift) | (place & ((1 << self.shift) - 1))
            yield start, rows[rows < self.num_rows]  # what is missing are the last ones

    def deal(self, table: Tensor, shard: int, out: Tensor) -> None:
        """Copy the rows of a shard.

        Args:
            table: ``[num_rows, num_columns]``, on the host.
            shard: Which.
            out: ``[size, num_columns]``, anywhere.
        """
        for start, rows in self.rows_of(shard):
            out[start : start + rows.numel()] = table.index_select(0, rows).to(out.device)


@dataclass(frozen=True, eq=False)
class PeerShards:
    """A table in the memories of several GPUs, each of which reads all of it.

    Args:
        dealt: Who has what.
        local: The own part, ``[size, num_columns]``.
        addresses: Of all parts, as this process's device knows them, int64 ``[num_shards]``, there.
        held: Whatever keeps the others' memory mapped.
    """

    dealt: Dealt
    local: Tensor
    addresses: Tensor
    held: Any = None

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return self.dealt.num_rows

    @property
    def shift(self) -> int:
        """Logarithm of the rows that each gets in turn."""
        return self.dealt.shift

    def take(self, index: Tensor, out: Tensor, scales: Tensor | None = None) -> None:
        """Gather rows, by one kernel.

        Args:
            index: int64 or int32 ``[n]``, on the device, not checked.
            out: As for :func:`~lightning_gnn.ops.gather_rows`.
            scales: Of all rows of an int8 table.
        """
        gather_from_shards(self.local, self.addresses, self.num_rows, self.shift, index, out, scales)


@dataclass(frozen=True, eq=False)
class ExchangedShards:
    """A table in the memories of several processes, which send each other rows.

    Args:
        dealt: Who has what.
        local: The own part, ``[size, num_columns]``.
        exchange: By which they do.
        number: Of the table there.
    """

    dealt: Dealt
    local: Tensor
    exchange: Exchange
    number: int

    def take(self, index: Tensor, out: Tensor, scales: Tensor | None = None) -> None:
        """Gather rows; arguments as for :meth:`PeerShards.take`. All processes must call it equally often.

        Within :meth:`Exchange.together`, ``out`` is filled at the end of that.

        Raises:
            IndexError: A row outside the table.
        """
        if index.numel():
            check_index(index, self.dealt.num_rows)  # another process would fail
        index = index.to(torch.int64)
        rows = out if scales is None else self.local.new_empty(out.shape)

        def arrived() -> None:
            if scales is not None:
                own = torch.arange(index.numel(), device=index.device)
                gather_rows(rows, own, out, scales=scales.index_select(0, index))

        self.exchange.ask(self.number, self.dealt.owner(index), self.dealt.place(index), rows, arrived)


Shards = PeerShards | ExchangedShards


class ShardedTable:
    """Node or edge features of which each GPU of a node holds a part; what loaders ask of a ``FeatureTable``.

    Args:
        shards: The rows.
        scales: Of an int8 table, all of them, float32 ``[num_rows]``, on the device.
    """

    cache = None
    cache_rows = 0

    def __init__(self, shards: Shards, scales: Tensor | None = None) -> None:
        self.shards, self.scales = shards, scales

    @property
    def num_nodes(self) -> int:
        """Number of rows."""
        return self.shards.dealt.num_rows

    @property
    def num_features(self) -> int:
        """Number of columns."""
        return self.shards.local.size(1)

    @property
    def dtype(self) -> torch.dtype:
        """What :meth:`gather` returns: what is kept; float32 for int8 tables."""
        return self.shards.local.dtype if self.scales is None else torch.float32

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


class Node:
    """The processes of a node that share tables, each with a GPU.

    Args:
        group: These processes.
        device: Of this one.
        peers: Whether the GPUs map each other's memory.
    """

    def __init__(self, group: Any, device: torch.device, peers: bool) -> None:
        self.group, self.device, self.peers = group, device, peers
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.exchange = None if peers else Exchange(group, device)

    def share(self, table: Tensor, shift: int = ROW_SHIFT) -> Shards:
        """Deal out a table; all processes must call it for the same one.

        Args:
            table: ``[num_rows, num_columns]``, on the host, as each has it.
            shift: Logarithm of the rows that each gets in turn.
        """
        dealt = Dealt(table.size(0), self.size, shift)
        shape = (max(dealt.size, 1), table.size(1))
        if self.exchange is not None:
            local = torch.empty(shape, dtype=table.dtype, device=self.device)
            dealt.deal(table, self.rank, local)
            return ExchangedShards(dealt, local, self.exchange, self.exchange.add(local))
        local, addresses, barrier, held = symmetric(shape, table.dtype, self.device, self.group)
        dealt.deal(table, self.rank, local)
        barrier()  # nobody reads what is not written yet
        return PeerShards(dealt, local, torch.tensor(addresses, device=self.device), held)

    def gather(self, value: Any) -> list[Any]:
        """Return what each process gives."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def first(self, make: Callable[[], T]) -> T:
        """Return what the first process makes, or raise its error in all of them."""
        made: Any = None
        if self.rank == 0:
            try:
                made = make()
            except ValueError as error:
                made = error
        made = self.gather(made)[0]
        if isinstance(made, ValueError):
            raise made
        return made  # type: ignore[no-any-return]


def meet_on_node(device: torch.device | None) -> Node | None:
    """Group the ranks of each machine that have a GPU.

    Collective: every rank of the run must call this.

    Args:
        device: Of this rank; None where it has no GPU, for which the result is None, too.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    own = which_machine() or socket.gethostname()
    index = device.index if device is not None and device.type == "cuda" else None
    dist.all_gather_object(everyone, (own if device is not None else None, index))
    groups = {}
    for where, _ in everyone:  # every rank makes every group, in the same order
        if where is not None and where not in groups:
            groups[where] = dist.new_group([rank for rank, (other, _) in enumerate(everyone) if other == where])
    if device is None:
        return None
    devices = [index for where, index in everyone if where == own]
    peers = None not in devices and len({*devices}) == len(devices) and reads_peers(device, devices)
    apart = Node(groups[own], device, False)
    if not all(apart.gather(peers)):
        return apart
    together = Node(groups[own], device, True)
    if all(apart.gather(reads_right(together))):
        return together
    rank_zero_warn("the GPUs of this machine report peer access, but reads across them fail: no table is sharded")
    return apart


def reads_right(node: Node) -> bool:
    """Tell whether a small table that is dealt out comes back as it was; all processes must call it."""
    table = torch.arange(3 * node.size).view(-1, 1)
    try:
        shards = node.share(table)
        found = torch.empty_like(table, device=node.device)
        shards.take(table.view(-1).to(node.device), found)
        return torch.equal(found.cpu(), table)
    except (RuntimeError, ValueError):
        return False


def symmetric(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, group: Any
) -> tuple[Tensor, list[int], Any, Any]:
    """Allocate as much on each GPU of a node, and map all of it on each.

    Args:
        shape: Of each part.
        dtype: Its dtype.
        device: Of this process.
        group: Whose processes all call it.

    Returns:
        The own part; where all parts lie for this process; a barrier for all, on the current stream; what must be kept
        for as long as they are read.
    """
    import torch.distributed._symmetric_memory as memory

    local = memory.empty(*shape, dtype=dtype, device=device)
    handle = memory.rendezvous(local, group)
    parts = [handle.get_buffer(rank, list(shape), dtype) for rank in range(handle.world_size)]

    def barrier() -> None:
        handle.barrier()
        torch.accelerator.synchronize(device)

    return local, [part.data_ptr() for part in parts], barrier, handle


def reads_peers(device: torch.device, devices: Sequence[int]) -> bool:
    """Tell whether a GPU maps the memory of others of its node.

    Args:
        device: The GPU.
        devices: The numbers of all, as this process sees them.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or max(devices) >= torch.cuda.device_count():
        return False
    return all(torch.cuda.can_device_access_peer(device, other) for other in devices if other != device.index)
