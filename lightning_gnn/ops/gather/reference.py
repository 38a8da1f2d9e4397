"""Gathering rows with torch's own operators: the definition, for caches on the CPU, and where there is no kernel."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn.ops.library import library


class Gather(NamedTuple):
    """What the operator is given, in the order of its schema."""

    table: Tensor  # [num_rows, ...], anywhere
    indices: Tensor  # int64 or int32 [n]
    out: Tensor  # [n, ...], on the device of the index
    scales: Tensor | None = None  # float32 [num_rows], anywhere, or None
    slot: Tensor | None = None  # int32 [num_rows], anywhere, or None
    cache: Tensor | None = None  # [cache_rows, ...] of the table's dtype, anywhere; given if slot is


def register(device: str, function: Callable[[Gather, bool], None]) -> None:
    """Let a device gather by a function of what is given, and of whether to look at the values of the index."""
    library.impl("gather_rows", lambda *given: function(Gather(*given[:-1]), given[-1]), device)  # type: ignore[no-untyped-call]


def gather_torch(call: Gather) -> None:
    """Gather with torch's own operators, for devices without a kernel; the arguments are checked already."""
    table, index, out, scales, slot, cache = call

    def taken(source: Tensor, which: Tensor) -> Tensor:
        return source.index_select(0, which.to(source.device)).to(out.device)

    if slot is None or cache is None:
        values = taken(table, index)
    else:
        place = taken(slot, index)
        hit = place >= 0
        values = torch.empty(out.shape, dtype=table.dtype, device=out.device)
        values[hit] = taken(cache, place[hit])
        values[~hit] = taken(table, index[~hit])
    if scales is not None:
        values = values.to(torch.float32) * taken(scales, index).view(-1, *[1] * (out.dim() - 1))
    out.copy_(values)
