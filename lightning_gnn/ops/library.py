"""The ``torch.library`` namespace of the package: one operator per hot path, one implementation per device."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.runtime.kernels import say_when_compiling
from lightning_gnn.runtime.store import say_once

library = torch.library.Library("lightning_gnn", "DEF")  # type: ignore[no-untyped-call]


class Context:
    """Typed view of an autograd context; each autograd function uses some of these fields."""

    save_for_backward: Callable[..., None]
    saved_tensors: tuple[Any, ...]  # tensors, or None
    needs_input_grad: tuple[bool, ...]
    rest: tuple[Any, ...]  # non-tensor arguments
    chip: Any  # executor on an Ascend chip, used instead of torch's dispatcher, or None
    num_edge_tensors: int
    reduce: str
    mean: bool
    transposed: bool
    slope: float


def define(schema: str, function: Callable[..., Any] | None, fake: Callable[..., Any] | None = None) -> Any:
    """Define and return ``lightning_gnn::…``; ``function`` is every device's fallback, ``fake`` serves compilers."""
    name = schema.partition("(")[0]
    library.define(schema)  # type: ignore[no-untyped-call]
    if function is not None:
        # Kernels registered for a device take precedence over this one, which runs on every other device.
        library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    if fake is not None:
        torch.library.register_fake(f"lightning_gnn::{name}", fake, lib=library)
    return getattr(torch.ops.lightning_gnn, name).default


def is_traced() -> bool:
    """Return whether ``torch.compile`` traces, and not ``torch.export``, whose programs run without this package."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def differentiable_gradients(
    compute: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return differentiable gradients of ``compute(*inputs)``, for ``create_graph=True``."""
    # Views keep the gradients separate if one tensor is passed as two inputs.
    views = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    sources = [tensor for tensor, want in zip(views, wanted, strict=True) if want and tensor is not None]
    pairs = [(out, grad) for out, grad in zip(compute(*views), grads, strict=True) if grad.numel()]
    outs, out_grads = zip(*pairs, strict=True)
    computed = iter(torch.autograd.grad(outs, sources, out_grads, create_graph=True, materialize_grads=True))
    return [next(computed) if want else None for want in wanted]


def check_floating(owner: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Raise unless all given tensors are floating and on ``device``, the device of ``owner``."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating tensor, but is {got}; convert it with .float()")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but {owner} is on {device}; move one of them with .to()")


def check_shapes(shapes: Mapping[str, tuple[Tensor | None, list[int]]]) -> None:
    """Raise a ValueError that names the first tensor with a wrong shape; tensors that are None are skipped."""
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, but is {list(tensor.shape)}")


_EXTENSION = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "lightning_gnn_probe"};
PyMODINIT_FUNC PyInit_lightning_gnn_probe(void) { return PyModule_Create(&module); }
"""


@functools.cache
def triton_obstacle() -> str | None:
    """Return why Triton cannot be used, and what to install; None if it can. A GPU also needs a C compiler."""
    try:
        import triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise  # a dependency of Triton is missing; falling back to a slower path would hide that
        return "the package triton is not installed: pip install 'lightning-gnn[gpu]' (Linux only)"
    if not torch.cuda.is_available():
        return None
    try:  # as Triton does at its first launch
        from triton.runtime.build import compile_module_from_src

        compile_module_from_src(_EXTENSION, "lightning_gnn_probe")
        triton.runtime.driver.active.get_current_target()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"Triton cannot build its launcher: {reason} Install gcc and Python.h: apt install gcc python3-dev"
    say_when_compiling()
    return None


@torch.compiler.assume_constant_result
def runs_triton(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device: a GPU, or the CPU with Triton's interpreter."""
    if device.type == "cuda" and torch.cuda.is_available():
        if (obstacle := triton_obstacle()) is not None:
            say_once(f"No Triton kernels on the GPU, so that torch's slower operators run: {obstacle}")
        return obstacle is None
    if device.type != "cpu" or triton_obstacle() is not None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)
