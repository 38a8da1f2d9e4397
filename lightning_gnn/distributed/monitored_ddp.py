"""Lightning's DDP with heartbeats: a rank that dies or stands still ends the run, and is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_gnn.distributed.heartbeat import BLAME_GRACE_S, check_stall_timeout
from lightning_gnn.distributed.monitored_ranks import MonitoredRanks, RankOptions
from lightning_gnn.runtime.lightning import DDPStrategy, _StrategyRegistry, reset_seed
from lightning_gnn.runtime.messages import keywords_of

_Step = TypeVar("_Step", bound=Callable[..., Any])


def _monitored(step: _Step) -> _Step:
    """Monitor a step of the strategy: the rank counts as hanging if it exceeds ``stall_timeout``."""

    @wraps(step)
    def run(self: MonitoredDDPStrategy, *args: object, **kwargs: object) -> Any:
        with self._working(step.__name__):
            return step(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class MonitoredDDPStrategy(MonitoredRanks, DDPStrategy):
    """Lightning's ``"ddp"`` that ends all ranks, with a message that names the cause, if one dies or stands still.

    Use it as ``Trainer(strategy="monitored_ddp", devices=N)``. Gradients, samplers and options are those of ``"ddp"``.

    Args:
        stall_timeout: Seconds after which the run is aborted because a rank sends no heartbeat, or a step does not
            finish. A backward pass waits for other ranks, too; if it exceeds the limit, the message says so.
        process_group_backend: As for ``"ddp"``; on NPUs hccl by default.
        timeout: Maximum duration of a collective.
        **kwargs: Arguments of Lightning's ``DDPStrategy``, and of torch's ``DistributedDataParallel``.

    Raises:
        TypeError, ValueError: An option is unknown, or ``stall_timeout`` is not a positive number.

    Examples:
        >>> from lightning_gnn import MonitoredDDPStrategy
        >>> from pytorch_lightning import Trainer
        >>> options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        >>> trainer = Trainer(strategy=MonitoredDDPStrategy(stall_timeout=60), devices=2, **options)
        >>> trainer.world_size
        2
    """

    strategy_name = "monitored_ddp"
    known_options = frozenset(
        {*RankOptions.__annotations__, *keywords_of(DDPStrategy), *keywords_of(DistributedDataParallel)}
    )

    def __init__(
        self,
        stall_timeout: float = 300.0,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        **kwargs: Any,
    ) -> None:
        self.stall_timeout = check_stall_timeout(stall_timeout)
        super().__init__(timeout, process_group_backend, **kwargs)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register ``strategy="monitored_ddp"``."""
        strategy_registry.register(cls.strategy_name, cls)

    @override
    def setup_distributed(self) -> None:
        """Connect the ranks, and start their heartbeats."""
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        assert self._timeout is not None
        device_id = self.root_device if self.root_device.type == "cuda" else None
        self.join_ranks(self._process_group_backend, self.stall_timeout, self._timeout, device_id)

    @override
    def determine_ddp_device_ids(self) -> list[int] | None:
        """Return None on NPUs, so that Lightning creates no CUDA stream."""
        return None if self.root_device.type == "npu" else super().determine_ddp_device_ids()

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        with nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return _WaitingDDP(self.waiting, module=model, device_ids=device_ids, **self._ddp_kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the ``with`` block."""
        with DDPStrategy.block_backward_sync(self):
            yield

    @_monitored
    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)

    @_monitored
    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().validation_step(*args, **kwargs)

    @_monitored
    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().test_step(*args, **kwargs)

    @_monitored
    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().predict_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass; other ranks have time to name a cause of their own before this rank blames it."""
        with self._working("backward", BLAME_GRACE_S):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _working(self, what: str, grace: float = 0.0) -> AbstractContextManager[None]:
        return nullcontext() if self._heartbeats is None else self._heartbeats.working(what, grace)


class _WaitingDDP(DistributedDataParallel):
    """DDP whose collectives before the forward pass count as waiting for other ranks."""

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]], **options: Any) -> None:
        super().__init__(**options)
        self._waiting = waiting

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._waiting():
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
