"""One direction of a whole graph as a sparse matrix in compressed rows, and its transpose."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.graph.csc import INT32_MAX, sort_by_target


@dataclass(frozen=True, eq=False)
class CSR:
    """A sparse matrix ``[num_rows, num_columns]``: the entries of row ``i`` are ``indptr[i]`` to ``indptr[i + 1]``."""

    indptr: Tensor  # first entry of each row, int64 [num_rows + 1]
    indices: Tensor  # column of each entry, int32 [num_edges]
    num_columns: int  # number of columns
    edge_ids: Tensor | None = None
    """Place of each entry in the order of the forward direction, int32 or int64 ``[num_edges]``, or None where this
    is the forward direction.
    """

    @property
    def num_rows(self) -> int:
        """Number of vertices on the row side (targets forward, sources backward)."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of entries."""
        return self.indices.numel()

    @property
    def edge_dtype(self) -> torch.dtype:
        """The dtype of places of edges: int32 where they fit."""
        return torch.int32 if self.num_edges <= INT32_MAX else torch.int64

    def degrees(self) -> Tensor:
        """Return the number of entries of each row, int64 ``[num_rows]``."""
        return self.indptr.diff()

    def entry_rows(self) -> Tensor:
        """Return the row of each entry, int32 ``[num_edges]``."""
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.indptr.device)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=self.num_edges)

    def transposed(self) -> CSR:
        """Return the transpose, made at the first call and kept as long as this; a row's entries in forward order."""
        known = self.known_transpose()
        if known is None:
            with torch.inference_mode(False), torch.no_grad():
                known = _transposes[self.indices] = self._transpose()
        return known

    def _transpose(self) -> CSR:
        here = self.to("cpu")
        rows, entries = np.empty(self.num_edges, np.int32), torch.empty(self.num_edges, dtype=self.edge_dtype)
        row_of_entry = here.entry_rows().numpy()
        indptr = sort_by_target(row_of_entry, here.indices.numpy(), self.num_columns, rows, entries.numpy())
        made = CSR(torch.from_numpy(indptr), torch.from_numpy(rows), self.num_rows, entries)
        return made.to(self.indices.device)

    def known_transpose(self) -> CSR | None:
        """Return the transpose if it was made."""
        return _transposes.get(self.indices)

    def known_bytes(self) -> int:
        """Return the bytes of all arrays, those of the transpose too where it was made."""
        own = sum(tensor.nbytes for tensor in (self.indptr, self.indices, self.edge_ids) if tensor is not None)
        back = self.known_transpose()
        return own if back is None else own + back.known_bytes()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CSR:
        """Return a copy on a device, or this where it is there already."""
        if self.indices.device == torch.device(device):
            return self
        indptr, indices = (part.to(device, non_blocking=non_blocking) for part in (self.indptr, self.indices))
        edge_ids = None if self.edge_ids is None else self.edge_ids.to(device, non_blocking=non_blocking)
        return replace(self, indptr=indptr, indices=indices, edge_ids=edge_ids)


_transposes: MutableMapping[Tensor, CSR] = WeakIdKeyDictionary()
"""By ``indices``; what is kept holds none of the arrays that it was made of."""
