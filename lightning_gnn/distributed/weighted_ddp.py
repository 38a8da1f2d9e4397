"""Lightning's DDP for ranks with unequal shares of a mini-batch, whose losses weigh as much as their shares."""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import do_nothing_closure
from pytorch_lightning.strategies import DDPStrategy, Strategy
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_gnn.distributed.loss_weights import (
    LOSS_CHECKS,
    returned_loss,
    returned_weight,
    warning_of,
    weighs_otherwise,
)
from lightning_gnn.distributed.mixed_device_group import MixedDeviceGroup
from lightning_gnn.distributed.monitored_ranks import MonitoredRanks, RankOptions
from lightning_gnn.distributed.step_sync import BatchWeight, StepSummary, StepSync
from lightning_gnn.runtime.devices import match_device

log = logging.getLogger(__name__)


class WeightedDDPStrategy(MonitoredRanks, DDPStrategy):
    """DDP whose gradients are those of the undivided mini-batch, of which each rank has a share."""

    # DDP's wrapper would average the gradients of unequal shares evenly, so it is not used: each loss is multiplied by
    # its share, or by what the returned weights make of it, and gradients are summed in one message, which carries all
    # that ranks must know of the step. A rank that is alone trains as under a plain Trainer.

    strategy_name: ClassVar[str]
    """By which the Trainer knows it."""
    counts: ClassVar[str] = "seeds"
    """What shares are counted in, in messages."""
    shards_graph: ClassVar[bool] = False
    """Whether ranks have rows of one graph, so that all must run every step, and what it writes is their own."""

    def __init__(self, timeout: timedelta, process_group_backend: str | None, **kwargs: Unpack[RankOptions]) -> None:
        super().__init__(timeout, process_group_backend, **kwargs)
        self._group: MixedDeviceGroup | None = None
        self._sync: StepSync | None = None
        self._gradients_synced = False
        self._loss_checks_left = 0

    # -- for subclasses

    @abstractmethod
    def batch_weight(self) -> BatchWeight:
        """Return this rank's share of the mini-batch that is worked on."""

    def batch_context(self, step: str, args: tuple[object, ...]) -> AbstractContextManager[object]:
        """Surround a step."""
        return nullcontext()

    def user_code(self, name: str) -> AbstractContextManager[object]:
        """Surround the module's own code: a step, or ``"backward"``."""
        return nullcontext()

    def step_timings(self) -> Sequence[float]:
        """Return numbers that all ranks are to see, as many on each."""
        return ()

    def observe_step(self, summaries: list[StepSummary]) -> None:
        """Take what all ranks have sent of a training step; with several backward passes, several times."""

    @property
    def rank_name(self) -> str:
        """What messages call this rank."""
        return f"rank {self.global_rank}"

    # -- processes

    @property
    def _alone(self) -> bool:
        """Whether this is the only rank."""
        return self.world_size == 1

    @property
    def _module(self) -> pl.LightningModule:
        """The module of the run."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _training_sync(self) -> StepSync | None:
        """What makes training steps those of all ranks; None where Lightning does what is to be done."""
        return self._sync if self._sync is not None and self._sync.is_training else None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Let all ranks go through the same order, of which each has its share."""
        return {"num_replicas": 1, "rank": 0}

    @override
    def setup_environment(self) -> None:
        """Make the device the current one, that of mixed precision too, and find the other ranks."""
        log.debug(f"{self.__class__.__name__}: setting up distributed")
        match_device(self.precision_plugin, self.root_device)
        super().setup_environment()

    def _connect(self, silence: float, accelerators: Sequence[int] = ()) -> None:
        """Connect the ranks."""
        assert self._timeout is not None
        self._process_group_backend = self._get_process_group_backend()
        devices = self.parallel_devices or []
        mixed = any(device.type == "cpu" for device in devices)
        device_id = self.root_device if self.root_device.type == "cuda" and not mixed else None
        self.join_ranks(self._process_group_backend, silence, self._timeout, device_id)
        if self._group is None:
            self._group = MixedDeviceGroup(devices * self.num_nodes, accelerators, self.global_rank)

    # -- the model

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: setting up the model")
        if self._alone:
            Strategy.setup(self, trainer)  # DDP's would ask for a process group
            return
        held = (*self._module.named_parameters(), *self._module.named_buffers())
        if lazy := [name for name, tensor in held if is_lazy(tensor)]:
            raise ValueError(
                f"{', '.join(lazy)} has no size yet, which several ranks must know from the start: give in_channels "
                "(or in_features), or run the module on one batch before trainer.fit"
            )
        super().setup(trainer)
        assert self._group is not None
        self._remove_sync()
        name = self.strategy_name if self.shards_graph else None
        self._sync = StepSync(self._module, self._group, self.observe_step, self.step_timings, name)
        # What steps log is reduced already, without Lightning's knowing.
        warnings.filterwarnings("ignore", r"It is recommended to use .self\.log\(.*sync_dist=True")

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model

    @override
    def configure_ddp(self) -> None:
        """Make parameters and buffers those of rank 0."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: broadcasting parameters and buffers of rank 0")
        assert self._group is not None
        self._group.broadcast_from_rank0([*self._module.parameters(), *self._module.buffers()])

    def trainable_parameters(self) -> list[Tensor]:
        """Return the module's parameters, then those that only optimizers know."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        held = (parameter for group in groups for parameter in group["params"])
        return list(dict.fromkeys([*self._module.parameters(), *held]))

    def resync_parameters(self) -> None:
        """Make parameters and states of optimizers those of rank 0. Collective: every rank must call this."""
        assert self._sync is not None
        states: list[Tensor] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    states += [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
        self._sync.resync_parameters([*self.trainable_parameters(), *states])

    # -- training

    @override
    def on_train_start(self) -> None:
        """Make equal on all ranks what training changes."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: starting training")
        super().on_train_start()
        if self._sync is not None:
            self._sync.start_training(self.trainable_parameters())
            self._loss_checks_left = LOSS_CHECKS

    @override
    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Begin a step with the parameters that there are now."""
        super().on_train_batch_start(batch, batch_idx)
        if (sync := self._training_sync) is not None:
            sync.begin_step(self.trainable_parameters())
            # Gradients that are held over from an earlier mini-batch are those of all ranks, if they were then.
            held = any(parameter.grad is not None for parameter in sync.parameters)
            self._gradients_synced = self._gradients_synced and held

    @override
    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        sync = self._training_sync
        output = self._run_step("training_step", super().training_step, args, kwargs)
        if sync is None:
            return output
        # By hand, the backward passes were part of the step.
        if not self._module.automatic_optimization:
            self._all_gather_step("training_step")
            return output
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None and not self.shards_graph:  # the other ranks may have one
            sync.record_loss(None, None)
            return torch.zeros((), device=self.root_device, requires_grad=True)
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"training_step must return a loss of one number, but that of {self.rank_name} has the shape "
                f"{list(loss.shape)}"
            )
        weight = returned_weight(output) if sync.has_valid_loss else None
        sync.record_loss(loss if isinstance(loss, Tensor) else None, weight)
        self._check_loss(sync, loss)
        return output

    def _run_step(
        self, name: str, step: Callable[..., STEP_OUTPUT], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> STEP_OUTPUT:
        """Run a step of the module; what it logs is collected."""
        with self.batch_context(name, args), self.user_code(name):
            if self._sync is None or name == "predict_step":
                return step(*args, **kwargs)
            with self._sync.collect(name, self.batch_weight()):
                return step(*args, **kwargs)

    def _all_gather_step(self, name: str) -> None:
        """Exchange what ranks must know of a step. Collective: every rank must call this."""
        if self._sync is not None:
            with self._waiting():
                self._sync.all_gather_step(name)

    def _waiting(self) -> AbstractContextManager[None]:
        """Wait for other ranks, which is no sign that this one hangs."""
        return nullcontext() if self._heartbeats is None else self._heartbeats.waiting()

    def _check_loss(self, sync: StepSync, loss: Tensor | None) -> None:
        """Warn, once, about a loss that needs a weight; it is looked for in the first mini-batches."""
        if not self._loss_checks_left:
            return
        self._loss_checks_left -= 1
        loss = returned_loss(loss) if sync.needs_check else None
        found = [None if loss is None else weighs_otherwise(loss, sync.batch.local)]
        # The ranks of one graph gather what they found, in the first step alone, and one warns for all.
        if self.shards_graph and self._group is not None:
            self._loss_checks_left, found = 0, self._group.all_gather_objects(found[0])
        if (why := next(filter(None, found), None)) is not None:
            self._loss_checks_left = 0
            if self.global_rank == 0 or not self.shards_graph:
                warnings.warn(warning_of(why, f"{self.strategy_name}'s ranks", self.counts), stacklevel=2)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: object, **kwargs: object) -> Tensor:
        """Compute gradients of the undivided mini-batch's loss: the sum of the ranks' losses, by their weights."""
        sync, module, precision = self._training_sync, self._module, self.precision_plugin
        if sync is None:
            with self.user_code("backward"):
                return super().backward(closure_loss, optimizer, *args, **kwargs)
        # The weights' sum divides the gradients if these are new: one message for all, and no rank waits before it.
        piggybacks = (
            module.automatic_optimization
            and self.sync_gradients
            and module.trainer.accumulate_grad_batches == 1
            and getattr(precision, "scaler", None) is None
            and all(parameter.grad is None for parameter in sync.parameters)
            and any(parameter.requires_grad for parameter in sync.parameters)
        )
        if not module.automatic_optimization:
            self._check_loss(sync, closure_loss)
        elif not piggybacks:
            self._all_gather_step("training_step")
        # A rank without a share adds nothing. The ranks of one graph exchange rows in the backward pass, too.
        factor = sync.loss_factor(piggybacks)
        loss = precision.pre_backward(closure_loss, module)
        if self.shards_graph or isinstance(factor, Tensor) or factor:
            with self.user_code("backward"):
                precision.backward(loss * (factor * self.world_size), module, optimizer, *args, **kwargs)
        if self.sync_gradients:
            with self._waiting():
                sync.reduce_gradients(piggybacks)
            self._gradients_synced = True
        return precision.post_backward(loss, module)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: object,
    ) -> object:
        """Step; an optimizer that reads the loss, as a line search does, gets that of the undivided mini-batch."""
        sync = self._training_sync
        if sync is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if not self._module.automatic_optimization:
            held = any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
            if held and not self._gradients_synced and closure is do_nothing_closure:
                raise RuntimeError(
                    f"with {self.strategy_name}, call self.manual_backward(loss) instead of loss.backward()"
                )
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def with_global_loss() -> Tensor | None:
            """Return the loss by which all ranks must make the same decision."""
            loss: Tensor | None = closure()
            return loss if loss is None else torch.full_like(loss, sync.global_loss)

        return super().optimizer_step(optimizer, with_global_loss, model, **kwargs)

    # -- evaluation

    @override
    def validation_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        output = self._run_step("validation_step", super().validation_step, args, kwargs)
        self._all_gather_step("validation_step")
        return output

    @override
    def test_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        output = self._run_step("test_step", super().test_step, args, kwargs)
        self._all_gather_step("test_step")
        return output

    @override
    def predict_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        return self._run_step("predict_step", super().predict_step, args, kwargs)

    # -- the end

    @override
    def on_train_end(self) -> None:
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: ending training")
        super().on_train_end()
        if self._sync is not None:
            self._sync.is_training = False

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Name the rank that was lost, or let the other ranks know that this one failed; then end training."""
        log.debug(f"{self.__class__.__name__}: handling {type(exception).__name__}")
        super().on_exception(exception)  # first of all, so that the other ranks know it soon
        if self._sync is not None:
            self._sync.is_training = False

    @override
    def teardown(self) -> None:
        """Give the module its own ``log`` back, and leave the other ranks when all are through."""
        log.debug(f"{self.__class__.__name__}: tearing down strategy")
        self._remove_sync()
        super().teardown()

    def _remove_sync(self) -> None:
        """Give the module its own ``log`` back."""
        if self._sync is not None:
            self._sync.metrics.remove()
            self._sync = None
