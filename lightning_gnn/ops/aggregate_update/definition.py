"""Aggregate and update in one operator: a layer of a mini-batch, with types or without, not through memory."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.backends import backend_name, runs_on_chip
from lightning_gnn.ops.aggregate_update import gcn_edges as aggregate_update_gcn_edges  # noqa: F401  defines the operator
from lightning_gnn.ops.aggregate_update import numba as aggregate_update_numba  # noqa: F401  registers the backends
from lightning_gnn.ops.aggregate_update import reference
from lightning_gnn.ops.aggregate_update import triton as aggregate_update_triton  # noqa: F401  registers the backends
from lightning_gnn.ops.aggregate_update.reference import ReluDropout, Update
from lightning_gnn.ops.aggregate_update.rows import chip_of
from lightning_gnn.ops.dropout import mixed_key
from lightning_gnn.ops.library import Context, check_floating, check_shapes, differentiable_gradients

REDUCES = ("sum", "mean")
_MACS_PER_ELEMENT = 16
"""Multiply-adds of a dense product in the time in which an aggregation reads and adds one element, about."""
_INT32_MAX = 2**31 - 1


def aggregate_update(
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor,
    self_weight: Tensor | None = None,
    bias: Tensor | None = None,
    num_targets: int | None = None,
    reduce: Literal["sum", "mean"] = "sum",
    edge_weight: Tensor | None = None,
    then: ReluDropout | None = None,
) -> Tensor:
    """Aggregate the in-neighbors of each target and multiply, ``(A x) W^T + x[:num_targets] S^T + b``.

    HyScale's aggregate-and-update (section IV): the aggregated rows of a tile of targets go into the product while they
    are in the cache. Where that costs less, x is multiplied first. Differentiable with respect to all but
    ``edge_weight``, any number of times. Edges that are sorted by target, as samplers give them, are not sorted again.

    Args:
        x: Features of the sources, floating ``[num_sources, in]``; the first ``num_targets`` are those of the targets.
        edge_index: Source and target of each edge, int64 ``[2, E]``, on the device of ``x``.
        weight: W, of the dtype of ``x``, ``[out, in]``.
        self_weight: S, of the dtype and shape of W, or None: no term for the targets themselves.
        bias: b, of the dtype of ``x``, ``[out]``, or None.
        num_targets: How many targets there are, by default as many as sources.
        reduce: ``"sum"``, or ``"mean"``: the sum divided by the number of edges.
        edge_weight: What each edge's features are multiplied with, floating ``[E]``; a constant.
        then: Apply ReLU and dropout to the result while it is in the cache.

    Returns:
        ``[num_targets, out]`` of the dtype of ``x`` (under autocast, of that dtype). float16 and bfloat16 are
        accumulated in float32.

    Raises:
        IndexError: On the CPU: an edge is outside the sources or targets. Other devices assert it, as torch's own
            indexing does, when they come to it.
        TypeError: A wrong dtype.
        ValueError: A wrong shape or device, an unknown ``reduce``, or an ``edge_weight`` that wants a gradient.
    """
    num_targets = x.size(0) if num_targets is None else num_targets
    _check(x, edge_index, weight, self_weight, bias, num_targets, reduce, edge_weight)
    edge_weight = None if edge_weight is None else edge_weight.detach().to(x.dtype)
    edges = torch.ops.lightning_gnn.edges_by_target(edge_index, x.size(0), num_targets, edge_weight)
    return update_by_edges(x, edges, weight, self_weight, bias, reduce == "mean", then)


def update_by_edges(
    x: Tensor,
    edges: list[Tensor],
    weight: Tensor,
    self_weight: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    then: ReluDropout | None = None,
) -> Tensor:
    """Do what :func:`aggregate_update` does with edges that are sorted by target, and checked, already."""
    self_weight, bias = (None if tensor is None else tensor.unsqueeze(0) for tensor in (self_weight, bias))
    layout = [edges[0].numel() - 1], [1], [0]
    return _run(Update(edges, x, weight.unsqueeze(0), self_weight, bias, *layout, mean, True), then)


class Relation(NamedTuple):
    """The edges of one type in a mini-batch."""

    source: int  # the number of the type that they come from
    target: int  # the number of the type that they reach
    edge_index: Tensor  # int64 [2, E], counted within the types


def relation_update(
    x: Tensor,
    num_sources: Sequence[int],
    num_targets: Sequence[int],
    relations: Sequence[Relation],
    weight: Tensor,
    self_weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean: bool = True,
    then: ReluDropout | None = None,
) -> Tensor:
    """Return ``sum_r (A_r x) W_r^T + x_t S_t^T + b_t`` for the targets of all types: R-GCN (arXiv:1703.06103, eq. 2).

    Nodes of all types are rows of ``x``, each type's targets first, and relations are sorted by type of target. Targets
    of a type without sources have no term of their own. Differentiable any number of times.
    """
    kinds, width, columns = len(num_targets), weight.size(1), x.size(1)
    check_shapes(
        {
            "x": (x, [sum(num_sources), columns]),
            "weight": (weight, [len(relations), width, columns]),
            "self_weight": (self_weight, [kinds, width, columns]),
            "bias": (bias, [kinds, width]),
        }
    )
    if any(one.target > other.target for one, other in pairwise(relations)):
        raise ValueError("relations must be sorted by the type of their targets")
    for sources, targets in zip(num_sources, num_targets, strict=True):
        if self_weight is not None and 0 < sources < targets:
            raise ValueError(f"self_weight reads the rows of {targets} targets, but there are {sources}")
    edges, count = sort_relations(num_sources, num_targets, relations)
    own = [first if sources else -1 for first, sources in zip(_starts(num_sources), num_sources, strict=True)]
    return _run(Update(edges, x, weight, self_weight, bias, list(num_targets), count, own, mean, True), then)


def sort_relations(
    num_sources: Sequence[int], num_targets: Sequence[int], relations: Sequence[Relation]
) -> tuple[list[Tensor], list[int]]:
    """Sort edges by target and relation; return ``indptr`` and ``indices``, and how many relations reach each type."""
    reached = [relation.target for relation in relations]
    count = [reached.count(kind) for kind in range(len(num_targets))]
    sizes = [targets * rows for targets, rows in zip(num_targets, count, strict=True)]
    first_row, first_source = _starts(sizes), _starts(num_sources)
    # The rows of a target are those of the relations that reach it, in their order.
    rows_of = [first_row[kind] + reached[:number].count(kind) for number, kind in enumerate(reached)]
    edges = torch.ops.lightning_gnn.relation_edges(
        [relation.edge_index for relation in relations],
        [num_sources[relation.source] for relation in relations],
        [num_targets[relation.target] for relation in relations],
        [first_source[relation.source] for relation in relations],
        rows_of,
        [count[kind] for kind in reached],
        sum(sizes),
    )
    return edges, count


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:kind]) for kind in range(len(sizes))]


def _run(call: Update, then: ReluDropout | None) -> Tensor:
    device = call.x.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else call.x.dtype
    if autocast or (device == "cpu" and dtype.itemsize < 4):
        # CPUs multiply and add in float32: 16 bits were measured to take longer.
        computed_in = torch.promote_types(dtype, torch.float32) if device == "cpu" else dtype
        names = ("x", "weight", "self_weight", "bias")
        given = {name: tensor.to(computed_in) for name in names if (tensor := getattr(call, name)) is not None}
        with torch.autocast(device, enabled=False):
            return _run(call._replace(**given), then).to(dtype)
    if then is not None:
        call = call._replace(p=then.p, key=mixed_key(then.key))
    x, weight = call.x, call.weight
    if call.edges[1].numel() == 0 or x.numel() == 0 or sum(call.targets) * weight.size(1) == 0:
        return reference.aggregate_update(call, False)[0]
    if _is_one(call) and runs_on_chip(x.device, backend_name(None)):
        computed: Tensor = _outside_compilers(call)
        return computed
    return _with_autograd(*call[1:5], call)


class _AggregateUpdate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, self_weight: Tensor | None, bias: Tensor | None, call: Update
    ) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        # A chip has a fused kernel for one relation; any other layer runs the general operator.
        ctx.chip = chip_of(x.device) if _is_one(call) else None
        # The order of the sum and the product is chosen by what is cheaper, the backward pass included.
        if _is_one(call) and ctx.chip is None:
            sizes = x.size(0), call.edges[0].numel() - 1, call.edges[1].numel()
            call = call._replace(aggregate_first=aggregates_first(*sizes, weight[0], wants_x, wants_weight))
        keep = call.aggregate_first and wants_weight
        # Aggregated rows are kept only if the gradient of the weight is computed from them.
        if ctx.chip is None:
            out, aggregated = torch.ops.lightning_gnn.aggregate_update(*call, keep)
            kept = [aggregated if keep else None]
        else:
            out, kept = ctx.chip.update(call, keep)
        # The result is saved only with a ReLU, whose gradient is read off its sign.
        ctx.rest, ctx.num_edge_tensors = call[5:], len(call.edges)
        ctx.save_for_backward(*call[1:5], None if call.p is None else out, *call.edges, *kept)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, self_weight, bias, result, *others = ctx.saved_tensors
        edges, kept = others[: ctx.num_edge_tensors], others[ctx.num_edge_tensors :]
        call, wanted = Update(edges, x, weight, self_weight, bias, *ctx.rest), list(ctx.needs_input_grad[:4])
        if torch.is_grad_enabled():  # create_graph=True

            def compute(*inputs: Any) -> tuple[Tensor]:
                return (reference.aggregate_update(Update(edges, *inputs, *ctx.rest), False)[0],)

            return *differentiable_gradients(compute, call[1:5], wanted, [grad]), None
        if ctx.chip is not None:
            grads = ctx.chip.backward(call, grad.contiguous(), kept, result, wanted)
        else:
            backward = torch.ops.lightning_gnn.aggregate_update_backward
            grads = backward(*call, grad.contiguous(), kept[0], result, wanted)
        return *(g if want else None for g, want in zip(grads, wanted, strict=True)), None


_with_autograd: Callable[..., Tensor] = _AggregateUpdate.apply


def _is_one(call: Update) -> bool:
    """Say whether this is a layer of one relation, which may multiply first."""
    return call.relations == [1]


@torch.compiler.disable(reason="its kernels are launched from Python")  # type: ignore[no-untyped-call]
def _outside_compilers(call: Update) -> Tensor:
    """Run on a chip; a compiler's graph ends before and goes on after."""
    return _with_autograd(*call[1:5], call)


