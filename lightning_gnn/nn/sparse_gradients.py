"""Sparse gradients where functions of torch take dense ones alone."""

from types import SimpleNamespace
from typing import Any

import torch


def with_values(optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer's parameters such that clipping reads and changes the values of sparse gradients.

    Rows that a sparse gradient lacks are zero: they count nothing in a norm, and stay zero when it is clipped.

    Returns:
        The optimizer itself if no gradient is sparse; else an object with its ``param_groups``.
    """
    found, sparse = [], False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or not parameter.grad.is_sparse:
                found.append(parameter)
                continue
            sparse = True
            parameter.grad = parameter.grad.coalesce()
            values = parameter.grad._values()
            stand_in = values.detach().requires_grad_()
            stand_in.grad = values
            found.append(stand_in)
    return SimpleNamespace(param_groups=[{"params": found}]) if sparse else optimizer
