"""How an operator over a whole graph gets its derivatives, whoever asks for them.

Every operator takes the tensors of a graph behind its own arguments, so that a compiler sees all that it reads; weights
are in the graph's forward order. ``torch.compile`` meets an operator of ``torch.library``. Otherwise an autograd
function with the same formulas calls it, for an operator alone knows neither ``torch.func`` nor forward mode, whose
tangents it would drop without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_gnn.graph.hybrid_plan import PlanSettings
from lightning_gnn.ops.aggregate.backends import (
    backend_name,
    bounds,
    chip_plan_of,
    chunk_tensors,
    operators,
    plan_of,
    runs_on_chip,
)
from lightning_gnn.ops.library import define, library

if TYPE_CHECKING:
    from lightning_gnn.graph.compress import CompressedGraph

_CHUNKS = ("rows", "row_ptr", "indptr", "local", "columns", "column_ptr")
_SCHEMA = ", ".join(
    [
        *(f"Tensor {name}" for name in _CHUNKS),
        *(f"Tensor backward_{name}" for name in _CHUNKS),
        "Tensor? backward_ids, int num_sources, int num_targets, str execution",
    ]
)
Graph = tuple[Any, ...]
"""The arguments in ``_SCHEMA``."""
_BACKWARD_IDS, _NUM_SOURCES, _NUM_TARGETS, _EXECUTION = range(12, 16)
NO_GRAPH = (None,) * 16
"""Gradients of these arguments."""


def graph_arguments(graph: CompressedGraph, backend: str | None) -> Graph:
    """Return a graph as the operators take it: both directions, places of backward entries, sizes,
    who executes them.
    """
    settings = graph.settings
    workers = settings.num_workers or 0
    execution = f"{backend_name(backend)} {workers} {settings.num_groups} {settings.bandwidth_ratio} {settings.mode}"
    directions = (*chunk_tensors(graph.forward), *chunk_tensors(graph.backward))
    return (*directions, graph.backward.edge_ids, graph.num_sources, graph.num_targets, execution)


@cache
def _executed(execution: str) -> tuple[str, PlanSettings]:
    backend, workers, groups, ratio, mode = execution.split(" ")
    num_groups: Any = groups if groups == "auto" else int(groups)
    return backend, PlanSettings(int(workers) or None, num_groups, float(ratio), mode)  # type: ignore[arg-type]


class Direction:
    """A direction of a graph as a backend's functions take it.

    Args:
        transposed: Rows are sources, not targets.
    """

    def __init__(self, graph: Graph, transposed: bool = False) -> None:
        self.chunks: list[Tensor] = list(graph[6:12] if transposed else graph[:6])
        self.num_rows: int = num_rows(graph, transposed)
        self._num_columns: int = num_rows(graph, not transposed)
        self.edge_ids: Tensor | None = graph[_BACKWARD_IDS] if transposed else None
        self._backend, self._settings = _executed(graph[_EXECUTION])
        self.functions = operators(self._backend, self.chunks[2].device)

    def plan(self, num_columns: int, one_group: bool = False) -> tuple[list[int], list[int]]:
        """Return the bounds of the groups' columns and of their members' chunks."""
        plan = plan_of(self.chunks, num_columns, self._settings, self._backend, one_group)
        return bounds(plan.slices), bounds(plan.chunk_ranges)

    def reduced(self, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
        """Return sums or means ``[num_rows, H, C]``, by the plan of whoever executes them."""
        num_columns = x.size(1) * x.size(2)
        chunks, function = self.chunks, self.functions.aggregate_chunks
        if runs_on_chip(chunks[2].device, self._backend) and self._settings.mode == "balanced":
            shape = self.num_rows, x.size(0)
            asked = num_columns, self._settings, self._backend
            chunks, plan = chip_plan_of(chunks, shape, *asked, heads=x.size(1))
            if plan.kernel == "vector":
                function = self.functions.aggregate_vector
        else:
            plan = plan_of(chunks, num_columns, self._settings, self._backend)
        out: Tensor = function(
            chunks, self.num_rows, x, weight, reduce, bounds(plan.slices), bounds(plan.chunk_ranges)
        )[0]
        return out

    def by_vertex(self, num_columns: int, heads: int) -> tuple[list[Tensor], list[int], list[int]]:
        """Return chunks and, as :meth:`plan` does, who does what, for what is done vertex by vertex on any device."""
        if not (runs_on_chip(self.chunks[2].device, self._backend) and self._settings.mode == "balanced"):
            return self.chunks, *self.plan(num_columns)
        shape = self.num_rows, self._num_columns
        asked = num_columns, self._settings, self._backend
        chunks, plan = chip_plan_of(self.chunks, shape, *asked, heads=heads, by_vertex=True)
        return chunks, bounds(plan.slices), bounds(plan.chunk_ranges)

    def ordered(self, weight: Tensor | None, permuted: Tensor | None) -> Tensor | None:
        """Return weights ``[E, H]`` in the order of this direction; ``permuted`` are those of the backward one."""
        if weight is None or self.edge_ids is None:
            return weight
        return in_order(weight, self.edge_ids) if permuted is None else permuted


def num_rows(graph: Graph, transposed: bool = False) -> int:
    """Return how many rows a result has."""
    count: int = graph[_NUM_SOURCES if transposed else _NUM_TARGETS]  # a symbol under a compiler
    return count


def num_edges(graph: Graph) -> int:
    """Return how many rows weights have."""
    local: Tensor = graph[3]
    return local.numel()


_AS_ONE = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Numbers of so many bytes."""


