"""Rows of a sparse matrix split into parts of bounded length, built once per graph for the full-graph kernels.

Each part is read by one program, so a hub does not keep a single program busy. The result of a row of one part goes
directly to the output. Partial results of other rows go to slots of a scratch table, which are added up in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ENTRIES = 512  # of one part; its program reads them block by block


@dataclass(frozen=True, eq=False)
class RowParts:
    """Sparse matrix whose rows are split into parts, one program per part."""

    indices: Tensor  # column of each entry, int32 [E]
    degrees: Tensor  # entries of each row, int32 [R]
    starts: Tensor  # first entry of each part, int64 [P]
    stops: Tensor  # last entry, exclusive, int64 [P]
    vertices: Tensor  # row of each part, int32 [P]
    places: Tensor  # destination of each part's sum: the row, or -1 - slot of the scratch table, int32 [P]
    shared: Tensor  # parts of split rows, which go to slots, int32 [num_slots]
    slot_ptr: Tensor  # first slot of each split row, int64 [S + 1]
    slot_vertices: Tensor  # split rows, int32 [S]

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return self.starts.numel()

    @property
    def num_slots(self) -> int:
        """Number of rows of the scratch table."""
        return self.shared.numel()


def build_parts(indptr: Tensor, indices: Tensor) -> RowParts:
    """Split each row, int64 ``[R + 1]`` and int32 ``[E]``, into one or more parts of up to ``MAX_ENTRIES`` entries."""
    degrees = indptr.diff()
    pieces = ((degrees + MAX_ENTRIES - 1) // MAX_ENTRIES).clamp(min=1)
    row = torch.repeat_interleave(pieces)
    before = pieces.cumsum(0) - pieces
    starts = indptr[row] + (torch.arange(row.numel(), device=row.device) - before[row]) * MAX_ENTRIES
    vertices, split = row.int(), pieces > 1
    shared = torch.nonzero(split[row]).flatten()
    places = vertices.clone()
    places[shared] = -1 - torch.arange(shared.numel(), dtype=torch.int32, device=row.device)
    return RowParts(
        indices=indices,
        degrees=degrees.int(),
        starts=starts,
        stops=torch.minimum(starts + MAX_ENTRIES, indptr[row + 1]),
        vertices=vertices,
        places=places,
        shared=shared.int(),
        slot_ptr=torch.nn.functional.pad(pieces[split].cumsum(0), (1, 0)),
        slot_vertices=torch.nonzero(split).flatten().int(),
    )
