"""Rows that stay on disk and in a part of host memory, of which a device holds those that are read most."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn.graph.cache import RowCache
from lightning_gnn.graph.disk_features import DiskFeatures
from lightning_gnn.graph.row_file import BLOCK_BYTES

DISK = 5
"""What a byte from the disk costs, of one over the bus: NVMe brings 3 to 7 GB/s beside PCIe's 25 GB/s."""
_BLOCK = 1 << 15


class HotDiskRows:
    """Gathers rows for a device: those that it holds there, the others by way of the host, from memory or the disk.

    Args:
        disk: The rows.
        cache: Copies of some of them on the device (:func:`hot_rows`), or None: all come by way of the host.
    """

    def __init__(self, disk: DiskFeatures, cache: RowCache | None) -> None:
        self.disk, self.cache = disk, cache

    def gather(self, n_id: Tensor) -> Tensor:
        """Return the rows of some nodes where ``n_id`` is.

        Args:
            n_id: Node ids, int64 or int32 ``[n]``, on the device of the cache.

        Raises:
            IndexError: A node is out of range.
            OSError, ValueError: As :meth:`DiskFeatures.gather`.
        """
        if self.cache is None:
            return self.disk.gather(n_id)
        slot = self.cache.slot.index_select(0, n_id)
        here = (slot >= 0).nonzero().view(-1)
        elsewhere = (slot < 0).nonzero().view(-1)
        out = torch.empty((n_id.numel(), self.disk.num_features), dtype=self.disk.dtype, device=n_id.device)
        out.index_copy_(0, here, self.cache.rows.index_select(0, slot.index_select(0, here)))
        if elsewhere.numel():
            out.index_copy_(0, elsewhere, self.disk.gather(n_id.index_select(0, elsewhere)))
        return out

    @property
    def announced(self) -> int:
        """Reads that are announced."""
        return self.disk.announced

    def claim(self, by: object = None) -> bool:
        """Begin to announce reads, as :meth:`DiskFeatures.claim`."""
        return self.disk.claim(by)

    def release(self, left_for: object = None) -> None:
        """Let others announce, as :meth:`DiskFeatures.release`."""
        self.disk.release(left_for)

    def forget(self) -> None:
        """Drop what was announced."""
        self.disk.forget()

    def announce(self, n_id: Tensor) -> None:
        """Add a read after those that were announced, without the rows that the device holds.

        Args:
            n_id: Whose rows, int64 or int32 ``[n]``, on any device.
        """
        if self.cache is not None:
            n_id = n_id.to(self.cache.slot.device)
            n_id = n_id[self.cache.slot.index_select(0, n_id) < 0]
        self.disk.announce(n_id)

    def advance(self) -> None:
        """Say that the first read of those announced comes now: call it just before :meth:`gather`."""
        self.disk.advance()


def hot_rows(disk: DiskFeatures, nodes: Tensor, device: torch.device | str) -> RowCache:
    """Read some rows from disk into a cache on a device, block by block; those in memory stay as they are.

    Args:
        disk: The rows.
        nodes: Which, int64 ``[cache_rows]``, none of them twice.
        device: Where to.
    """
    slot = torch.full((disk.num_nodes,), -1, dtype=torch.int32)
    slot[nodes] = torch.arange(nodes.numel(), dtype=torch.int32)
    return RowCache(slot.to(device), rows_on(disk, nodes, device))


def rows_on(disk: DiskFeatures, nodes: Tensor, device: torch.device | str) -> Tensor:
    """Return some rows on a device, ``[n, num_features]``, read with the least memory and in ascending ranges.

    Args:
        disk: The rows.
        nodes: Which, int64 ``[n]``.
        device: Where to.
    """
    out = torch.empty((nodes.numel(), disk.num_features), dtype=disk.dtype, device=device)
    least = DiskFeatures.least_bytes(disk.file, disk.verify)
    reader = DiskFeatures(disk.file, least, disk.verify)
    try:
        order = torch.argsort(nodes)
        for start in range(0, order.numel(), _BLOCK):
            places = order[start : start + _BLOCK]
            out[places.to(device)] = reader.gather(nodes[places]).to(device)
    finally:
        reader.close()
    return out


def read_cost(disk: DiskFeatures) -> float:
    """Return what it costs to read a row that is not on the device, beside the bus, in bytes that cross the bus.

    As if what memory has room for were any rows: those of which it holds more are also those that the device holds.
    """
    kept = min(1.0, disk.cache_rows / max(disk.num_nodes, 1))
    return DISK * (1 - kept) * max(BLOCK_BYTES, disk.row_bytes)
