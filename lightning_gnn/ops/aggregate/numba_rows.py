"""Helpers of the compiled CPU loops: rows of a matrix, huge pages, and row ranges of equal work."""

import ctypes
import functools
import sys
from bisect import bisect_left
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.ops.aggregate.matrix import Matrix
from lightning_gnn.ops.worker_threads import run_all

MAX_SERIAL_WORK = 1 << 19  # edges times columns up to which a single thread is faster than waking others
PACK_FROM = 4096  # minimum number of columns for packing: 4096 pieces of 256 bytes fill half of an L2 cache of 2 MB
PACK_DEGREE = 12  # minimum edges per column that pays for packing, which reads and writes every row once
HUGE_PAGE = 1 << 21  # bytes


@dataclass
class Rows:
    """A matrix in the form that the compiled loops read."""

    indptr: np.ndarray  # first entry of each row, int64 [R + 1]
    indices: np.ndarray  # column of each entry, int32 [num_edges]
    degrees: np.ndarray  # entries of each row, at least 1, int64 [R]
    empty: np.ndarray  # rows without entries, int64
    packed: bool  # whether feature rows are packed
    scratch: list[Tensor] = field(default_factory=list)  # buffers of earlier calls, reused for packed features

    def take_scratch(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer for packed features; append it to ``scratch`` after use."""
        size = count * dtype.itemsize
        try:
            buffer = self.scratch.pop()
        except IndexError:
            buffer = torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < size:
            buffer = use_huge_pages(torch.empty(size, dtype=torch.uint8))
        return buffer


_rows: MutableMapping[Tensor, Rows] = WeakIdKeyDictionary()


def get_rows(matrix: Matrix) -> Rows:
    """Return the rows of a matrix, derived on first use and cached for the lifetime of its ``indices``."""
    rows = _rows.get(matrix.indices)
    if rows is None:
        rows = _rows[matrix.indices] = _derive(matrix)
    return rows


def _derive(matrix: Matrix) -> Rows:
    # Detached, because an array that references its own weak key would keep the entry alive.
    indptr, indices = matrix.indptr.detach().numpy(), matrix.indices.detach().numpy()
    degrees = np.diff(indptr)
    packed = matrix.num_columns >= PACK_FROM and indices.size >= PACK_DEGREE * matrix.num_columns
    return Rows(indptr, indices, np.maximum(degrees, 1), np.flatnonzero(degrees == 0), packed)


def row_ranges(matrix: Matrix, work: int) -> list[tuple[int, int]]:
    """Divide the rows into one range of equal work per worker, counting entries and rows; little work is one range."""
    num_rows = matrix.num_rows
    workers = 1 if work <= MAX_SERIAL_WORK else matrix.settings.num_workers or torch.get_num_threads()
    indptr = matrix.indptr.numpy()
    total = num_rows + matrix.num_edges
    bounds = [bisect_left(range(num_rows), total * worker // workers, key=lambda row: indptr[row] + row)
              for worker in range(workers)]  # fmt: skip
    return [(first, last) for first, last in pairwise([*bounds, num_rows]) if last > first]


def run_rows(matrix: Matrix, work: int, function: Callable[[int, int, int], object]) -> None:
    """Call ``function(worker, first row, one past the last)`` in parallel for ranges of rows of equal work."""
    if tasks := [partial(function, worker, *rows) for worker, rows in enumerate(row_ranges(matrix, work))]:
        run_all(tasks)


def widen(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor in the dtype of accumulation: float32 or wider."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()


def to_loadable(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor that the loops can load: bfloat16 unchanged, all others as by :func:`widen`."""
    return tensor.detach().contiguous() if tensor.dtype == torch.bfloat16 else widen(tensor)


def flatten(tensor: Tensor) -> np.ndarray:
    """Return a one-dimensional array, sharing memory if the tensor is contiguous; bfloat16 becomes uint16."""
    tensor = tensor.contiguous().view(-1)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def use_huge_pages(tensor: Tensor) -> Tensor:
    """Advise huge pages for a newly allocated tensor: faulting in a 4 KB page costs more than filling it."""
    madvise = _madvise()
    if madvise is not None and tensor.nbytes >= 2 * HUGE_PAGE:
        begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        length = (tensor.data_ptr() + tensor.nbytes - begin) // HUGE_PAGE * HUGE_PAGE
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), 14)  # MADV_HUGEPAGE; a failure does no harm
    return tensor


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.to(dtype)``; large rows without a gradient are written into huge pages, in a quarter of the time."""
    if not x.is_cpu or x.dtype == dtype or x.requires_grad or torch.compiler.is_compiling():
        return x.to(dtype)
    return use_huge_pages(torch.empty(x.shape, dtype=dtype)).copy_(x)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform.startswith("linux") else None
