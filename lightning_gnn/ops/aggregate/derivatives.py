"""Operators behind ``aggregate`` and ``edge_softmax``, and their derivatives.

The derivatives of a sum over in-edges are a sum over the transposed graph and dot products of both ends of every edge.
The derivatives of dot products are sums again, so that both are differentiable any number of times. A maximum and a
softmax have a first derivative only. Each operator takes the arrays of a graph after its own arguments, so that
compilers see all inputs. Weights ``[E, H]`` are in the graph's forward order; features are ``[num_sources, H, C]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.graph.csr import CSR
from lightning_gnn.ops.aggregate.backends import backend_name, functions_of
from lightning_gnn.ops.aggregate.matrix import Matrix, Scores
from lightning_gnn.ops.aggregate.reference import accumulation_dtype
from lightning_gnn.ops.library import Context, define

if TYPE_CHECKING:
    from lightning_gnn.compressed.graph import CompressedGraph


class Graph(NamedTuple):
    """A graph as the operators take it, after their own arguments."""

    indptr: Tensor  # first entry of each target, int64 [num_targets + 1]
    indices: Tensor  # source of each entry, int32 [E]
    num_sources: int  # vertices on the source side
    execution: str  # backend and settings, separated by spaces (_parse_execution)

    @classmethod
    def of(cls, graph: CompressedGraph, backend: str | None) -> Graph:
        """Convert a graph for aggregation by ``backend``."""
        settings = graph.settings
        fields = backend_name(backend), settings.num_workers or 0, settings.num_groups, settings.bandwidth_ratio
        execution = " ".join(map(str, (*fields, settings.grouping, settings.chunks)))
        return cls(graph.forward.indptr, graph.forward.indices, graph.num_sources, execution)

    def num_rows(self, transposed: bool = False) -> int:
        """Return the number of rows of a result, symbolic in a compiler."""
        return self.num_sources if transposed else self.indptr.size(0) - 1

    @property
    def num_edges(self) -> int:
        """Number of edges, the rows of weights."""
        return self.indices.size(0)

    def direction(self, transposed: bool = False) -> tuple[Any, Matrix]:
        """Return the backend's functions and the matrix of a direction, with the forward edge ids of a transpose."""
        backend, settings = _parse_execution(self.execution)
        functions = functions_of(backend, self.indices.device)
        rows = CSR(self.indptr, self.indices, self.num_sources)
        rows = rows.transposed() if transposed else rows
        return functions, Matrix(rows.indptr, rows.indices, rows.num_columns, rows.edge_ids, settings)


_FIELDS = len(Graph._fields)


@cache
def _parse_execution(execution: str) -> tuple[str, PlanSettings]:
    backend, workers, groups, ratio, *names = execution.split(" ")
    num_groups = groups if groups == "auto" else int(groups)
    return backend, PlanSettings(int(workers) or None, num_groups, float(ratio), *names)  # type: ignore[arg-type]


_DTYPE_BY_BYTES = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def permute_rows(weight: Tensor, edge_ids: Tensor) -> Tensor:
    """Return rows ``edge_ids`` of constant weights ``[E, H]``."""
    # index_select is several times faster on single elements than on rows, so a row of a few heads is viewed as one.
    dtype = _DTYPE_BY_BYTES.get(weight.size(1) * weight.element_size())
    if dtype is None or not weight.is_contiguous() or weight.storage_offset() % weight.size(1):
        return weight.index_select(0, edge_ids)
    whole = weight.detach().view(dtype).view(-1).index_select(0, edge_ids)
    return whole.view(-1, 1).view(weight.dtype)


def _define_operator(schema: str, compute: Callable[..., object], fake: Callable[..., object]) -> Callable[..., Any]:
    """Define an operator that takes the arrays of a graph last, from functions that take a :class:`Graph` last."""

    def pack_graph(function: Callable[..., object]) -> Callable[..., object]:
        return lambda *given: function(*given[:-_FIELDS], Graph(*given[-_FIELDS:]))

    arguments, _, result = schema.partition(") ->")
    schema = f"{arguments}, Tensor indptr, Tensor indices, int num_sources, str execution) ->{result}"
    operator: Callable[..., Any] = define(schema, pack_graph(compute), pack_graph(fake))
    return lambda *given: operator(*given[:-1], *given[-1])


def _sum(
    x: Tensor, weight: Tensor | None, permuted: Tensor | None, mean: bool, transposed: bool, graph: Graph
) -> Tensor:
    num_rows = graph.num_rows(transposed)
    if x.numel() == 0 or num_rows == 0 or graph.num_edges == 0:
        return x.new_zeros(num_rows, *x.shape[1:], dtype=_promoted_dtype(x, weight))
    functions, matrix = graph.direction(transposed)
    if weight is not None and matrix.edge_ids is not None:
        weight = permute_rows(weight, matrix.edge_ids) if permuted is None else permuted
    # Without weights all columns form a single head.
    table = x.reshape(x.size(0), 1, -1) if weight is None else x
    out: Tensor = functions.aggregate(matrix, table, weight, "mean" if mean else "sum")[0]
    return out.view(num_rows, *x.shape[1:])


