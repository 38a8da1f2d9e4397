"""What several trainers return, log and count in a step, made one: outputs, ``self.log`` and torchmetrics."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import CompositionalMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers.abstract import WrapperMetric


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float], device: torch.device) -> Tensor:
    """Return the weighted sum of the trainers' tensors, which is their mean where the weights add up to 1.

    Args:
        values: Of the trainers, of one shape, each on its own device.
        weights: One for each of them.
        device: Where the result is to be.
    """
    return torch.stack([value.detach().to(device) * weight for value, weight in zip(values, weights, strict=True)]).sum(
        0
    )


def joined_entry(values: Sequence[Any], weights: Sequence[float], device: torch.device) -> Any:
    """Return one entry for all trainers: the mean of single numbers, the rows of tensors, else the first trainer's.

    Args:
        values: What each trainer returned under one name.
        weights: Their shares of the seeds.
        device: Where tensors are to be.
    """
    if not all(isinstance(value, Tensor) for value in values):
        return values[0]
    if all(value.dim() == 0 and value.is_floating_point() for value in values):
        return weighted_mean(values, weights, device)
    if all(value.dim() and value.shape[1:] == values[0].shape[1:] for value in values):
        return torch.cat([value.detach().to(device) for value in values])
    return values[0]


_EXACT: dict[Callable[..., Any], Callable[[list[Tensor]], Tensor]] = {
    dim_zero_sum: lambda values: torch.stack(values).sum(0),
    dim_zero_max: lambda values: torch.stack(values).amax(0),
    dim_zero_min: lambda values: torch.stack(values).amin(0),
    dim_zero_cat: lambda values: torch.cat([value.reshape(-1) if value.dim() == 0 else value for value in values]),
}


def prepare_replica(module: nn.Module) -> None:
    """Empty a replica's metrics, let those of a collection be updated one by one, and refuse what cannot be merged."""
    for name, child in module.named_modules():
        if isinstance(child, MetricCollection):
            # Members of a compute group share states, which are taken from the replicas one by one here.
            child._enable_compute_groups, child._groups_checked, child._groups = False, False, {}
        elif isinstance(child, Metric):
            child.reset()
            reason = _why_not_mergeable(child)
            if reason is not None:
                refuse = partial(_refuse, f"the metric '{name}' ({type(child).__name__}) {reason}")
                child.__dict__.update(update=refuse, forward=refuse)


def _why_not_mergeable(metric: Metric) -> str | None:
    if isinstance(metric, (WrapperMetric, CompositionalMetric)):
        return "keeps more than states of its own"
    for state, reduction in metric._reductions.items():
        if reduction is not dim_zero_sum and reduction not in _EXACT:
            return f"has the state '{state}' with dist_reduce_fx={getattr(reduction, '__name__', reduction)}"
    return None


def _refuse(what: str, *args: Any, **kwargs: Any) -> None:
    raise TypeError(
        f"{what}: under hyscale, training_step can only update metrics whose states are summed, maximised, minimised "
        f"or concatenated; update it in validation_step instead, or train with another strategy"
    )


class MetricMerger:
    """Takes what the replicas' metrics have counted in a step over to the main module's.

    Args:
        main: The module whose metrics shall count everything.
        replicas: Its copies, after :func:`prepare_replica`.
    """

    def __init__(self, main: nn.Module, replicas: Sequence[nn.Module]) -> None:
        self._names = [name for name, child in main.named_modules() if isinstance(child, Metric)]
        self._main: list[Any] = [main.get_submodule(name) for name in self._names]
        self._copies = [[replica.get_submodule(name) for name in self._names] for replica in replicas]
        self._scratch: dict[int, Any] = {}

    def name_of(self, replica: int, metric: Metric) -> str | None:
        """Return the name of a replica's metric, None if it is none of its submodules."""
        for name, child in zip(self._names, self._copies[replica], strict=True):
            if child is metric:
                return str(name)
        return None

    def merge(self, active: Sequence[int], count: bool = True) -> None:
        """Take over a step of some replicas, whose metrics are empty afterwards.

        Args:
            active: The replicas.
            count: Without, what they have counted is dropped.
        """
        for place in range(len(self._names)):
            parts: list[Any] = [self._copies[replica][place] for replica in active]
            parts = [part for part in parts if part._update_count > 0]
            if not parts or not count:
                for part in parts:
                    part.reset()
                continue
            main: Any = self._main[place]
            step = _merged(main, [_states(part, main.device) for part in parts])
            total = step if main._update_count == 0 else _merged(main, [_states(main, main.device), step])
            called = any(part._forward_cache is not None for part in parts)
            for part in parts:
                part.reset()  # first: states that hang on a graph could not be copied
            if called:
                main._forward_cache = self._value(place, step)
            for state, value in total.items():
                setattr(main, state, value)
            main._update_count += 1
            main._computed = None

    def _value(self, place: int, states: Mapping[str, Any]) -> Any:
        """Compute the metric of one step."""
        scratch: Any = self._scratch.get(place)
        if scratch is None:
            scratch = self._scratch[place] = copy.deepcopy(self._copies[0][place]).to(self._main[place].device)
        scratch.reset()
        for state, value in states.items():
            setattr(scratch, state, list(value) if isinstance(value, list) else value)
        scratch._update_count, scratch._computed, scratch._to_sync = 1, None, False
        value = scratch.compute()
        scratch.reset()
        return value


def _states(metric: Any, device: torch.device) -> dict[str, Any]:
    """Return a metric's states, cut from any graph."""

    def taken(value: Any) -> Any:
        if isinstance(value, list):
            return [taken(part) for part in value]
        return value.detach().to(device) if isinstance(value, Tensor) else value

    return {state: taken(getattr(metric, state)) for state in metric._defaults}


def _merged(metric: Any, parts: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for state, reduction in metric._reductions.items():
        values = [part[state] for part in parts]
        if any(isinstance(value, list) for value in values):
            out[state] = [part for value in values for part in (value if isinstance(value, list) else [value])]
        elif reduction is dim_zero_sum:
            # One after another, as a single metric would have added them.
            total = values[0]
            for value in values[1:]:
                total = total + value
            out[state] = total
        else:
            out[state] = values[0] if len(values) == 1 else _EXACT[reduction](values)
    return out


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
