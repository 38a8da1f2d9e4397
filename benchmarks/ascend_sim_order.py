"""The two orders of vertices that the baseline is simulated in: a data set's own, and one that leans towards degree.

Data parallelism gives each core a range of equally many vertices. What it loses to imbalance, and so what hybrid
parallelism gains, is therefore a matter of how the vertices are numbered, which NeutronAscend does not say: its figure
4 shows that the ranges' edges differ by up to 7.4 times on 30 cores, for Reddit. Its baseline framework can sort by
degree (``rerank`` of ``mindspore_gl.graph.graph_csr_data``). An order between the published one and that is described
by how far it leans, which is fitted to that one number.
"""

from __future__ import annotations

import numpy as np

ORDERS = ("published", "degree-leaning")
RANGES = 30
"""Cores of figure 4."""
LOAD_RATIO = 7.4
"""Edges of the heaviest range over those of the lightest, in the same figure (section 3.1)."""


def ranks(in_degrees: np.ndarray, lean: float) -> np.ndarray:
    """Return the vertices' new numbers, int64 ``[V]``.

    They are sorted by ``(1 - lean) * old number + lean * place by falling degree``: 0 keeps the order, 1 sorts by
    degree.

    Args:
        in_degrees: Of the vertices in their published order, ``[V]``.
        lean: From 0 to 1.
    """
    published = np.arange(in_degrees.size)
    by_degree = np.argsort(np.argsort(-in_degrees, kind="stable"), kind="stable")
    return np.argsort(np.argsort((1 - lean) * published + lean * by_degree, kind="stable"), kind="stable")


def load_ratio(in_degrees: np.ndarray, lean: float = 0.0, ranges: int = RANGES) -> float:
    """Return the edges of the heaviest range of equally many vertices over those of the lightest."""
    ordered = np.empty_like(in_degrees)
    ordered[ranks(in_degrees, lean)] = in_degrees
    loads = [float(part.sum()) for part in np.array_split(ordered, ranges)]
    return max(loads) / max(min(loads), 1.0)


def fitted_lean(in_degrees: np.ndarray, ratio: float = LOAD_RATIO, ranges: int = RANGES) -> float:
    """Return the lean, to a millionth, at which the ranges' loads differ by a ratio; where none does, the nearer end.

    Args:
        in_degrees: Of the vertices in their published order, ``[V]``.
        ratio: Edges of the heaviest range over those of the lightest.
        ranges: How many ranges.
    """
    low, high = 0.0, 1.0
    if load_ratio(in_degrees, low, ranges) >= ratio:
        return low
    while high - low > 1e-6:
        middle = (low + high) / 2
        if load_ratio(in_degrees, middle, ranges) < ratio:
            low = middle
        else:
            high = middle
    return high
