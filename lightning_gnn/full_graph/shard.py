"""One rank's shard of a graph: owns some rows, and aggregates one feature slice of a range of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import (
    HybridPlan,
    PlanSettings,
    balance_ranges,
    check_groups,
    divisors,
    slice_columns,
)
from lightning_gnn.compressed.self_loops import inverse_root
from lightning_gnn.full_graph.cut import (
    RowEntries,
    RowRangeGraph,
    UserEdges,
    count_self_loops,
    extract_row_range,
    sum_in_weights,
)
from lightning_gnn.full_graph.exchange import SliceAllToAll, exchange_row_ownership, rows_to_slice, slice_to_rows
from lightning_gnn.full_graph.plan import Ownership, plan_devices
from lightning_gnn.ops.aggregate.definition import Reduce, aggregate
from lightning_gnn.ops.aggregate.edge_softmax import edge_softmax

T = TypeVar("T")


@dataclass(eq=False)
class _Range:
    """This rank's range of rows for one number of groups."""

    num_groups: int
    part: RowRangeGraph  # the range, with its graph on the rank's device
    rows: tuple[int, int]  # start and stop of its forward rows
    edges: tuple[int, int]  # start and stop of its edges, in the whole graph's forward order
    endpoints: tuple[dict[str, Any], dict[str, Any]] | None = None
    """Arguments of :class:`SliceAllToAll` for sources and targets, without slices; None until they are exchanged."""

    @property
    def graph(self) -> CompressedGraph:
        """The range as a separate graph."""
        return self.part.graph


