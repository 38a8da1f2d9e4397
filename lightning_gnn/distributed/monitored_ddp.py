"""Lightning's DDP with heartbeats: a rank that dies or stands still ends the run, and is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_gnn.distributed.heartbeat import BLAME_GRACE_S, Heartbeats, check_stall_timeout
from lightning_gnn.distributed.monitored_ranks import MonitoredRanks, RankOptions
from lightning_gnn.runtime.lightning import DDPStrategy, _StrategyRegistry, reset_seed
from lightning_gnn.runtime.messages import keywords_of

_Step = TypeVar("_Step", bound=Callable[..., Any])


def _monitored(step: _Step) -> _Step:
    """Monitor a step of the strategy: the rank counts as hanging if it exceeds ``stall_timeout``."""

    @wraps(step)
    def run(self: MonitoredDDPStrategy, *args: object, **kwargs: object) -> Any:
        with self.working(step.__name__):
            return step(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class MonitoredDDPStrategy(MonitoredRanks):
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
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        with nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return _WaitingDDP(module=model, device_ids=device_ids, **self._ddp_kwargs)

    block_backward_sync = DDPStrategy.block_backward_sync
    training_step = _monitored(DDPStrategy.training_step)
    validation_step = _monitored(DDPStrategy.validation_step)
    test_step = _monitored(DDPStrategy.test_step)
    predict_step = _monitored(DDPStrategy.predict_step)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass; other ranks have time to name a cause of their own before this rank blames it."""
        with self.working("backward", BLAME_GRACE_S):
            return super().backward(closure_loss, optimizer, *args, **kwargs)


class _WaitingDDP(DistributedDataParallel):
    """DDP whose collectives before the forward pass may take longer, as they wait for other ranks."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        beats = Heartbeats.current
        with nullcontext() if beats is None else beats.working("the broadcast of buffers", BLAME_GRACE_S):
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
