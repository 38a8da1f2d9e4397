"""Joining the torchmetrics of several replicas, exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import CompositionalMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers.abstract import WrapperMetric

_EXACT: dict[Callable, Callable[[list[Tensor]], Tensor]] = {
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
                return name
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
