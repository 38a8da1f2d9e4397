"""One rank's part of a graph: it owns some rows, and aggregates one feature slice of a range of the graph's rows."""

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
    in_weights,
)
from lightning_gnn.full_graph.exchange import SliceAllToAll, exchange_row_ownership, rows_to_slice, slice_to_rows
from lightning_gnn.full_graph.plan import Ownership, plan_devices
from lightning_gnn.ops.aggregate.definition import Reduce, aggregate
from lightning_gnn.ops.edge_softmax.definition import edge_softmax

Made = TypeVar("Made")


@dataclass(eq=False)
class _ChunkRange:
    """This rank's range of rows in one number of groups."""

    num_groups: int
    part: RowRangeGraph  # the range, with its graph on the rank's device
    rows: tuple[int, int]  # first forward row of the range and the one after the last
    edges: tuple[int, int]  # its first edge and the one after the last, in the whole graph's forward order
    endpoints: tuple[dict[str, Any], dict[str, Any]] | None = None
    """For sources and targets the last arguments of an :class:`SliceAllToAll`, all but the slices; None until the ranks
    have exchanged them.
    """

    @property
    def graph(self) -> CompressedGraph:
        """The range as a graph of its own."""
        return self.part.graph


class RowShard:
    """What a rank sees in place of a :class:`~lightning_gnn.compressed.graph.CompressedGraph`."""

    # Every tensor of vertices holds the rows that the rank owns. An aggregation brings rows to slices by all-to-all,
    # aggregates this rank's slice over its range of rows, and brings the slices back to rows; backward runs the
    # adjoints (NeutronAscend, section 5). All ranks must call the same operations in the same order. Weights of edges
    # are those of the rank's range, the same on its M ranks, whose gradients add up, as for parameters. Of the graph's
    # edges a rank brings those of its ranges to memory alone; the graph may be mapped from disk. A layer with fewer
    # columns than groups runs in fewer groups, whose ranges subdivide the others'.

    def __init__(
        self,
        graph: CompressedGraph,
        owners: Ownership,
        rank: int,
        num_columns: int = 1,
        num_groups: int | Literal["auto"] = "auto",  # M, which divides the number of ranks, or ``"auto"``
        settings: PlanSettings | None = None,
        device: torch.device | str = "cpu",
        memory_limit: int | None = None,  # bytes that a rank may use, or None
        element_size: int = 4,  # bytes of a feature
        process_group: dist.ProcessGroup | None = None,
        looped: bool = False,  # what :meth:`with_self_loops` returns: with exactly one self-loop per vertex
    ) -> None:
        self.whole = graph.to("cpu")
        self.owners = owners
        self.rank = rank
        self.device = torch.empty(0, device=device).device
        self.settings = settings or PlanSettings()
        self.process_group = process_group
        self.rows = owners.rows(rank).to(self.device)  # vertices that this rank owns, ascending, int64 [n]
        self._forced = num_groups
        self._looped = looped
        self._loops = count_self_loops(self.whole.forward) if looped else None
        # A layer that is narrower than the ranks takes fewer groups later: other layers need not.
        self.plan: HybridPlan = plan_devices(
            num_columns if num_groups != "auto" else max(num_columns, owners.num_ranks),
            owners.order.numel(),
            self._loads(),
            owners.num_ranks,
            num_groups,
            memory_limit,
            element_size=element_size,
        )
        self._cuts: dict[int, _ChunkRange] = {}
        self._exchanges: dict[object, tuple[SliceAllToAll, SliceAllToAll]] = {}
        self.cache: dict[object, Any] = {}

    # What the layers ask of a graph.

    @property
    def num_sources(self) -> int:
        """Rows that this rank owns."""
        return self.rows.numel()

    @property
    def num_targets(self) -> int:
        """Rows that this rank owns."""
        return self.rows.numel()

    @property
    def num_edges(self) -> int:
        """Edges of this rank's range of rows: the length of weights."""
        start, stop = self._base.edges
        return stop - start

    @property
    def edge_places(self) -> Tensor:
        """Places of this rank's edges in the forward order of the whole graph, int64 ``[num_edges]``."""
        return self._once("edge_places", lambda: torch.arange(*self._base.edges, device=self.device))

    @property
    def in_degrees(self) -> Tensor:
        """Edges into each row that this rank owns, int64."""
        return self._once("in_degrees", lambda: self._own(self._looped_degrees(self.whole.in_degrees)))

    @property
    def out_degrees(self) -> Tensor:
        """Edges out of each row that this rank owns, int64."""
        return self._once("out_degrees", lambda: self._own(self._looped_degrees(self.whole.out_degrees)))

    def with_self_loops(self) -> RowShard:
        """Return the shard of the graph with exactly one self-loop per vertex, rows owned as here."""

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
            looped._forced = self._forced
            return looped

        return self if self._looped else self._once("with_self_loops", build)

    def gcn_weight(
        self,
        edge_weight: Tensor | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return this rank's part of what :meth:`CompressedGraph.gcn_weight` returns; ``edge_weight`` is global."""
        shard = self.with_self_loops() if add_self_loops else self
        if edge_weight is None:
            dtype = dtype or torch.get_default_dtype()
            return shard._once(("gcn_weight", dtype), lambda: shard._normalized(dtype))
        self.whole.check_edge_values(edge_weight, "edge_weight")
        edge_weight = edge_weight.to(self.whole.device)
        # A self-loop that is added weighs 1 or 2; that of a graph which has them anyway, nothing.
        fill = 0.0 if not add_self_loops else 2.0 if improved else 1.0
        weights = add_self_loops and not self._looped
        values = shard._user_edges().values(edge_weight, fill, weights)
        return shard._scaled(in_weights(self.whole, edge_weight, shard._looped, weights, fill), values)

    def edge_order(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Return this rank's part of what :meth:`CompressedGraph.edge_order` returns for global values."""
        self.whole.check_edge_values(values, "values")
        return self._user_edges().values(values.to(self.whole.device), fill).to(self.device)

    def aggregate(self, x: Tensor, weight: Tensor | None = None, reduce: Reduce = "sum") -> Tensor:
        """Aggregate over the whole graph; all ranks call this together. See :func:`~lightning_gnn.ops.aggregate`."""
        # x is [num_sources, D] or [num_sources, H, C], of this rank's rows; weight [num_edges] or [num_edges, H].
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
        cut = self._cut(self._groups(num_columns))
        to_slice, to_rows = self._exchange(cut, slice_columns(num_columns, cut.num_groups))
        columns = rows_to_slice(x.reshape(x.size(0), num_columns), to_slice)
        if weight is not None:
            start, stop = (edge - self._base.edges[0] for edge in cut.edges)
            weight = weight[start:stop]
        # Also where there is no edge: every rank needs the same derivatives, through the same exchanges, or the others
        # would wait for this one.
        if weight is None or weight.dim() == 1:
            part = aggregate(cut.graph, columns, weight, reduce)
        else:
            part = self._by_head(cut, columns, weight, reduce, x.size(2))
        return slice_to_rows(part.index_select(0, cut.part.row_of), to_rows).view(x.shape)

    def edge_softmax(self, source_scores: Tensor, target_scores: Tensor, negative_slope: float = 0.2) -> Tensor:
        """Turn scores into attention weights of this rank's range, for all heads; all ranks call this together."""
        # Scores are [num_sources, H] and [num_targets, H]. The M ranks of a range compute the same weights, whose
        # gradients, of a slice each, add up in the exchange.
        self._check(source_scores, "source_scores", (2,))
        self._check(target_scores, "target_scores", (2,))
        heads = source_scores.size(1)
        of_sources, of_targets = self._exchange(self._base, ((0, heads),) * self._base.num_groups)
        of_owners = rows_to_slice(target_scores, of_targets)
        by_row = torch.zeros_like(of_owners).index_copy(0, self._base.part.row_of, of_owners)
        return edge_softmax(self._base.graph, rows_to_slice(source_scores, of_sources), by_row, negative_slope)

    def large_arrays(self) -> dict[str, object]:
        """Return the graph and what has been made of it, by names that ranks which hold the same have in common."""
        ranges = {
            f"range {self.rank // groups} of {groups} groups": (cut.graph, cut.graph.forward.known_transpose())
            for groups, cut in self._cuts.items()
        }
        derived = {str(key): made.large_arrays() for key, made in self.cache.items() if isinstance(made, RowShard)}
        return {"whole": self.whole, **ranges, **derived}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RowShard:
        """Return this: a shard lies where its rank computes."""
        if torch.empty(0, device=device).device != self.device:
            raise ValueError(f"the shard of rank {self.rank} lies on {self.device} and cannot move to {device}")
        return self

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank={self.rank} of {self.owners.num_ranks}, rows={self.num_targets} of "
            f"{self.owners.order.numel()}, num_groups={self.plan.num_groups})"
        )

    # Inside.

    @property
    def _base(self) -> _ChunkRange:
        """The range that weights belong to."""
        return self._cut(self.plan.num_groups)

    def _groups(self, num_columns: int) -> int:
        """Return M for a layer."""
        if self._forced != "auto":
            check_groups(self.plan.num_groups, self.owners.num_ranks, num_columns)
        return max(groups for groups in divisors(self.plan.num_groups) if groups <= num_columns)

    def _cut(self, num_groups: int) -> _ChunkRange:
        if num_groups not in self._cuts:
            with torch.inference_mode(False), torch.no_grad():
                self._cuts[num_groups] = self._make_cut(num_groups)
        return self._cuts[num_groups]

    def _make_cut(self, num_groups: int) -> _ChunkRange:
        # Rank m + g * M is member g * (M / M') + m div M' of M' groups: of its own range, it takes a part.
        finer, member = self.plan.num_groups // num_groups, self.rank // num_groups
        loads = self._loads()
        start, stop = self.plan.chunk_ranges[member // finer]
        first, last = (start + row for row in balance_ranges(loads[start:stop], finer)[member % finer])
        before = int(loads[:first].sum())
        position, every = self.owners.position.numpy(), num_groups == self.owners.num_ranks
        part = extract_row_range(self.whole, position, (first, last), self._looped, every, self.settings)
        part = replace(part, graph=part.graph.to(self.device), row_of=part.row_of.to(self.device))
        return _ChunkRange(num_groups, part, (first, last), (before, before + part.graph.num_edges))

    def _endpoints(self, cut: _ChunkRange) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return who owns the rows of each range; the first time, all ranks call this together."""
        if cut.endpoints is None:
            with torch.inference_mode(False), torch.no_grad():
                cut.endpoints = (
                    self._endpoint_owners(cut, cut.part.sources),
                    self._endpoint_owners(cut, cut.part.targets),
                )
        return cut.endpoints

    def _endpoint_owners(self, cut: _ChunkRange, positions: np.ndarray) -> dict[str, Any]:
        own: list[Tensor | None] = [None]
        counts = self.owners.counts
        if cut.num_groups < self.owners.num_ranks:  # else there is one range, of all rows
            mine = torch.from_numpy(positions).to(self.device)
            own, counts = exchange_row_ownership(
                self.rank, mine, self.owners.offsets, cut.num_groups, self.process_group
            )
        return {"own": own, "counts": counts, "num_rows": self.num_targets, "group": self.process_group}

    def _loads(self) -> np.ndarray:
        """Return the edges of each forward row; as large as the vertices, so that it is not kept."""
        return self._looped_degrees(self.whole.forward.degrees()).numpy()

    def _user_edges(self) -> UserEdges:
        """Return which of the user's edges are in this rank's range."""
        return self._once("user_edges", lambda: RowEntries.of(self.whole, self._base.rows, self._looped).user)

    def _looped_degrees(self, degrees: Tensor) -> Tensor:
        """Count exactly one self-loop per vertex where the shard has them."""
        return degrees if self._loops is None else degrees + 1 - self._loops

    def _normalized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights of GCN where all edges weigh 1."""
        return self._scaled(self._looped_degrees(self.whole.forward.degrees()).to(dtype), None)

    def _scaled(self, degrees: Tensor, values: Tensor | None) -> Tensor:
        """Scale the values of this rank's edges by one over the root of both vertices' sums."""
        scale, base = inverse_root(degrees), self._base
        of_sources = scale[self.owners.order][torch.from_numpy(base.part.sources)].to(self.device)
        from_source = of_sources[base.graph.forward.indices]
        to_target = scale[slice(*base.rows)].to(self.device)[base.graph.forward.entry_rows()]
        return from_source * to_target if values is None else from_source * values.to(self.device) * to_target

    def _exchange(self, cut: _ChunkRange, slices: tuple[tuple[int, int], ...]) -> tuple[SliceAllToAll, SliceAllToAll]:
        """Return the exchanges with the owners of the sources and of the targets."""
        key = (cut.num_groups, slices)
        if key not in self._exchanges:
            sources, targets = self._endpoints(cut)
            self._exchanges[key] = (
                SliceAllToAll(self.rank, slices, **sources),
                SliceAllToAll(self.rank, slices, **targets),
            )
        return self._exchanges[key]

    def _by_head(self, cut: _ChunkRange, columns: Tensor, weight: Tensor, reduce: Reduce, channels: int) -> Tensor:
        """Aggregate a slice that may begin and end inside a head: block by block of whole or part heads."""
        start, stop = slice_columns(weight.size(1) * channels, cut.num_groups)[self.rank % cut.num_groups]
        out = []
        for first, last, width in head_blocks(start, stop, channels):
            size = (last - first) * width
            block, columns = columns[:, :size], columns[:, size:]
            block = block.reshape(block.size(0), last - first, width)
            out.append(aggregate(cut.graph, block, weight[:, first:last], reduce).flatten(1))
        return torch.cat(out, dim=1)

    def _own(self, values: Tensor) -> Tensor:
        return values[self.rows.to(values.device)].to(self.device)

    def _once(self, name: object, function: Callable[[], Made]) -> Made:
        if name not in self.cache:
            # Made while validating, it must be good for training too.
            with torch.inference_mode(False), torch.no_grad():
                self.cache[name] = function()
        made: Made = self.cache[name]
        return made

    def _check(self, values: Tensor, name: str, dims: tuple[int, ...]) -> None:
        if values.dim() not in dims or values.size(0) != self.num_sources:
            raise ValueError(
                f"{name} must hold the {self.num_sources} rows that rank {self.rank} owns, but is {list(values.shape)}"
            )


def head_blocks(start: int, stop: int, channels: int) -> list[tuple[int, int, int]]:
    """Cut a range of columns ``[H, C]`` into blocks of the same part of adjacent heads."""
    # Each is (first head, one after the last, columns of each); at most three, in order.
    blocks = []
    while start < stop:
        head, offset = divmod(start, channels)
        heads = (stop - start) // channels if offset == 0 else 0
        width = channels if heads else min(channels - offset, stop - start)
        heads = heads or 1
        blocks.append((head, head + heads, width))
        start += heads * width
    return blocks
