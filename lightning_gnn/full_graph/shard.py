"""One rank's part of a graph: it owns some rows, and aggregates one feature slice of one chunk range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.full_graph.exchange import Exchange, all_gather_rows, rows_to_slice, slice_to_rows
from lightning_gnn.full_graph.plan import Ownership, plan_devices
from lightning_gnn.graph.chunks import Chunks, compress_columns, count_columns
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.hybrid_plan import (
    HybridPlan,
    PlanSettings,
    balance_ranges,
    check_groups,
    divisors,
    slice_columns,
)
from lightning_gnn.ops.aggregate.definition import Reduce, aggregate
from lightning_gnn.ops.edge_softmax.definition import edge_softmax

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class _Cut:
    """How the chunk ranges of one number of groups are cut: this rank's graph, and who owns the rows of each range.

    ``sources`` and ``targets`` are the last arguments of an :class:`Exchange`, all but the slices.
    """

    num_groups: int
    graph: CompressedGraph
    edges: tuple[int, int]
    sources: dict[str, Any]
    targets: dict[str, Any]


class RowShard:
    """What a rank sees in place of a :class:`~lightning_gnn.graph.compress.CompressedGraph`.

    Every tensor of vertices holds the rows that the rank owns. An aggregation brings rows to slices by all-to-all,
    aggregates this rank's slice over its chunk range, and brings the slices back to rows; backward runs the adjoints
    (NeutronAscend, section 5; between devices M is chosen by volume and memory). So all ranks must call the same
    operations in the same order.

    Weights of edges are those of the rank's chunk range, the same on its M ranks, each of which holds a part of their
    gradient: the gradients of all ranks add up, for weights as for parameters.

    A layer with fewer columns than groups runs in fewer groups, whose chunk ranges subdivide those of the others;
    if ``num_groups`` was given, it is an error.

    Args:
        graph: The whole graph, the same on all ranks.
        owners: Who owns which rows.
        rank: This rank.
        num_columns: Columns of the features, for the choice of M.
        num_groups: M, which divides the number of ranks, or ``"auto"``.
        settings: Who executes this rank's aggregations.
        device: Where to compute.
        memory_limit: Bytes that a rank may use, or None.
        element_size: Bytes of a feature.
        process_group: The ranks; None for the default group.

    Raises:
        ValueError: M does not divide the number of ranks, or the graph does not fit the memory (says how many ranks
            would do).
    """

    def __init__(
        self,
        graph: CompressedGraph,
        owners: Ownership,
        rank: int,
        num_columns: int = 1,
        num_groups: int | Literal["auto"] = "auto",
        settings: PlanSettings | None = None,
        device: torch.device | str = "cpu",
        memory_limit: int | None = None,
        element_size: int = 4,
        process_group: Any = None,
    ) -> None:
        if graph.num_sources != graph.num_targets or graph.num_targets != owners.order.numel():
            raise ValueError(
                f"ranks share out the vertices of one set, but the graph has {graph.num_sources} sources, "
                f"{graph.num_targets} targets and {owners.order.numel()} rows with an owner"
            )
        self.whole = graph.to("cpu")
        self.owners = owners
        self.rank = rank
        self.device = torch.empty(0, device=device).device
        self.settings = settings or PlanSettings()
        self.process_group = process_group
        self.rows = owners.rows(rank).to(self.device)
        """Vertices that this rank owns, ascending, int64 ``[n]``."""
        self._forced = num_groups
        self._runs = RowRuns.of(self.whole.forward)
        # A layer that is narrower than the ranks takes fewer groups later: other layers need not.
        self.plan: HybridPlan = plan_devices(
            num_columns if num_groups != "auto" else max(num_columns, owners.num_ranks),
            owners.order.numel(),
            self._runs.loads,
            owners.num_ranks,
            num_groups,
            memory_limit,
            element_size=element_size,
        )
        self._cuts: dict[int, _Cut] = {}
        self._exchanges: dict[Any, tuple[Exchange, Exchange]] = {}
        self.cache: dict[Any, Any] = {}

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
        """Edges of this rank's chunk range: the length of weights."""
        start, stop = self._base.edges
        return stop - start

    @property
    def edge_places(self) -> Tensor:
        """Places of this rank's edges in the forward order of the whole graph, int64 ``[num_edges]``."""
        return self._once("edge_places", lambda: torch.arange(*self._base.edges, device=self.device))

    @property
    def in_degrees(self) -> Tensor:
        """Edges into each row that this rank owns, int64."""
        return self._once("in_degrees", lambda: self._own(self.whole.in_degrees))

    @property
    def out_degrees(self) -> Tensor:
        """Edges out of each row that this rank owns, int64."""
        return self._once("out_degrees", lambda: self._own(self.whole.out_degrees))

    def with_self_loops(self) -> RowShard:
        """Return the shard of the graph with exactly one self-loop per vertex, rows owned as here."""

        def build() -> RowShard:
            looped = RowShard(
                self.whole.with_self_loops(),
                self.owners,
                self.rank,
                self.plan.num_columns,
                self.plan.num_groups,
                self.settings,
                self.device,
                process_group=self.process_group,
            )
            looped._forced = self._forced
            return looped

        return self._once("with_self_loops", build)

    def gcn_weight(
        self,
        edge_weight: Tensor | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return this rank's part of what :meth:`CompressedGraph.gcn_weight` returns; ``edge_weight`` is global."""
        shard = self.with_self_loops() if add_self_loops else self

        def part() -> Tensor:
            given = None if edge_weight is None else edge_weight.to(self.whole.device)
            weight = self.whole.gcn_weight(given, improved, add_self_loops, dtype)
            return weight[slice(*shard._base.edges)].to(self.device)

        if edge_weight is not None:
            return part()
        return self._once(("gcn_weight", add_self_loops, dtype or torch.get_default_dtype()), part)

    def edge_order(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Return this rank's part of what :meth:`CompressedGraph.edge_order` returns for global values."""
        ordered = self.whole.edge_order(values.to(self.whole.device), fill)
        return ordered[slice(*self._base.edges)].to(self.device)

    def aggregate(self, x: Tensor, weight: Tensor | None = None, reduce: Reduce = "sum") -> Tensor:
        """Aggregate over the whole graph; all ranks call this together. See :func:`~lightning_gnn.ops.aggregate`.

        Args:
            x: This rank's rows, ``[num_sources, D]`` or ``[num_sources, H, C]``.
            weight: ``[num_edges]`` or ``[num_edges, H]``.
            reduce: ``"sum"``, ``"mean"`` or ``"max"``.

        Raises:
            ValueError: A shape does not fit, or D is less than a given ``num_groups``.
        """
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
        return slice_to_rows(part, to_rows).view(x.shape)

    def edge_softmax(self, source_scores: Tensor, target_scores: Tensor, negative_slope: float = 0.2) -> Tensor:
        """Turn scores into attention weights of this rank's chunk range, for all heads; all ranks call this together.

        The M ranks of a chunk range compute the same weights. Their gradients, which are those of a slice each, add up
        in the exchange of the scores' gradients.

        Args:
            source_scores: ``[num_sources, H]``.
            target_scores: ``[num_targets, H]``.
            negative_slope: Of the leaky ReLU.

        Raises:
            ValueError: A shape does not fit.
        """
        self._check(source_scores, "source_scores", (2,))
        self._check(target_scores, "target_scores", (2,))
        heads = source_scores.size(1)
        of_sources, of_targets = self._exchange(self._base, ((0, heads),) * self._base.num_groups)
        return edge_softmax(
            self._base.graph,
            rows_to_slice(source_scores, of_sources),
            rows_to_slice(target_scores, of_targets),
            negative_slope,
        )

    def gather(self, values: Tensor) -> Tensor:
        """Return rows of all ranks in the order of the vertices, on every rank; all ranks call this together.

        Args:
            values: This rank's rows, ``[num_targets, ...]``.
        """
        gathered = all_gather_rows(values, self.owners.counts, self.process_group)
        return gathered[self.owners.position.to(values.device)]

    def large_arrays(self) -> dict[str, Any]:
        """Return the graph and what has been made of it, by names that ranks which hold the same have in common."""
        ranges = {f"range {self.rank // groups} of {groups} groups": cut.graph for groups, cut in self._cuts.items()}
        derived = {str(key): made.large_arrays() for key, made in self.cache.items() if isinstance(made, RowShard)}
        return {"whole": self.whole, **ranges, **derived}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RowShard:
        """Return this: a shard lies where its rank computes.

        Raises:
            ValueError: Another device.
        """
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
    def _base(self) -> _Cut:
        """The chunk range that weights belong to."""
        return self._cut(self.plan.num_groups)

    def _groups(self, num_columns: int) -> int:
        """Return M for a layer."""
        if self._forced != "auto":
            check_groups(self.plan.num_groups, self.owners.num_ranks, num_columns)
        return max(groups for groups in divisors(self.plan.num_groups) if groups <= num_columns)

    def _cut(self, num_groups: int) -> _Cut:
        if num_groups not in self._cuts:
            with torch.inference_mode(False), torch.no_grad():
                self._cuts[num_groups] = self._make_cut(num_groups)
        return self._cuts[num_groups]

    def _make_cut(self, num_groups: int) -> _Cut:
        # Rank m + g * M is member g * (M / M') + m div M' of M' groups: of its own range, it takes a part.
        finer = self.plan.num_groups // num_groups
        ranges = []
        for start, stop in self.plan.chunk_ranges:
            parts = balance_ranges(self._runs.loads[start:stop], finer)
            ranges += [(int(self._runs.starts[start + a]), int(self._runs.starts[start + b])) for a, b in parts]
        position = self.owners.position.numpy()
        members = [chunk_range(self.whole, position, rows, len(ranges) == 1) for rows in ranges]
        member = self.rank // num_groups
        graph = cut_out(self.whole, position, ranges[member], members[member], self.settings)
        return _Cut(
            num_groups,
            graph.to(self.device),
            members[member].edges,
            self._sides(members, member, "sources"),
            self._sides(members, member, "targets"),
        )

    def _sides(self, members: list[ChunkRange], member: int, side: str) -> dict[str, Any]:
        offsets = self.owners.offsets
        own: list[Tensor | None] = []
        for part in members:
            positions = getattr(part, side)
            first, last = np.searchsorted(positions, offsets[self.rank : self.rank + 2])
            index = torch.from_numpy(positions[first:last] - offsets[self.rank])
            own.append(None if index.numel() == self.num_targets else index.to(self.device))
        counts = np.diff(np.searchsorted(getattr(members[member], side), offsets)).tolist()
        return {"own": own, "counts": counts, "num_rows": self.num_targets, "group": self.process_group}

    def _exchange(self, cut: _Cut, slices: tuple[tuple[int, int], ...]) -> tuple[Exchange, Exchange]:
        """Return the exchanges with the owners of the sources and of the targets."""
        key = (cut.num_groups, slices)
        if key not in self._exchanges:
            self._exchanges[key] = (
                Exchange(self.rank, slices, **cut.sources),
                Exchange(self.rank, slices, **cut.targets),
            )
        return self._exchanges[key]

    def _by_head(self, cut: _Cut, columns: Tensor, weight: Tensor, reduce: Reduce, channels: int) -> Tensor:
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

    def _once(self, name: Any, function: Callable[[], Made]) -> Made:
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
    """Cut a range of columns ``[H, C]`` into blocks of the same part of adjacent heads.

    Args:
        start: First column.
        stop: The column after the last.
        channels: C.

    Returns:
        First head, the one after the last, and columns of each of them; at most three blocks, in order.
    """
    blocks = []
    while start < stop:
        head, offset = divmod(start, channels)
        heads = (stop - start) // channels if offset == 0 else 0
        width = channels if heads else min(channels - offset, stop - start)
        heads = heads or 1
        blocks.append((head, head + heads, width))
        start += heads * width
    return blocks


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Where the forward rows of a graph may be cut: in front of a vertex, never between the parts of a hub.

    Args:
        starts: First row of each vertex's run, and the number of rows, int64 ``[V + 1]``.
        loads: Edges of each run, int64 ``[V]``.
    """

    starts: np.ndarray
    loads: np.ndarray

    @classmethod
    def of(cls, chunks: Chunks) -> RowRuns:
        """Find the runs."""
        rows, indptr = chunks.rows.numpy(), chunks.indptr.numpy()
        starts = np.flatnonzero(np.concatenate([rows[:1] >= 0, rows[1:] != rows[:-1], [True]]))
        return cls(starts, np.diff(indptr[starts]))


@dataclass(frozen=True, eq=False)
class ChunkRange:
    """The targets of a range of forward rows, and the sources of their edges.

    Args:
        targets: Positions in the order of the owners, ascending, int64.
        sources: The same of the sources; all vertices where they are so wanted.
        edges: First edge and the one after the last, in the whole graph's forward order.
    """

    targets: np.ndarray
    sources: np.ndarray
    edges: tuple[int, int]


def chunk_range(graph: CompressedGraph, position: np.ndarray, rows: tuple[int, int], all_sources: bool) -> ChunkRange:
    """Find the vertices of a range.

    Args:
        graph: The whole graph, on the CPU.
        position: Position of each vertex in the order of the owners, int64 ``[V]``.
        rows: First forward row and the one after the last.
        all_sources: Take all vertices for sources, used or not.
    """
    chunks = graph.forward
    edges = (int(chunks.indptr[rows[0]]), int(chunks.indptr[rows[1]]))
    targets = np.unique(position[chunks.rows.numpy()[rows[0] : rows[1]]])
    if all_sources:
        return ChunkRange(targets, np.arange(position.size), edges)
    used: np.ndarray = np.zeros(position.size, bool)
    used[position[chunks.entry_columns().numpy()[edges[0] : edges[1]]]] = True
    return ChunkRange(targets, np.flatnonzero(used), edges)


def cut_out(
    graph: CompressedGraph,
    position: np.ndarray,
    rows: tuple[int, int],
    part: ChunkRange,
    settings: PlanSettings,
) -> CompressedGraph:
    """Build the bipartite graph of a range, whose forward order is that part of the whole graph's.

    Its chunks are those of the whole graph, without what lies outside the range.

    Args:
        graph: The whole graph, on the CPU.
        position: Position of each vertex in the order of the owners, int64 ``[V]``.
        rows: First forward row and the one after the last.
        part: The result of :func:`chunk_range`.
        settings: Who executes its aggregations.
    """
    start, stop = part.edges
    target_of: np.ndarray = np.full(position.size, -1, np.int32)
    target_of[part.targets] = np.arange(part.targets.size)
    source_of: np.ndarray = np.full(position.size, -1, np.int32)
    source_of[part.sources] = np.arange(part.sources.size)

    whole = graph.forward
    first_row, last_row = rows
    forward = _rebuilt(
        source_of[position[whole.entry_columns().numpy()[start:stop]]],
        target_of[position[whole.rows.numpy()[first_row:last_row]]],
        whole.indptr.numpy()[first_row : last_row + 1] - start,
        np.clip(whole.row_ptr.numpy(), first_row, last_row) - first_row,
        part.targets.size,
        part.sources.size,
    )
    whole = graph.backward
    assert whole.edge_ids is not None
    places = whole.edge_ids.numpy()
    kept = (places >= start) & (places < stop)
    before: np.ndarray = np.concatenate([[0], np.cumsum(kept)])
    indptr = before[whole.indptr.numpy()]
    back_rows = source_of[position[whole.rows.numpy()]]
    # Rows of sources that the range does not need go, and of split hubs the parts that are left empty, but for one.
    present = (back_rows >= 0) & (np.diff(indptr) > 0)
    if not present.all():
        missing: np.ndarray = np.ones(part.sources.size, bool)
        missing[back_rows[present]] = False
        candidates = np.flatnonzero((back_rows >= 0) & ~present)
        candidates = candidates[missing[back_rows[candidates]]]
        _, once = np.unique(back_rows[candidates], return_index=True)
        present[candidates[once]] = True
    left: np.ndarray = np.concatenate([[0], np.cumsum(present)])
    backward = _rebuilt(
        target_of[position[whole.entry_columns().numpy()[kept]]],
        back_rows[present],
        np.concatenate([indptr[:-1][present], indptr[-1:]]),
        left[whole.row_ptr.numpy()],
        part.sources.size,
        part.targets.size,
    )
    edge_ids = torch.from_numpy((places[kept] - start).astype(np.int32 if stop - start < 2**31 else np.int64))
    return CompressedGraph(forward, replace(backward, edge_ids=edge_ids), settings=settings)


def _rebuilt(
    columns: np.ndarray, rows: np.ndarray, indptr: np.ndarray, row_ptr: np.ndarray, num_rows: int, num_columns: int
) -> Chunks:
    """Number the columns of each chunk anew; the entries keep their order."""
    row_ptr = np.unique(row_ptr)
    if row_ptr.size == 1:
        row_ptr = np.array([0, 0])
    first, last = indptr[:-1], indptr[1:]
    row_ptr = row_ptr.astype(np.int64)
    column_ptr = count_columns(columns, first, last, row_ptr, num_columns)
    chunks, _ = compress_columns(columns, rows, first, last, row_ptr, column_ptr, num_rows, num_columns)
    return chunks
