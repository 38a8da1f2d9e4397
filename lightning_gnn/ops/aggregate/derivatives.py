"""The operators under ``aggregate`` and ``edge_softmax``, and their derivatives.

A sum over the in-edges is differentiated by the same sum along the transpose and by the dot products of both ends of
every edge, which are differentiated by sums in turn: any number of times. A maximum and a softmax have a first
derivative only. Each operator takes the arrays of a graph behind its own arguments, so that a compiler sees all that it
reads; weights are in the graph's forward order. ``torch.compile`` meets an operator of ``torch.library``; otherwise an
autograd function with the same formulas calls it, which refuses forward mode where an operator would drop tangents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.ops.aggregate.backends import backend_name, functions_of
from lightning_gnn.ops.aggregate.matrix import Matrix
from lightning_gnn.ops.aggregate.reference import accumulator
from lightning_gnn.ops.library import define, library

if TYPE_CHECKING:
    from lightning_gnn.compressed.graph import CompressedGraph

_SCHEMA = "Tensor indptr, Tensor indices, int num_sources, str execution"


class Graph(NamedTuple):
    """A graph as the operators take it, behind their own arguments."""

    indptr: Tensor  # first entry of each target, int64 [num_targets + 1]
    indices: Tensor  # source of each entry, int32 [E]
    num_sources: int  # vertices that edges start from
    execution: str  # backend and settings in words: who executes

    @classmethod
    def of(cls, graph: CompressedGraph, backend: str | None) -> Graph:
        """Take a graph that ``backend`` is to aggregate over."""
        settings = graph.settings
        words = backend_name(backend), settings.num_workers or 0, settings.num_groups, settings.bandwidth_ratio
        execution = " ".join(map(str, (*words, settings.mode)))
        return cls(graph.forward.indptr, graph.forward.indices, graph.num_sources, execution)

    def num_rows(self, transposed: bool = False) -> int:
        """Return how many rows a result has; a symbol under a compiler."""
        return self.num_sources if transposed else self.indptr.size(0) - 1

    @property
    def num_edges(self) -> int:
        """How many rows weights have."""
        return self.indices.size(0)

    def direction(self, transposed: bool = False) -> tuple[Any, Matrix, Tensor | None]:
        """Return the functions that execute, the rows of a direction, and the forward places of their entries."""
        backend, settings = _executed(self.execution)
        functions = functions_of(backend, self.indices.device)
        matrix = Matrix(self.indptr, self.indices, self.num_sources, settings)
        if not transposed:
            return functions, matrix, None
        back = matrix.csr.transposed()
        return functions, Matrix(back.indptr, back.indices, back.num_columns, settings), back.edge_ids


NO_GRAPH = (None,) * len(Graph._fields)  # gradients of these arguments


@cache
def _executed(execution: str) -> tuple[str, PlanSettings]:
    backend, workers, groups, ratio, mode = execution.split(" ")
    num_groups: Any = groups if groups == "auto" else int(groups)
    return backend, PlanSettings(int(workers) or None, num_groups, float(ratio), mode)  # type: ignore[arg-type]


_AS_ONE = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # numbers of so many bytes


def in_order(weight: Tensor, edge_ids: Tensor) -> Tensor:
    """Take rows ``edge_ids`` of constant weights ``[E, H]``."""
    # Single numbers are taken several times faster than rows, so those of a few heads are taken as one.
    dtype = _AS_ONE.get(weight.size(1) * weight.element_size())
    if dtype is None or not weight.is_contiguous() or weight.storage_offset() % weight.size(1):
        return weight.index_select(0, edge_ids)
    whole = weight.detach().view(dtype).view(-1).index_select(0, edge_ids)
    return whole.view(-1, 1).view(weight.dtype)


class GraphOperator(torch.autograd.Function):
    """An operator with its formulas, which serve autograd, ``torch.func.grad`` and ``torch.compile`` alike.

    Subclasses have ``compute``, ``fake``, ``setup_context`` and ``backward``, of one signature, and :func:`register`.
    """

    operator: Callable[..., Any]
    call: Callable[..., Any]  # computes, with autograd


def keep(ctx: Any, values: Sequence[Tensor | None], graph: Sequence[Any]) -> None:
    """Keep tensors and the graph for ``backward``."""
    ctx.rest = graph[2:]
    ctx.save_for_backward(*values, *graph[:2])


def kept(ctx: Any) -> tuple[tuple[Any, ...], Graph]:
    """Return the tensors that were kept, and the graph."""
    *values, indptr, indices = ctx.saved_tensors
    return tuple(values), Graph(indptr, indices, *ctx.rest)


def refuse(what: str, instead: str) -> Any:
    """Raise: somebody asked for a second derivative of what has a first one only."""
    raise NotImplementedError(
        f"{what} has a first derivative only, but a second one was asked for, such as that of a gradient penalty; "
        f"{instead}, or detach the gradient"
    )


Operator = TypeVar("Operator", bound=type[GraphOperator])


def register(schema: str) -> Callable[[Operator], Operator]:
    """Make a class's operator, ``lightning_gnn::…``."""

    def define_for(function: Operator) -> Operator:
        arguments, _, result = schema.partition(") ->")
        compute, fake = function.compute, function.fake  # type: ignore[attr-defined]
        operator = define(f"{arguments}, {_SCHEMA}) ->{result}", compute, fake)
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


