"""``self.log`` of several trainers as one: recorded in the replicas, replayed once in the main module."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gnn.hyscale.metric_merge import MetricMerger

_PARAMETERS = list(inspect.signature(pl.LightningModule.log).parameters)[3:]  # without self, name and value
_NEUTRAL = {"max": float("-inf"), "min": float("inf")}


@dataclass
class LogRecorder:
    """Stands for ``self.log`` in a replica.

    ``entries`` holds name, value and keyword arguments of each call since it was last emptied.
    """

    entries: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note a call.

        Raises:
            ValueError: The graph of the value should be kept.
        """
        kwargs.update(zip(_PARAMETERS, args, strict=False))
        if kwargs.get("enable_graph"):
            raise ValueError(
                f"self.log({name!r}, enable_graph=True): hyscale joins values of several trainers, graphs not"
            )
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self.entries.append((name, value, kwargs))

    def take(self) -> list[tuple[str, Any, dict[str, Any]]]:
        """Return the calls and forget them."""
        entries, self.entries = self.entries, []
        return entries


def replay(
    main: pl.LightningModule,
    merger: MetricMerger,
    recorders: Sequence[LogRecorder],
    active: Sequence[int],
    seeds: Sequence[int],
    neutral: bool = False,
) -> None:
    """Log once what several trainers have logged.

    Values are joined by ``reduce_fx``; means weigh each trainer by its ``batch_size``, or else by its number of seeds.
    Metrics must be merged before.

    Args:
        main: The module that logs.
        merger: Knows the metrics.
        recorders: One per replica.
        active: The replicas that took part.
        seeds: Seeds of every replica.
        neutral: The values are of seeds that belong to another node; log what does not count.
    """
    groups: dict[tuple[str, int], list[tuple[int, Any, dict[str, Any]]]] = {}
    for replica in active:
        times: dict[str, int] = {}
        for name, value, kwargs in recorders[replica].take():
            times[name] = times.get(name, 0) + 1
            groups.setdefault((name, times[name]), []).append((replica, value, kwargs))
    for (name, _), calls in groups.items():
        replica, first, kwargs = calls[0]
        if isinstance(first, Metric):
            attribute = merger.name_of(replica, first)
            if attribute is None:
                raise ValueError(f"self.log({name!r}, …): the metric is no attribute of the LightningModule")
            metric: Any = main.get_submodule(attribute)
            main.log(name, metric, **{**kwargs, "batch_size": 1})
            continue
        sizes = [kwargs.get("batch_size") or seeds[replica] for replica, _, kwargs in calls]
        values = [_scalar(name, value, main.device) for _, value, _ in calls]
        reduction = kwargs.get("reduce_fx", "mean")
        reduction = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "mean")
        value = _joined(values, sizes, reduction.lower())
        size = sum(sizes)
        if neutral:
            value, size = torch.full_like(value, _NEUTRAL.get(reduction, 0.0)), 0
        main.log(name, value, **{**kwargs, "batch_size": size})


def _scalar(name: str, value: Any, device: torch.device) -> Tensor:
    if not isinstance(value, (Tensor, int, float)):
        raise ValueError(f"self.log({name!r}, …) takes a number, a tensor or a metric, but got {type(value).__name__}")
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.get_default_dtype())
    if tensor.numel() != 1:
        raise ValueError(f"self.log({name!r}, …) takes one number, but the tensor has the shape {list(tensor.shape)}")
    return tensor.to(device).reshape(())


def _joined(values: list[Tensor], sizes: list[int], reduction: str) -> Tensor:
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(values)
    if reduction == "max":
        return stacked.amax(0)
    if reduction == "min":
        return stacked.amin(0)
    if reduction == "sum":
        return stacked.sum(0)
    wide = stacked.to(torch.float64) if stacked.device.type != "mps" else stacked.float()
    weights = torch.tensor(sizes, dtype=wide.dtype, device=wide.device)
    mean = (wide * weights).sum() / weights.sum()
    return mean.to(stacked.dtype if stacked.is_floating_point() else torch.get_default_dtype())
