"""The ``torch.library`` namespace of the package: one operator per hot path, one implementation per device."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from lightning_gnn.ascend_ops import build
from lightning_gnn.runtime.store import kept_folder

library = torch.library.Library("lightning_gnn", "DEF")  # type: ignore[no-untyped-call]
references = SimpleNamespace()  # the functions of all operators that are made of torch's own, by name
build.use_store(kept_folder)  # that package knows nothing of this one


def define(schema: str, function: Callable[..., Any] | None, fake: Callable[..., Any] | None = None) -> Any:
    """Define the operator ``lightning_gnn::…`` and return it.

    Args:
        function: What it does, in torch's own operators, on every device that registers no kernel of its own, or None:
            nothing.
        fake: Makes results of the right shape and dtype, for compilers; without, they cannot look through it.
    """
    name = schema.partition("(")[0]
    library.define(schema)  # type: ignore[no-untyped-call]
    if function is not None:
        # Below any device's own kernel, above the fallback: what runs on a device that this package does not know.
        library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        setattr(references, name, function)
    if fake is not None:
        # register_fake would do the same, but looks through all modules for its caller's: a tenth of a second.
        library.impl(name, fake, "Meta")  # type: ignore[no-untyped-call]
    return getattr(torch.ops.lightning_gnn, name).default


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
