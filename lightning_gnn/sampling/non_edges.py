"""Negative edges that are not edges of the graph, unlike PyG's, which are drawn without a look at it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling
from torch_geometric.sampler.neighbor_sampler import neg_sample

from lightning_gnn.graph.csc import CSCGraph

_ROUNDS = 16
"""How often edges among the negatives are drawn again, before all non-edges of their sources are listed."""


class KnownEdges:
    """The pairs of nodes that are edges of one type, for lookups.

    Args:
        edges: Sources and targets, int64 ``[2, n]``; may contain duplicates.
        sizes: Numbers of source and of target nodes.
    """

    def __init__(self, edges: Tensor, sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        self._codes: Tensor = torch.unique(edges[0] * sizes[1] + edges[1])

    def contain(self, source: Tensor, target: Tensor) -> Tensor:
        """Return which pairs are edges, bool ``[m]``, for their sources and targets, int64 ``[m]``."""
        code = source * self.sizes[1] + target
        if not self._codes.numel():
            return torch.zeros_like(code, dtype=torch.bool)
        return self._codes[torch.searchsorted(self._codes, code).clamp_(max=self._codes.numel() - 1)] == code

    def targets_of(self, source: int) -> Tensor:
        """Return the targets of a node's edges, int64 ``[d]``."""
        width = self.sizes[1]
        first, last = torch.searchsorted(self._codes, torch.tensor([source * width, (source + 1) * width])).tolist()
        return self._codes[first:last] - source * width

    def rest(self, target_weight: Tensor) -> Tensor:
        """Return the total weight of the targets that each source is not linked to, ``[num_sources]``."""
        source, target = self._codes // self.sizes[1], self._codes % self.sizes[1]
        linked = torch.zeros(self.sizes[0], dtype=target_weight.dtype).index_add_(0, source, target_weight[target])
        possible = target_weight > 0
        count = torch.bincount(source[possible[target]], minlength=self.sizes[0])
        rest = (target_weight.sum() - linked).clamp(min=torch.finfo(linked.dtype).tiny)
        return torch.where(count < possible.sum(), rest, 0.0)  # without rounding errors at nodes linked to all


def known_edges(
    graph: CSCGraph | None, labeled: Sequence[Tensor], sizes: tuple[int, int], one_type: bool = True
) -> KnownEdges:
    """Return the edges of a graph and labeled ones, ``[2, n]``, which count in both directions in an undirected graph.

    ``graph`` holds the edges of one edge type, or is None without any; ``sizes`` are the numbers of sources and
    targets; ``one_type`` is whether they have the same node type.
    """
    edges = torch.zeros((2, 0), dtype=torch.int64)
    if graph is not None:
        target = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.indptr.cpu().diff())
        edges = torch.stack([graph.indices.to("cpu", torch.int64), target])
    known, labels = KnownEdges(edges, sizes), torch.cat([edges[:, :0], *(part.cpu() for part in labeled)], dim=1)
    if one_type and edges.numel() and bool(known.contain(edges[1], edges[0]).all()):
        labels = torch.cat([labels, labels.flip(0)], dim=1)  # RandomLinkSplit labels one direction of an edge
    return known if bool(known.contain(*labels).all()) else KnownEdges(torch.cat([edges, labels], dim=1), sizes)


class FilteredNegatives(NegativeSampling):  # type: ignore[misc]
    """PyG's negative sampling without known edges, for :class:`~lightning_gnn.NeighborSampler` and its subclasses."""

    def __init__(self, negatives: NegativeSampling, known: KnownEdges) -> None:
        super().__init__(negatives.mode, negatives.amount, negatives.src_weight, negatives.dst_weight)
        self.known = known


class _Negatives(Protocol):
    """Negative sampling from a generator."""

    amount: float
    generator: torch.Generator
    weights: dict[str, Tensor | None]

    def is_binary(self) -> bool: ...
    def sample(self, num_samples: int, endpoint: str, num_nodes: int) -> Tensor: ...


class DrawnNegatives:
    """Negative edges, drawn in advance, in the interface of PyG's ``NegativeSampling``."""

    def __init__(self, negatives: Any, source: Tensor, target: Tensor) -> None:
        self.amount, self.is_binary, self.is_triplet = negatives.amount, negatives.is_binary, negatives.is_triplet
        self._ends = {"src": source, "dst": target}

    def sample(self, num_samples: int, endpoint: str, num_nodes: int) -> Tensor:
        """Return the sources or the targets, int64 ``[num_samples]``."""
        return self._ends[endpoint]


