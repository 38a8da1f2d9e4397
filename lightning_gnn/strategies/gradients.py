"""The mean of all ranks' gradients, in one message per dtype."""

from __future__ import annotations

from collections.abc import Iterable
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
    by_kind: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for parameter in wanted:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"a parameter {list(parameter.shape)} has a sparse gradient, which ascend_hybrid does not reduce; "
                "use Embedding(sparse=False)"
            )
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for chosen in by_kind.values():
        _average(chosen, num_ranks, group)


def _average(parameters: list[Parameter], num_ranks: int, group: Any) -> None:
    here = [parameter.grad is not None for parameter in parameters]
    used = parameters[0].new_tensor([float(has) for has in here])
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([used, *(grad.detach().reshape(-1) for grad in grads)])
    dist.all_reduce(flat, group=group)
    used, flat = flat[: len(parameters)], flat[len(parameters) :].div_(num_ranks)
    # Reading the flags waits for the device, so only a rank that misses a gradient does.
    anywhere: list[bool] = here if all(here) else (used > 0).tolist()
    parts: tuple[Tensor, ...] = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part, has in zip(parameters, parts, anywhere, strict=True):
        if not has:
            continue
        if parameter.grad is None:
            parameter.grad = part.view_as(parameter).clone()
        else:
            parameter.grad.copy_(part.view_as(parameter))
