"""One direction of a graph, as the functions of every backend take it."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.graph.csr import CSR

Match = tuple[Tensor, Tensor]  # maxima [num_rows, H, C], and weights [num_edges, H]: what attains the maximum counts


class Scores(NamedTuple):
    """What an edge softmax is computed from: a row's number and a column's, added up, then a leaky ReLU."""

    row: Tensor  # [num_rows, H]
    column: Tensor  # [num_columns, H], of the same dtype
    slope: float  # of the leaky ReLU


class Matrix(NamedTuple):
    """A sparse matrix in compressed rows, and who executes what is computed with it."""

    indptr: Tensor  # first entry of each row, int64 [num_rows + 1]
    indices: Tensor  # column of each entry, int32 [num_edges]. What is derived of the graph is known by this object
    num_columns: int  # vertices on the column side
    settings: PlanSettings = PlanSettings()  # who executes

    @property
    def num_rows(self) -> int:
        """Vertices on the row side."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of entries."""
        return self.indices.numel()

    @property
    def csr(self) -> CSR:
        """The same arrays as a direction of a graph."""
        return CSR(self.indptr, self.indices, self.num_columns)

    def entry_rows(self) -> Tensor:
        """Return the row of each entry, int64 ``[num_edges]``."""
        rows = torch.arange(self.num_rows, device=self.indptr.device)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=self.num_edges)
