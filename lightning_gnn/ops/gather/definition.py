"""Public gathering of feature rows (the Feature Loading stage)."""

import torch
from torch import Tensor

from lightning_gnn.features.hot_cache import RowCache
from lightning_gnn.features.memory_pool import pool
from lightning_gnn.ops.gather.reference import Gather
from lightning_gnn.ops.library import define

_HALF = (torch.float16, torch.bfloat16)


def gather_rows(
    table: Tensor,
    index: Tensor,
    out: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    cache: RowCache | None = None,
    check: bool = False,
) -> Tensor:
    """Copy rows of a table, ``out[i] = table[index[i]]``, to the device of the index, and return ``out``.

    A CUDA index runs a Triton kernel (without Triton, torch's operators). The table may be on the device or in pinned
    host memory, which the kernel reads in place (UVA).

    Args:
        table: Rows of any dtype, ``[num_rows, ...]``.
        index: Row numbers, int64 or int32 ``[n]``.
        out: Output, contiguous ``[n, ...]``: of the table's dtype, float32 for a 16-bit table, or float32 or float16
            with ``scales``. By default a buffer from the memory pool, or new device memory.
        scales: Factors of the rows of an int8 table, float32 ``[num_rows]``.
        cache: Feature cache on the device of the index, read instead of the table for the rows that it holds.
        check: Check the index on CUDA too, which synchronizes the device; on the CPU it is always checked. Without the
            check, an invalid index gives a row of NaN (-1 in integer tables).

    Raises:
        IndexError: An index is outside ``[0, num_rows)``.
        TypeError: ``index`` is not int64 or int32, or the dtype of ``out`` does not match the table.
        ValueError: A shape does not match, ``out`` is not contiguous, a tensor is not readable from the device, or the
            table requires a gradient, which a copy would lose.

    Examples:
        >>> import torch
        >>> from lightning_gnn import gather_rows
        >>> table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> gather_rows(table, torch.tensor([2, 0]))
        tensor([[5., 6.],
                [1., 2.]])
        >>> quantized = torch.tensor([[10, 20], [-3, 7]], dtype=torch.int8)
        >>> gather_rows(quantized, torch.tensor([1]), scales=torch.tensor([1.0, 0.5]))
        tensor([[-1.5000,  3.5000]])
    """
    if out is None:
        shape = (index.numel(), *table.shape[1:])
        dtype = table.dtype if scales is None else torch.float32
        out = pool.empty(shape, dtype) if index.is_cpu else torch.empty(shape, dtype=dtype, device=index.device)
    slot, rows = (None, None) if cache is None else (cache.slot, cache.rows)
    torch.ops.lightning_gnn.gather_rows(table, index, out, scales, slot, rows, check)
    return out


define(
    "gather_rows(Tensor table, Tensor index, Tensor(a!) out, Tensor? scales, Tensor? slot, Tensor? cache, bool check)"
    " -> ()",
    None,
)


def check_arguments(call: Gather) -> None:
    """Check dtypes and shapes as documented in :func:`gather_rows`; values are not read."""
    table, index, out, scales, slot, cache = call
    # Check the inputs: the index and the table.
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"index must be int64 or int32, but is {index.dtype}")
    if table.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "gather_rows copies rows without autograd, but the table requires a gradient, which would be lost; take "
            "table[index], or the rows of table.detach()"
        )
    if index.dim() != 1 or table.dim() < 1:
        raise ValueError(f"expected a table of rows and an index [n], got {list(table.shape)} and {list(index.shape)}")
    # Quantized tables are widened on the fly, and so are 16-bit tables.
    if scales is not None:
        if table.dtype != torch.int8 or scales.dtype != torch.float32 or list(scales.shape) != [table.size(0)]:
            raise TypeError(
                f"scales must be float32 [{table.size(0)}] with an int8 table, but are {scales.dtype} "
                f"{list(scales.shape)} with {table.dtype}"
            )
        if out.dtype not in (torch.float32, torch.float16):
            raise TypeError(f"out must be float32 or float16 if scales are given, but is {out.dtype}")
    elif out.dtype != table.dtype and not (table.dtype in _HALF and out.dtype == torch.float32):
        raise TypeError(f"out must be {table.dtype}, the dtype of the table, but is {out.dtype}")
    # Check the output.
    shape = [index.numel(), *table.shape[1:]]
    if list(out.shape) != shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {shape}, but is {list(out.shape)}")
    # Check the cache: a slot for each row of the table, and rows of the same shape and dtype.
    if slot is not None and cache is not None:
        if slot.dtype != torch.int32 or list(slot.shape) != [table.size(0)]:
            raise ValueError(f"slot must be int32 [{table.size(0)}], but is {slot.dtype} {list(slot.shape)}")
        if cache.dtype != table.dtype or cache.shape[1:] != table.shape[1:] or not cache.is_contiguous():
            rows = f"{table.dtype} rows of shape {list(table.shape[1:])}"
            raise ValueError(f"cache must be contiguous {rows}, but is {cache.dtype} {list(cache.shape)}")


def check_index(index: Tensor, num_rows: int) -> None:
    """Check the values of a non-empty index; this synchronizes its device."""
    low, high = (int(value) for value in torch.aminmax(index))
    if low < 0 or high >= num_rows:
        raise IndexError(f"index holds row {low if low < 0 else high}, but the table has {num_rows} rows")
