"""One output of ``training_step`` from those of several trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float], device: torch.device) -> Tensor:
    """Return the weighted sum of the trainers' tensors, which is their mean where the weights add up to 1.

    Args:
        values: Of the trainers, of one shape, each on its own device.
        weights: As many.
        device: Where the result is to be.
    """
    return torch.stack([value.detach().to(device) * weight for value, weight in zip(values, weights, strict=True)]).sum(
        0
    )


def joined_entry(values: Sequence[Any], weights: Sequence[float], device: torch.device) -> Any:
    """Return one entry for all trainers: the mean of single numbers, the rows of tensors, else the first trainer's.

    Args:
        values: What each trainer returned under one name.
        weights: Their shares of the seeds.
        device: Where tensors are to be.
    """
    if not all(isinstance(value, Tensor) for value in values):
        return values[0]
    if all(value.dim() == 0 and value.is_floating_point() for value in values):
        return weighted_mean(values, weights, device)
    if all(value.dim() and value.shape[1:] == values[0].shape[1:] for value in values):
        return torch.cat([value.detach().to(device) for value in values])
    return values[0]
