"""Several optimizers as one, and sparse gradients where functions of torch take dense ones alone."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer


class SplitOptimizer(Optimizer):
    """Steps several optimizers, without a common parameter or a closure, where Lightning or a scheduler takes one."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts: tuple[Optimizer, ...] = ()
        groups = [group for part in parts for group in part.param_groups]
        super().__init__(groups, dict(parts[0].defaults))
        for part in parts:
            self.state.update(part.state)
        self.parts = parts
        self._share()

    def _share(self) -> None:
        """Let the optimizers work on this one's groups and state."""
        start = 0
        for part in self.parts:
            stop = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:stop], self.state
            start = stop

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers; return what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state of a checkpoint."""
        super().load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters that belong to none of the optimizers."""
        if self.parts:
            raise ValueError("add parameters to one of the optimizers, before SplitOptimizer puts them together")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}


def with_values(optimizer: torch.optim.Optimizer) -> Any:
    """Return ``param_groups`` in which the values of sparse gradients stand for tables, so that they are clipped."""
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
