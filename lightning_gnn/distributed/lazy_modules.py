"""Modules that take their sizes from their first mini-batch, in runs of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric


class _InitializedError(Exception):
    """Ends a step whose lazy modules are all initialized."""


def uninitialized(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers without a shape, by name."""
    return {name: held for name, held in (*module.named_parameters(), *module.named_buffers()) if is_lazy(held)}


def initialize(module: pl.LightningModule, step: Callable[[], object]) -> bool:
    """Initialize lazy modules by a step whose results are dropped, and make them those of the first rank that has them.

    All ranks call this together. The step ends as soon as no lazy module is left. It leaves nothing but what it drew
    from torch's random stream, which goes on as on rank 0.
    """
    names = list(uninitialized(module))
    if not names:
        return False

    def stop(*_: object) -> None:
        raise _InitializedError

    def look(*_: object) -> None:
        if not uninitialized(module):
            stop()

    owners = [part for part in module.modules() if any(map(is_lazy, (*part.parameters(False), *part.buffers(False))))]
    hooks = [owner.register_forward_pre_hook(look) for owner in owners]  # after those that initialize
    own = dict(module.__dict__)
    module.__dict__.update(log=lambda *_, **__: None, manual_backward=stop)
    try:
        with no_side_effects(module), torch.no_grad():
            step()
    except _InitializedError:
        pass
    finally:
        for name in ("log", "manual_backward"):
            del module.__dict__[name]
            module.__dict__.update({name: own[name]} if name in own else {})
        for hook in hooks:
            hook.remove()
    _agree(module, names)
    return True


def _agree(module: nn.Module, names: list[str]) -> None:
    held: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    initialized: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(initialized, [name for name in names if not is_lazy(held[name])])
    if unused := [name for name in names if not any(name in found for found in initialized)]:
        raise RuntimeError(
            f"{', '.join(unused)} has no size yet, and no rank's first mini-batch gives it one: give in_channels (or "
            "in_features), or run the module on one batch before trainer.fit"
        )
    for source, found in enumerate(initialized):
        here = [name for name in names if name in found]
        names = [name for name in names if name not in found]
        sent: list[Any] = [None, None]
        if source == dist.get_rank():
            sent = [[held[name].detach().cpu() for name in here], torch.get_rng_state()]
        if here or source == 0:
            dist.broadcast_object_list(sent, source)
            for name, value in zip(here, sent[0], strict=True):
                if is_lazy(held[name]):
                    held[name].materialize(value.shape)
                with torch.no_grad():
                    held[name].copy_(value)
        if source == 0:
            torch.set_rng_state(sent[1])


@contextmanager
def no_side_effects(module: nn.Module) -> Iterator[None]:
    """Run a step that must not count: buffers, and the states of torchmetrics, are put back as they were afterwards.

    Args:
        module: Its step makes the same calls as those of other ranks, or a metric would miss where all synchronise.
    """
    buffers = [
        (part._buffers, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    states = [{name: _copied(getattr(metric, name)) for name in metric._defaults} for metric in metrics]
    counts = [(metric._update_count, metric._computed) for metric in metrics]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, before in buffers:
                owner[name] = buffer.resize_(before.shape).copy_(before)
        for metric, state, (count, computed) in zip(metrics, states, counts, strict=True):
            for name, value in state.items():
                if isinstance(value, list):  # of what was added, nothing but the shape: ranks with an empty list hang
                    value += [item[:0] for item in getattr(metric, name)[len(value) :] if item.dim()]
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, computed


def _copied(state: object) -> object:
    """Return a state of a metric as it is now: a list of what is never changed, or what is written to."""
    return list(state) if isinstance(state, list) else state.detach().clone() if isinstance(state, Tensor) else state
