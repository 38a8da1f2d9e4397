"""Gathering rows on the CPU: a compiled copy outside the GIL, or in the main thread, torch's parallel copy."""

from threading import current_thread, main_thread

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.features.memory_pool import pool
from lightning_gnn.ops.gather.definition import check_arguments, check_index
from lightning_gnn.ops.gather.reference import Gather, gather_torch, register
from lightning_gnn.ops.intrinsics import copy_bytes, prefetch

_AHEAD = 4  # prefetch distance in rows
_LINE = 64  # bytes of a cache line
_MAX_PREFETCH_BYTES = 1024  # prefetched bytes per row; the hardware prefetcher handles the rest of a longer row
_DTYPE_BY_BYTES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def gather_cpu(call: Gather, check: bool = True) -> None:
    """Run :func:`~lightning_gnn.ops.gather_rows` for an index on the CPU, which is always checked."""
    check_arguments(call)
    table, index, out, scales, slot, _ = call
    if index.numel() == 0:
        return
    check_index(index, table.size(0))
    if out.numel() == 0:
        return
    if slot is not None:
        gather_torch(call)
    elif scales is not None:
        rows = out if out.dtype == torch.float32 else pool.empty(out.shape, torch.float32)
        shape = (-1, rows[0].numel())
        contiguous = table.contiguous().reshape(shape)
        _dequantize(contiguous.numpy(), scales.numpy(), index.contiguous().numpy(), rows.view(shape).numpy())
        if rows is not out:
            out.copy_(rows)
    elif out.dtype != table.dtype:
        rows = pool.empty(out.shape, table.dtype)
        gather_cpu(Gather(table, index, rows))
        out.copy_(rows)
    # torch parallelizes the copy over its threads. Worker threads parallelize over mini-batches instead, and a team of
    # threads per worker would only compete with the others.
    elif not table.is_contiguous() or (current_thread() is main_thread() and torch.get_num_threads() > 1):
        torch.index_select(table, 0, index, out=out)
    else:
        _copy(table, index.contiguous().numpy(), out)


register("CPU", gather_cpu)


def _copy(table: Tensor, index: np.ndarray, out: Tensor) -> None:
    row_bytes = table[0].numel() * table.element_size()
    source, target = _as_bytes(table), _as_bytes(out)
    if row_bytes in _DTYPE_BY_BYTES:
        take(source.view(_DTYPE_BY_BYTES[row_bytes]), index, target.view(_DTYPE_BY_BYTES[row_bytes]))
    else:
        _copy_rows(source, index, target, row_bytes)


def _as_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


@numba.njit(nogil=True, cache=True)
def take(table: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """Write ``table[index]``, without checks; ``out`` may be ``index`` itself."""
    for i in range(index.size):
        out[i] = table[index[i]]


@numba.njit(nogil=True, cache=True)
def _copy_rows(table: np.ndarray, index: np.ndarray, out: np.ndarray, row_bytes: int) -> None:
    for i in range(index.size):
        if i + _AHEAD < index.size:
            later = np.int64(index[i + _AHEAD]) * row_bytes
            for at in range(later, later + min(row_bytes, _MAX_PREFETCH_BYTES), _LINE):
                prefetch(table, at)
        # Rows are copied as bytes, so that one compiled loop serves every dtype.
        copy_bytes(out, i * row_bytes, table, np.int64(index[i]) * row_bytes, row_bytes)


@numba.njit(nogil=True, cache=True)
def _dequantize(table: np.ndarray, scales: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    for i in range(index.size):
        row = index[i]
        scale = scales[row]
        for j in range(table.shape[1]):
            out[i, j] = np.float32(table[row, j]) * scale
