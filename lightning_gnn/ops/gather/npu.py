"""Gathering rows on an NPU: an Ascend C kernel for plain copies, else torch's own operators."""

import torch

from lightning_gnn.ascend_ops.tiling import gather_missing, gather_tiling
from lightning_gnn.ops.aggregate.backends import backend_name, chip_executor
from lightning_gnn.ops.gather.definition import check_arguments, check_index
from lightning_gnn.ops.gather.reference import Gather, gather_torch, register

_BITS = 32  # width of the kernel's sizes


def gather_npu(call: Gather, check: bool = False) -> None:
    """Run :func:`~lightning_gnn.ops.gather_rows` for an index on an NPU."""
    check_arguments(call)
    table, index, out, scales, slot, cache = call
    for name, tensor in (("table", table), ("index", index), ("scales", scales), ("slot", slot), ("cache", cache)):
        if tensor is not None and tensor.device != out.device:
            raise ValueError(f"out is on {out.device}, but the {name} is on {tensor.device}; move it to {out.device}")
    if out.numel() == 0:
        return
    if check:
        check_index(index, table.size(0))
    row_bytes = table.shape[1:].numel() * table.element_size()
    whole = scales is None and slot is None and out.dtype == table.dtype and table.is_contiguous()
    small = max(table.size(0), index.numel(), row_bytes) < 1 << (_BITS - 1)
    executor = chip_executor(out.device, backend_name(None)) if whole and small else None
    if executor is None:
        gather_torch(call)
        return
    source, rows = (tensor.view(tensor.size(0), -1).view(torch.uint8) for tensor in (table.detach(), out))
    missing = torch.from_numpy(gather_missing(row_bytes)).to(out.device)
    # Clamping keeps an out-of-range 64-bit index from wrapping around to a valid row.
    index32 = index if index.dtype == torch.int32 else index.clamp(-1, table.size(0)).to(torch.int32)
    tiling = gather_tiling(index.numel(), row_bytes, table.size(0))
    executor[0].launch("gather_rows", 2 * executor[1], [source, index32.contiguous(), missing], [rows], tiling)


register("PrivateUse1", gather_npu)
