"""Sorts the edges of a table by target, by counting."""

from collections.abc import Iterator
from functools import cached_property

import numba
import numpy as np
import numpy.typing as npt

from lightning_gnn.datasets.table_files import TableFiles
from lightning_gnn.graph.csc import index_dtype

_EDGES_PER_BLOCK = 1 << 22


class EdgeOrder:
    """The order of edges by target, then by position in the table, computed by counting in-degrees."""

    def __init__(self, database: TableFiles, table: str, target: str, num_nodes: int, memory: int) -> None:
        self._database, self._table = database, table
        self._target, self._num_nodes = _cast(target, index_dtype(num_nodes)), num_nodes
        # Two arrays of one number per node are in memory at the same time.
        self._buffer_bytes = max(memory - 2 * 8 * num_nodes, memory // 4)

    @cached_property
    def indptr(self) -> npt.NDArray[np.int64]:
        """Offsets of the nodes' in-edges, int64 ``[num_nodes + 1]``."""
        indptr = np.zeros(self._num_nodes + 1, np.int64)
        for (targets,) in self._scan(self._target):
            _count_in_degrees(targets, indptr)
        return np.cumsum(indptr, out=indptr)

    def _scan(self, *columns: str) -> Iterator[list[np.ndarray]]:
        named = {f"column{number}": column for number, column in enumerate(columns)}
        for block in self._database.blocks(self._table, named, _EDGES_PER_BLOCK):
            yield [np.asarray(block[name]) for name in named]

    def place(self, column: str, dtype: npt.DTypeLike) -> Iterator[np.ndarray]:
        """Yield a column in the order of the edges; each array is overwritten by the next one.

        One scan of the table places as many edges as the memory holds.
        """
        places = self.indptr[:-1].copy()
        most, first = self._buffer_bytes // np.dtype(dtype).itemsize, 0
        buffer = np.empty(0, dtype)
        while first < self._num_nodes:
            begin = self.indptr[first]
            last = max(int(np.searchsorted(self.indptr, begin + most, "right")) - 1, first + 1)
            if self.indptr[last] - begin > buffer.size:
                buffer = np.empty(self.indptr[last] - begin, dtype)
            for values, targets in self._scan(_cast(column, dtype), self._target):
                _place_values(values, targets, first, last, begin, places, buffer)
            yield buffer[: self.indptr[last] - begin]
            first = last


def _cast(column: str, dtype: npt.DTypeLike) -> str:
    names = {np.dtype(np.int32): "INTEGER", np.dtype(np.int64): "BIGINT", np.dtype(np.float64): "DOUBLE"}
    return f"({column})::{names[np.dtype(dtype)]}"


@numba.njit(nogil=True, cache=True)
def _count_in_degrees(targets: np.ndarray, indptr: np.ndarray) -> None:
    """Add the in-degrees to ``indptr``, shifted by one."""
    for target in targets:
        indptr[target + 1] += 1


@numba.njit(nogil=True, cache=True)
def _place_values(
    values: np.ndarray, targets: np.ndarray, first: int, last: int, begin: int, places: np.ndarray, out: np.ndarray
) -> None:
    """Write the values of edges to nodes ``first`` to ``last`` to the next places of their targets."""
    for e in range(targets.size):
        target = targets[e]
        if first <= target < last:
            out[places[target] - begin] = values[e]
            places[target] += 1
