"""``self.log`` of numbers that each rank computed over its own rows, as one number over all rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

_STEPS = ("training_step", "validation_step", "test_step")


def log_globally(module: pl.LightningModule, share: Callable[[], tuple[int, int]], num_ranks: int) -> None:
    """Make a module's ``log`` exact over all ranks, until :func:`log_locally`.

    Inside the three steps, a mean becomes the mean over the split's nodes of all ranks; a sum, maximum or minimum runs
    over all ranks. Metrics of torchmetrics are left to their own synchronisation, and so are other hooks.

    Args:
        module: The module.
        share: Returns how many nodes of the current split this rank has, and how many there are.
        num_ranks: N.
    """
    original = type(module).log.__get__(module)
    signature = inspect.signature(original)

    def log(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        value, reduce = given["value"], given.get("reduce_fx", "mean")
        reduce = getattr(reduce, "__name__", reduce)
        known = reduce in ("mean", "avg", "sum", "max", "min")
        if isinstance(value, Metric | MetricCollection) or module._current_fx_name not in _STEPS or not known:
            original(**given)
            return
        if given.get("rank_zero_only"):
            raise ValueError(
                f"log({given['name']!r}, rank_zero_only=True): under ascend_hybrid each rank has some of the rows, "
                "so that all must log; leave rank_zero_only out"
            )
        if reduce in ("mean", "avg"):
            here, everywhere = share()
            value = _float(value) * (here / everywhere * num_ranks)
            given["batch_size"] = everywhere
        original(**{**given, "value": value, "sync_dist": True})

    module.__dict__["log"] = log


def log_locally(module: pl.LightningModule) -> None:
    """Give a module its own ``log`` back."""
    module.__dict__.pop("log", None)


def _float(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.get_default_dtype())
    value = value.detach()
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())
