"""What the kernels of whole graphs run over, built once per graph: rows of a sparse matrix, in parts.

A row is read in parts of bounded length, one program each, so that no hub keeps one program busy. A row of one part
goes straight to the output, parts of others to slots of a scratch table, which are added up in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ENTRIES = 512  # of one part: a program reads them one block after the other


@dataclass(frozen=True, eq=False)
class RowParts:
    """A sparse matrix in parts, each of one row and for one program."""

    indices: Tensor  # column of each entry, int32 [E]
    degrees: Tensor  # entries of each row, int32 [R]
    starts: Tensor  # first entry of each part, int64 [P]
    stops: Tensor  # last entry, exclusive, int64 [P]
    vertices: Tensor  # its row, int32 [P]
    places: Tensor  # where the sum goes: the row, or -1 - slot of the scratch table, int32 [P]
    shared: Tensor  # the parts that go to slots, int32
    slot_ptr: Tensor  # first slot of each row that has some, int64 [S + 1]
    slot_vertices: Tensor  # these rows, int32 [S]

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return self.starts.numel()

    @property
    def num_slots(self) -> int:
        """Rows of the scratch table."""
        return self.shared.numel()


def build_parts(indptr: Tensor, indices: Tensor) -> RowParts:
    """Cut rows, int64 ``[R + 1]`` and int32 ``[E]``, into parts of at most ``MAX_ENTRIES`` entries, one at least."""
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
