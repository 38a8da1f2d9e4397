"""Combines several optimizers, and makes sparse gradients usable for functions that need dense gradients."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer


class SplitOptimizer(Optimizer):
    """Steps several optimizers as one for Lightning and schedulers; they share no parameters."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts: tuple[Optimizer, ...] = ()
        groups = [group for optimizer in parts for group in optimizer.param_groups]
        super().__init__(groups, dict(parts[0].defaults))
        for optimizer in parts:
            self.state.update(optimizer.state)
        self.parts = parts
        self._share_state()

    def _share_state(self) -> None:
        """Make the optimizers use this one's groups and state."""
        start = 0
        for optimizer in self.parts:
            stop = start + len(optimizer.param_groups)
            optimizer.param_groups, optimizer.state = self.param_groups[start:stop], self.state
            start = stop

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers, and return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.parts:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state of a checkpoint."""
        super().load_state_dict(state_dict)
        self._share_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise a ValueError: new parameters would belong to none of the optimizers."""
        if self.parts:
            raise ValueError("add parameters to one of the optimizers before SplitOptimizer combines them")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}


def densify_gradients(optimizer: torch.optim.Optimizer) -> Any:
    """Return ``param_groups`` with the values of sparse gradients in place of tables, for gradient clipping."""
    parameters, has_sparse = [], False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or not parameter.grad.is_sparse:
                parameters.append(parameter)
                continue
            has_sparse = True
            parameter.grad = parameter.grad.coalesce()
            values = parameter.grad._values()
            stand_in = values.detach().requires_grad_()
            stand_in.grad = values
            parameters.append(stand_in)
    return SimpleNamespace(param_groups=[{"params": parameters}]) if has_sparse else optimizer