def aggregates_first(
    num_sources: int, num_targets: int, num_edges: int, weight: Tensor, wants_x: bool, wants_weight: bool
) -> bool:
    """Say whether ``(A x) W^T`` costs less than ``A (x W^T)``, forward and wanted gradients together."""
    wide, narrow = weight.size(1), weight.size(0)
    elements, products = _MACS_PER_ELEMENT * num_edges, wide * narrow * (1 + wants_x + wants_weight)
    before = elements * wide * (1 + wants_x) + num_targets * products
    after = elements * narrow * (1 + (wants_x or wants_weight)) + num_sources * products
    return before <= after


def _check(
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor,
    self_weight: Tensor | None,
    bias: Tensor | None,
    num_targets: int,
    reduce: str,
    edge_weight: Tensor | None,
) -> None:
    # Check the types of the arguments; under autocast the dtypes may differ.
    if reduce not in REDUCES:
        raise ValueError(f"reduce={reduce!r} is unknown; use one of {', '.join(REDUCES)}")
    given = {"weight": weight, "self_weight": self_weight, "bias": bias}
    check_floating("x", x.device, x=x, **given, edge_weight=edge_weight)
    for name, tensor in given.items():
        if tensor is not None and tensor.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{name} is {tensor.dtype}, but x {x.dtype}; convert one of them")
    if not isinstance(edge_index, Tensor) or edge_index.dtype != torch.int64:
        got = edge_index.dtype if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise TypeError(f"edge_index must be an int64 tensor, but is {got}")
    if edge_index.device != x.device:
        raise ValueError(f"edge_index is on {edge_index.device}, but x on {x.device}; move one of them with .to()")
    # Check the shapes against each other.
    if x.dim() != 2 or weight.dim() != 2 or weight.size(1) != x.size(1):
        raise ValueError(
            f"x must be [num_sources, in] and weight [out, in], but they are {list(x.shape)} and {list(weight.shape)}"
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(f"edge_index must be [2, E], but is {list(edge_index.shape)}")
    check_shapes(
        {
            "self_weight": (self_weight, [*weight.shape]),
            "bias": (bias, [weight.size(0)]),
            "edge_weight": (edge_weight, [edge_index.size(1)]),
        }
    )
    # Vertices are counted with int32, and targets are the first rows of the sources.
    if num_targets < 0 or max(x.size(0), 2 * num_targets) > _INT32_MAX:
        raise ValueError(f"num_targets={num_targets} and {x.size(0)} sources: vertices are counted with 31 bits")
    if self_weight is not None and num_targets > x.size(0):
        raise ValueError(
            f"self_weight reads the targets' own rows of x, but there are {num_targets} targets and {x.size(0)} rows; "
            "without self_weight targets need no rows"
        )
    # Edge weights are constants for the backward pass, so that a wanted gradient would be lost.
    if edge_weight is not None and edge_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "edge_weight wants a gradient, which aggregate_update does not give; detach() it, or multiply the result "
            "of lightning_gnn.aggregate, which does, with the weight"
        )