class RowShard:
    """One rank's replacement for a :class:`~lightning_gnn.compressed.graph.CompressedGraph`."""

    # Every node tensor holds only the rows that the rank owns. An aggregation converts rows to slices by all-to-all,
    # aggregates this rank's slice over its range of rows, and converts the slices back to rows; backward runs the
    # adjoints (NeutronAscend, section 5). All ranks must call the same operations in the same order. Edge weights
    # belong to a range and are equal on its M ranks; their gradients are summed, as for parameters. A rank loads only
    # the edges of its ranges; the graph may be memory-mapped. A layer with fewer columns than groups uses fewer groups,
    # with ranges that subdivide the original ones.

    def __init__(
        self,
        graph: CompressedGraph,
        owners: Ownership,
        rank: int,
        num_columns: int = 1,
        num_groups: int | Literal["auto"] = "auto",  # M, a divisor of the number of ranks, or ``"auto"``
        settings: PlanSettings | None = None,
        device: torch.device | str = "cpu",
        memory_limit: int | None = None,  # bytes that a rank may use, or None
        element_size: int = 4,  # bytes of a feature
        process_group: dist.ProcessGroup | None = None,
        looped: bool = False,  # whether each vertex has exactly one self-loop, see :meth:`with_self_loops`
    ) -> None:
        self.whole = graph.to("cpu")
        self.owners = owners
        self.rank = rank
        self.device = torch.empty(0, device=device).device
        self.settings = settings or PlanSettings()
        self.process_group = process_group
        self.rows = owners.rows(rank).to(self.device)  # vertices that this rank owns, ascending, int64 [n]
        self._requested_groups = num_groups
        self._looped = looped
        self._loops = count_self_loops(self.whole.forward) if looped else None
        # With "auto", plan for at least as many columns as ranks. Narrower layers use fewer groups, see `_num_groups`.
        self.plan: HybridPlan = plan_devices(
            num_columns if num_groups != "auto" else max(num_columns, owners.num_ranks),
            owners.order.numel(),
            self._degrees().numpy(),
            owners.num_ranks,
            num_groups,
            memory_limit,
            element_size=element_size,
        )
        self._ranges: dict[int, _Range] = {}
        self._exchanges: dict[object, tuple[SliceAllToAll, SliceAllToAll]] = {}
        self.cache: dict[object, Any] = {}

    # -- the interface of CompressedGraph

    @property
    def num_sources(self) -> int:
        """Number of rows that this rank owns."""
        return self.rows.numel()

    @property
    def num_targets(self) -> int:
        """Number of rows that this rank owns."""
        return self.rows.numel()

    @property
    def num_edges(self) -> int:
        """Number of edges in this rank's range of rows, the length of edge weights."""
        start, stop = self._base.edges
        return stop - start

    @property
    def edge_places(self) -> Tensor:
        """Indices of this rank's edges in the whole graph's forward order, int64 ``[num_edges]``."""
        return self._get_or_create("edge_places", lambda: torch.arange(*self._base.edges, device=self.device))

    @property
    def in_degrees(self) -> Tensor:
        """In-degree of each row that this rank owns, int64."""
        return self._get_or_create("in_degrees", lambda: self._select_own(self._looped_degrees(self.whole.in_degrees)))

    @property
    def out_degrees(self) -> Tensor:
        """Out-degree of each row that this rank owns, int64."""
        return self._get_or_create(
            "out_degrees", lambda: self._select_own(self._looped_degrees(self.whole.out_degrees))
        )

    def with_self_loops(self) -> RowShard:
        """Return the shard of the graph with exactly one self-loop per vertex and the same row ownership."""

        def build() -> RowShard:
            looped = RowShard(
                self.whole,
                self.owners,
                self.rank,
                self.plan.num_columns,
                self.plan.num_groups,
                self.settings,
                self.device,
                process_group=self.process_group,
                looped=True,
            )
            looped._requested_groups = self._requested_groups
            return looped

        return self if self._looped else self._get_or_create("with_self_loops", build)

    def gcn_weight(
        self,
        edge_weight: Tensor | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return this rank's part of :meth:`CompressedGraph.gcn_weight`; ``edge_weight`` is global."""
        shard = self.with_self_loops() if add_self_loops else self
        if edge_weight is None:
            dtype = dtype or torch.get_default_dtype()
            return shard._get_or_create(
                ("gcn_weight", dtype), lambda: shard._normalize(shard._degrees().to(dtype), None)
            )
        self.whole.check_edge_values(edge_weight, "edge_weight")
        edge_weight = edge_weight.to(self.whole.device)
        # Self-loops added here have weight 1, or 2 if improved; those added by an earlier call have weight 0.
        fill = 0.0 if not add_self_loops else 2.0 if improved else 1.0
        weights = add_self_loops and not self._looped
        values = shard._user_edges().values(edge_weight, fill, weights)
        return shard._normalize(sum_in_weights(self.whole, edge_weight, shard._looped, weights, fill), values)

    def edge_order(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Return this rank's part of :meth:`CompressedGraph.edge_order` for global values."""
        self.whole.check_edge_values(values, "values")
        return self._user_edges().values(values.to(self.whole.device), fill).to(self.device)

    def aggregate(self, x: Tensor, weight: Tensor | None = None, reduce: Reduce = "sum") -> Tensor:
        """Aggregate over the whole graph, as ``ops.aggregate`` does. All ranks must call this."""
        # x has this rank's rows, [num_sources, D] or [num_sources, H, C]; weight is [num_edges] or [num_edges, H].
        self._check(x, "x", (2, 3))
        if weight is not None and (weight.dim() not in (1, 2) or weight.size(0) != self.num_edges):
            raise ValueError(
                f"weight must have one row per edge of this rank, {self.num_edges}, but is {list(weight.shape)}"
            )
        if weight is not None and weight.dim() == 2 and (x.dim() != 3 or weight.size(1) != x.size(1)):
            raise ValueError(
                f"weight {list(weight.shape)} has one number per edge and head, so x must be "
                f"[{self.num_sources}, {weight.size(1)}, C], but is {list(x.shape)}"
            )
        num_columns = x.numel() // x.size(0) if x.size(0) else x[0:0].reshape(0, -1).size(1)
        if num_columns == 0:
            return x
        cut = self._get_range(self._num_groups(num_columns))
        to_slice, to_rows = self._get_exchanges(cut, slice_columns(num_columns, cut.num_groups))
        columns = rows_to_slice(x.reshape(x.size(0), num_columns), to_slice)
        if weight is not None:
            start, stop = (edge - self._base.edges[0] for edge in cut.edges)
            weight = weight[start:stop]
        # Even without edges: every rank must run the same exchanges in the backward pass, or the others would hang.
        if weight is None or weight.dim() == 1:
            part = aggregate(cut.graph, columns, weight, reduce)
        else:
            part = self._aggregate_heads(cut, columns, weight, reduce, x.size(2))
        return slice_to_rows(part.index_select(0, cut.part.row_of), to_rows).view(x.shape)

    def edge_softmax(self, source_scores: Tensor, target_scores: Tensor, negative_slope: float = 0.2) -> Tensor:
        """Return attention weights of this rank's range for all heads. All ranks must call this."""
        # Scores are [num_sources, H] and [num_targets, H]. The M ranks of a range compute the same weights. Their
        # gradients come from one slice each, and the exchange sums them.
        self._check(source_scores, "source_scores", (2,))
        self._check(target_scores, "target_scores", (2,))
        heads = source_scores.size(1)
        source_exchange, target_exchange = self._get_exchanges(self._base, ((0, heads),) * self._base.num_groups)
        by_owner = rows_to_slice(target_scores, target_exchange)
        by_row = torch.zeros_like(by_owner).index_copy(0, self._base.part.row_of, by_owner)
        return edge_softmax(self._base.graph, rows_to_slice(source_scores, source_exchange), by_row, negative_slope)

    def large_arrays(self) -> dict[str, object]:
        """Return the graph and derived arrays, with equal names for equal contents on different ranks."""
        ranges = {
            f"range {self.rank // groups} of {groups} groups": (cut.graph, cut.graph.forward.known_transpose())
            for groups, cut in self._ranges.items()
        }
        derived = {str(key): value.large_arrays() for key, value in self.cache.items() if isinstance(value, RowShard)}
        return {"whole": self.whole, **ranges, **derived}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RowShard:
        """Return this shard, which must be on the device already."""
        if torch.empty(0, device=device).device != self.device:
            raise ValueError(f"the shard of rank {self.rank} is on {self.device} and cannot be moved to {device}")
        return self

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank={self.rank} of {self.owners.num_ranks}, rows={self.num_targets} of "
            f"{self.owners.order.numel()}, num_groups={self.plan.num_groups})"
        )

    # -- internals

    @property
    def _base(self) -> _Range:
        """The range that edge weights belong to."""
        return self._get_range(self.plan.num_groups)

    def _num_groups(self, num_columns: int) -> int:
        """Return M for a layer of this width."""
        if self._requested_groups != "auto":
            check_groups(self.plan.num_groups, self.owners.num_ranks, num_columns)
        return max(groups for groups in divisors(self.plan.num_groups) if groups <= num_columns)

    def _get_range(self, num_groups: int) -> _Range:
        if num_groups not in self._ranges:
            with torch.inference_mode(False), torch.no_grad():
                self._ranges[num_groups] = self._extract_range(num_groups)
        return self._ranges[num_groups]

    def _extract_range(self, num_groups: int) -> _Range:
        # With M' groups, rank m + g * M is member g * (M / M') + m div M': its new range is a part of the original one.
        finer, member = self.plan.num_groups // num_groups, self.rank // num_groups
        loads = self._degrees().numpy()
        start, stop = self.plan.chunk_ranges[member // finer]
        first, last = (start + row for row in balance_ranges(loads[start:stop], finer)[member % finer])
        edge_start = int(loads[:first].sum())
        position, all_sources = self.owners.position.numpy(), num_groups == self.owners.num_ranks
        part = extract_row_range(self.whole, position, (first, last), self._looped, all_sources, self.settings)
        part = replace(part, graph=part.graph.to(self.device), row_of=part.row_of.to(self.device))
        return _Range(num_groups, part, (first, last), (edge_start, edge_start + part.graph.num_edges))

    def _get_endpoints(self, cut: _Range) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the owners of a range's sources and targets. All ranks must call this on first use."""
        if cut.endpoints is None:
            with torch.inference_mode(False), torch.no_grad():
                sources, targets = (self._find_owners(cut, rows) for rows in (cut.part.sources, cut.part.targets))
                cut.endpoints = sources, targets
        return cut.endpoints

    def _find_owners(self, cut: _Range, positions: np.ndarray) -> dict[str, Any]:
        own: list[Tensor | None] = [None]
        counts = self.owners.counts
        if cut.num_groups < self.owners.num_ranks:  # otherwise a single range covers all rows
            rows, offsets = torch.from_numpy(positions).to(self.device), self.owners.offsets
            own, counts = exchange_row_ownership(self.rank, rows, offsets, cut.num_groups, self.process_group)
        return {"own": own, "counts": counts, "num_rows": self.num_targets, "group": self.process_group}

    def _degrees(self) -> Tensor:
        """Return the number of edges of each forward row; not cached, since it has one entry per vertex."""
        return self._looped_degrees(self.whole.forward.degrees())

    def _user_edges(self) -> UserEdges:
        """Return the user's edges in this rank's range."""
        return self._get_or_create("user_edges", lambda: RowEntries.of(self.whole, self._base.rows, self._looped).user)

    def _looped_degrees(self, degrees: Tensor) -> Tensor:
        """Return the degrees, adjusted to exactly one self-loop per vertex if the shard has self-loops."""
        return degrees if self._loops is None else degrees + 1 - self._loops

    def _normalize(self, degrees: Tensor, values: Tensor | None) -> Tensor:
        """Divide this rank's edge values by the square roots of the degrees of both endpoints."""
        scale, base = inverse_root(degrees), self._base
        source_scale = scale[self.owners.order][torch.from_numpy(base.part.sources)].to(self.device)
        from_source = source_scale[base.graph.forward.indices]
        to_target = scale[slice(*base.rows)].to(self.device)[base.graph.forward.entry_rows()]
        return from_source * to_target if values is None else from_source * values.to(self.device) * to_target

    def _get_exchanges(self, cut: _Range, slices: tuple[tuple[int, int], ...]) -> tuple[SliceAllToAll, SliceAllToAll]:
        """Return the all-to-all exchanges with the owners of the sources and of the targets."""
        key = (cut.num_groups, slices)
        if key not in self._exchanges:
            sources, targets = (SliceAllToAll(self.rank, slices, **owners) for owners in self._get_endpoints(cut))
            self._exchanges[key] = sources, targets
        return self._exchanges[key]

    def _aggregate_heads(self, cut: _Range, columns: Tensor, weight: Tensor, reduce: Reduce, channels: int) -> Tensor:
        """Aggregate a slice that may start and stop inside a head, in blocks of whole or partial heads."""
        start, stop = slice_columns(weight.size(1) * channels, cut.num_groups)[self.rank % cut.num_groups]
        out = []
        for first, last, width in split_into_head_blocks(start, stop, channels):
            size = (last - first) * width
            block, columns = columns[:, :size], columns[:, size:]
            block = block.reshape(block.size(0), last - first, width)
            out.append(aggregate(cut.graph, block, weight[:, first:last], reduce).flatten(1))
        return torch.cat(out, dim=1)

    def _select_own(self, values: Tensor) -> Tensor:
        return values[self.rows.to(values.device)].to(self.device)

    def _get_or_create(self, name: object, function: Callable[[], T]) -> T:
        """Return the cached result of ``function``, computed on first use."""
        if name not in self.cache:
            # A value computed during validation must not be an inference tensor, since training uses it, too.
            with torch.inference_mode(False), torch.no_grad():
                self.cache[name] = function()
        value: T = self.cache[name]
        return value

    def _check(self, values: Tensor, name: str, dims: tuple[int, ...]) -> None:
        if values.dim() not in dims or values.size(0) != self.num_sources:
            raise ValueError(
                f"{name} must have the {self.num_sources} rows that rank {self.rank} owns, but is {list(values.shape)}"
            )


def split_into_head_blocks(start: int, stop: int, channels: int) -> list[tuple[int, int, int]]:
    """Split a range of columns ``[H, C]`` into at most three blocks of equally cut, adjacent heads, in order."""
    # Each block is (first head, stop, columns per head).
    blocks = []
    while start < stop:
        head, offset = divmod(start, channels)
        heads = (stop - start) // channels if offset == 0 else 0
        width = channels if heads else min(channels - offset, stop - start)
        heads = heads or 1
        blocks.append((head, head + heads, width))
        start += heads * width
    return blocks
