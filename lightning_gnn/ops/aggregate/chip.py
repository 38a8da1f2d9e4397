"""The functions of a backend by Ascend C kernels, on an NPU or on their twin.

The kernels read a graph in chunks, kept as long as it; numbers of edges are brought into their order and back.
"""

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
class _Chunked:
    """What is kept of a matrix for a chip: its layout, plans by what they are for, and its chunks for each kernel."""

    layout: ChipLayout
    plans: dict[Any, HybridPlan] = field(default_factory=dict)
    cuts: dict[str, list[Tensor]] = field(default_factory=dict)
    entries: dict[int, Entries] = field(default_factory=dict)


_known: MutableMapping[Tensor, _Chunked] = WeakIdKeyDictionary()


@dataclass
class Chip:
    """What ``reference.py`` here and in ``edge_softmax`` defines, by the kernels of a module."""

    kernels: Any  # npu or ascend_twin
    cores: int  # AI cores, unless settings say otherwise

    def plan(self, matrix: Matrix, num_columns: int, heads: int = 1) -> tuple[list[Tensor], HybridPlan]:
        """Return the chunks of an aggregation, cut as its plan wants them, and the plan, which names the kernel."""
        known, cores = _chunked(matrix), matrix.settings.num_workers or self.cores
        if matrix.settings.mode == "paper":
            return known.layout.chunks.tensors(), self._plan_cores(matrix, num_columns)
        key = num_columns, cores, matrix.settings, heads
        if key not in known.plans:
            given = num_columns, known.layout.chunks, matrix.settings, cores
            known.plans[key] = chip_plan.plan_chip(*given, heads=heads)
        plan = known.plans[key]
        if plan.kernel not in known.cuts:
            known.cuts[plan.kernel] = known.layout.chunks.recut(chip_plan.HEIGHT[plan.kernel]).tensors()
        return known.cuts[plan.kernel], plan

    def _plan_cores(self, matrix: Matrix, num_columns: int, one_group: bool = False) -> HybridPlan:
        """Plan by algorithm 1; ``one_group``: for results per edge, to which every column adds."""
        known, cores = _chunked(matrix), matrix.settings.num_workers or self.cores
        settings = replace(matrix.settings, num_groups=1) if one_group else matrix.settings
        key = num_columns, cores, settings
        if key not in known.plans:
            known.plans[key] = plan_cores(num_columns, known.layout.chunks.loads.cpu().numpy(), settings, cores)
        return known.plans[key]

    def aggregate(self, matrix: Matrix, x: Tensor, weight: Tensor | None, reduce: str) -> tuple[Tensor, Tensor]:
        """Reduce the weighted rows of ``x`` over the entries of each row."""
        if reduce == "max":
            if x.dtype != torch.float32:
                return reference.aggregate(matrix, x, weight, reduce)
            return maxima(self.kernels.launch, self._entries(matrix), x, weight)
        chunks, plan = self.plan(matrix, x.size(1) * x.size(2), x.size(1))
        function = self.kernels.aggregate_vector if plan.kernel == "vector" else self.kernels.aggregate_chunks
        cut = bounds(plan.slices), bounds(plan.chunk_ranges)
        out: tuple[Tensor, Tensor] = function(chunks, matrix.num_rows, x, _ordered(matrix, weight), reduce, *cut)
        return out

    def aggregate_max_backward(
        self, matrix: Matrix, grad: Tensor, best: Tensor, x: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Send the gradient of a maximum to the rows of ``x`` that attain it."""
        if x.dtype != torch.float32:
            return reference.aggregate_max_backward(matrix, grad, best, x, weight)
        return maxima_backward(self.kernels.launch, self._entries(matrix), grad, best, x, weight)

    def edge_products(
        self, matrix: Matrix, row_side: Tensor, column_side: Tensor, match: Match | None = None
    ) -> Tensor:
        """Take the dot product of both ends of each entry, per head; with ``match`` torch's operators do."""
        if match is not None:
            return reference.edge_products(matrix, row_side, column_side, match)
        chunks, plan = self._by_edge(matrix, row_side.size(1) * row_side.size(2))
        cut = bounds(plan.slices), bounds(plan.chunk_ranges)
        return _back(matrix, self.kernels.edge_products(chunks, row_side, column_side, None, None, *cut))

    def edge_softmax(self, matrix: Matrix, scores: Scores) -> Tensor:
        """Normalize ``exp(leaky_relu(row + column))`` over the entries of each row."""
        chunks, plan = self._by_edge(matrix, 1)
        return _back(matrix, self.kernels.edge_softmax(chunks, *scores, bounds(plan.chunk_ranges)))

    def edge_softmax_backward(self, matrix: Matrix, scores: Scores, attention: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of ``row + column`` of each entry from that of its normalized weight."""
        chunks, plan = self._by_edge(matrix, 1)
        given = *scores, _ordered(matrix, attention), _ordered(matrix, grad)
        return _back(matrix, self.kernels.edge_softmax_backward(chunks, *given, bounds(plan.chunk_ranges)))

    def edge_sums(self, matrix: Matrix, edge_ids: Tensor | None, values: Tensor) -> Tensor:
        """Add up numbers of the edges over the entries of each row."""
        chunks, plan = self._by_edge(matrix, 1)
        places = _chunked(matrix).layout.places
        ids = edge_ids if places is None else places if edge_ids is None else edge_ids[places]
        out: Tensor = self.kernels.edge_sums(chunks, matrix.num_rows, ids, values, bounds(plan.chunk_ranges))
        return out

    def _by_edge(self, matrix: Matrix, num_columns: int) -> tuple[list[Tensor], HybridPlan]:
        return _chunked(matrix).layout.chunks.tensors(), self._plan_cores(matrix, num_columns, one_group=True)

    def _entries(self, matrix: Matrix) -> Entries:
        """Return the rows as they are, for the kernels that go vertex by vertex."""
        known, cores = _chunked(matrix), matrix.settings.num_workers or self.cores
        if cores not in known.entries:
            # Detached: what is kept must not hold the tensor object by which it is known.
            known.entries[cores] = entries_of_edges([matrix.indptr, matrix.indices.detach()], cores)
        return known.entries[cores]


def _chunked(matrix: Matrix) -> _Chunked:
    known = _known.get(matrix.indices)
    if known is None:
        known = _known[matrix.indices] = _Chunked(layout_of(matrix.csr))
    return known


def _ordered(matrix: Matrix, values: Tensor | None) -> Tensor | None:
    """Bring numbers of the edges ``[num_edges, H]`` into the order of the chunks."""
    places = _chunked(matrix).layout.places
    return values if values is None or places is None else values.index_select(0, places)


def _back(matrix: Matrix, values: Tensor) -> Tensor:
    """Bring numbers of the edges ``[num_edges, H]`` from the order of the chunks into that of the rows."""
    places = _chunked(matrix).layout.places
    return values if places is None else torch.empty_like(values).index_copy_(0, places, values)


def bounds(pairs: tuple[tuple[int, int], ...]) -> list[int]:
    """Return ``(start, stop)`` pairs that follow one another as their bounds."""
    return [pairs[0][0], *(stop for _, stop in pairs)]
