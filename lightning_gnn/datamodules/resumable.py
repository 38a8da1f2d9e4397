"""Exact resuming: checkpoints of random state, logged values, accumulated gradients and loop position.

Lightning does not include these in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_gnn.distributed.exceptions import is_handling_exception
from lightning_gnn.distributed.stop_on_signal import StopOnSignal
from lightning_gnn.loading.random_state import random_state, set_random_state
from lightning_gnn.runtime.checkpoint_io import use_safe_files
from lightning_gnn.runtime.devices import all_gather_objects
from lightning_gnn.runtime.lightning import _Metadata, _ResultMetric, _Sync, check_package, check_script, pl
from lightning_gnn.runtime.precision import convert_batches
from lightning_gnn.runtime.shared_arrays import share_equal_arrays

_FIELDS = tuple(field.name for field in fields(_Metadata) if field.name not in ("reduce_fx", "_sync"))
_REDUCTIONS = ("mean", "max", "min", "sum")
_BY_RANK = ("rng", "logged", "gradients", "order_state")


class ResumableDataModule(pl.LightningDataModule):
    """Saves and restores state that Lightning's checkpoints lack.

    This includes random states, results logged so far in the epoch, accumulated gradients, ``should_stop``, and pending
    work of the last batch, such as a validation or plateau schedulers.
    """

    _resumed: dict[str, Any] | None = None
    _order_state: torch.Tensor | None = None
    _state_after_order: torch.Tensor | None = None
    _has_order_state = False
    _resumed_at: int | None = None

    share_memory = True
    """Whether the ranks of one machine share one copy of :meth:`large_arrays`."""

    def __init__(self) -> None:
        check_script()
        super().__init__()

    @property
    def trainer(self) -> pl.Trainer | None:
        """The trainer that this DataModule is attached to."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        check_package(trainer)
        self._trainer = trainer

    def setup(self, stage: str) -> None:
        """Enable atomic checkpoints, stops by signals and precision conversion; share :meth:`large_arrays`."""
        self._resumed_at = None
        if self.trainer is not None:
            StopOnSignal.add_to(self.trainer)
            use_safe_files(self.trainer)
            convert_batches(self.trainer)
        has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.share_memory and has_group and self._world_size > 1:
            share_equal_arrays(self.large_arrays())

    def train_dataloader(self) -> Any:
        """Return the batches of training; see :meth:`make_loader`."""
        return self.make_loader("train")

    def val_dataloader(self) -> Any:
        """Return the batches of validation; see :meth:`make_loader`."""
        return self.make_loader("val")

    def test_dataloader(self) -> Any:
        """Return the batches of testing; see :meth:`make_loader`."""
        return self.make_loader("test")

    def predict_dataloader(self) -> Any:
        """Return the batches of prediction; see :meth:`make_loader`."""
        return self.make_loader("predict")

    def make_loader(self, stage: str) -> Any:
        """Return the loader of a stage: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.

        Mini-batches of training are shuffled, others are in order; the whole graph is one batch.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Return a short phrase about the batches, which ``lgnn`` prints before a run."""
        raise NotImplementedError

    def large_arrays(self) -> dict[str, object]:
        """Return large arrays by name, for :func:`~lightning_gnn.runtime.shared_arrays.share_equal_arrays`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume in addition to Lightning's. All ranks must call this."""
        trainer = self.trainer if self.trainer is not None and self.trainer.state.fn == "fit" else None
        mine: list[Any] = [random_state()]
        if trainer is not None:
            mine += [logged_state(trainer), _gradients(trainer), self._order_state]
        by_rank: list[Any] = [mine] * self._world_size
        if self._world_size > 1 and not is_handling_exception():
            by_rank = all_gather_objects(mine)
        state: dict[str, Any] = {
            name: list(values) for name, values in zip(_BY_RANK, zip(*by_rank, strict=True), strict=False)
        }
        return state if trainer is None else {**state, "position": _read_position(trainer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state of the interrupted run, which is restored when training starts."""
        self._resumed = state_dict
        if self.trainer is not None and self.trainer.state.fn == "fit":
            self.trainer.callbacks.append(_ResumeCallback(self))  # type: ignore[attr-defined]

    def restore_random_state(self) -> None:
        """Restore the random state of the interrupted run at the first call."""
        state, self._resumed = self._resumed, None
        if state is not None:
            set_random_state(_select_rank(state.get("rng"), self._rank))
            self._order_state = _select_rank(state.get("order_state"), self._rank)
            self._has_order_state = True

    def set_order_state(self, first: int) -> None:
        """Set torch's generator just before the order of an epoch is drawn, to repeat the order of a resumed epoch."""
        if self._has_order_state and first and self._order_state is not None:
            self._state_after_order = torch.get_rng_state()
            torch.set_rng_state(self._order_state)
        self._has_order_state = False
        self._order_state = torch.get_rng_state()

    def restore_after_order(self) -> None:
        """Restore torch's generator after the order has been drawn."""
        state, self._state_after_order = self._state_after_order, None
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
    at_end = epochs.started == epochs.processed
    results = [] if at_end else [_save(key, metric) for key, metric in trainer.fit_loop.epoch_loop._results.items()]
    # Exclude what Lightning is about to reset: at the end of an epoch, or for a validation that will be repeated.
    logged = trainer.fit_loop.epoch_loop.val_loop._results if trainer.validating else {}
    logged = {**logged, **(trainer.fit_loop.epoch_loop._results if at_end else {})}
    excluded = {metric.meta.metric_attribute for metric in logged.values()}
    return {
        "results": [saved for saved in results if saved is not None],
        "metrics": {
            name: (metric._update_count, state)
            for name, metric in _metrics(trainer.lightning_module)
            if (state := _metric_state(metric)) is not None and name not in excluded
        },
        "callback_metrics": {
            name: value.detach().cpu().clone()
            for name, value in trainer.callback_metrics.items()
            if isinstance(value, Tensor)
        },
    }


def load_logged(trainer: pl.Trainer, state: dict[str, Any] | None, mid_epoch: bool) -> None:
    """Restore logged values and torchmetrics states from :func:`logged_state`."""
    if state is None:
        return
    module, connector = trainer.lightning_module, trainer._logger_connector
    metrics = dict(_metrics(module))
    for name, (count, values) in state["metrics"].items():
        if name in metrics:
            metric = metrics[name]
            for key, value in values.items():
                setattr(metric, key, _copy_to(value, metric.device))
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
                setattr(metric, key, _copy_to(value, module.device))
        metric._update_count = saved["count"]
        trainer.fit_loop.epoch_loop._results[saved["key"]] = metric
    connector._callback_metrics.update(state["callback_metrics"])
    if mid_epoch:
        connector._first_loop_iter = True  # else the first batch would reset logged values


def _save(key: str, metric: _ResultMetric) -> dict[str, Any] | None:
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
        "states": {name: _copy_to(getattr(metric, name), "cpu") for name in names} if metric.is_tensor else None,
        **{name: getattr(meta, name) for name in _FIELDS},
    }


def _metrics(module: pl.LightningModule) -> Iterator[tuple[str, Metric]]:
    for child in module.modules():
        if isinstance(child, MetricCollection):
            child.values()  # makes the metrics of a compute group share one state
    for name, child in module.named_modules():
        if isinstance(child, Metric):
            yield name, child


def _metric_state(metric: Metric) -> dict[str, Any] | None:
    """Return the states of a metric, or None if they contain anything other than tensors."""
    values = {name: getattr(metric, name) for name in metric._defaults}
    flat = [item for value in values.values() for item in (value if isinstance(value, list) else [value])]
    if not all(isinstance(item, Tensor) for item in flat):
        return None
    return {name: _copy_to(value, "cpu") for name, value in values.items()}


def _copy_to(value: Any, device: torch.device | str) -> Any:
    """Copy a tensor or a list of tensors to a device."""
    if isinstance(value, list):
        return [_copy_to(item, device) for item in value]
    return value.detach().to(device, copy=True)


class _ResumeCallback(pl.Callback):
    """Moves Lightning's loops to the position of the interrupted run."""

    def __init__(self, datamodule: ResumableDataModule) -> None:
        self.datamodule = datamodule
        self.state = dict(datamodule._resumed or {})
        self.batches_that_stepped: int | None = None

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Rewrite progress counters that Lightning would misinterpret."""
        position = self.state.get("position")
        if position is None:
            return
        fit = checkpoint["loops"]["fit_loop"]
        epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
        if epochs["total"]["started"] == epochs["total"]["processed"]:  # between two epochs
            for counts in (epochs["total"], epochs["current"]):
                counts["ready"] = counts["completed"] = counts["processed"]
            return
        if not position["validation_due"] and not (position["in_batch_end"] and batches["is_last_batch"]):
            return
        for counts in (batches["total"], batches["current"]):
            counts["completed"] = counts["processed"]
        if position["validation_due"]:  # as if interrupted in the first validation batch
            progress = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            fit["epoch_loop.val_loop.batch_progress"].update(total=dict(progress), current=dict(progress))
        else:
            fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore logged values, gradients, loop position and random state before training starts."""
        state, self.state = self.state, {}
        rank = self.datamodule._rank
        if (position := state.get("position")) is not None:
            load_logged(trainer, _select_rank(state["logged"], rank), position["mid_epoch"])
            gradients = _select_rank(state["gradients"], rank) or {}
            for name, parameter in pl_module.named_parameters():
                if name in gradients:
                    parameter.grad = gradients[name].to(parameter.device)
            trainer.should_stop = position["should_stop"]
            if position["mid_epoch"] and position["in_batch_start"]:
                self.batches_that_stepped = position["batches_that_stepped"]
            self._restore_position(trainer.fit_loop, **position)
        self.datamodule.restore_random_state()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: object) -> None:
        """Restore torch's generator, since the first batch implies that the order has been drawn."""
        self.datamodule.restore_after_order()
        if self.batches_that_stepped is not None:  # Lightning has counted the previous batch twice
            trainer.fit_loop.epoch_loop._batches_that_stepped = self.batches_that_stepped
            self.batches_that_stepped = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the resumed state of the loop even if the first epoch had no batches left."""
        trainer.fit_loop.epoch_loop.on_iteration_done()

    def _restore_position(
        self, loop: Any, mid_epoch: bool, in_batch_end: bool, in_epoch_end: bool, validation_due: bool, **more: Any
    ) -> None:
        epoch_loop = loop.epoch_loop
        loop._restarting = False  # it would skip plateau schedulers for lack of metrics, which are restored here
        if not mid_epoch:
            epoch_loop.restarting = False
            for restarted in (epoch_loop, epoch_loop.val_loop):
                restarted.reset_restart_stage()
            if in_epoch_end:
                epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        elif in_batch_end and not validation_due and epoch_loop.batch_progress.is_last_batch:
            epoch_loop.val_loop._has_run = True  # only the end of the epoch is left
            epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def _read_position(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the position in Lightning's loops that their own counters do not determine."""
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
    """Return the gradients accumulated for the next optimizer step."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batches: Any = progress.current
    done = batches.processed
    if done % trainer.accumulate_grad_batches == 0 or done != batches.started or done == trainer.num_training_batches:
        return {}
    if done == batches.ready and progress.is_last_batch:
        return {}
    parameters = trainer.lightning_module.named_parameters()
    return {name: value.grad.detach().cpu() for name, value in parameters if value.grad is not None}


def _select_rank(by_rank: list[Any] | None, rank: int) -> Any:
    return by_rank[rank] if by_rank is not None and rank < len(by_rank) else None
