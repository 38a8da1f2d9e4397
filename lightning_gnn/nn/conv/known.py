"""What a layer takes as its graph where the aggregation of its input is known already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KnownAggregation:
    """Stands for a graph whose aggregation has been computed before: a layer only has to update each row.

    Args:
        aggregated: What the layer's aggregation of its input comes to, floating ``[N, F]``; the layer's input has the
            rows of the same nodes.
    """

    def __init__(self, aggregated: Tensor) -> None:
        self._aggregated = aggregated
        self.num_sources = self.num_targets = aggregated.size(0)
        self.num_edges = 0

    def with_self_loops(self) -> KnownAggregation:
        """Return this: whether nodes count themselves was decided when it was computed."""
        return self

    def gcn_weight(
        self,
        edge_weight: Tensor | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return None: the normalisation is in it."""
        return None

    def aggregate(self, x: Tensor, weight: Tensor | None = None, reduce: Any = "sum") -> Tensor:
        """Return what is known, whatever ``x`` is."""
        return self._aggregated

    def edge_softmax(self, source_scores: Tensor, target_scores: Tensor, negative_slope: float) -> Tensor:
        """Refuse: attention follows from parameters, which change.

        Raises:
            ValueError: Always.
        """
        raise ValueError("x_aggregated is for sums and means of the neighbours' features; attention weighs them anew")
