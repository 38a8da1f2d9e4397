"""Gathering feature rows: the Feature Loading stage."""

from __future__ import annotations

import threading

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn.graph.buffers import pool
from lightning_gnn.ops.library import library
from lightning_gnn.ops.memory import copy_bytes


def gather_rows(table: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy rows of a table, ``out[i] = table[index[i]]``.

    Args:
        table: float32, float16 or any other dtype ``[num_rows, ...]``.
        index: int64 or int32 ``[n]``, on the device of the table.
        out: Where to write, ``[n, ...]`` of the table's dtype, contiguous; by default a buffer from the pool.

    Returns:
        ``out``.

    Raises:
        IndexError: An index is outside ``[0, num_rows)``.
        TypeError: ``index`` is not of an integer dtype, or ``out`` is not of the table's dtype.
        ValueError: A shape does not fit, or ``out`` is not contiguous.
    """
    if out is None:
        shape = (index.numel(), *table.shape[1:])
        out = pool.empty(shape, table.dtype) if table.is_cpu else table.new_empty(shape)
    torch.ops.lightning_gnn.gather_rows(table, index, out)
    return out


library.define("gather_rows(Tensor table, Tensor index, Tensor(a!) out) -> ()")


@torch.library.impl(library, "gather_rows", "CPU")
def _gather_cpu(table: Tensor, index: Tensor, out: Tensor) -> None:
    _check(table, index, out)
    if index.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(index))
    if low < 0 or high >= table.size(0):
        raise IndexError(f"index holds row {low if low < 0 else high}, but the table has {table.size(0)} rows")
    # torch spreads the copy over its threads. In a worker thread the batches are the parallelism, and a team of threads
    # per worker would only fight the others.
    if threading.current_thread() is threading.main_thread() or not table.is_contiguous():
        torch.index_select(table, 0, index, out=out)
    else:
        row_bytes = table[0].numel() * table.element_size()
        _copy_rows(_as_bytes(table), index.contiguous().numpy(), _as_bytes(out), row_bytes)


def _check(table: Tensor, index: Tensor, out: Tensor) -> None:
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"index must be int64 or int32, but is {index.dtype}")
    if index.dim() != 1 or table.dim() < 1:
        raise ValueError(f"expected a table of rows and an index [n], got {list(table.shape)} and {list(index.shape)}")
    if out.dtype != table.dtype:
        raise TypeError(f"out must be {table.dtype} as the table is, but is {out.dtype}")
    shape = [index.numel(), *table.shape[1:]]
    if list(out.shape) != shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {shape}, but is {list(out.shape)}")


def _as_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


@numba.njit(nogil=True, cache=True)
def _copy_rows(table, index, out, row_bytes):
    for i in range(index.size):
        copy_bytes(out, i * row_bytes, table, np.int64(index[i]) * row_bytes, row_bytes)
