"""Gathering feature rows: the Feature Loading stage."""

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
    """Copy rows of a table, ``out[i] = table[index[i]]``, to where the index is, and return ``out``.

    With a CUDA index this is a Triton kernel (without Triton, torch), and the table may be on the device or in pinned
    host memory, which the kernel reads in place.

    Args:
        table: float32, float16, bfloat16 or any other dtype ``[num_rows, ...]``.
        index: int64 or int32 ``[n]``.
        out: Where to write, ``[n, ...]``, contiguous: of the table's dtype, or float32 for 16 bits, or float32
            or float16 where there are ``scales``; by default a buffer from the pool, or new device memory.
        scales: What the rows of an int8 table are multiplied with, float32 ``[num_rows]``.
        cache: Copies of some rows, read instead of the table's, on the device of the index.
        check: Check the index on CUDA too, as always on the CPU, which waits for the device. Unchecked, a row out of
            range comes out as NaN (-1 in a table of integers).

    Raises:
        IndexError: An index is outside ``[0, num_rows)``.
        TypeError: ``index`` is not of an integer dtype, or the dtype of ``out`` does not follow from the table's.
        ValueError: A shape does not fit, ``out`` is not contiguous, a tensor is where it cannot be read, or the table
            requires a gradient, which a copy would lose.

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
    """Check dtypes and shapes as :func:`gather_rows` describes them; no value is read."""
    table, index, out, scales, slot, cache = call
    # Check what is read: the index and the table.
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"index must be int64 or int32, but is {index.dtype}")
    if table.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "gather_rows copies rows without autograd, but the table requires a gradient, which would be lost; take "
            "table[index], or the rows of table.detach()"
        )
    if index.dim() != 1 or table.dim() < 1:
        raise ValueError(f"expected a table of rows and an index [n], got {list(table.shape)} and {list(index.shape)}")
    # Quantized tables are widened on the fly; of the others, only 16-bit ones may be.
    if scales is not None:
        if table.dtype != torch.int8 or scales.dtype != torch.float32 or list(scales.shape) != [table.size(0)]:
            raise TypeError(
                f"scales must be float32 [{table.size(0)}] beside an int8 table, but are {scales.dtype} "
                f"{list(scales.shape)} beside {table.dtype}"
            )
        if out.dtype not in (torch.float32, torch.float16):
            raise TypeError(f"out must be float32 or float16 where there are scales, but is {out.dtype}")
    elif out.dtype != table.dtype and not (table.dtype in _HALF and out.dtype == torch.float32):
        raise TypeError(f"out must be {table.dtype} as the table is, but is {out.dtype}")
    # Check what is written.
    shape = [index.numel(), *table.shape[1:]]
    if list(out.shape) != shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {shape}, but is {list(out.shape)}")
    # Check the cache: a slot for each row of the table, and rows like the table's.
    if slot is not None and cache is not None:
        if slot.dtype != torch.int32 or list(slot.shape) != [table.size(0)]:
            raise ValueError(f"slot must be int32 [{table.size(0)}], but is {slot.dtype} {list(slot.shape)}")
        if cache.dtype != table.dtype or cache.shape[1:] != table.shape[1:] or not cache.is_contiguous():
            raise ValueError(f"the cache is {cache.dtype} {list(cache.shape)}, the table {table.dtype} {table.shape}")


def check_index(index: Tensor, num_rows: int) -> None:
    """Look at the values of an index that is not empty; on a device this waits for it."""
    low, high = (int(value) for value in torch.aminmax(index))
    if low < 0 or high >= num_rows:
        raise IndexError(f"index holds row {low if low < 0 else high}, but the table has {num_rows} rows")
