"""Attention layers on the edges of a mini-batch, without materializing messages per edge and channel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate_update import edge_order  # noqa: F401  defines the operators that sort edges
from lightning_gnn.ops.attention import numba, reference, triton
from lightning_gnn.ops.attention.reference import Attend, Layout
from lightning_gnn.ops.library import Context, check_shapes, define, differentiable_gradients, runs_triton


def attend(
    edges: list[Tensor],
    values: Tensor,
    side: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    factor: Tensor | None = None,
    negative_slope: float = 0.2,
    dynamic: bool = False,
) -> Tensor:
    """Sum the source values of each target and head, weighted by the softmax of the scores of the in-edges.

    A score is ``leaky_relu(side · value + target)`` (GAT, arXiv:1710.10903), or, if ``dynamic``, ``side ·
    leaky_relu(value + target)`` (GATv2, arXiv:2105.14491). With ``weight`` ``[heads * out, channels]`` all heads read
    the same values, and the sums are multiplied by it. The constant ``factor`` ``[E, heads]`` multiplies the attention.
    :class:`~lightning_gnn.ops.attention.reference.Attend` documents all shapes.
    """
    if weight is not None:
        if weight.size(0) % max(side.size(0), 1):
            raise ValueError(f"weight has {weight.size(0)} rows, which is not a multiple of {side.size(0)} heads")
        weight = weight.reshape(1, side.size(0), weight.size(0) // max(side.size(0), 1), weight.size(1))
    # A homogeneous layer is a single relation of a single node type.
    layout = Layout([edges[0].numel() - 1], [1], False)
    call = Attend(edges, values, side.unsqueeze(0), target, weight, factor, layout, negative_slope, dynamic)
    return _run(call, with_mass=False)[0]


def attend_relations(
    edges: list[Tensor],
    values: Tensor,
    side: Tensor,
    shift: Tensor,
    weight: Tensor,
    layout: Layout,
    factor: Tensor | None = None,
    negative_slope: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Sum the source values of each target and head over all relations; also return the sum of attention of each row.

    A row is a target and one of its relations; scores are ``leaky_relu(side · value + shift)``. The softmax is over the
    edges of a row (arXiv:1710.10903), or with ``layout.across`` over those of a target (arXiv:2003.01332).
    """
    return _run(Attend(edges, values, side, shift, weight, factor, layout, negative_slope), with_mass=True)


def attend_keys(
    edges: list[Tensor], query: Tensor, keys: Tensor, values: Tensor, factor: Tensor | None = None
) -> Tensor:
    """Sum the source values of each target and head, weighted by the softmax of ``query · key`` over the in-edges.

    The scores are those of dot-product attention (arXiv:2009.03509), scaled by the caller. ``query`` is ``[num_targets,
    heads, channels]``; ``keys`` and ``values`` are ``[num_sources, heads * channels]``.
    """
    layout = Layout([edges[0].numel() - 1], [1], True)
    shift = query.new_zeros(query.shape[:2])
    return _run(Attend(edges, values, query, shift, None, factor, layout, 1.0, keys=keys), with_mass=False)[0]


def with_self_loops(edges: list[Tensor], num_sources: int) -> list[Tensor]:
    """Return edges sorted by target in which each target that is a source ends with exactly one self-loop."""
    # The CPU's own leaves no unused entries, so that its number of edges is known only at run time.
    backend = (not torch.compiler.is_compiling() and _backend(edges[0].device)) or triton
    looped: list[Tensor] = backend.with_self_loops(edges, min(num_sources, edges[0].numel() - 1))
    return looped


def _backend(device: torch.device) -> Any:
    """Return the module of the kernels for a device, or None for the reference."""
    if device.type == "cpu":
        return numba
    return triton if runs_triton(device) else None


def _run(call: Attend, with_mass: bool) -> tuple[Tensor, Tensor]:
    _check(call)
    sizes = call.edges[1], call.values, call.side, call.side if call.weight is None else call.weight
    if _backend(call.values.device) is None or any(tensor.numel() == 0 for tensor in sizes):
        return _attend_by_reference(call)
    return _with_autograd(*call[1:5], call.keys, call, with_mass)


