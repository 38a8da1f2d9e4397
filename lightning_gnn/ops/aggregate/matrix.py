"""One direction of a graph, the input of every backend."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.graph.csr import CSR

Match = tuple[Tensor, Tensor]  # maxima [num_rows, H, C] and weights [num_edges, H], to select tied entries


class Scores(NamedTuple):
    """Inputs of an edge softmax: the score of an entry is ``leaky_relu(row + column)``."""

    row: Tensor  # [num_rows, H]
    column: Tensor  # [num_columns, H], same dtype
    slope: float  # negative slope of the leaky ReLU


@dataclass(frozen=True, eq=False)
class Matrix(CSR):
    """One direction of a graph and its execution settings; caches of derived data use ``indices`` as a weak key."""

    settings: PlanSettings = field(default_factory=PlanSettings)  # number of workers and plan
