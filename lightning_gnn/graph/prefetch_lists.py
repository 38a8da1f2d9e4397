"""Prefetches adjacency lists from a memory-mapped file larger than memory: those of a frontier, before its hop."""

import mmap
import sys
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from torch import Tensor

from lightning_gnn.features.arrays import advise
from lightning_gnn.runtime.memory_info import total_bytes

_PAGE = mmap.PAGESIZE
_MERGE_GAP_PAGES = 4  # ranges with at most this many pages between them are merged into one call
_WILL_NEED = getattr(mmap, "MADV_WILLNEED", 3)
_madvise: Any = types.ExternalFunction("madvise", types.int32(types.uintp, types.uintp, types.int32))
_random_read_addresses: set[int] = set()  # addresses of the indices of topologies that are prefetched


def expect_list_reads(indices: Tensor, larger_than: int | None = None) -> Tensor:
    """Enable prefetching for random reads of a mapped topology, by default if it is larger than half of the memory."""
    limit = total_bytes() // 2 if larger_than is None else larger_than
    if sys.platform == "linux" and indices.is_cpu and indices.nbytes > limit:
        advise(indices, "MADV_RANDOM")
        _random_read_addresses.add(indices.data_ptr())
    return indices


def read_lists_ahead(indptr: npt.NDArray[Any], indices: npt.NDArray[Any], nodes: npt.NDArray[Any], fanout: int) -> int:
    """Prefetch a frontier's lists in ascending, merged ranges if :func:`expect_list_reads` enabled it; return calls."""
    if not _random_read_addresses or indices.ctypes.data not in _random_read_addresses or not nodes.size:
        return 0
    return int(_advise_ranges(indptr, indices.ctypes.data, indices.itemsize, np.sort(nodes), fanout))


@numba.njit(nogil=True, cache=True)
def _advise_ranges(indptr: npt.NDArray[Any], address: int, size: int, nodes: npt.NDArray[Any], fanout: int) -> int:
    begin = end = np.int64(-1)  # current range, in pages of the address space
    count = 0
    for v in nodes:
        first, last = indptr[v], indptr[v + 1]
        if first == last:
            continue
        low, high = (address + first * size) // _PAGE, (address + last * size - 1) // _PAGE + 1
        if fanout >= 0 and high - low > max(fanout, 1):  # the picks need fewer pages than the list has
            continue
        if begin >= 0 and low <= end + _MERGE_GAP_PAGES:
            end = max(end, high)
            continue
        if begin >= 0:
            _madvise(begin * _PAGE, (end - begin) * _PAGE, np.int32(_WILL_NEED))
            count += 1
        begin, end = low, high
    if begin >= 0:
        _madvise(begin * _PAGE, (end - begin) * _PAGE, np.int32(_WILL_NEED))
        count += 1
    return count
