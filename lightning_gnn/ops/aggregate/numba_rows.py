"""What compiled loops on the CPU read and run on: the rows of a matrix, large pages, shares of equal work."""

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

SMALL = 1 << 19  # edges times columns up to which threads would take longer to wake up than one takes to finish
PACK_FROM = 4096
"""Columns from which on feature rows are packed into contiguous slices: as many 256-byte pieces fill half a level-2
cache of 2 MB."""
PACK_DEGREE = 12  # edges per column from which on packing, which reads and writes every row once, pays
HUGE_PAGE = 1 << 21


@dataclass
class Rows:
    """A matrix as the compiled loops read it."""

    indptr: np.ndarray  # first entry of each row, int64 [R + 1]
    indices: np.ndarray  # column of each entry, in the order of order if that is given, int32 [num_edges]
    degrees: np.ndarray  # entries of each row, at least 1, int64 [R]
    empty: np.ndarray  # rows without entries, int64
    order: np.ndarray | None  # columns by falling degree, int64 [num_columns], where feature rows are packed so
    scratch: list[Tensor] = field(default_factory=list)  # packed features of earlier calls, to be used again

    def take_scratch(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return memory for packed features; give it back by appending it to ``scratch``."""
        size = count * dtype.itemsize
        try:
            buffer = self.scratch.pop()
        except IndexError:
            buffer = torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < size:
            buffer = huge_pages(torch.empty(size, dtype=torch.uint8))
        return buffer


_rows: MutableMapping[Tensor, Rows] = WeakIdKeyDictionary()


def rows_of(matrix: Matrix) -> Rows:
    """Return the rows of a matrix, derived at its first use and kept as long as its ``indices``."""
    rows = _rows.get(matrix.indices)
    if rows is None:
        rows = _rows[matrix.indices] = _derive(matrix)
    return rows


def _derive(matrix: Matrix) -> Rows:
    # Detached: the array must not hold the tensor object by which it is known.
    indptr, indices = matrix.indptr.detach().numpy(), matrix.indices.detach().numpy()
    degrees, order = np.diff(indptr), None
    if matrix.num_columns >= PACK_FROM and indices.size >= PACK_DEGREE * matrix.num_columns:
        order = np.argsort(-np.bincount(indices, minlength=matrix.num_columns), kind="stable")
        rank = np.empty(matrix.num_columns, np.int32)
        rank[order] = np.arange(matrix.num_columns, dtype=np.int32)
        indices = rank[indices]
    return Rows(indptr, indices, np.maximum(degrees, 1), np.flatnonzero(degrees == 0), order)


def row_ranges(matrix: Matrix, work: int) -> list[tuple[int, int]]:
    """Cut the rows into one range per worker, of about as many entries and rows each; a little work into one."""
    num_rows = matrix.num_rows
    parts = 1 if work <= SMALL else matrix.settings.num_workers or torch.get_num_threads()
    indptr = matrix.indptr.numpy()
    total = num_rows + matrix.num_edges
    bounds = [bisect_left(range(num_rows), total * part // parts, key=lambda row: indptr[row] + row)
              for part in range(parts)]  # fmt: skip
    return [(first, last) for first, last in pairwise([*bounds, num_rows]) if last > first]


def execute(matrix: Matrix, work: int, share: Callable[[int, int, int], object]) -> None:
    """Call ``share(worker, first row, one past the last)`` for ranges of rows of equal work, side by side."""
    if shares := [partial(share, worker, *rows) for worker, rows in enumerate(row_ranges(matrix, work))]:
        run_all(shares)


def wide(tensor: Tensor) -> Tensor:
    """Return contiguous numbers of the dtype in which they are added up: float32 at least."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()


def loadable(tensor: Tensor) -> Tensor:
    """Return contiguous numbers that the loops load: bfloat16, which they widen themselves, or :func:`wide` ones."""
    return tensor.detach().contiguous() if tensor.dtype == torch.bfloat16 else wide(tensor)


def flat(tensor: Tensor) -> np.ndarray:
    """Return the numbers as an array of one dimension, of the same memory if they lie together; bfloat16 as uint16."""
    tensor = tensor.contiguous().view(-1)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages for a new tensor, which is not touched yet: a fresh 4 KB page costs more than filling it."""
    madvise = _madvise()
    if madvise is not None and tensor.nbytes >= 2 * HUGE_PAGE:
        begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        length = (tensor.data_ptr() + tensor.nbytes - begin) // HUGE_PAGE * HUGE_PAGE
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), 14)  # MADV_HUGEPAGE; refused, it does no harm
    return tensor


@functools.cache
def _madvise() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform.startswith("linux") else None
