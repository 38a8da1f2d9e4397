"""One direction of a graph, the input of every backend."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.graph.csr import CSR

Match = tuple[Tensor, Tensor]  # maxima [num_rows, H, C] and weights [num_edges, H], to select tied entries


class Scores(NamedTuple):
    """Inputs of an edge softmax: the score of an entry is ``leaky_relu(row + column)``."""

    row: Tensor  # [num_rows, H]
    column: Tensor  # [num_columns, H], same dtype
    slope: float  # negative slope of the leaky ReLU


class Matrix(NamedTuple):
    """A CSR matrix and its execution settings."""

    indptr: Tensor  # first entry of each row, int64 [num_rows + 1]
    indices: Tensor  # column of each entry, int32 [num_edges]; caches of derived data use this object as a weak key
    num_columns: int  # vertices on the column side
    settings: PlanSettings = PlanSettings()  # number of workers and plan

    @property
    def num_rows(self) -> int:
        """Number of vertices on the row side."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of entries."""
        return self.indices.numel()

    @property
    def csr(self) -> CSR:
        """The same arrays as a CSR object."""
        return CSR(self.indptr, self.indices, self.num_columns)

    def entry_rows(self) -> Tensor:
        """Return the row of each entry, int64 ``[num_edges]``."""
        rows = torch.arange(self.num_rows, device=self.indptr.device)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=self.num_edges)
