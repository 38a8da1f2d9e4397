"""Public fused aggregate and update of a mini-batch layer, homogeneous or heterogeneous."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.backends import backend_name, chip_executor
from lightning_gnn.ops.aggregate.numba_rows import convert
from lightning_gnn.ops.aggregate_update import gcn_edges as aggregate_update_gcn_edges  # noqa: F401  defines the operator
from lightning_gnn.ops.aggregate_update import reference
from lightning_gnn.ops.aggregate_update import triton as aggregate_update_triton  # noqa: F401  registers the backends
from lightning_gnn.ops.aggregate_update.numba import aggregate_update as numba_update
from lightning_gnn.ops.aggregate_update.numba import puts_own_rows_beside
from lightning_gnn.ops.aggregate_update.reference import ReluDropout, Update
from lightning_gnn.ops.aggregate_update.rows import get_chip
from lightning_gnn.ops.aggregate_update.sums_ahead import find_sums, sort_edges
from lightning_gnn.ops.dropout import mixed_key
from lightning_gnn.ops.library import Context, check_floating, check_shapes, differentiable_gradients
from lightning_gnn.ops.products import multiplies_bfloat16

REDUCES = ("sum", "mean")
_MACS_PER_ELEMENT = 16  # approximate cost of aggregating one element, in multiply-adds of a dense product
_GPU_MACS_PER_ELEMENT = 35  # on an H100 in float32: 50 TFLOP/s and 2.85 TB/s
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

    HyScale's aggregate-and-update (section IV): the aggregated rows of a tile of targets are multiplied while they are
    in the cache. If it costs less, x is multiplied first. Differentiable any number of times with respect to all
    inputs except ``edge_weight``. Edges that are sorted by target, as returned by samplers, are not sorted again.

    Args:
        x: Features of the sources, floating ``[num_sources, in]``; the first ``num_targets`` rows are the targets.
        edge_index: Source and target of each edge, int64 ``[2, E]``, on the device of ``x``.
        weight: W, ``[out, in]``, in the dtype of ``x``.
        self_weight: S, with the dtype and shape of W, or None for no term of the targets themselves.
        bias: b, ``[out]``, in the dtype of ``x``, or None.
        num_targets: Number of targets; by default the number of sources.
        reduce: ``"sum"``, or ``"mean"``: the sum divided by the number of edges.
        edge_weight: Factor of each edge's features, floating ``[E]``, a constant.
        then: Apply ReLU and dropout to the result while it is in the cache.

    Returns:
        ``[num_targets, out]`` in the dtype of ``x`` or of autocast. float16 and bfloat16 are accumulated in float32.

    Raises:
        IndexError: An edge is outside the sources or targets (CPU). Other devices assert this asynchronously, like
            torch's own indexing.
        TypeError: A dtype is wrong.
        ValueError: A shape or device is wrong, ``reduce`` is unknown, or ``edge_weight`` requires a gradient.
    """
    num_targets = x.size(0) if num_targets is None else num_targets
    _check(x, edge_index, weight, self_weight, bias, num_targets, reduce, edge_weight)
    edge_weight = None if edge_weight is None else edge_weight.detach().to(x.dtype)
    if edge_weight is None:
        edges = sort_edges(x, edge_index, num_targets)
    else:
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
    """Run :func:`aggregate_update` with edges that are already checked and sorted by target."""
    self_weight, bias = (None if tensor is None else tensor.unsqueeze(0) for tensor in (self_weight, bias))
    layout = [edges[0].numel() - 1], [1], [0]
    return _run(Update(edges, x, weight.unsqueeze(0), self_weight, bias, *layout, mean, True), then)


