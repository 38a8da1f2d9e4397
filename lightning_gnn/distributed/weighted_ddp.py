"""Lightning's DDP for ranks with unequal shares of a mini-batch, with losses weighted by the shares."""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_gnn.distributed.engines import check_num_ranks, find_engine
from lightning_gnn.distributed.loss_weights import LOSS_CHECKS, explain_weighting, format_warning, get_loss, get_weight
from lightning_gnn.distributed.metric_sync import share_metrics_on_host
from lightning_gnn.distributed.mixed_device_group import MixedDeviceGroup
from lightning_gnn.distributed.module_tree import named_parts
from lightning_gnn.distributed.monitored_ranks import MonitoredRanks, RankOptions
from lightning_gnn.distributed.step_sync import BatchWeight, StepSummary, StepSync
from lightning_gnn.distributed.stop_on_signal import StopOnSignal
from lightning_gnn.runtime.lightning import STEP_OUTPUT, Strategy, TrainerFn, do_nothing_closure, pl

log = logging.getLogger(__name__)


class WeightedDDPStrategy(MonitoredRanks):
    """DDP over shares of a mini-batch, with the gradients of the undivided mini-batch."""

    # DDP's wrapper is not used, since it would average gradients evenly. Instead, each loss is multiplied by its share
    # or its relative weight, and the gradients are summed in one message, which also carries the step's metadata. A
    # single rank trains as under a plain Trainer.

    strategy_name: ClassVar[str]
    """Name under which the Trainer registers the strategy."""
    counts: ClassVar[str] = "seeds"
    """Unit of the shares in messages."""
    shards_graph: ClassVar[bool] = False
    """Whether the ranks share the rows of one graph, so all must run every step and buffers stay local."""

    def __init__(self, timeout: timedelta, process_group_backend: str | None, **kwargs: Unpack[RankOptions]) -> None:
        super().__init__(timeout, process_group_backend, **kwargs)
        self._group: MixedDeviceGroup | None = None
        self._sync: StepSync | None = None
        self._gradients_synced = False
        self._loss_checks_left = 0

    # -- for subclasses

    @abstractmethod
    def batch_weight(self) -> BatchWeight:
        """Return this rank's share of the current mini-batch."""

    def batch_context(self, step: str, args: tuple[object, ...]) -> AbstractContextManager[object]:
        """Return a context manager that surrounds each step."""
        return nullcontext()

    def user_code(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager that surrounds module code: a step, or ``"backward"``."""
        return nullcontext()

    def step_timings(self) -> Sequence[float]:
        """Return numbers to share with all ranks; the length must be the same on all ranks."""
        return ()

    def observe_step(self, summaries: list[StepSummary]) -> None:
        """Process all ranks' summaries of a training step; called once per backward pass."""

    @property
    def rank_name(self) -> str:
        """Name of this rank in messages."""
        return f"rank {self.global_rank}"

    # -- processes

    @property
    def _is_single_rank(self) -> bool:
        """Whether this is the only rank."""
        return self.world_size == 1

    @property
    def _module(self) -> pl.LightningModule:
        """The module of the current run."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _training_sync(self) -> StepSync | None:
        """The synchronization of training steps; None outside training and on a single rank."""
        return self._sync if self._sync is not None and self._sync.is_training else None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Sampler options that make all ranks iterate over the same order."""
        return {"num_replicas": 1, "rank": 0}

    @override
    def _configure_launcher(self) -> None:
        if find_engine(self.cluster_environment)[0] != "Ray":  # whose workers prepare_trainer counts later
            check_num_ranks(self)
        super()._configure_launcher()

    @override
    def connect(self, model: pl.LightningModule) -> None:
        check_num_ranks(self)
        super().connect(model)

    def _connect(self, silence: float, accelerators: Sequence[int] = ()) -> None:
        """Create the process group and the groups of mixed devices. All ranks must call this."""
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
        stop = StopOnSignal.add_to(trainer)
        if self._is_single_rank:
            Strategy.setup(self, trainer)  # DDP's would ask for a process group
            return
        tensors = (*self._module.named_parameters(), *self._module.named_buffers())
        if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
            raise ValueError(
                f"{', '.join(lazy)} has no size yet, which distributed training requires: give in_channels (or "
                "in_features), or run the module on one batch before trainer.fit"
            )
        if trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
        else:  # DDP's would broadcast parameters on the device, which gloo does not accept on NPUs
            Strategy.setup(self, trainer)
            self.configure_ddp()
        share_metrics_on_host(self._module)
        assert self._group is not None
        self._remove_sync()
        name = self.strategy_name if self.shards_graph else None
        self._sync = StepSync(self._module, self._group, self.observe_step, self.step_timings, stop, name)
        # Logged values are reduced already, which Lightning cannot detect.
        warnings.filterwarnings("ignore", r"It is recommended to use .self\.log\(.*sync_dist=True")

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model

    @override
    def configure_ddp(self) -> None:
        """Broadcast rank 0's parameters and buffers. All ranks must call this."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: broadcasting parameters and buffers of rank 0")
        assert self._group is not None
        self._group.broadcast_from_rank0([*self._module.parameters(), *self._module.buffers()])

    def trainable_parameters(self) -> list[Tensor]:
        """Return the module's parameters, followed by parameters that only optimizers reference."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        optimized = (parameter for group in groups for parameter in group["params"])
        own = (each for _, part in named_parts(self._module) for each in part._parameters.values() if each is not None)
        return list(dict.fromkeys([*own, *optimized]))

    def resync_parameters(self) -> None:
        """Broadcast rank 0's parameters and optimizer states. All ranks must call this."""
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
        """Synchronize the parameters of all ranks."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: starting training")
        super().on_train_start()
        if self._sync is not None:
            self._sync.start_training(self.trainable_parameters())
            self._loss_checks_left = LOSS_CHECKS

    @override
    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Start a step with the current parameters, which may include new ones."""
        super().on_train_batch_start(batch, batch_idx)
        if (sync := self._training_sync) is not None:
            sync.begin_step(self.trainable_parameters())
            # Gradients left over from an earlier mini-batch remain synchronized if they were.
            has_gradients = any(parameter.grad is not None for parameter in sync.parameters)
            self._gradients_synced = self._gradients_synced and has_gradients

    @override
    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        sync = self._training_sync
        output = self._run_step("training_step", args, kwargs)
        if sync is None:
            return output
        # With manual optimization, the step included the backward passes.
        if not self._module.automatic_optimization:
            self._all_gather_step("training_step")
            return output
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None and not self.shards_graph:  # other ranks may have a loss, so the backward pass must run
            sync.record_loss(None, None)
            return torch.zeros((), device=self.root_device, requires_grad=True)
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"training_step must return a loss of one number, but the loss of {self.rank_name} has the shape "
                f"{list(loss.shape)}"
            )
        weight = get_weight(output) if sync.has_valid_loss else None
        sync.record_loss(loss if isinstance(loss, Tensor) else None, weight)
        self._check_loss(sync, loss)
        return output

    def _run_step(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> STEP_OUTPUT:
        """Run a step of the module and collect the values that it logs."""
        step: Callable[..., STEP_OUTPUT] = getattr(super(), name)
        with self.batch_context(name, args), self.user_code(name):
            if self._sync is None or name == "predict_step":
                return step(*args, **kwargs)
            with self._sync.collect(name, self.batch_weight()):
                return step(*args, **kwargs)

    def _all_gather_step(self, name: str) -> None:
        """All-gather the step summaries. All ranks must call this."""
        if self._sync is not None:
            with self.waiting():
                self._sync.all_gather_step(name)

    def _check_loss(self, sync: StepSync, loss: Tensor | None) -> None:
        """Warn once about a loss that needs a weight; checked in the first mini-batches only."""
        if not self._loss_checks_left:
            return
        self._loss_checks_left -= 1
        loss = get_loss(loss) if sync.needs_check else None
        reasons = [None if loss is None else explain_weighting(loss, sync.batch.local)]
        # If the graph is sharded, the ranks gather their findings in the first step only, and rank 0 warns.
        if self.shards_graph and self._group is not None:
            self._loss_checks_left, reasons = 0, self._group.all_gather_objects(reasons[0])
        if (reason := next(filter(None, reasons), None)) is not None:
            self._loss_checks_left = 0
            if self.global_rank == 0 or not self.shards_graph:
                warnings.warn(format_warning(reason, f"{self.strategy_name}'s ranks", self.counts), stacklevel=2)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: object, **kwargs: object) -> Tensor:
        """Compute the gradients of the undivided mini-batch's loss, the weighted sum of the ranks' losses."""
        sync, module, precision = self._training_sync, self._module, self.precision_plugin
        if sync is None:
            with self.user_code("backward"):
                return super().backward(closure_loss, optimizer, *args, **kwargs)
        # With fresh gradients, the sum of the weights is exchanged in the same message and divides them afterwards, so
        # no rank waits before its backward pass. Otherwise the weights are exchanged first.
        piggybacks = (
            module.automatic_optimization
            and self.sync_gradients
            and module.trainer.accumulate_grad_batches == 1
            and getattr(precision, "scaler", None) is None
            and all(parameter.grad is None for parameter in sync.parameters)
            and any(parameter.requires_grad for parameter in sync.parameters)
        )
        if self._group is not None and not piggybacks:  # CPU ranks may have gradients of earlier mini-batches
            self._group.only_accelerators = False
        if not module.automatic_optimization:
            self._check_loss(sync, closure_loss)
        elif not piggybacks:
            self._all_gather_step("training_step")
        # A rank without a share can skip the backward pass, unless that also exchanges rows of a sharded graph.
        factor = sync.loss_factor(piggybacks)
        loss = precision.pre_backward(closure_loss, module)
        if self.shards_graph or isinstance(factor, Tensor) or factor:
            with self.user_code("backward"):
                precision.backward(loss * (factor * self.world_size), module, optimizer, *args, **kwargs)
        if self.sync_gradients:
            with self.waiting():
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
        """Run the optimizer; its closure returns the undivided mini-batch's loss, as a line search requires."""
        sync = self._training_sync
        if sync is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if not self._module.automatic_optimization:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            has_gradients = any(parameter.grad is not None for parameter in parameters)
            if has_gradients and not self._gradients_synced and closure is do_nothing_closure:
                raise RuntimeError(
                    f"with {self.strategy_name}, call self.manual_backward(loss) instead of loss.backward()"
                )
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def with_global_loss() -> Tensor | None:
            """Return the global loss, so that all ranks make the same decision."""
            loss: Tensor | None = closure()
            return loss if loss is None else torch.full_like(loss, sync.global_loss)

        return super().optimizer_step(optimizer, with_global_loss, model, **kwargs)

    # -- evaluation

    def _evaluate(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> STEP_OUTPUT:
        output = self._run_step(name, args, kwargs)
        self._all_gather_step(name)
        return output

    @override
    def validation_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        return self._run_step("predict_step", args, kwargs)

    # -- the end

    @override
    def on_train_end(self) -> None:
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: ending training")
        super().on_train_end()
        if self._sync is not None:
            self._sync.is_training = False

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Name the rank that died, or notify the other ranks that this one failed; then end training."""
        log.debug(f"{self.__class__.__name__}: handling {type(exception).__name__}")
        super().on_exception(exception)  # first, to notify the other ranks quickly
        if self._sync is not None:
            self._sync.is_training = False

    @override
    def teardown(self) -> None:
        """Restore the module's ``log``, and leave the process group once all ranks have finished."""
        log.debug(f"{self.__class__.__name__}: tearing down strategy")
        self._remove_sync()
        super().teardown()

    def _remove_sync(self) -> None:
        """Restore the module's own ``log``."""
        if self._sync is not None:
            self._sync.metrics.remove()
            self._sync = None
