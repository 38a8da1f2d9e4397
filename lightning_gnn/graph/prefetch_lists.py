"""Adjacency lists in a mapped file that is larger than memory: those of a frontier are asked for before its hop."""

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
_GAP = 4  # pages between lists that are asked for too, so that there is one call instead of two
_WILL_NEED = getattr(mmap, "MADV_WILLNEED", 3)
_madvise: Any = types.ExternalFunction("madvise", types.int32(types.uintp, types.uintp, types.int32))
_expected: set[int] = set()  # where the lists of topologies begin that are read so


def expect_list_reads(indices: Tensor, larger_than: int | None = None) -> Tensor:
    """Note that a mapped topology's lists will be read here and there; by default one above half of the memory."""
    least = total_bytes() // 2 if larger_than is None else larger_than
    if sys.platform == "linux" and indices.is_cpu and indices.nbytes > least:
        advise(indices, "MADV_RANDOM")
        _expected.add(indices.data_ptr())
    return indices


def read_lists_ahead(indptr: npt.NDArray[Any], indices: npt.NDArray[Any], nodes: npt.NDArray[Any], fanout: int) -> int:
    """Let the system read the lists of a frontier that :func:`expect_list_reads` knows, in ascending, merged ranges."""
    if not _expected or indices.ctypes.data not in _expected or not nodes.size:
        return 0
    return int(_ask(indptr, indices.ctypes.data, indices.itemsize, np.sort(nodes), fanout))


@numba.njit(nogil=True, cache=True)
def _ask(indptr: npt.NDArray[Any], address: int, size: int, nodes: npt.NDArray[Any], fanout: int) -> int:
    begin = end = np.int64(-1)  # pages of the address space
    count = 0
    for v in nodes:
        first, last = indptr[v], indptr[v + 1]
        if first == last:
            continue
        low, high = (address + first * size) // _PAGE, (address + last * size - 1) // _PAGE + 1
        if fanout >= 0 and high - low > max(fanout, 1):  # its picks need fewer pages than it has
            continue
        if begin >= 0 and low <= end + _GAP:
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