def _products(row_side: Tensor, column_side: Tensor, graph: Graph) -> Tensor:
    if row_side.size(1) * row_side.size(2) == 0 or graph.num_edges == 0:
        return row_side.new_zeros(graph.num_edges, row_side.size(1), dtype=_promoted_dtype(row_side, column_side))
    functions, matrix = graph.direction()
    products: Tensor = functions.edge_products(matrix, row_side, column_side)
    return products


def _max(x: Tensor, weight: Tensor | None, graph: Graph) -> tuple[Tensor, Tensor]:
    if x.numel() == 0 or graph.num_rows() == 0 or graph.num_edges == 0:
        best, ties = _max_shapes(x, weight, graph)
        return best.zero_(), ties.zero_()
    functions, matrix = graph.direction()
    best, ties = functions.aggregate(matrix, x, weight, "max")
    return best, ties


def _max_shapes(x: Tensor, weight: Tensor | None, graph: Graph) -> tuple[Tensor, Tensor]:
    out = x.new_empty(graph.num_rows(), *x.shape[1:], dtype=accumulation_dtype(x.dtype))
    return out, torch.empty_like(out)


def _max_backward(
    shares: Tensor, best: Tensor, x: Tensor, weight: Tensor | None, wants_x: bool, wants_weight: bool, graph: Graph
) -> tuple[Tensor, Tensor]:
    """Return the gradients, empty if not requested; ``shares`` is the gradient of a maximum per tied edge."""
    grad_x, grad_weight = _max_backward_shapes(shares, best, x, weight, wants_x, wants_weight, graph)
    shares = shares.contiguous()
    if x.numel() == 0 or shares.numel() == 0 or graph.num_edges == 0:
        return grad_x.zero_(), grad_weight.zero_()
    if wants_x:
        functions, matrix = graph.direction(transposed=True)
        ordered = None if weight is None or matrix.edge_ids is None else permute_rows(weight, matrix.edge_ids)
        grad_x = functions.aggregate_max_backward(matrix, shares, best, x, ordered)
    if wants_weight:
        functions, matrix = graph.direction()
        grad_weight = functions.edge_products(matrix, shares, x, (best, weight))
    return grad_x, grad_weight


def _max_backward_shapes(
    shares: Tensor, best: Tensor, x: Tensor, weight: Tensor | None, wants_x: bool, wants_weight: bool, graph: Graph
) -> tuple[Tensor, Tensor]:
    edges = best.new_empty(graph.num_edges, x.size(1)) if wants_weight else best.new_empty(0)
    return x.new_empty(x.shape if wants_x else 0), edges


def _softmax(source: Tensor, target: Tensor, slope: float, graph: Graph) -> Tensor:
    functions, matrix = graph.direction()
    attention: Tensor = functions.edge_softmax(matrix, Scores(target, source, slope))
    return attention


def _softmax_backward(
    source: Tensor, target: Tensor, slope: float, attention: Tensor, grad: Tensor, graph: Graph
) -> tuple[Tensor, Tensor]:
    functions, matrix = graph.direction()
    edge_grads = functions.edge_softmax_backward(matrix, Scores(target, source, slope), attention, grad)
    _, back = graph.direction(transposed=True)
    return functions.edge_sums(back, back.edge_ids, edge_grads), functions.edge_sums(matrix, None, edge_grads)


graph_sum = _define_operator(
    "graph_sum(Tensor x, Tensor? weight, Tensor? permuted, bool mean, bool transposed) -> Tensor",
    _sum,
    lambda x, weight, permuted, mean, transposed, graph: x.new_empty(
        graph.num_rows(transposed), *x.shape[1:], dtype=_promoted_dtype(x, weight)
    ),
)
graph_products = _define_operator(
    "graph_products(Tensor row_side, Tensor column_side) -> Tensor",
    _products,
    lambda row_side, column_side, graph: column_side.new_empty(
        graph.num_edges, row_side.size(1), dtype=_promoted_dtype(row_side, column_side)
    ),
)
graph_max = _define_operator("graph_max(Tensor x, Tensor? weight) -> (Tensor, Tensor)", _max, _max_shapes)
_graph_max_backward = _define_operator(
    "graph_max_backward(Tensor shares, Tensor best, Tensor x, Tensor? weight, bool wants_x, bool wants_weight)"
    " -> (Tensor, Tensor)",
    _max_backward,
    _max_backward_shapes,
)
graph_softmax = _define_operator(
    "graph_softmax(Tensor source, Tensor target, float slope) -> Tensor",
    _softmax,
    lambda source, target, slope, graph: source.new_empty(graph.num_edges, source.size(1)),
)
_graph_softmax_backward = _define_operator(
    "graph_softmax_backward(Tensor source, Tensor target, float slope, Tensor attention, Tensor grad)"
    " -> (Tensor, Tensor)",
    _softmax_backward,
    lambda source, target, *_: (torch.empty_like(source), torch.empty_like(target)),
)


