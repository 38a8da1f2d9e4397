"""Synchronizes ``self.log`` over ranks with unequal shares: values equal those of the undivided mini-batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_gnn.distributed.mixed_device_group import as_message
from lightning_gnn.runtime.devices import all_gather_objects
from lightning_gnn.runtime.lightning import pl

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "amax": "max", "min": "min", "amin": "min"}
Key = tuple[str, str, int]
"""Step, metric name, and the number of earlier values with this name in the step."""


class MetricSync:
    """Collects the values that a module logs in a step, and logs them reduced over all ranks."""

    def __init__(self, module: pl.LightningModule, sharded_strategy: str | None = None) -> None:
        self._module = module
        self._original = type(module).log.__get__(module)
        self._signature = inspect.signature(self._original)
        self._registered: dict[Key, dict[str, Any]] = {}
        self._logged: dict[Key, dict[str, Any]] = {}
        self._sharded_strategy = sharded_strategy
        self._step: str | None = None
        self._share = 0
        module.__dict__["log"] = self.log

    def remove(self) -> None:
        """Restore the module's own ``log`` method."""
        self._module.__dict__.pop("log", None)

    @contextmanager
    def collect(self, step: str, share: int) -> Iterator[None]:
        """Collect the values logged inside the ``with`` block."""
        self._logged, self._step, self._share = {}, step, share
        try:
            yield
        finally:
            self._step = None

    def log(self, *args: object, **kwargs: object) -> None:
        """Replacement for the module's ``log`` method."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        reduce = arguments.get("reduce_fx", "mean")
        reduction = _REDUCTIONS.get(getattr(reduce, "__name__", str(reduce)))
        value = arguments["value"]
        if self._step is None or reduction is None or isinstance(value, Metric | MetricCollection | dict):
            self._original(**arguments)
            return
        if isinstance(value, Tensor) and value.numel() != 1:
            self._original(**arguments)  # raises an error with an explanation
            return
        if self._sharded_strategy is not None and arguments.get("rank_zero_only"):
            raise ValueError(
                f"log({arguments['name']!r}, rank_zero_only=True): under {self._sharded_strategy} each rank has some "
                "of the rows, and all must log; omit rank_zero_only"
            )
        count = sum(key[:2] == (self._step, arguments["name"]) for key in self._logged)
        self._logged[(self._step, arguments["name"], count)] = arguments

    @property
    def has_new_names(self) -> bool:
        """Whether this rank has logged a metric that :meth:`row` does not include yet."""
        return any(key not in self._registered for key in self._logged)

    def exchange_names(self) -> None:
        """All-gather names and options of the logged metrics. All ranks must call this."""
        own = {key: {k: v for k, v in arguments.items() if k != "value"} for key, arguments in self._logged.items()}
        for by_key in all_gather_objects(own):
            for key, options in by_key.items():
                self._registered.setdefault(key, options)

    def row(self) -> list[float | Tensor]:
        """Return a value and a weight for each registered metric; the weight is NaN if this rank has no value."""
        # Values of a rank without a share are ignored: its step ran on a seed of another rank.
        numbers: list[float | Tensor] = []
        for key in self._registered:
            arguments = self._logged.get(key)
            if arguments is None or not self._share:
                numbers += [0.0, math.nan]
            else:
                size = None if self._sharded_strategy is not None else arguments.get("batch_size")
                value = arguments["value"]
                number = value.detach() if isinstance(value, Tensor) else float(value)
                numbers += [number, float(self._share if size is None else size)]
        return numbers

    def flush(self, step: str, rows: Sequence[Sequence[float]]) -> None:
        """Log the reduced values, given the :meth:`row` of every rank."""
        own, self._logged = self._logged, {}
        previous, self._module._current_fx_name = self._module._current_fx_name, step
        try:
            for index, (key, options) in enumerate(self._registered.items()):
                weighted = [(row[2 * index], row[2 * index + 1]) for row in rows if not math.isnan(row[2 * index + 1])]
                if key[0] != step or not weighted:
                    continue
                arguments = {**options, **own.get(key, {})}
                reduce = arguments.get("reduce_fx", "mean")
                value = _reduce(weighted, _REDUCTIONS[getattr(reduce, "__name__", str(reduce))])
                like = own.get(key, {}).get("value")
                like = like if isinstance(like, Tensor) else torch.empty(0)
                dtype = like.dtype if like.is_floating_point() else None
                arguments["value"] = torch.tensor(value, dtype=dtype, device=like.device)
                total = sum(weight for _, weight in weighted)
                self._original(**{**arguments, "batch_size": max(1, round(total)), "sync_dist": False})
        finally:
            self._module._current_fx_name = previous


def share_metrics_on_host(module: pl.LightningModule) -> None:
    """Let metrics gather their states over the host, unless they have an own way: gloo does not accept NPU tensors."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = _gather_on_host


def _gather_on_host(state: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    return [each.to(state.device) for each in gather_all_tensors(as_message(state, group), group)]


def _reduce(weighted: Sequence[tuple[float, float]], reduction: str) -> float:
    if reduction == "mean":
        total = math.fsum(weight for _, weight in weighted)
        if not total:
            return math.fsum(value for value, _ in weighted) / len(weighted)
        # Skip values of weight 0, which may be NaN: the mean of an empty set.
        return sum(value * weight for value, weight in weighted if weight) / total
    values = [value for value, _ in weighted]
    if any(math.isnan(value) for value in values):
        return math.nan
    return math.fsum(values) if reduction == "sum" else max(values) if reduction == "max" else min(values)
