"""Backend of Ascend C kernels, on an NPU or simulated, which read a graph as chunks and edge values in their order."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.compressed.builder import ChipLayout, layout_of
from lightning_gnn.compressed.hybrid_plan import HybridPlan, plan_cores
from lightning_gnn.ops.aggregate import chip_plan, reference
from lightning_gnn.ops.aggregate.chip_max import Entries, entries_of_edges, maxima, maxima_backward
from lightning_gnn.ops.aggregate.matrix import Match, Matrix, Scores


@dataclass(eq=False)
class _ChipCache:
    """Cached data of a matrix in one kind of chunks for a chip."""

    layout: ChipLayout
    plans: dict[Any, HybridPlan] = field(default_factory=dict)  # by settings
    chunks: dict[str, list[Tensor]] = field(default_factory=dict)  # by kernel
    entries: dict[int, Entries] = field(default_factory=dict)  # by number of cores


_caches: MutableMapping[Tensor, dict[str, _ChipCache]] = WeakIdKeyDictionary()


@dataclass
class Chip:
    """The functions of ``reference.py``, executed by the kernels of a module."""

    kernels: Any  # npu or ascend_twin
    cores: int  # AI cores, overridden by settings.num_workers

    def plan(self, matrix: Matrix, num_columns: int, heads: int = 1) -> tuple[list[Tensor], HybridPlan]:
        """Return an aggregation's chunks, cut to the height of its kernel, and its plan, which selects the kernel."""
        cached, cores = _get_cache(matrix), matrix.settings.num_workers or self.cores
        if matrix.settings.grouping == "paper":
            return cached.layout.chunks.tensors(), self._plan_cores(matrix, num_columns)
        key = num_columns, cores, matrix.settings, heads
        if key not in cached.plans:
            arguments = num_columns, cached.layout.chunks, matrix.settings, cores
            cached.plans[key] = chip_plan.plan_chip(*arguments, heads=heads)
        plan = cached.plans[key]
        if plan.kernel not in cached.chunks:
            cached.chunks[plan.kernel] = cached.layout.chunks.recut(chip_plan.HEIGHT[plan.kernel]).tensors()
        return cached.chunks[plan.kernel], plan

    def _plan_cores(self, matrix: Matrix, num_columns: int, one_group: bool = False) -> HybridPlan:
        """Plan by algorithm 1; ``one_group`` is for results per edge, which sum over all columns."""
        cached, cores = _get_cache(matrix), matrix.settings.num_workers or self.cores
        settings = replace(matrix.settings, num_groups=1) if one_group else matrix.settings
        key = num_columns, cores, settings
        if key not in cached.plans:
            cached.plans[key] = plan_cores(num_columns, cached.layout.chunks.loads.cpu().numpy(), settings, cores)
        return cached.plans[key]

    def aggregate(self, matrix: Matrix, x: Tensor, weight: Tensor | None, reduce: str) -> tuple[Tensor, Tensor]:
        """Reduce the weighted rows of ``x`` over the entries of each row."""
        if reduce == "max":
            if x.dtype != torch.float32:
                return reference.aggregate(matrix, x, weight, reduce)
            return maxima(self.kernels.launch, self._entries(matrix), x, weight)
        chunks, plan = self.plan(matrix, x.size(1) * x.size(2), x.size(1))
        function = self.kernels.aggregate_vector if plan.kernel == "vector" else self.kernels.aggregate_chunks
        ranges = bounds(plan.slices), bounds(plan.chunk_ranges)
        weight = _to_chunk_order(matrix, weight)
        out: tuple[Tensor, Tensor] = function(chunks, matrix.num_rows, x, weight, reduce, *ranges)
        return out

    def aggregate_max_backward(
        self, matrix: Matrix, grad: Tensor, best: Tensor, x: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Return the gradient of ``x``: that of each maximum, for the rows that attain it."""
        if x.dtype != torch.float32:
            return reference.aggregate_max_backward(matrix, grad, best, x, weight)
        return maxima_backward(self.kernels.launch, self._entries(matrix), grad, best, x, weight)

    def edge_products(
        self, matrix: Matrix, row_side: Tensor, column_side: Tensor, match: Match | None = None
    ) -> Tensor:
        """Compute the dot product of both ends of each entry, per head; ``match`` runs torch's operators."""
        if match is not None:
            return reference.edge_products(matrix, row_side, column_side, match)
        chunks, plan = self._plan_edges(matrix, row_side.size(1) * row_side.size(2))
        products = self.kernels.edge_products(chunks, row_side, column_side, bounds(plan.chunk_ranges))
        return _to_row_order(matrix, products)

    def edge_softmax(self, matrix: Matrix, scores: Scores) -> Tensor:
        """Normalize ``exp(leaky_relu(row + column))`` over the entries of each row."""
        chunks, plan = self._plan_edges(matrix, 1)
        return _to_row_order(matrix, self.kernels.edge_softmax(chunks, *scores, bounds(plan.chunk_ranges)))

    def edge_softmax_backward(self, matrix: Matrix, scores: Scores, attention: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of ``row + column`` of each entry from that of its normalized weight."""
        chunks, plan = self._plan_edges(matrix, 1)
        inputs = *scores, _to_chunk_order(matrix, attention), _to_chunk_order(matrix, grad)
        return _to_row_order(matrix, self.kernels.edge_softmax_backward(chunks, *inputs, bounds(plan.chunk_ranges)))

    def edge_sums(self, matrix: Matrix, edge_ids: Tensor | None, values: Tensor) -> Tensor:
        """Sum edge values over the entries of each row."""
        chunks, plan = self._plan_edges(matrix, 1)
        order = _get_cache(matrix).layout.places
        ids = edge_ids if order is None else order if edge_ids is None else edge_ids[order]
        out: Tensor = self.kernels.edge_sums(chunks, matrix.num_rows, ids, values, bounds(plan.chunk_ranges))
        return out

    def _plan_edges(self, matrix: Matrix, num_columns: int) -> tuple[list[Tensor], HybridPlan]:
        return _get_cache(matrix).layout.chunks.tensors(), self._plan_cores(matrix, num_columns, one_group=True)

    def _entries(self, matrix: Matrix) -> Entries:
        """Return the uncut rows, for kernels that process one vertex at a time."""
        cached, cores = _get_cache(matrix), matrix.settings.num_workers or self.cores
        if cores not in cached.entries:
            # Detached, because a cached reference to its own weak key would keep the entry alive.
            cached.entries[cores] = entries_of_edges([matrix.indptr, matrix.indices.detach()], cores)
        return cached.entries[cores]


def _get_cache(matrix: Matrix) -> _ChipCache:
    by_chunks, chunks = _caches.setdefault(matrix.indices, {}), matrix.settings.chunks
    if chunks not in by_chunks:
        by_chunks[chunks] = _ChipCache(layout_of(matrix, chunks))
    return by_chunks[chunks]


def _to_chunk_order(matrix: Matrix, values: Tensor | None) -> Tensor | None:
    """Permute edge values ``[num_edges, H]`` from the order of the rows to that of the chunks."""
    order = _get_cache(matrix).layout.places
    return values if values is None or order is None else values.index_select(0, order)


def _to_row_order(matrix: Matrix, values: Tensor) -> Tensor:
    """Permute edge values ``[num_edges, H]`` from the order of the chunks to that of the rows."""
    order = _get_cache(matrix).layout.places
    return values if order is None else torch.empty_like(values).index_copy_(0, order, values)


def bounds(pairs: tuple[tuple[int, int], ...]) -> list[int]:
    """Convert consecutive ``(start, stop)`` ranges to a list of their bounds."""
    return [pairs[0][0], *(stop for _, stop in pairs)]
