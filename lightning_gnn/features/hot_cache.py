"""Device caches for a graph in host memory: hot feature rows and hot adjacency lists under one budget.

Source: DUCATI (Zhang, Shen, Shao, Chen: DUCATI: A Dual-Cache Training System for Graph Neural Networks on Giant Graphs
with the GPU, SIGMOD 2023): both caches, and the split of one budget between them by pre-sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SECTOR_BYTES = 32  # granularity of an accelerator's reads from host memory

_ROWS_PER_BLOCK = 1 << 18
_Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class RowCache:
    """Cached rows of a table, with a lookup table."""

    slot: Tensor  # index of each row in rows, or -1, int32 [num_rows]
    rows: Tensor  # [cache_rows, num_columns] of the table's dtype, on the device of slot

    @classmethod
    def build(cls, table: Tensor, nodes: Tensor, device: torch.device | str) -> RowCache:
        """Copy rows of a table to a device in blocks, so that a memory-mapped table is never loaded completely.

        Args:
            table: ``[num_rows, num_columns]``.
            nodes: Indices of the rows, unique int64 or int32 ``[cache_rows]``.
        """
        nodes = _validate_nodes(nodes, table.size(0))
        rows = torch.empty((nodes.numel(), *table.shape[1:]), dtype=table.dtype, device=device)
        for start in range(0, nodes.numel(), _ROWS_PER_BLOCK):
            block = nodes[start : start + _ROWS_PER_BLOCK]
            rows[start : start + _ROWS_PER_BLOCK] = table.index_select(0, block.to(table.device)).to(device)
        slot = torch.full((table.size(0),), -1, dtype=torch.int32)
        slot[nodes] = torch.arange(nodes.numel(), dtype=torch.int32)
        return cls(slot.to(device), rows)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.slot.nbytes + self.rows.nbytes


@dataclass(frozen=True, eq=False)
class CachedAdjacency:
    """A graph's in-neighbors, with the lists of some nodes cached on a device.

    In-neighbor p of node v is ``cached_indices[offset[v] + p]`` where ``offset[v] >= 0``, else ``indices[indptr[v] +
    p]``.
    """

    indptr: Tensor  # copy of the graph's offsets on the device, int64 [num_nodes + 1]
    indices: Tensor  # the graph's source nodes in host memory, int32 or int64 [num_edges]
    offset: Tensor  # start of each node's list in cached_indices, or -1, int64 [num_nodes], on the device
    cached_indices: Tensor  # concatenated lists of the cached nodes, of the dtype of indices, on the device

    @classmethod
    def build(cls, indptr: Tensor, indices: Tensor, nodes: Tensor, device: torch.device | str) -> CachedAdjacency:
        """Copy the adjacency lists of some nodes, unique int64 or int32 ``[n]``, to a device."""
        nodes = _validate_nodes(nodes, indptr.numel() - 1)
        starts, degrees = indptr[nodes], indptr[nodes + 1] - indptr[nodes]
        ends = degrees.cumsum(0)
        offset = torch.full((indptr.numel() - 1,), -1, dtype=torch.int64)
        offset[nodes] = ends - degrees
        # Entry p of the list of v moves from indptr[v] + p to offset[v] + p.
        source = torch.repeat_interleave(starts - offset[nodes], degrees)
        lists = indices[source.add_(torch.arange(source.numel()))]
        return cls(indptr.to(device), indices, offset.to(device), lists.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.indptr.nbytes + self.offset.nbytes + self.cached_indices.nbytes


@dataclass(frozen=True, eq=False)
class Cacheable:
    """Candidate data for the device cache, cached by entry: the rows of a table, or the lists of a graph."""

    reads: _Array  # number of reads of each entry, [n], finite and not negative
    sizes: _Array  # bytes of each entry, int64 [n]
    cost: float  # cost of one read of an entry from host memory, in one unit for all candidates
    lookup_bytes: int  # bytes of the lookup table, needed if any entry is cached

    @property
    def total(self) -> float:
        """Cost of all reads."""
        return float(self.reads.sum() * self.cost)


@dataclass(frozen=True, eq=False)
class CacheChoice:
    """Entries to cache, for each candidate."""

    nodes: list[Tensor]  # int64 [n] for each candidate, highest benefit per byte first
    nbytes: list[int]  # bytes on the device for each candidate, including its lookup table
    gains: list[float]  # cost of the reads saved for each candidate


class CacheOrder:
    """Entries of several candidates, sorted by benefit per byte; ties go to earlier candidates, then lower ids."""

    def __init__(self, kinds: Sequence[Cacheable]) -> None:
        self._candidates = kinds
        empty = np.empty(0, np.int64)
        useful = [np.flatnonzero((kind.reads > 0) & (kind.sizes > 0) & (kind.cost > 0)) for kind in kinds]
        gains = [kind.reads[nodes] * kind.cost for kind, nodes in zip(kinds, useful, strict=True)]
        self._entry_candidate = np.repeat(np.arange(len(kinds)), [nodes.size for nodes in useful])
        self._entry_node = np.concatenate([empty, *useful])
        self._entry_size = np.concatenate([empty, *(kind.sizes[n] for kind, n in zip(kinds, useful, strict=True))])
        self._entry_gain = np.concatenate([empty, *gains])
        self._order = np.argsort(-(self._entry_gain / self._entry_size), kind="stable")

    def best(self, budget: int, among: Collection[int] | None = None) -> CacheChoice:
        """Fill a budget in bytes greedily by benefit per byte; ``among`` restricts the candidates, by index."""
        wanted = range(len(self._candidates)) if among is None else sorted(among)
        best, best_gain = np.empty(0, np.int64), 0.0
        # Each candidate in use costs its lookup table, so several subsets of them are tried.
        for used in _candidate_subsets(wanted, lambda kind: self._candidates[kind].total):
            left = int(budget) - sum(int(self._candidates[kind].lookup_bytes) for kind in used)
            if left <= 0:
                continue
            allowed = np.zeros(len(self._candidates), np.bool_)
            allowed[list(used)] = True
            chosen = _fill_greedily(self._order, self._entry_candidate, self._entry_size, allowed, left)
            if (gain := float(self._entry_gain[chosen].sum())) > best_gain:
                best, best_gain = chosen, gain
        parts = [best[self._entry_candidate[best] == kind] for kind in range(len(self._candidates))]
        return CacheChoice(
            [torch.from_numpy(self._entry_node[part].astype(np.int64)) for part in parts],
            [
                int(self._entry_size[part].sum()) + int(kind.lookup_bytes) * bool(part.size)
                for kind, part in zip(self._candidates, parts, strict=True)
            ],
            [float(self._entry_gain[part].sum()) for part in parts],
        )


def _candidate_subsets(numbers: Sequence[int], weight: Callable[[int], float]) -> Iterator[tuple[int, ...]]:
    """Yield subsets to try: all for up to four numbers, else single numbers and prefixes by descending weight."""
    if len(numbers) <= 4:
        for size in range(1, len(numbers) + 1):
            yield from combinations(numbers, size)
        return
    heaviest = sorted(numbers, key=lambda number: -weight(number))
    yield from ((number,) for number in heaviest)
    yield from (tuple(heaviest[:size]) for size in range(2, len(heaviest) + 1))


def row_cost(row_bytes: int) -> int:
    """Return the bytes of the sectors that an accelerator reads for one row in host memory."""
    return math.ceil(row_bytes / SECTOR_BYTES) * SECTOR_BYTES


def top_accessed(scores: Tensor, count: int) -> Tensor:
    """Return the nodes with the highest scores ``[num_nodes]``, int64 ``[count]`` at most; ties go to lower ids."""
    return torch.argsort(scores, descending=True, stable=True)[: max(count, 0)]


@numba.njit(nogil=True, cache=True)
def _fill_greedily(order: _Array, kinds: _Array, size: _Array, allowed: _Array, left: int) -> _Array:
    """Return the entries of allowed candidates that fit into ``left`` bytes, chosen in order."""
    chosen = np.empty(order.size, np.int64)
    n = 0
    for entry in order:
        if allowed[kinds[entry]] and size[entry] <= left:
            left -= size[entry]
            chosen[n] = entry
            n += 1
    result: _Array = chosen[:n].copy()
    return result


def _validate_nodes(nodes: Tensor, num_nodes: int) -> Tensor:
    nodes = nodes.detach().to("cpu", torch.int64)
    if nodes.numel():
        low, high = (int(value) for value in torch.aminmax(nodes))
        if low < 0 or high >= num_nodes:
            raise IndexError(f"cannot cache node {low if low < 0 else high}: the graph has {num_nodes} nodes")
    seen = torch.zeros(num_nodes, dtype=torch.bool)
    seen[nodes] = True
    if int(seen.sum()) != nodes.numel():
        raise ValueError("the nodes to cache contain duplicates")
    return nodes