def draw_non_edges(
    inputs: EdgeSamplerInput,
    negatives: _Negatives,
    known: KnownEdges,
    node_times: tuple[Tensor | None, Tensor | None],
    disjoint: bool,
) -> DrawnNegatives:
    """Draw the negatives of seed edges as PyG, then draw those again that are edges, until none is.

    Args:
        inputs: The seed edges.
        negatives: Draws the nodes; also in the rounds after the first.
        known: The edges.
        node_times: Times of source and target nodes, if nodes have times: later nodes than the seed are not drawn.
        disjoint: Whether each seed has its own tree; then PyG orders the negatives of triplets otherwise.

    Raises:
        ValueError: A node is linked to all nodes that can be drawn, or all nodes are.
    """
    # Draw them as PyG, in its order, so that those that are non-edges stay the same.
    count, binary = inputs.row.numel(), negatives.is_binary()
    source = neg_sample(inputs.row, negatives, known.sizes[0], inputs.time, node_times[0], "src") if binary else None
    target: Tensor = neg_sample(inputs.col, negatives, known.sizes[1], inputs.time, node_times[1], "dst")
    number = torch.arange(target.numel())
    seed = number % count if binary or disjoint else number // int(negatives.amount)
    if source is None:
        source = inputs.row[seed]
    limits = None if inputs.time is None else inputs.time[seed]

    def is_late(rows: Tensor) -> Tensor:
        late = torch.zeros_like(rows, dtype=torch.bool)
        drawn = (source if binary else None, target)
        for times, nodes in zip(node_times, drawn, strict=True):
            if times is not None and nodes is not None and limits is not None:
                late |= times[nodes[rows]] > limits[rows]
        return late

    wrong = known.contain(source, target).nonzero().view(-1)
    for _ in range(_ROUNDS):
        if not wrong.numel():
            break
        if binary:
            source[wrong] = negatives.sample(wrong.numel(), "src", known.sizes[0])
        target[wrong] = negatives.sample(wrong.numel(), "dst", known.sizes[1])
        wrong = wrong[known.contain(source[wrong], target[wrong]) | is_late(wrong)]
    # A few are left at nodes that are linked to most others: draw among their non-edges alone.
    for rows, weights in _weights_by_time(wrong, negatives, known.sizes, node_times, limits):
        if binary:
            source[rows] = _draw_sources(rows.numel(), weights, known, negatives.generator)
        for node in torch.unique(source[rows]).tolist():
            own, weight = rows[source[rows] == node], weights[1].clone()
            weight[known.targets_of(node)] = 0.0
            if not bool(weight.any()):
                raise ValueError(
                    f"node {node} has no non-edges: it is linked to all {known.sizes[1]} nodes, or to all that "
                    "negative sampling can draw (by weight and time); leave it out, or set filter_negatives=False"
                )
            target[own] = _draw(weight, own.numel(), negatives.generator)
    return DrawnNegatives(negatives, source, target)


def _weights_by_time(
    rows: Tensor,
    negatives: _Negatives,
    sizes: tuple[int, int],
    node_times: tuple[Tensor | None, Tensor | None],
    limits: Tensor | None,
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Yield groups of rows, and the weights of source and target nodes, float64, which are 0 if they are too late."""
    if not rows.numel():
        return
    is_timed = any(times is not None for times in node_times)
    groups = [(None, rows)]
    if is_timed and limits is not None:
        groups = [(limit, rows[limits[rows] == limit]) for limit in torch.unique(limits[rows])]
    for limit, own in groups:
        weights = []
        for end, size, times in zip(("src", "dst"), sizes, node_times, strict=True):
            given = negatives.weights[end]
            weight = torch.ones(size, dtype=torch.float64) if given is None else given.to(torch.float64, copy=True)
            if times is not None and limit is not None:
                weight[times > limit] = 0.0
            weights.append(weight)
        yield own, (weights[0], weights[1])


def _draw_sources(count: int, weights: tuple[Tensor, Tensor], known: KnownEdges, generator: torch.Generator) -> Tensor:
    """Return the sources of ``count`` pairs that are drawn from all non-edges, by the weights of both ends."""
    weight = weights[0] * known.rest(weights[1])
    if not bool(weight.any()):
        raise ValueError(
            f"the graph has no non-edges: all {known.sizes[0]} x {known.sizes[1]} pairs of nodes are edges, or all "
            "that negative sampling can draw (by weight and time); set filter_negatives=False"
        )
    return _draw(weight, count, generator)


def _draw(weight: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` indices drawn by their weights, float64 of any length (multinomial takes at most 2^24)."""
    total = weight.cumsum(0)
    last = torch.searchsorted(total, total[-1:])  # the last one with a weight
    drawn = torch.rand(count, dtype=torch.float64, generator=generator) * total[-1]
    return torch.minimum(torch.searchsorted(total, drawn, right=True), last)
