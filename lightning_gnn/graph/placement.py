"""Where arrays lie: on a GPU, or in page-locked host memory that the GPU reads over PCIe."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from pytorch_lightning.utilities import rank_zero_warn

PLACES = ("auto", "device", "pinned")
_SHARE = 0.5
"""Of the free device memory, how much ``"auto"`` takes for one kind of data; the rest is the model's."""


class Pinnable(Protocol):
    """What can copy itself into page-locked memory: a tensor, a graph, a feature table."""

    def pin_memory(self) -> Pinnable:
        """Return the copy."""


P = TypeVar("P", bound=Pinnable)


def check_place(place: str, name: str) -> None:
    """Check the name of a place.

    Raises:
        ValueError: It is none of ``PLACES``.
    """
    if place not in PLACES:
        raise ValueError(f"{name}={place!r} is unknown; use one of {', '.join(PLACES)}")


def choose_place(place: str, num_bytes: int, device: torch.device, what: str) -> str:
    """Return ``"device"`` or ``"pinned"``; says so where ``"auto"`` finds the device too small.

    Args:
        place: One of ``PLACES``.
        num_bytes: Size of the data.
        device: The GPU.
        what: What to call the data in the message.
    """
    if place != "auto":
        return place
    if device.type == "cpu":
        return "device"
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes <= _SHARE * free:
        return "device"
    rank_zero_warn(
        f"{what} takes {num_bytes / 1e9:.2f} GB, more than half of the {free / 1e9:.2f} GB free on {device}: "
        "it stays in page-locked host memory"
    )
    return "pinned"


def pinned(data: P, num_bytes: int, device: torch.device, what: str) -> P:
    """Copy data into page-locked host memory; for the CPU, any memory will do.

    Args:
        data: What to copy.
        num_bytes: Its size.
        device: Who is to read it.
        what: What to call it in the message.

    Raises:
        RuntimeError: The system refused the memory; names the size and the fix.
    """
    if device.type == "cpu":
        return data
    try:
        return data.pin_memory()  # type: ignore[return-value]
    except RuntimeError as error:
        raise RuntimeError(
            f"page-locked memory for {what}, {num_bytes / 1e9:.2f} GB, was refused ({str(error).splitlines()[0]}); "
            "raise the limit (`ulimit -l`), free host memory, or place it on the device"
        ) from error
