"""One direction of a whole graph as a sparse CSR matrix, and its transpose."""

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
    """Sparse matrix ``[num_rows, num_columns]``: the entries of row ``i`` are ``indptr[i]`` to ``indptr[i + 1]``."""

    indptr: Tensor  # first entry of each row, int64 [num_rows + 1]
    indices: Tensor  # column of each entry, int32 [num_edges]
    num_columns: int
    edge_ids: Tensor | None = None
    """Position of each entry in the forward direction, int32 or int64 ``[num_edges]``; None if this is forward."""

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
        """Dtype of edge positions: int32 if they fit, otherwise int64."""
        return torch.int32 if self.num_edges <= INT32_MAX else torch.int64

    def degrees(self) -> Tensor:
        """Return the number of entries of each row, int64 ``[num_rows]``."""
        return self.indptr.diff()

    def entry_rows(self) -> Tensor:
        """Return the row of each entry, int32 ``[num_edges]``."""
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.indptr.device)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=self.num_edges)

    def transposed(self) -> CSR:
        """Return the transpose, with each row's entries in forward order; cached as long as ``indices`` exists."""
        transpose = self.known_transpose()
        if transpose is None:
            with torch.inference_mode(False), torch.no_grad():
                transpose = _transposes[self.indices] = self._transpose()
        return transpose

    def _transpose(self) -> CSR:
        on_cpu = self.to("cpu")
        rows, entries = np.empty(self.num_edges, np.int32), torch.empty(self.num_edges, dtype=self.edge_dtype)
        row_of_entry = on_cpu.entry_rows().numpy()
        indptr = sort_by_target(row_of_entry, on_cpu.indices.numpy(), self.num_columns, rows, entries.numpy())
        transpose = CSR(torch.from_numpy(indptr), torch.from_numpy(rows), self.num_rows, entries)
        return transpose.to(self.indices.device)

    def known_transpose(self) -> CSR | None:
        """Return the transpose if it has been built."""
        return _transposes.get(self.indices)

    def stored_bytes(self) -> int:
        """Return the bytes of all arrays, including those of the transpose if it has been built."""
        own = sum(tensor.nbytes for tensor in (self.indptr, self.indices, self.edge_ids) if tensor is not None)
        transpose = self.known_transpose()
        return own if transpose is None else own + transpose.stored_bytes()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CSR:
        """Return a copy on a device, or ``self`` if it is already there."""
        if self.indices.device == torch.device(device):
            return self
        indptr, indices = (array.to(device, non_blocking=non_blocking) for array in (self.indptr, self.indices))
        edge_ids = None if self.edge_ids is None else self.edge_ids.to(device, non_blocking=non_blocking)
        return replace(self, indptr=indptr, indices=indices, edge_ids=edge_ids)


_transposes: MutableMapping[Tensor, CSR] = WeakIdKeyDictionary()
"""Cache by ``indices``; its values do not reference the arrays of the forward direction."""