def _attend_by_reference(call: Attend) -> tuple[Tensor, Tensor]:
    """Run the reference in the dtype of the sides, without unused entries behind the edges; waits for the device."""
    (indptr, indices), factor, dtype = call.edges, call.factor, call.side.dtype
    count = int(indptr[-1])
    weight = None if call.weight is None else call.weight.to(dtype)
    wide = call._replace(values=call.values.to(dtype), shift=call.shift.to(dtype), weight=weight)
    wide = wide._replace(edges=[indptr, indices[:count]], factor=None if factor is None else factor[:count])
    out, mass = reference.attend(wide)
    return out.to(call.values.dtype), mass


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        values: Tensor,
        side: Tensor,
        shift: Tensor,
        weight: Tensor | None,
        keys: Tensor | None,
        call: Attend,
        with_mass: bool,
    ) -> tuple[Tensor, Tensor]:
        attend = _attend_in_graph if torch.compiler.is_compiling() else _backend(values.device).attend
        out, mass, *saved = attend(call, ctx.needs_input_grad[3], with_mass)
        ctx.rest = call.layout, call.slope, call.dynamic
        ctx.save_for_backward(*call[1:5], keys, call.factor, *saved, *call.edges)
        return out, mass

    @staticmethod
    def backward(ctx: Context, grad: Tensor, grad_mass: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, keys, factor, first, second, third, indptr, indices = ctx.saved_tensors
        wanted, rest = ctx.needs_input_grad[:5], (factor, *ctx.rest)
        call = Attend([indptr, indices], *inputs, *rest)._replace(keys=keys)
        if torch.is_grad_enabled():  # create_graph=True

            def compute(*inputs: Any) -> tuple[Tensor, Tensor]:
                call = Attend([indptr, indices], *inputs[:4], *rest)._replace(keys=inputs[4])
                return _attend_by_reference(call)

            grads = differentiable_gradients(compute, [*inputs, keys], wanted, [grad, grad_mass])
        else:
            run = _differentiate_in_graph if torch.compiler.is_compiling() else _backend(grad.device).attend_backward
            grads = run(call, grad.contiguous(), grad_mass.contiguous(), (first, second, third), [*wanted])
        return *grads, None, None


_with_autograd: Callable[..., tuple[Tensor, Tensor]] = _Attend.apply


# Compilers call operators, which take and return tensors, none of them twice; otherwise, they would only cost time.
def _attend_in_graph(call: Attend, keep: bool, with_mass: bool) -> tuple[Tensor, ...]:
    out, mass, *saved = torch.ops.lightning_gnn.attend(*_to_arguments(call), keep, with_mass)
    saved[0] = out if call.weight is None else saved[0]
    saved[1] = saved[1] if call.values.is_cpu else mass
    return out, mass, *saved


def _differentiate_in_graph(
    call: Attend, grad: Tensor, grad_mass: Tensor, saved: tuple[Tensor, ...], wanted: list[bool]
) -> list[Tensor | None]:
    grads = torch.ops.lightning_gnn.attend_backward(*_to_arguments(call), grad, grad_mass, [*saved], wanted)
    return [part if want else None for part, want in zip(grads, wanted, strict=True)]


def _to_arguments(call: Attend) -> tuple[Any, ...]:
    return *call[:6], *call.layout, *call[7:]


def _from_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        *inputs, targets, relations, across, slope, dynamic, keys = given[:12]
        layout = Layout(targets, relations, across)
        return function(Attend._make([*inputs, layout, slope, dynamic, keys]), *given[12:])

    return run


def _attend_by_device(call: Attend, keep: bool, with_mass: bool) -> list[Tensor]:
    out, mass, *saved = _backend(call.values.device).attend(call, keep, with_mass)
    return [out, mass, *(out.new_empty(0) if part is None or part is out or part is mass else part for part in saved)]


def _differentiate_by_device(
    call: Attend, grad: Tensor, grad_mass: Tensor, saved: list[Tensor], wanted: list[bool]
) -> list[Tensor]:
    grads = _backend(grad.device).attend_backward(call, grad, grad_mass, tuple(saved), wanted)
    return [grad.new_empty(0) if part is None else part.contiguous() for part in grads]


def _shapes(call: Attend, keep: bool, with_mass: bool) -> list[Tensor]:
    values, weight, num_rows = call.values, call.weight, call.layout.num_rows
    wide = torch.promote_types(values.dtype, torch.float32)
    _, heads, channels = call.side.shape
    columns = heads * (channels if weight is None else weight.size(2))
    keeps = weight is not None and (keep or not values.is_cpu)
    shapes = (
        (num_rows if weight is None else sum(call.layout.targets), columns),
        (num_rows, heads) if with_mass else 0,
        (num_rows, heads * channels) if keeps else 0,
        (call.edges[1].numel(), heads) if values.is_cpu else 0,  # attention
        (call.edges[1].numel() if values.is_cpu else num_rows, heads),  # signed attention, or logarithms
    )
    # On a CPU, all but rows of columns are float32 or wider.
    wider = (1, 3, 4) if values.is_cpu else (4,)
    return [values.new_empty(shape, dtype=wide if i in wider else values.dtype) for i, shape in enumerate(shapes)]


def _backward_shapes(call: Attend, grad: Tensor, grad_mass: Tensor, saved: object, wanted: list[bool]) -> list[Tensor]:
    wide = torch.promote_types(grad.dtype, torch.float32) if grad.is_cpu else grad.dtype
    dtypes = grad.dtype, wide, wide, wide, grad.dtype
    given = zip((*call[1:5], call.keys), wanted, dtypes, strict=True)
    return [grad.new_empty(0 if one is None or not want else one.shape, dtype=dtype) for one, want, dtype in given]


_ATTEND = (
    "Tensor[] edges, Tensor values, Tensor side, Tensor shift, Tensor? weight, Tensor? factor, SymInt[] targets,"
    " int[] relations, bool across, float slope, bool dynamic, Tensor? keys"
)
define(
    f"attend({_ATTEND}, bool keep, bool with_mass) -> Tensor[]",
    _from_arguments(_attend_by_device),
    _from_arguments(_shapes),
)
define(
    f"attend_backward({_ATTEND}, Tensor grad, Tensor grad_mass, Tensor[] saved, bool[] wanted) -> Tensor[]",
    _from_arguments(_differentiate_by_device),
    _from_arguments(_backward_shapes),
)


def _check(call: Attend) -> None:
    values, side, weight, layout = call.values, call.side, call.weight, call.layout
    if side.dim() != 3 or (weight is not None and (weight.dim() != 4 or call.dynamic)):
        raise ValueError(
            f"side must be [sides, heads, channels], but is {list(side.shape)}, and weight [relations, heads, out, "
            "channels]; dynamic attention scores values that are already multiplied, so its weight must be None"
        )
    backend = _backend(values.device) or numba
    dtypes = backend.DTYPES
    if values.dtype not in dtypes:
        raise TypeError(f"values must be {' or '.join(str(d)[6:] for d in dtypes)}, but is {values.dtype}")
    heads, channels = side.shape[1:]
    num_relations, columns = sum(layout.relations), heads * channels
    out = 0 if weight is None else weight.size(2)
    shapes = {
        "values": (values, [values.size(0), columns if weight is None else channels]),
        "side": (side, [layout.num_rows if layout.across else num_relations, heads, channels]),
        "shift": (call.shift, [layout.num_rows, columns if call.dynamic else heads]),
        "weight": (weight, [num_relations, heads, out, channels]),
        "factor": (call.factor, [call.edges[1].numel(), heads]),
        "keys": (call.keys, list(values.shape)),
    }
    check_shapes(shapes)
    # float16 and bfloat16 would round the factors of dropout; a CPU only reads and multiplies bfloat16.
    wide = torch.promote_types(values.dtype, torch.float32)
    wider = ("factor", "side", "shift", "weight") if backend is numba else ("factor",)
    for name, (tensor, _) in shapes.items():
        if tensor is not None and tensor.dtype not in (values.dtype, wide if name in wider else values.dtype):
            raise TypeError(f"{name} is {tensor.dtype}, but values is {values.dtype}; convert one of them")
    if backend is numba and values.dtype == torch.bfloat16 and call.keys is not None:
        raise TypeError("keys and values are bfloat16, which dot-product attention on a CPU does not support")
