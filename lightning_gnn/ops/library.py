"""The ``torch.library`` namespace of the package: one operator per hot path, one implementation per device."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

library = torch.library.Library("lightning_gnn", "DEF")  # type: ignore[no-untyped-call]


class Context:
    """What an autograd function keeps for its gradient, with types; not all have all of it."""

    save_for_backward: Callable[..., None]
    saved_tensors: tuple[Any, ...]  # tensors, or None
    needs_input_grad: tuple[bool, ...]
    rest: tuple[Any, ...]  # arguments that are no tensors
    chip: Any  # what executes the operator in place of torch's dispatcher, or None
    num_edge_tensors: int
    reduce: str
    mean: bool
    transposed: bool
    slope: float


def define(schema: str, function: Callable[..., Any] | None, fake: Callable[..., Any] | None = None) -> Any:
    """Define and return ``lightning_gnn::…``, ``function`` runs where a device has no kernel, ``fake`` in compilers."""
    name = schema.partition("(")[0]
    library.define(schema)  # type: ignore[no-untyped-call]
    if function is not None:
        # Below any device's own kernel, above the fallback: what runs on a device that this package does not know.
        library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    if fake is not None:
        # register_fake would do the same, but looks through all modules for its caller's: a tenth of a second.
        library.impl(name, fake, "Meta")  # type: ignore[no-untyped-call]
    return getattr(torch.ops.lightning_gnn, name).default


def differentiable_gradients(
    compute: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the gradients of ``compute(*inputs)``, made of torch's own operators, for ``create_graph=True``."""
    # Views, so that a tensor that is two of the inputs gets the gradient of each of them apart.
    views = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    some = [tensor for tensor, want in zip(views, wanted, strict=True) if want and tensor is not None]
    pairs = [(out, grad) for out, grad in zip(compute(*views), grads, strict=True) if grad.numel()]
    outs, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, some, given, create_graph=True, materialize_grads=True))
    return [next(found) if want else None for want in wanted]


def check_floating(place: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Raise unless all tensors that are given are floating and on the device of what ``place`` names."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating tensor, but is {kind}; convert it with .float()")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but {place} on {device}; move one of them with .to()")


def check_shapes(shapes: Mapping[str, tuple[Tensor | None, list[int]]]) -> None:
    """Raise a ValueError that names the first tensor, of those given, that does not have its shape."""
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, but is {list(tensor.shape)}")


@functools.cache
def triton_installed() -> bool:
    """Tell whether Triton is there; a CPU build of torch does not bring it along."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise  # something that Triton needs is missing: running slowly instead would hide it
        return False
    return True


def require_triton(what: str) -> None:
    """Raise a ValueError that says how to get Triton, which ``what`` needs, unless it is there."""
    if not triton_installed():
        raise ValueError(
            f"{what} needs the package triton, which CUDA builds of torch bring along: "
            "pip install 'lightning-gnn[gpu]' (Linux only)"
        )
