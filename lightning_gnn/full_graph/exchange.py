"""Exchange between ranks that own rows and ranks that compute feature slices, by all-to-all with autograd."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SliceAllToAll:
    """Who sends which rows and columns to whom."""

    # Rank q = m + g * M computes the columns of slice m for a set of rows, that of member g. Every row has one owner,
    # and a set lists its rows in the order of their owners.

    rank: int
    slices: tuple[tuple[int, int], ...]
    """Columns of each of the M groups, pairs ``(start, stop)``. They may overlap: several ranks then compute with
    the same columns, and what :meth:`gather_columns` brings back adds up.
    """
    own: Sequence[Tensor | None]
    """For each of the G sets, which of this rank's rows are in it, int64, ascending; None where all are."""
    counts: Sequence[int]  # how many rows of this rank's set each rank owns, [N]
    num_rows: int  # rows that this rank owns
    group: dist.ProcessGroup | None = None  # process group; None for the default one

    @property
    def num_ranks(self) -> int:
        """N."""
        return len(self.counts)

    @property
    def width(self) -> int:
        """Columns of this rank's slice."""
        start, stop = self.slices[self.rank % len(self.slices)]
        return stop - start

    @property
    def num_columns(self) -> int:
        """D."""
        return max(stop for _, stop in self.slices)

    def scatter_columns(self, x: Tensor) -> Tensor:
        """Send rows to the ranks that compute with them, and return the rows of this rank's set."""
        # [num_rows, D], this rank's rows -> [sum of counts, width], its slice of the rows of its set.
        chosen = [x if index is None else x.index_select(0, index) for index in self.own]
        parts = [rows[:, start:stop] for rows in chosen for start, stop in self.slices]
        sizes = [part.numel() for part in parts]
        sent = x.new_empty(sum(sizes))
        for flat, part in zip(torch.split(sent, sizes), parts, strict=True):
            flat.view(part.shape).copy_(part)
        received = [count * self.width for count in self.counts]
        return all_to_all(sent, sizes, received, self.group).view(-1, self.width)

    def gather_columns(self, y: Tensor) -> Tensor:
        """Send rows back to their owners, where what comes from several ranks adds up: the adjoint of `spread`."""
        # [sum of counts, width] -> [num_rows, D], zeros in rows that are in no set.
        sent = [count * self.width for count in self.counts]
        heights = [self.num_rows if index is None else index.numel() for index in self.own]
        shapes = [(height, stop - start) for height in heights for start, stop in self.slices]
        sizes = [height * width for height, width in shapes]
        flat = all_to_all(y.reshape(-1), sent, sizes, self.group)
        parts = [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
        if len(self.own) == 1 and self.own[0] is None and self._consecutive():
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

    def _consecutive(self) -> bool:
        stops = accumulate((stop - start for start, stop in self.slices), initial=0)
        return all(start == stop for (start, _), stop in zip(self.slices, stops, strict=False))


def all_to_all(
    sent: Tensor, sizes: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Send a piece of a tensor to each rank, and return the pieces that came, one rank after the other."""
    out = sent.new_empty(sum(received))
    if not sent.numel():
        sent = sent.new_empty(0)  # an empty one may have strides that do not let it be seen as bytes
    # As bytes, since backends do not know all dtypes, and nothing is computed on the way.
    unit = sent.element_size()
    dist.all_to_all_single(
        out.view(torch.uint8),
        sent.contiguous().view(torch.uint8),
        [size * unit for size in received],
        [size * unit for size in sizes],
        group=group,
    )
    return out


def exchange_row_ownership(
    rank: int, positions: Tensor, offsets: Sequence[int], num_groups: int, group: dist.ProcessGroup | None = None
) -> tuple[list[Tensor | None], list[int]]:
    """Tell the owners of rows which of them this rank's set has; all ranks call this together."""
    # positions: the set in the order of the owners, ascending, int32 [n]. The result is what an Exchange takes: for
    # each of the G sets which of this rank's rows are in it (int64, ascending, None: all), and the rows of each owner
    # in its set.
    num_ranks = len(offsets) - 1
    bounds = torch.searchsorted(positions, torch.tensor(offsets, dtype=positions.dtype, device=positions.device))
    counts = bounds.diff()
    if rank % num_groups:  # the M ranks of a member have the same set: the first of them sends it
        positions = positions.new_empty(0)
    sent = counts if rank % num_groups == 0 else torch.zeros_like(counts)
    one_each = [1] * num_ranks
    received = all_to_all(sent, one_each, one_each, group).tolist()
    rows = all_to_all(positions, sent.tolist(), received, group).to(torch.int64).sub_(offsets[rank])
    num_rows = offsets[rank + 1] - offsets[rank]
    own = [None if index.numel() == num_rows else index for index in torch.split(rows, received)[::num_groups]]
    return own, counts.tolist()


def rows_to_slice(x: Tensor, exchange: SliceAllToAll) -> Tensor:
    """Do :meth:`SliceAllToAll.scatter_columns`, with autograd."""
    out: Tensor = _Exchanged.apply(x, exchange, True)  # type: ignore[no-untyped-call]
    return out


def slice_to_rows(y: Tensor, exchange: SliceAllToAll) -> Tensor:
    """Do :meth:`SliceAllToAll.gather_columns`, with autograd."""
    out: Tensor = _Exchanged.apply(y, exchange, False)  # type: ignore[no-untyped-call]
    return out


class _Exchanged(torch.autograd.Function):
    """Either exchange; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, exchange: SliceAllToAll, spreads: bool) -> Tensor:
        ctx.exchange, ctx.spreads = exchange, spreads
        return exchange.scatter_columns(values) if spreads else exchange.gather_columns(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back = slice_to_rows if ctx.spreads else rows_to_slice
        return back(grad, ctx.exchange), None, None


def all_gather_rows(values: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the rows of all ranks, one rank after the other, on every rank; autograd does not follow them."""
    values = values.detach()
    # To the length of the longest: backends gather equal lengths only.
    padded = values.new_zeros((max(counts), *values.shape[1:]))
    padded[: values.size(0)] = values
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded.contiguous(), group=group)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