class Relation(NamedTuple):
    """The edges of one edge type in a mini-batch."""

    source: int  # index of the source node type
    target: int  # index of the target node type
    edge_index: Tensor  # int64 [2, E], with ids within the node types


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

    The rows of ``x`` are the nodes of all types, each type's targets first. Relations must be sorted by target type.
    Targets of a type without sources have no self term. Differentiable any number of times.
    """
    num_types, width, columns = len(num_targets), weight.size(1), x.size(1)
    check_shapes(
        {
            "x": (x, [sum(num_sources), columns]),
            "weight": (weight, [len(relations), width, columns]),
            "self_weight": (self_weight, [num_types, width, columns]),
            "bias": (bias, [num_types, width]),
        }
    )
    if any(one.target > other.target for one, other in pairwise(relations)):
        raise ValueError("relations must be sorted by the type of their targets")
    for sources, targets in zip(num_sources, num_targets, strict=True):
        if self_weight is not None and 0 < sources < targets:
            raise ValueError(f"self_weight reads the rows of {targets} targets, but x has only {sources} for this type")
    edges, count = sort_relations(num_sources, num_targets, relations)
    own = [first if sources else -1 for first, sources in zip(_offsets(num_sources), num_sources, strict=True)]
    return _run(Update(edges, x, weight, self_weight, bias, list(num_targets), count, own, mean, True), then)


def sort_relations(
    num_sources: Sequence[int], num_targets: Sequence[int], relations: Sequence[Relation]
) -> tuple[list[Tensor], list[int]]:
    """Sort edges by target and relation; return [``indptr``, ``indices``] and the number of relations per node type."""
    target_types = [relation.target for relation in relations]
    count = [target_types.count(node_type) for node_type in range(len(num_targets))]
    sizes = [targets * rows for targets, rows in zip(num_targets, count, strict=True)]
    first_row, first_source = _offsets(sizes), _offsets(num_sources)
    # A target has one row per relation that ends in its type, in the order of the relations.
    rows_of = [first_row[target] + target_types[:number].count(target) for number, target in enumerate(target_types)]
    edges = torch.ops.lightning_gnn.relation_edges(
        [relation.edge_index for relation in relations],
        [num_sources[relation.source] for relation in relations],
        [num_targets[relation.target] for relation in relations],
        [first_source[relation.source] for relation in relations],
        rows_of,
        [count[node_type] for node_type in target_types],
        sum(sizes),
    )
    return edges, count


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


def _run(call: Update, then: ReluDropout | None) -> Tensor:
    device = call.x.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else call.x.dtype
    # A CPU computes in bfloat16 only if it multiplies faster in it, and never in float16.
    is_narrow = device != "cpu" or (dtype == torch.bfloat16 and multiplies_bfloat16())
    compute_dtype = dtype if is_narrow else torch.promote_types(dtype, torch.float32)
    if autocast or compute_dtype != call.x.dtype:
        # Parameters are rounded to bfloat16 in the operator, so that their gradients are float32.
        names = ("x",) if device == "cpu" and is_narrow else ("x", "weight", "self_weight", "bias")
        inputs: dict[str, Any] = {
            name: convert(tensor, compute_dtype) for name in names if (tensor := getattr(call, name)) is not None
        }
        with torch.autocast(device, enabled=False):
            out = _run(call._replace(**inputs), then)
        # Under autocast to bfloat16, float32 is not rounded, because the next layer would widen it again.
        return out if autocast and not is_narrow and dtype == torch.bfloat16 else out.to(dtype)
    if then is not None:
        call = call._replace(p=then.p, key=mixed_key(then.key))
    x, weight = call.x, call.weight
    if call.edges[1].numel() == 0 or x.numel() == 0 or sum(call.targets) * weight.size(1) == 0:
        return reference.aggregate_update(_in_dtype_of_x(call), False)[0]
    if _has_one_relation(call) and chip_executor(x.device, backend_name(None)) is not None:
        computed: Tensor = _run_outside_compiler(call)
        return computed
    return _with_autograd(*call[1:5], call)


class _AggregateUpdate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, self_weight: Tensor | None, bias: Tensor | None, call: Update
    ) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        # A chip has a fused kernel for a single relation; any other layer runs the general operator.
        ctx.chip = get_chip(x.device) if _has_one_relation(call) else None
        # Choose the cheaper order of sum and product, including the backward pass.
        if _has_one_relation(call) and ctx.chip is None:
            sizes = x.size(0), call.edges[0].numel() - 1, call.edges[1].numel()
            call = call._replace(aggregate_first=aggregates_first(*sizes, weight[0], wants_x, wants_weight))
        keep = call.aggregate_first and wants_weight
        # Aggregated rows are saved only if the gradient of the weight needs them.
        if ctx.chip is None:
            rounded = _in_dtype_of_x(call)
            given = find_sums(rounded, puts_own_rows_beside(rounded)) if x.is_cpu else None
            if given is None:
                out, aggregated = torch.ops.lightning_gnn.aggregate_update(*rounded, keep)
            else:
                out, aggregated = numba_update(rounded, keep, given)
            saved = [aggregated if keep else None]
        else:
            out, saved = ctx.chip.update(call, keep)
        # The result is saved only with a ReLU, whose gradient follows from its sign.
        ctx.rest, ctx.num_edge_tensors = call[5:], len(call.edges)
        ctx.save_for_backward(*call[1:5], None if call.p is None else out, *call.edges, *saved)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, self_weight, bias, result, *others = ctx.saved_tensors
        edges, saved = others[: ctx.num_edge_tensors], others[ctx.num_edge_tensors :]
        call, wanted = Update(edges, x, weight, self_weight, bias, *ctx.rest), list(ctx.needs_input_grad[:4])
        if torch.is_grad_enabled():  # create_graph=True

            def compute(*inputs: Any) -> tuple[Tensor]:
                return (reference.aggregate_update(_in_dtype_of_x(Update(edges, *inputs, *ctx.rest)), False)[0],)

            return *differentiable_gradients(compute, call[1:5], wanted, [grad]), None
        if ctx.chip is not None:
            grads = ctx.chip.backward(call, grad.contiguous(), saved, result, wanted)
        else:
            backward = torch.ops.lightning_gnn.aggregate_update_backward
            grads = backward(*_in_dtype_of_x(call), grad.contiguous(), saved[0], result, wanted)
        given = zip(grads, wanted, call[1:5], strict=True)
        return *(g.to(one.dtype) if want and one is not None else None for g, want, one in given), None


def _in_dtype_of_x(call: Update) -> Update:
    """Return the call with parameters rounded to bfloat16 if x is; any other mixture of dtypes is an error."""
    if call.x.dtype != torch.bfloat16:
        return call
    names = ("weight", "self_weight", "bias")
    return call._replace(**{name: one.to(call.x.dtype) for name in names if (one := getattr(call, name)) is not None})


_with_autograd: Callable[..., Tensor] = _AggregateUpdate.apply


def _has_one_relation(call: Update) -> bool:
    return call.relations == [1]


@torch.compiler.disable(reason="its kernels are launched from Python")  # type: ignore[no-untyped-call]
def _run_outside_compiler(call: Update) -> Tensor:
    """Run on a chip with a graph break in compilers."""
    return _with_autograd(*call[1:5], call)


def aggregates_first(
    num_sources: int, num_targets: int, num_edges: int, weight: Tensor, wants_x: bool, wants_weight: bool
) -> bool:
    """Return whether ``(A x) W^T`` costs less than ``A (x W^T)``, including the gradients that are requested."""
    wide, narrow = weight.size(1), weight.size(0)
    macs = _GPU_MACS_PER_ELEMENT if weight.is_cuda else _MACS_PER_ELEMENT
    elements, products = macs * num_edges, wide * narrow * (1 + wants_x + wants_weight)
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
    # Check the types of the arguments; with autocast the dtypes may differ.
    if reduce not in REDUCES:
        raise ValueError(f"reduce={reduce!r} is unknown; use one of {', '.join(REDUCES)}")
    parameters = {"weight": weight, "self_weight": self_weight, "bias": bias}
    check_floating("x", x.device, x=x, **parameters, edge_weight=edge_weight)
    for name, tensor in parameters.items():
        if tensor is not None and tensor.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{name} is {tensor.dtype}, but x is {x.dtype}; convert one of them")
    if not isinstance(edge_index, Tensor) or edge_index.dtype != torch.int64:
        got = edge_index.dtype if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise TypeError(f"edge_index must be an int64 tensor, but is {got}")
    if edge_index.device != x.device:
        raise ValueError(f"edge_index is on {edge_index.device}, but x is on {x.device}; move one of them with .to()")
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
    # Vertex ids are int32, and targets are the first rows of the sources.
    if num_targets < 0 or max(x.size(0), 2 * num_targets) > _INT32_MAX:
        raise ValueError(f"num_targets={num_targets} and {x.size(0)} sources are outside the range of int32 vertex ids")
    if self_weight is not None and num_targets > x.size(0):
        raise ValueError(
            f"self_weight reads the targets' own rows of x, but x has {x.size(0)} rows for {num_targets} targets; "
            "only without self_weight x may have fewer rows than targets"
        )
    # Edge weights are constants in the backward pass, so a requested gradient would be lost silently.
    if edge_weight is not None and edge_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "edge_weight requires a gradient, which aggregate_update does not compute; detach() it, or multiply the "
            "result of lightning_gnn.aggregate, which does, by the weight"
        )
