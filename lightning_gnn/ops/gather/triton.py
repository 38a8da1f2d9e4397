"""Gathering rows on CUDA: the Triton kernel where Triton can be used, torch's own operators elsewhere."""

import torch
from torch import Tensor

from lightning_gnn.ops.gather.definition import check_arguments, check_index
from lightning_gnn.ops.gather.reference import Gather, gather_torch, register
from lightning_gnn.ops.library import runs_triton


# The dispatcher prefers the accelerator, so that a call with a pinned table and a CUDA index runs this function too.
def gather_cuda(call: Gather, check: bool = False) -> None:
    """Run :func:`~lightning_gnn.ops.gather_rows` for an index on CUDA."""
    check_arguments(call)
    table, index, out, scales, slot, cache = call
    if index.device != out.device:
        raise ValueError(f"index is on {index.device}, but out is on {out.device}; move index to {out.device}")
    for name, tensor in (("table", table), ("scales", scales), ("slot", slot), ("cache", cache)):
        if tensor is not None and tensor.device != out.device and not (tensor.is_cpu and tensor.is_pinned()):
            where = f"on {tensor.device}; move index and out to {tensor.device}"
            if tensor.is_cpu:
                where = "in pageable host memory; pin it with pin_memory()"
            raise ValueError(f"out is on {out.device}, which cannot read the {name}: it is {where}")
    if out.numel() == 0:
        return
    if check:
        check_index(index, table.size(0))
    if not runs_triton(out.device):
        gather_torch(call)
        return
    from lightning_gnn.triton_kernels.gather import BUS_BYTES, CACHED_BUS_BYTES, gather

    rows = _as_matrix(table)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        gather(
            rows,
            index.contiguous(),
            _as_matrix(out),
            None if scales is None else scales.contiguous(),
            None if slot is None else slot.contiguous(),
            None if cache is None else _as_matrix(cache),
            bus_bytes=None if table.device == out.device else BUS_BYTES if cache is None else CACHED_BUS_BYTES,
        )


register("CUDA", gather_cuda)


def gather_from_shards(
    local: Tensor, addresses: Tensor, num_rows: int, shift: int, index: Tensor, out: Tensor, scales: Tensor | None
) -> None:
    """Gather rows of a table sharded over GPUs in cyclic blocks of ``2^shift`` rows; ``index`` is not checked."""
    from lightning_gnn.triton_kernels.gather import gather

    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        gather(local, index.contiguous(), out, scales, shards=(addresses, num_rows, shift))


def _as_matrix(table: Tensor) -> Tensor:
    """View a table as ``[num_rows, num_columns]`` with adjacent columns."""
    if table.dim() == 2 and (table.stride(1) == 1 or table.size(1) == 1):
        return table
    if not table.is_contiguous():
        raise ValueError(f"the rows of a table must be contiguous, but its strides are {table.stride()}")
    return table.view(table.size(0), -1)