def in_order(weight: Tensor, edge_ids: Tensor) -> Tensor:
    """Take rows ``edge_ids`` of constant weights ``[E, H]``."""
    # Single numbers are taken several times faster than rows, so those of a few heads are taken as one.
    dtype = _AS_ONE.get(weight.size(1) * weight.element_size())
    if dtype is None or not weight.is_contiguous() or weight.storage_offset() % weight.size(1):
        return weight.index_select(0, edge_ids)
    whole = weight.detach().view(dtype).view(-1).index_select(0, edge_ids)
    return whole.view(-1, 1).view(weight.dtype)


class GraphOperator(torch.autograd.Function):
    """An operator with its formulas, which serve ``autograd``, ``torch.func`` and ``torch.compile`` alike.

    Subclasses have ``compute``, ``fake``, ``setup_context`` and ``backward``, of one signature, and :func:`register`.
    """

    by_head: int
    """How many of the first arguments have a row per vertex or edge, and heads next, ``[n, H, …]``."""
    operator: Callable[..., Any]
    call: Callable[..., Any]
    """Computes, with autograd."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Compute a batch as so many times the heads."""
        size = info.batch_size

        def folded(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            batched = value.unsqueeze(1) if dim is None else value.movedim(dim, 1)
            return batched.expand(-1, size, *batched.shape[2:]).flatten(1, 2)

        values = [folded(value, dim) for value, dim in zip(arguments[: cls.by_head], in_dims, strict=False)]
        out = cls.call(*values, *arguments[cls.by_head :])
        parts = out if isinstance(out, tuple) else (out,)
        # What nobody wanted is an empty vector.
        dims = tuple(1 if part.dim() > 1 else None for part in parts)
        parts = tuple(part.unflatten(1, (size, -1)) if part.dim() > 1 else part for part in parts)
        return (parts, dims) if isinstance(out, tuple) else (parts[0], dims[0])


def keep(
    ctx: Any, values: Sequence[Tensor | None], graph: Sequence[Any], backward: Sequence[Tensor | None] | None = None
) -> None:
    """Keep tensors and the graph for ``jvp``; the same, or those of ``backward`` in their places, for ``backward``."""
    # Autograd refuses tensors that were made in inference mode, as a graph may have been; they are constants.
    inference = any(tensor is not None and tensor.is_inference() for tensor in graph[:_NUM_SOURCES])
    ctx.graph = graph if inference else graph[_NUM_SOURCES:]
    ctx.save_for_backward(*(values if backward is None else backward), *graph[: -len(ctx.graph)])
    if forward_ad._current_level >= 0:  # there can be tangents; torch keeps these till the end
        ctx.save_for_forward(*values, *graph[: -len(ctx.graph)])


def kept(ctx: Any) -> tuple[tuple[Any, ...], Graph]:
    """Return the tensors that were kept, and the graph."""
    tensors = tuple(ctx.saved_tensors)
    count = len(tensors) - len(NO_GRAPH) + len(ctx.graph)
    return tensors[:count], (*tensors[count:], *ctx.graph)


Operator = TypeVar("Operator", bound=type[GraphOperator])


def register(schema: str) -> Callable[[Operator], Operator]:
    """Make a class's operator, ``lightning_gnn::…``."""

    def define_for(function: Operator) -> Operator:
        operator = define_over_graph(schema, function.compute, function.fake)  # type: ignore[attr-defined]

        with_autograd: Callable[..., Any] = function.apply

        def call(*arguments: Any) -> Any:
            return operator(*arguments) if torch.compiler.is_compiling() else with_autograd(*arguments)

        def forward(*arguments: Any) -> Any:
            return operator(*arguments)

        # Autograd asks for it at each call, which would take longer than a small aggregation.
        forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        function.operator = operator
        function.forward = staticmethod(forward)  # type: ignore[method-assign]
        function.call = staticmethod(call)
        name = operator.name()
        torch.library.register_autograd(name, function.backward, setup_context=function.setup_context, lib=library)
        return function

    return define_for


def define_over_graph(schema: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator over a graph, without derivatives, and return it."""
    arguments, _, result = schema.partition(") ->")
    return define(f"{arguments}, {_SCHEMA}) ->{result}", compute, fake)


def differentiated() -> bool:
    """Say, inside a ``backward``, whether what it computes is to be differentiated in turn."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