def _save(ctx: Context, graph: Graph, *values: Tensor | None) -> None:
    ctx.save_for_backward(*graph[:2], *values)
    ctx.rest = graph[2:]


def _load_saved(ctx: Context) -> tuple[Any, ...]:
    indptr, indices, *values = ctx.saved_tensors
    return Graph(indptr, indices, *ctx.rest), *values


def _promoted_dtype(x: Tensor, other: Tensor | None) -> torch.dtype:
    return x.dtype if other is None else torch.promote_types(x.dtype, other.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor | None,
        permuted: Tensor | None,
        mean: bool,
        transposed: bool,
        graph: Graph,
    ) -> Tensor:
        # x, the largest tensor, is saved only for the gradient of the weights.
        saves_x = weight is not None and ctx.needs_input_grad[1]
        _save(ctx, graph, x if saves_x else None, weight, permuted)
        ctx.mean, ctx.transposed = mean, transposed
        out: Tensor = graph_sum(x, weight, permuted, mean, transposed, graph)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        graph, x, weight, permuted = _load_saved(ctx)
        if ctx.mean:
            dtype = grad.dtype
            divisors = graph.indptr.diff().clamp(min=1).view(-1, 1, 1)
            grad = grad / divisors.to(torch.promote_types(dtype, torch.float32))
            # float16 would underflow; without weights the gradient can stay in float32.
            grad = grad if weight is None and dtype == torch.float16 else grad.to(dtype)
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = sum_over_edges(grad, weight, permuted, False, not ctx.transposed, graph)
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = _products_of_ends(*((x, grad) if ctx.transposed else (grad, x)), graph)
        return grad_x, grad_weight, None, None, None, None


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, row_side: Tensor, column_side: Tensor, graph: Graph) -> Tensor:
        _save(ctx, graph, row_side, column_side)
        products: Tensor = graph_products(row_side, column_side, graph)
        return products

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        graph, row_side, column_side = _load_saved(ctx)
        row_grad = column_grad = None
        if ctx.needs_input_grad[0]:
            row_grad = sum_over_edges(column_side, grad.contiguous(), None, False, False, graph)
        if ctx.needs_input_grad[1]:
            column_grad = sum_over_edges(row_side, grad.contiguous(), None, False, True, graph)
        return row_grad, column_grad, None


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor | None, graph: Graph) -> Tensor:
        best: Tensor
        best, ties = graph_max(x, weight, graph)
        _save(ctx, graph, best, ties, x, weight)
        return best

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        graph, best, ties, x, weight = _load_saved(ctx)
        shares = (grad / ties.clamp(min=1)).to(best.dtype)
        wants = ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[1]
        names = "aggregate(reduce='max')", "use reduce='sum' or 'mean'"
        grads = _first_derivative(*names, _graph_max_backward, shares, best, x, weight, *wants, graph)
        return *(grad if want else None for grad, want in zip(grads, wants, strict=True)), None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, source: Tensor, target: Tensor, slope: float, graph: Graph) -> Tensor:
        attention: Tensor = graph_softmax(source, target, slope, graph)
        _save(ctx, graph, source, target, attention)
        ctx.slope = slope
        return attention

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        graph, source, target, attention = _load_saved(ctx)
        names = "edge_softmax", "use a layer of PyG's own on the edge_index tensor"
        inputs = source, target, ctx.slope, attention, grad.contiguous()
        return *_first_derivative(*names, _graph_softmax_backward, *inputs, graph), None, None


class _FirstDerivative(torch.autograd.Function):
    """Computes a first derivative; differentiating it again raises an error that names an alternative."""

    @staticmethod
    def forward(ctx: Context, name: str, alternative: str, compute: Callable[..., Any], *inputs: object) -> Any:
        ctx.rest = name, alternative
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Context, *_: Tensor) -> NoReturn:
        name, alternative = ctx.rest
        raise NotImplementedError(
            f"{name} has a first derivative only, but a second one was requested, such as for a gradient penalty; "
            f"{alternative}, or detach the gradient"
        )


_first_derivative: Callable[..., tuple[Tensor, Tensor]] = _FirstDerivative.apply
sum_over_edges: Callable[..., Tensor] = _Sum.apply
"""``y[i] = sum of weight[e] * x[j] over e = (j, i)``, or if ``transposed`` over ``e = (i, j)``.

``permuted`` holds constant weights in the order of the backward direction, or None. ``mean`` divides by the number of
edges if not ``transposed``. On the CPU, bfloat16 ``x`` with float32 weights gives float32.
"""
_products_of_ends: Callable[..., Tensor] = _Products.apply  # p[e] = row_side[i] · column_side[j], e = (j, i), per head
max_over_edges: Callable[..., Tensor] = _Max.apply  # y[i] = max of weight[e] * x[j] over e = (j, i), not rounded
softmax_over_edges: Callable[..., Tensor] = _Softmax.apply