@register("graph_sum(Tensor x, Tensor? weight, Tensor? permuted, bool mean, bool transposed) -> Tensor")
class GraphSum(GraphOperator):
    """``y[i] = sum of weight[e] * x[j] over e = (j, i)``, or with ``transposed`` over ``e = (i, j)``.

    Args:
        x: ``[num_sources, H, C]``, transposed ``[num_targets, H, C]``.
        weight: ``[E, H]`` of the dtype of ``x``, or None; on the CPU float32 beside bfloat16 too, which makes float32.
        permuted: The same in the order of the backward direction, if they are constants that somebody keeps.
        mean: Divide the sums by the number of edges into the targets; not if transposed.
    """

    @staticmethod
    def compute(
        x: Tensor, weight: Tensor | None, permuted: Tensor | None, mean: bool, transposed: bool, *given: Any
    ) -> Tensor:
        """Compute without autograd."""
        graph = Graph(*given)
        num_rows = graph.num_rows(transposed)
        if x.numel() == 0 or num_rows == 0 or graph.num_edges == 0:
            return x.new_zeros(num_rows, *x.shape[1:], dtype=_product_type(x, weight))
        functions, matrix, edge_ids = graph.direction(transposed)
        if weight is not None and edge_ids is not None:
            weight = in_order(weight, edge_ids) if permuted is None else permuted
        # Without weights nothing tells the heads apart.
        table = x.reshape(x.size(0), 1, -1) if weight is None else x
        out: Tensor = functions.aggregate(matrix, table, weight, "mean" if mean else "sum")[0]
        return out.view(num_rows, *x.shape[1:])

    @staticmethod
    def fake(x: Tensor, weight: Any, permuted: Any, mean: bool, transposed: bool, *graph: Any) -> Tensor:
        """Return the shape."""
        return x.new_empty(Graph(*graph).num_rows(transposed), *x.shape[1:], dtype=_product_type(x, weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what derivatives need."""
        x, weight, permuted, ctx.mean, ctx.transposed, *graph = inputs
        # It forgets x, the largest tensor, unless the weights want a gradient.
        keeps_x = weight is not None and ctx.needs_input_grad[1]
        keep(ctx, (x if keeps_x else None, weight, permuted), graph)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Sum along the other direction; multiply both ends."""
        (x, weight, permuted), graph = kept(ctx)
        if ctx.mean:
            dtype = grad.dtype
            divisors = graph.indptr.diff().clamp(min=1).view(-1, 1, 1)
            grad = grad / divisors.to(torch.promote_types(dtype, torch.float32))
            # Of float16, whose small numbers end early, it stays wide where nothing forbids it.
            grad = grad if weight is None and dtype == torch.float16 else grad.to(dtype)
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = GraphSum.call(grad, weight, permuted, False, not ctx.transposed, *graph)
        if weight is not None and ctx.needs_input_grad[1]:
            ends = (x, grad) if ctx.transposed else (grad, x)
            grad_weight = GraphProducts.call(*ends, *graph)
        return grad_x, grad_weight, None, None, None, *NO_GRAPH


@register("graph_products(Tensor row_side, Tensor column_side) -> Tensor")
class GraphProducts(GraphOperator):
    """``p[e] = row_side[i] · column_side[j] for e = (j, i)``, per head.

    Args:
        row_side: ``[num_targets, H, C]``.
        column_side: ``[num_sources, H, C]``, of the same dtype; on the CPU also float32 beside bfloat16.
    """

    @staticmethod
    def compute(row_side: Tensor, column_side: Tensor, *given: Any) -> Tensor:
        """Compute without autograd."""
        graph = Graph(*given)
        if row_side.size(1) * row_side.size(2) == 0 or graph.num_edges == 0:
            return row_side.new_zeros(graph.num_edges, row_side.size(1), dtype=_product_type(row_side, column_side))
        functions, matrix, _ = graph.direction()
        products: Tensor = functions.edge_products(matrix, row_side, column_side)
        return products

    @staticmethod
    def fake(row_side: Tensor, column_side: Tensor, *graph: Any) -> Tensor:
        """Return the shape."""
        dtype = _product_type(row_side, column_side)
        return column_side.new_empty(Graph(*graph).num_edges, row_side.size(1), dtype=dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what derivatives need."""
        keep(ctx, inputs[:2], inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Sum the other end, weighted by the gradient."""
        (row_side, column_side), graph = kept(ctx)
        row_grad = column_grad = None
        if ctx.needs_input_grad[0]:
            row_grad = GraphSum.call(column_side, grad.contiguous(), None, False, False, *graph)
        if ctx.needs_input_grad[1]:
            column_grad = GraphSum.call(row_side, grad.contiguous(), None, False, True, *graph)
        return row_grad, column_grad, *NO_GRAPH


@register("graph_max(Tensor x, Tensor? weight) -> (Tensor, Tensor)")
class GraphMax(GraphOperator):
    """``y[i] = max of weight[e] * x[j] over e = (j, i)``, not rounded, and how many edges attain it.

    Args:
        x: ``[num_sources, H, C]``, float32 or float64, on the CPU also bfloat16.
        weight: ``[E, H]`` of the same dtype, float32 for bfloat16, or None.
    """

    @staticmethod
    def compute(x: Tensor, weight: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
        """Compute without autograd."""
        graph = Graph(*given)
        if x.numel() == 0 or graph.num_rows() == 0 or graph.num_edges == 0:
            nothing = x.new_zeros(graph.num_rows(), *x.shape[1:], dtype=accumulator(x.dtype))
            return nothing, nothing.clone()
        functions, matrix, _ = graph.direction()
        best, ties = functions.aggregate(matrix, x, weight, "max")
        return best, ties

    @staticmethod
    def fake(x: Tensor, weight: Tensor | None, *graph: Any) -> tuple[Tensor, Tensor]:
        """Return the shapes."""
        out = x.new_empty(Graph(*graph).num_rows(), *x.shape[1:], dtype=accumulator(x.dtype))
        return out, torch.empty_like(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the derivative needs."""
        best, ties = output
        ctx.mark_non_differentiable(ties)
        ctx.set_materialize_grads(False)
        keep(ctx, (best, ties, *inputs[:2]), inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        """Share the gradient out to the edges that attain the maximum."""
        if grad is None:
            return None, None, *NO_GRAPH
        (best, ties, x, weight), graph = kept(ctx)
        shares = (grad / ties.clamp(min=1)).to(best.dtype)
        wants_x, wants_weight = ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[1]
        grad_x, grad_weight = GraphMaxBackward.call(shares, best, x, weight, wants_x, wants_weight, *graph)
        return grad_x if wants_x else None, grad_weight if wants_weight else None, *NO_GRAPH


@register(
    "graph_max_backward(Tensor shares, Tensor best, Tensor x, Tensor? weight, bool wants_x, bool wants_weight)"
    " -> (Tensor, Tensor)"
)
class GraphMaxBackward(GraphOperator):
    """Gradients of a maximum, empty where not wanted.

    Args:
        shares: Gradient of each maximum by the edges that attain it, ``[num_targets, H, C]``.
        best: The maxima, ``[num_targets, H, C]``.
        x: ``[num_sources, H, C]``, float32 or float64, on the CPU also bfloat16.
        weight: ``[E, H]`` of the same dtype, float32 for bfloat16, or None.
        wants_x: Whether to compute that of ``x``.
        wants_weight: Whether to compute that of ``weight``.
    """

    @staticmethod
    def compute(
        shares: Tensor, best: Tensor, x: Tensor, weight: Tensor | None, wants_x: bool, wants_weight: bool, *given: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute without autograd."""
        grad_x, grad_weight = GraphMaxBackward.fake(shares, best, x, weight, wants_x, wants_weight, *given)
        graph, shares = Graph(*given), shares.contiguous()
        if x.numel() == 0 or shares.numel() == 0 or graph.num_edges == 0:
            return grad_x.zero_(), grad_weight.zero_()
        if wants_x:
            functions, matrix, edge_ids = graph.direction(transposed=True)
            ordered = None if weight is None or edge_ids is None else in_order(weight, edge_ids)
            grad_x = functions.aggregate_max_backward(matrix, shares, best, x, ordered)
        if wants_weight:
            functions, matrix, _ = graph.direction()
            grad_weight = functions.edge_products(matrix, shares, x, best, weight)
        return grad_x, grad_weight

    @staticmethod
    def fake(
        shares: Tensor, best: Tensor, x: Tensor, weight: Tensor | None, wants_x: bool, wants_weight: bool, *graph: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the shapes."""
        edges = best.new_empty(Graph(*graph).num_edges, x.size(1)) if wants_weight else best.new_empty(0)
        return x.new_empty(x.shape) if wants_x else x.new_empty(0), edges

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        refuse("aggregate(reduce='max')", "use reduce='sum' or 'mean'")


@register("graph_softmax(Tensor source, Tensor target, float slope) -> Tensor")
class GraphSoftmax(GraphOperator):
    """What :func:`~lightning_gnn.ops.edge_softmax` returns, ``[E, H]``.

    Args:
        source: ``[num_sources, H]``.
        target: ``[num_targets, H]``.
    """

    @staticmethod
    def compute(source: Tensor, target: Tensor, slope: float, *given: Any) -> Tensor:
        """Compute without autograd."""
        functions, matrix, _ = Graph(*given).direction()
        attention: Tensor = functions.edge_softmax(matrix, target, source, slope)
        return attention

    @staticmethod
    def fake(source: Tensor, target: Tensor, slope: float, *graph: Any) -> Tensor:
        """Return the shape."""
        return source.new_empty(Graph(*graph).num_edges, source.size(1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the derivative needs."""
        source, target, ctx.slope, *graph = inputs
        keep(ctx, (source, target, output), graph)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Compute both gradients at once."""
        (source, target, attention), graph = kept(ctx)
        wants = ctx.needs_input_grad[:2]
        grads = GraphSoftmaxBackward.call(source, target, attention, grad.contiguous(), ctx.slope, *wants, *graph)
        return *(g if want else None for g, want in zip(grads, wants, strict=True)), None, *NO_GRAPH


@register(
    "graph_softmax_backward(Tensor source, Tensor target, Tensor attention, Tensor grad, float slope,"
    " bool wants_source, bool wants_target) -> (Tensor, Tensor)"
)
class GraphSoftmaxBackward(GraphOperator):
    """Gradients of both scores, empty where not wanted."""

    @staticmethod
    def compute(
        source: Tensor,
        target: Tensor,
        attention: Tensor,
        grad: Tensor,
        slope: float,
        wants_source: bool,
        wants_target: bool,
        *given: Any,
    ) -> tuple[Tensor, Tensor]:
        """Compute without autograd."""
        graph = Graph(*given)
        functions, matrix, _ = graph.direction()
        scores = functions.edge_softmax_backward(matrix, target, source, slope, attention, grad)
        grad_source, grad_target = source.new_empty(0), source.new_empty(0)
        if wants_source:
            _, back, edge_ids = graph.direction(transposed=True)
            grad_source = functions.edge_sums(back, edge_ids, scores)
        if wants_target:
            grad_target = functions.edge_sums(matrix, None, scores)
        return grad_source, grad_target

    @staticmethod
    def fake(
        source: Tensor,
        target: Tensor,
        attention: Any,
        grad: Any,
        slope: Any,
        wants_source: bool,
        wants_target: bool,
        *_: Any,
    ) -> tuple[Tensor, ...]:
        """Return the shapes."""
        pairs = ((source, wants_source), (target, wants_target))
        return tuple(scores.new_empty(scores.shape if wanted else 0) for scores, wanted in pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        refuse("edge_softmax", "use a layer of PyG's own on the edge_index tensor")


def _product_type(x: Tensor, other: Tensor | None) -> torch.dtype:
    return x.dtype if other is None else torch.promote_types(x.dtype, other.dtype)
