"""Differentiable all-to-all between ranks that own rows and ranks that compute feature slices."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn.distributed.heartbeat import waiting_for_ranks


@dataclass(frozen=True, eq=False)
class SliceAllToAll:
    """An all-to-all that converts owned rows to feature slices, and back."""

    # Rank q = m + g * M computes the columns of slice m for the row set of member g. Every row has one owner, and a set
    # lists its rows in owner order.

    rank: int
    slices: tuple[tuple[int, int], ...]
    """Columns of each of the M groups, pairs ``(start, stop)``. They may overlap: then several ranks compute with the
    same columns, and :meth:`gather_columns` sums their results.
    """
    own: Sequence[Tensor | None]
    """For each of the G sets, the indices of this rank's rows in it, int64, ascending; None for all rows."""
    counts: Sequence[int]  # rows of this rank's set by owner, [N]
    num_rows: int  # rows that this rank owns
    group: dist.ProcessGroup | None = None  # process group; None for the default one

    @property
    def num_ranks(self) -> int:
        """Number of ranks, N."""
        return len(self.counts)

    @property
    def width(self) -> int:
        """Number of columns of this rank's slice."""
        start, stop = self.slices[self.rank % len(self.slices)]
        return stop - start

    @property
    def num_columns(self) -> int:
        """Number of columns, D."""
        return max(stop for _, stop in self.slices)

    def scatter_columns(self, x: Tensor) -> Tensor:
        """Send rows to the ranks that compute their columns, and return the slice of this rank's row set."""
        # This rank's rows, [num_rows, D] -> its slice of the rows of its set, [sum of counts, width].
        row_sets = [x if index is None else x.index_select(0, index) for index in self.own]
        parts = [rows[:, start:stop] for rows in row_sets for start, stop in self.slices]
        sizes = [part.numel() for part in parts]
        send_buffer = x.new_empty(sum(sizes))
        for flat, part in zip(torch.split(send_buffer, sizes), parts, strict=True):
            flat.view(part.shape).copy_(part)
        recv_sizes = [count * self.width for count in self.counts]
        return all_to_all(send_buffer, sizes, recv_sizes, self.group).view(-1, self.width)

    def gather_columns(self, y: Tensor) -> Tensor:
        """Send slices back to the rows' owners, which sum overlaps: the adjoint of :meth:`scatter_columns`."""
        # [sum of counts, width] -> [num_rows, D], with zeros in rows outside all sets.
        send_sizes = [count * self.width for count in self.counts]
        heights = [self.num_rows if index is None else index.numel() for index in self.own]
        shapes = [(height, stop - start) for height in heights for start, stop in self.slices]
        sizes = [height * width for height, width in shapes]
        flat = all_to_all(y.reshape(-1), send_sizes, sizes, self.group)
        parts = [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
        if len(self.own) == 1 and self.own[0] is None and self._is_consecutive():
            return torch.cat(parts, dim=1)
        out = y.new_zeros(self.num_rows, self.num_columns)
        for rank, part in enumerate(parts):
            start, stop = self.slices[rank % len(self.slices)]
            index = self.own[rank // len(self.slices)]
            if index is None:
                out[:, start:stop] += part
            else:
                out[:, start:stop].index_add_(0, index, part)
        return out

    def _is_consecutive(self) -> bool:
        stops = accumulate((stop - start for start, stop in self.slices), initial=0)
        return all(start == stop for (start, _), stop in zip(self.slices, stops, strict=False))


def all_to_all(
    values: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Send a chunk of a tensor to each rank, and return the received chunks. All ranks must call this."""
    out = values.new_empty(sum(recv_sizes))
    if not values.numel():
        values = values.new_empty(0)  # strides of an empty tensor may not allow a view as bytes
    # Send bytes, since backends do not support all dtypes.
    unit = values.element_size()
    with waiting_for_ranks():
        dist.all_to_all_single(
            out.view(torch.uint8),
            values.contiguous().view(torch.uint8),
            [size * unit for size in recv_sizes],
            [size * unit for size in send_sizes],
            group=group,
        )
    return out


def exchange_row_ownership(
    rank: int, positions: Tensor, offsets: Sequence[int], num_groups: int, group: dist.ProcessGroup | None = None
) -> tuple[list[Tensor | None], list[int]]:
    """Exchange row sets; return ``own`` and ``counts`` of ``SliceAllToAll``. All ranks must call this."""
    # positions is this rank's set in owner order, ascending, int32 [n].
    num_ranks = len(offsets) - 1
    bounds = torch.searchsorted(positions, torch.tensor(offsets, dtype=positions.dtype, device=positions.device))
    counts = bounds.diff()
    if rank % num_groups:  # the M ranks of a member have the same set, so only the first one sends it
        positions = positions.new_empty(0)
    sent_counts = counts if rank % num_groups == 0 else torch.zeros_like(counts)
    one_each = [1] * num_ranks
    recv_counts = all_to_all(sent_counts, one_each, one_each, group).tolist()
    rows = all_to_all(positions, sent_counts.tolist(), recv_counts, group).to(torch.int64).sub_(offsets[rank])
    num_rows = offsets[rank + 1] - offsets[rank]
    own = [None if index.numel() == num_rows else index for index in torch.split(rows, recv_counts)[::num_groups]]
    return own, counts.tolist()


def rows_to_slice(x: Tensor, exchange: SliceAllToAll) -> Tensor:
    """Run :meth:`SliceAllToAll.scatter_columns` with autograd."""
    out: Tensor = _Exchange.apply(x, exchange, True)  # type: ignore[no-untyped-call]
    return out


def slice_to_rows(y: Tensor, exchange: SliceAllToAll) -> Tensor:
    """Run :meth:`SliceAllToAll.gather_columns` with autograd."""
    out: Tensor = _Exchange.apply(y, exchange, False)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """Either direction of an exchange; each direction is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, exchange: SliceAllToAll, scatters: bool) -> Tensor:
        ctx.exchange, ctx.scatters = exchange, scatters
        return exchange.scatter_columns(values) if scatters else exchange.gather_columns(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back = slice_to_rows if ctx.scatters else rows_to_slice
        return back(grad, ctx.exchange), None, None


def all_gather_rows(values: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate the rows of all ranks, without autograd. All ranks must call this."""
    values = values.detach()
    # Pad to the longest part, since backends gather equal sizes only.
    padded = values.new_zeros((max(counts), *values.shape[1:]))
    padded[: values.size(0)] = values
    gathered = [torch.empty_like(padded) for _ in counts]
    with waiting_for_ranks():
        dist.all_gather(gathered, padded.contiguous(), group=group)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
