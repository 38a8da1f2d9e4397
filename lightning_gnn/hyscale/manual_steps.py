"""Manual optimisation in replicas: the trainers meet, and the main thread acts once on the main module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class ReplicaOptimizer:
    """Stands for one of the optimizers in a replica.

    Args:
        engine: Runs the trainers.
        module: The replica.
        number: Which optimizer.
    """

    def __init__(self, engine: Any, module: Any, number: int) -> None:
        self._engine = engine
        self._module = module
        self.number = number

    @property
    def original(self) -> Any:
        """The optimizer of the main module."""
        return self._engine.strategy._lightning_optimizers[self.number]

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step once, with the gradients of all trainers."""
        kind = "step" if closure is None else "step with closure"
        return self._engine.threads.meet(kind, self.number, kwargs, closure)

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients."""
        self._engine.threads.meet("zero_grad", self.number, kwargs)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only this optimizer's parameters have gradients."""
        self._module.toggle_optimizer(self)
        try:
            yield
        finally:
            self._module.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        """Be like the original otherwise."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.original, name)


class ReplicaScheduler:
    """Stands for one of the learning rate schedulers in a replica."""

    def __init__(self, engine: Any, number: int) -> None:
        self._engine = engine
        self.number = number

    def step(self, *args: Any) -> None:
        """Step once."""
        self._engine.threads.meet("scheduler", self.number, args)

    def __getattr__(self, name: str) -> Any:
        """Be like the original otherwise."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._engine.strategy.lr_scheduler_configs[self.number].scheduler, name)


def join_manual_steps(engine: Any, replica: int, module: Any) -> None:
    """Replace what a replica's ``training_step`` calls in manual optimisation.

    Args:
        engine: Runs the trainers.
        replica: Number of the replica.
        module: The replica.
    """
    strategy = engine.strategy
    toggled: dict[nn.Parameter, bool] = {}

    def optimizers(use_pl_optimizer: bool = True) -> Any:
        found = [ReplicaOptimizer(engine, module, number) for number in range(len(strategy._lightning_optimizers))]
        return found[0] if len(found) == 1 else found

    def lr_schedulers() -> Any:
        found = [ReplicaScheduler(engine, number) for number in range(len(strategy.lr_scheduler_configs))]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(loss: Tensor, **kwargs: Any) -> None:
        factor = engine.threads.meet("manual_backward", None, loss)
        loss.backward(**{**kwargs, "gradient": factor.to(loss.device, loss.dtype)})  # type: ignore[no-untyped-call]
        engine.threads.meet("end of manual_backward")

    def toggle_optimizer(optimizer: ReplicaOptimizer) -> None:
        ours = engine.replicas.counterpart(replica)
        for other in strategy.optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    mine = ours[id(parameter)]
                    if mine not in toggled:
                        toggled[mine] = mine.requires_grad
                        mine.requires_grad = False
        for group in optimizer.original.optimizer.param_groups:
            for parameter in group["params"]:
                mine = ours[id(parameter)]
                mine.requires_grad = toggled[mine]

    def untoggle_optimizer(optimizer: ReplicaOptimizer) -> None:
        for parameter, value in toggled.items():
            parameter.requires_grad = value
        toggled.clear()

    @contextmanager
    def toggled_optimizer(optimizer: ReplicaOptimizer) -> Iterator[None]:
        toggle_optimizer(optimizer)
        try:
            yield
        finally:
            untoggle_optimizer(optimizer)

    def clip_gradients(
        optimizer: ReplicaOptimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        engine.threads.meet("clip_gradients", optimizer.number, (gradient_clip_val, gradient_clip_algorithm))

    for function in (
        optimizers,
        lr_schedulers,
        manual_backward,
        toggle_optimizer,
        untoggle_optimizer,
        toggled_optimizer,
        clip_gradients,
    ):
        module.__dict__[function.__name__] = function
