"""What an accelerator keeps of a graph that lies in host memory: hot feature rows, hot adjacency lists, one budget.

Source: DUCATI (Zhang, Shen, Shao, Chen: DUCATI: A Dual-Cache Training System for Graph Neural Networks on Giant Graphs
with the GPU, SIGMOD 2023): both caches, and the split of one budget between them by pre-sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SECTOR_BYTES = 32  # the least that an accelerator reads from host memory at once

_BLOCK = 1 << 18
_Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class RowCache:
    """Copies of some rows of a table."""

    slot: Tensor  # int32 [num_rows], the place of each row in rows, or -1
    rows: Tensor  # of the table's dtype [cache_rows, num_columns], on the device of slot

    @classmethod
    def build(cls, table: Tensor, nodes: Tensor, device: torch.device | str) -> RowCache:
        """Copy rows of a table to a device, block by block, so that a memory-mapped table never comes in whole.

        Args:
            table: ``[num_rows, num_columns]``.
            nodes: Which rows, int64 or int32 ``[cache_rows]``, within range and none of them twice.
        """
        nodes = _checked(nodes, table.size(0))
        rows = torch.empty((nodes.numel(), *table.shape[1:]), dtype=table.dtype, device=device)
        for start in range(0, nodes.numel(), _BLOCK):
            block = nodes[start : start + _BLOCK]
            rows[start : start + _BLOCK] = table.index_select(0, block.to(table.device)).to(device)
        slot = torch.full((table.size(0),), -1, dtype=torch.int32)
        slot[nodes] = torch.arange(nodes.numel(), dtype=torch.int32)
        return cls(slot.to(device), rows)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.slot.nbytes + self.rows.nbytes


@dataclass(frozen=True, eq=False)
class CachedAdjacency:
    """A graph's in-neighbors, with the lists of some nodes on a device.

    In-neighbor p of node v is ``cached_indices[offset[v] + p]`` where ``offset[v] >= 0``, else ``indices[indptr[v] +
    p]``.
    """

    indptr: Tensor  # a copy of the graph's offsets on the device, int64 [num_nodes + 1]
    indices: Tensor  # the graph's own source nodes in host memory, int32 or int64 [num_edges]
    offset: Tensor  # where a node's list starts in cached_indices, or -1, int64 [num_nodes], on the device
    cached_indices: Tensor  # lists of the cached nodes, one after the other, of the dtype of indices, on the device

    @classmethod
    def build(cls, indptr: Tensor, indices: Tensor, nodes: Tensor, device: torch.device | str) -> CachedAdjacency:
        """Copy the adjacency lists of some nodes, int64 or int32 ``[n]``, none of them twice, to a device."""
        nodes = _checked(nodes, indptr.numel() - 1)
        starts, degrees = indptr[nodes], indptr[nodes + 1] - indptr[nodes]
        ends = degrees.cumsum(0)
        offset = torch.full((indptr.numel() - 1,), -1, dtype=torch.int64)
        offset[nodes] = ends - degrees
        # Entry p of a list goes from indptr[v] + p to offset[v] + p.
        moved = torch.repeat_interleave(starts - offset[nodes], degrees)
        lists = indices[moved.add_(torch.arange(moved.numel()))]
        return cls(indptr.to(device), indices, offset.to(device), lists.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.indptr.nbytes + self.offset.nbytes + self.cached_indices.nbytes


@dataclass(frozen=True, eq=False)
class Cacheable:
    """What a device may keep single entries of: the rows of a table, the lists of a graph."""

    reads: _Array  # how often each entry was read, [n], finite and not negative
    sizes: _Array  # bytes of each entry, int64 [n]
    cost: float  # what it costs to read an entry once from host memory, in any unit that all kinds share
    lookup_bytes: int  # bytes of the lookup table of a cache that is not empty

    @property
    def total(self) -> float:
        """The cost of all reads."""
        return float(self.reads.sum() * self.cost)


@dataclass(frozen=True, eq=False)
class CacheChoice:
    """What of each kind goes to the device."""

    nodes: list[Tensor]  # of each kind, int64 [n], the most beneficial first
    nbytes: list[int]  # of each kind, bytes on the device, its lookup table included
    gains: list[float]  # of each kind, the cost of the reads that are saved


class CacheOrder:
    """Entries of several kinds in one order, by benefit per byte; ties go to earlier kinds, then to lower ids."""

    def __init__(self, kinds: Sequence[Cacheable]) -> None:
        self._kinds = kinds
        none = np.empty(0, np.int64)
        found = [np.flatnonzero((kind.reads > 0) & (kind.sizes > 0) & (kind.cost > 0)) for kind in kinds]
        self._kind = np.repeat(np.arange(len(kinds)), [nodes.size for nodes in found])
        self._node = np.concatenate([none, *found])
        self._size = np.concatenate([none, *(kind.sizes[n] for kind, n in zip(kinds, found, strict=True))])
        self._gain = np.concatenate([none, *(kind.reads[n] * kind.cost for kind, n in zip(kinds, found, strict=True))])
        self._order = np.argsort(-(self._gain / self._size), kind="stable")

    def best(self, budget: int, among: Collection[int] | None = None) -> CacheChoice:
        """Fill a budget greedily by benefit per byte: an entry that does not fit is passed over for smaller ones."""
        wanted = range(len(self._kinds)) if among is None else sorted(among)
        best, best_gain = np.empty(0, np.int64), 0.0
        for used in _some_subsets(wanted, lambda kind: self._kinds[kind].total):
            left = int(budget) - sum(int(self._kinds[kind].lookup_bytes) for kind in used)
            if left <= 0:
                continue
            allowed = np.zeros(len(self._kinds), np.bool_)
            allowed[list(used)] = True
            chosen = _fill(self._order, self._kind, self._size, allowed, left)
            if (gain := float(self._gain[chosen].sum())) > best_gain:
                best, best_gain = chosen, gain
        parts = [best[self._kind[best] == kind] for kind in range(len(self._kinds))]
        return CacheChoice(
            [torch.from_numpy(self._node[part].astype(np.int64)) for part in parts],
            [
                int(self._size[part].sum()) + int(kind.lookup_bytes) * bool(part.size)
                for kind, part in zip(self._kinds, parts, strict=True)
            ],
            [float(self._gain[part].sum()) for part in parts],
        )


def _some_subsets(numbers: Sequence[int], weight: Callable[[int], float]) -> Iterator[tuple[int, ...]]:
    """Give the subsets worth a look, the smallest first: all of up to four, else single ones and the heaviest."""
    if len(numbers) <= 4:
        for size in range(1, len(numbers) + 1):
            yield from combinations(numbers, size)
        return
    heaviest = sorted(numbers, key=lambda number: -weight(number))
    yield from ((number,) for number in heaviest)
    yield from (tuple(heaviest[:size]) for size in range(2, len(heaviest) + 1))


def row_cost(row_bytes: int) -> int:
    """Return the bytes of the sectors that a row in host memory covers."""
    return math.ceil(row_bytes / SECTOR_BYTES) * SECTOR_BYTES


def hottest_of_types(scores: Mapping[Any, Tensor], count: int) -> dict[Any, Tensor]:
    """Return the nodes with the highest scores ``[num_nodes]`` of all types together, int64 by type, hottest first."""
    chosen, first = top_accessed(torch.cat([*scores.values()]), count), 0
    out: dict[Any, Tensor] = {}
    for name, own in scores.items():
        nodes = chosen[(chosen >= first) & (chosen < first + own.numel())] - first
        first += own.numel()
        if nodes.numel():
            out[name] = nodes
    return out


def top_accessed(scores: Tensor, count: int) -> Tensor:
    """Return the nodes with the highest scores ``[num_nodes]``, int64 ``[count]`` at most; ties go to lower ids."""
    return torch.argsort(scores, descending=True, stable=True)[: max(count, 0)]


@numba.njit(nogil=True, cache=True)
def _fill(order: _Array, kinds: _Array, size: _Array, allowed: _Array, left: int) -> _Array:
    """Take the entries that fit, in order, of the kinds that are allowed."""
    chosen = np.empty(order.size, np.int64)
    n = 0
    for entry in order:
        if allowed[kinds[entry]] and size[entry] <= left:
            left -= size[entry]
            chosen[n] = entry
            n += 1
    taken: _Array = chosen[:n].copy()
    return taken


def _checked(nodes: Tensor, num_nodes: int) -> Tensor:
    nodes = nodes.detach().to("cpu", torch.int64)
    if nodes.numel():
        low, high = (int(value) for value in torch.aminmax(nodes))
        if low < 0 or high >= num_nodes:
            raise IndexError(f"cannot cache node {low if low < 0 else high}: the graph has {num_nodes} nodes")
    seen = torch.zeros(num_nodes, dtype=torch.bool)
    seen[nodes] = True
    if int(seen.sum()) != nodes.numel():
        raise ValueError("a node to cache is given twice")
    return nodes
