"""Sums and means of all processes' gradients, in one message per dtype."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


def average_gradients(parameters: Iterable[Parameter], num_ranks: int, group: Any = None) -> None:
    """Replace each parameter's gradient by the mean over the ranks; all ranks call this together.

    A parameter without a gradient on one rank counts as zero there; without one on any rank, it stays without.

    Args:
        parameters: In the same order on all ranks; those that require no gradient are left out.
        num_ranks: N.
        group: Process group; None for the default one.

    Raises:
        ValueError: A sparse gradient.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in wanted:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"a parameter {list(parameter.shape)} has a sparse gradient, which ascend_hybrid does not reduce; "
                "use Embedding(sparse=False)"
            )
    for parameter, total in zip(wanted, sum_gradients([p.grad for p in wanted], wanted, group), strict=True):
        if total is None:
            continue
        if parameter.grad is None:
            parameter.grad = total / num_ranks
        else:
            torch.div(total, num_ranks, out=parameter.grad)


def sum_gradients(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], group: Any = None
) -> list[Tensor | None]:
    """Add up the gradients of all processes; what has none on any of them stays None. All call this together.

    Args:
        gradients: Of this process, one per parameter; sparse ones come out dense.
        parameters: In the same order on all processes; those that require no gradient are left as they are.
        group: Process group; None for the default one.
    """
    out: list[Tensor | None] = list(gradients)
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, parameter in enumerate(parameters):
        if parameter.requires_grad:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(place)
    for (dtype, device), places in by_kind.items():
        here = [gradients[place] is not None for place in places]
        parts = [torch.tensor(here, dtype=dtype, device=device)]
        for place in places:
            gradient = gradients[place]
            gradient = torch.zeros_like(parameters[place]) if gradient is None else gradient.detach()
            parts.append((gradient if gradient.layout == torch.strided else gradient.to_dense()).reshape(-1))
        flat = torch.cat(parts)
        dist.all_reduce(flat, group=group)
        used, *sums = torch.split(flat, [part.numel() for part in parts])
        # Reading the flags waits for the device, so only a process that misses a gradient does.
        anywhere: list[bool] = here if all(here) else (used > 0).tolist()
        for place, total, has in zip(places, sums, anywhere, strict=True):
            out[place] = total.view(parameters[place].shape) if has else None
    return out
