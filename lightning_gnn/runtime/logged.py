"""What was logged and measured in an epoch so far, which Lightning keeps out of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor
from torchmetrics import Metric, MetricCollection

_FIELDS = tuple(field.name for field in fields(_Metadata) if field.name not in ("reduce_fx", "_sync"))
_REDUCTIONS = ("mean", "max", "min", "sum")


def logged_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Return this rank's logged values and the states of the module's torchmetrics."""
    epochs: Any = trainer.fit_loop.epoch_progress.total
    ended = epochs.started == epochs.processed
    results = [] if ended else [_saved(key, metric) for key, metric in trainer.fit_loop.epoch_loop._results.items()]
    # What Lightning is about to reset: at the end of an epoch, or for a validation that will begin anew.
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
    """Go on with what was logged.

    Args:
        trainer: About to train.
        state: From :func:`logged_state`; None leaves everything as it is.
        mid_epoch: Whether the epoch goes on.
    """
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


def _saved(key: str, metric: Any) -> dict[str, Any] | None:
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


def _to(value: Any, device: Any) -> Any:
    """Copy a tensor, or each of a list."""
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    return value.detach().to(device, copy=True)
