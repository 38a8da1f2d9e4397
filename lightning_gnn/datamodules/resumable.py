"""What lets a resumed run go on as if it had not been stopped: random streams, logged values, gradients, loops.

Lightning keeps these out of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_gnn.distributed.exceptions import is_handling_exception
from lightning_gnn.loading.random_state import random_state, set_random_state
from lightning_gnn.runtime.checkpoint_io import use_safe_files
from lightning_gnn.runtime.precision import convert_batches
from lightning_gnn.runtime.shared_arrays import share_equal_arrays

_FIELDS = tuple(field.name for field in fields(_Metadata) if field.name not in ("reduce_fx", "_sync"))
_REDUCTIONS = ("mean", "max", "min", "sum")
_BY_RANK = ("rng", "logged", "gradients", "order_state")


class ResumableDataModule(pl.LightningDataModule):
    """Adds to checkpoints what Lightning leaves out, and restores it.

    That is: random streams, results logged so far in the epoch, accumulated gradients, whether the run was about to
    stop, and what was left to do for the last batch, such as a validation or plateau schedules.
    """

    _resumed: dict[str, Any] | None = None
    _order_state: torch.Tensor | None = None
    _after_order: torch.Tensor | None = None
    _draws_again = False
    _begun: int | None = None

    share_memory = True
    """Whether the ranks of one machine use one copy of :meth:`large_arrays`."""

    def setup(self, stage: str) -> None:
        """Let the trainer convert batches to its precision and write files that a crash cannot damage; share memory."""
        self._begun = None
        if self.trainer is not None:
            use_safe_files(self.trainer)
            convert_batches(self.trainer)
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.share_memory and grouped and self._world_size > 1:
            share_equal_arrays(self.large_arrays())

    def large_arrays(self) -> dict[str, object]:
        """Return what takes memory, by name, for :func:`~lightning_gnn.runtime.shared_arrays.share_equal_arrays`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside Lightning's own state; all ranks must call it, as Lightning does."""
        trainer = self.trainer if self.trainer is not None and self.trainer.state.fn == "fit" else None
        mine: list[Any] = [random_state()]
        if trainer is not None:
            mine += [logged_state(trainer), _gradients(trainer), self._order_state]
        by_rank: list[Any] = [mine] * self._world_size
        if self._world_size > 1 and not is_handling_exception():
            torch.distributed.all_gather_object(by_rank, mine)
        state: dict[str, Any] = {
            name: list(values) for name, values in zip(_BY_RANK, zip(*by_rank, strict=True), strict=False)
        }
        return state if trainer is None else {**state, "position": _position(trainer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of the interrupted run once training goes on."""
        self._resumed = state_dict
        if self.trainer is not None and self.trainer.state.fn == "fit":
            self.trainer.callbacks.append(_GoOn(self))  # type: ignore[attr-defined]

    def restore_random_state(self) -> None:
        """Go on with the random streams of the interrupted run, the first time that this is called."""
        state, self._resumed = self._resumed, None
        if state is not None:
            set_random_state(_of_rank(state.get("rng"), self._rank))
            self._order_state = _of_rank(state.get("order_state"), self._rank)
            self._draws_again = True

    def draw_order(self, first: int) -> None:
        """Prepare torch's generator for the order of an epoch, which is drawn next."""
        if self._draws_again and first and self._order_state is not None:
            self._after_order = torch.get_rng_state()
            torch.set_rng_state(self._order_state)
        self._draws_again = False
        self._order_state = torch.get_rng_state()

    def order_drawn(self) -> None:
        """Go on with what torch's generator was before."""
        state, self._after_order = self._after_order, None
        if state is not None:
            torch.set_rng_state(state)

    @property
    def _rank(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def _world_size(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size


def logged_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Return this rank's logged values and the states of the module's torchmetrics."""
    epochs: Any = trainer.fit_loop.epoch_progress.total
    ended = epochs.started == epochs.processed
    results = [] if ended else [_saved(key, metric) for key, metric in trainer.fit_loop.epoch_loop._results.items()]
    # What Lightning is about to reset: at the end of an epoch, or for a validation that will begin again.
    logged = trainer.fit_loop.epoch_loop.val_loop._results if trainer.validating else {}
    logged = {**logged, **(trainer.fit_loop.epoch_loop._results if ended else {})}
    left_out = {metric.meta.metric_attribute for metric in logged.values()}
    return {
        "results": [saved for saved in results if saved is not None],
        "metrics": {
            name: (metric._update_count, state)
            for name, metric in _metrics(trainer.lightning_module)
            if (state := _metric_state(metric)) is not None and name not in left_out
        },
        "callback_metrics": {
            name: value.detach().cpu().clone()
            for name, value in trainer.callback_metrics.items()
            if isinstance(value, Tensor)
        },
    }


def load_logged(trainer: pl.Trainer, state: dict[str, Any] | None, mid_epoch: bool) -> None:
    """Go on with what was logged."""
    if state is None:
        return
    module, connector = trainer.lightning_module, trainer._logger_connector
    metrics = dict(_metrics(module))
    for name, (count, values) in state["metrics"].items():
        if name in metrics:
            metric = metrics[name]
            for key, value in values.items():
                setattr(metric, key, _to(value, metric.device))
            metric._update_count, metric._computed = count, None
    for saved in state["results"]:
        meta = _Metadata(reduce_fx=saved["reduce_fx"], **{name: saved[name] for name in _FIELDS})
        should, rank_zero_only = saved["sync"]
        meta.sync = _Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
        metric = _ResultMetric(meta, saved["states"] is not None)
        if saved["states"] is None:
            if meta.metric_attribute not in metrics:
                continue
            metric.value = metrics[meta.metric_attribute]
        else:
            for key, value in saved["states"].items():
                setattr(metric, key, _to(value, module.device))
        metric._update_count = saved["count"]
        trainer.fit_loop.epoch_loop._results[saved["key"]] = metric
    connector._callback_metrics.update(state["callback_metrics"])
    if mid_epoch:
        connector._first_loop_iter = True  # else the first batch would reset what earlier ones logged


def _saved(key: str, metric: _ResultMetric) -> dict[str, Any] | None:
    meta = metric.meta
    reduction = next((name for name in _REDUCTIONS if getattr(meta, f"is_{name}_reduction")), None)
    if metric.has_reset or not (metric.is_tensor or meta.metric_attribute):
        return None
    names = [name for name in ("value", "cumulated_batch_size") if hasattr(metric, name)]
    return {
        "key": key,
        "reduce_fx": reduction,
        "sync": (meta.sync.should, meta.sync.rank_zero_only),
        "count": metric._update_count,
        "states": {name: _to(getattr(metric, name), "cpu") for name in names} if metric.is_tensor else None,
        **{name: getattr(meta, name) for name in _FIELDS},
    }


def _metrics(module: pl.LightningModule) -> Iterator[tuple[str, Metric]]:
    for child in module.modules():
        if isinstance(child, MetricCollection):
            child.values()  # metrics of one compute group share the state of one of them from here on
    for name, child in module.named_modules():
        if isinstance(child, Metric):
            yield name, child


def _metric_state(metric: Metric) -> dict[str, Any] | None:
    """Return the states of a metric, None if they are not made of tensors."""
    values = {name: getattr(metric, name) for name in metric._defaults}
    flat = [item for value in values.values() for item in (value if isinstance(value, list) else [value])]
    if not all(isinstance(item, Tensor) for item in flat):
        return None
    return {name: _to(value, "cpu") for name, value in values.items()}


def _to(value: Any, device: torch.device | str) -> Any:
    """Copy a tensor, or each of a list."""
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    return value.detach().to(device, copy=True)


class _GoOn(pl.Callback):
    """Puts Lightning's loops where the interrupted run stood."""

    def __init__(self, datamodule: ResumableDataModule) -> None:
        self.datamodule = datamodule
        self.state = dict(datamodule._resumed or {})
        self.batches_that_stepped: int | None = None

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Rewrite the counters that Lightning would misread."""
        position = self.state.get("position")
        if position is None:
            return
        fit = checkpoint["loops"]["fit_loop"]
        epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
        if epochs["total"]["started"] == epochs["total"]["processed"]:  # the epoch was over, or had not begun
            for counts in (epochs["total"], epochs["current"]):
                counts["ready"] = counts["completed"] = counts["processed"]
            return
        if not position["validation_due"] and not (position["in_batch_end"] and batches["is_last_batch"]):
            return
        for counts in (batches["total"], batches["current"]):
            counts["completed"] = counts["processed"]
        if position["validation_due"]:  # as if it had been stopped within its first batch
            begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            fit["epoch_loop.val_loop.batch_progress"].update(total=dict(begun), current=dict(begun))
        else:
            fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put back the rest, before anything of the resumed run happens."""
        state, self.state = self.state, {}
        rank = self.datamodule._rank
        if (position := state.get("position")) is not None:
            load_logged(trainer, _of_rank(state["logged"], rank), position["mid_epoch"])
            gradients = _of_rank(state["gradients"], rank) or {}
            for name, parameter in pl_module.named_parameters():
                if name in gradients:
                    parameter.grad = gradients[name].to(parameter.device)
            trainer.should_stop = position["should_stop"]
            if position["mid_epoch"] and position["in_batch_start"]:
                self.batches_that_stepped = position["batches_that_stepped"]
            self._take_position(trainer.fit_loop, **position)
        self.datamodule.restore_random_state()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: object) -> None:
        """The first batch is here, and so is the order."""
        self.datamodule.order_drawn()
        if self.batches_that_stepped is not None:  # Lightning has counted the batch before once more
            trainer.fit_loop.epoch_loop._batches_that_stepped = self.batches_that_stepped
            self.batches_that_stepped = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on as usual also where nothing was left of the first epoch's batches."""
        trainer.fit_loop.epoch_loop.on_iteration_done()

    def _take_position(
        self, loop: Any, mid_epoch: bool, in_batch_end: bool, in_epoch_end: bool, validation_due: bool, **more: Any
    ) -> None:
        epoch_loop = loop.epoch_loop
        loop._restarting = False  # it says to leave out plateau schedules, for want of metrics; but here they are
        if not mid_epoch:
            epoch_loop.restarting = False
            for restarted in (epoch_loop, epoch_loop.val_loop):
                restarted.reset_restart_stage()
            if in_epoch_end:
                epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        elif in_batch_end and not validation_due and epoch_loop.batch_progress.is_last_batch:
            epoch_loop.val_loop._has_run = True  # nothing is left but the end of the epoch
            epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def _position(trainer: pl.Trainer) -> dict[str, Any]:
    """Say where in Lightning's loops we are, as far as their counters do not tell."""
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.total
    batches: Any = loop.epoch_loop.batch_progress.total
    in_batch_end = batches.ready == batches.started == batches.processed == batches.completed + 1
    fetcher = loop._data_fetcher
    validated = loop.epoch_loop.val_loop.batch_progress
    validating = trainer.validating and not (
        validated.is_last_batch and 0 < validated.current.ready == validated.current.completed
    )
    return {
        "mid_epoch": epochs.started != epochs.processed,
        "in_batch_end": in_batch_end,
        "in_epoch_end": epochs.started == epochs.processed == epochs.completed + 1,
        "validation_due": validating
        or (in_batch_end and fetcher is not None and loop.epoch_loop._should_check_val_fx(fetcher)),
        "in_batch_start": batches.ready > batches.processed,
        "batches_that_stepped": loop.epoch_loop._batches_that_stepped,
        "should_stop": trainer.should_stop,
    }


def _gradients(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what was accumulated for the next step of the optimizer."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batches: Any = progress.current
    done = batches.processed
    if done % trainer.accumulate_grad_batches == 0 or done != batches.started or done == trainer.num_training_batches:
        return {}
    if done == batches.ready and progress.is_last_batch:
        return {}
    parameters = trainer.lightning_module.named_parameters()
    return {name: value.grad.detach().cpu() for name, value in parameters if value.grad is not None}


def _of_rank(by_rank: list[Any] | None, rank: int) -> Any:
    return by_rank[rank] if by_rank is not None and rank < len(by_rank) else None
