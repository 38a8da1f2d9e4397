"""The ``torch.library`` namespace of the package: one operator per hot path, one implementation per device."""

import functools

import torch

from lightning_gnn.ascend_ops import build
from lightning_gnn.runtime.store import kept_folder

library = torch.library.Library("lightning_gnn", "DEF")
build.use_store(kept_folder)  # that package knows nothing of this one


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
