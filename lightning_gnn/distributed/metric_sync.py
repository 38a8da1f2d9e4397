"""``self.log`` in the steps of ranks with unequal shares: each value becomes that of the undivided mini-batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric, MetricCollection

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "amax": "max", "min": "min", "amin": "min"}
Key = tuple[str, str, int]
"""Step, name, and how many values of this name came before it in the step."""


class MetricSync:
    """Collects what a module logs in a step on this rank, and logs it for all ranks once their values are gathered."""

    def __init__(self, module: pl.LightningModule, shares_only: str | None = None) -> None:
        self._module = module
        self._original = type(module).log.__get__(module)
        self._signature = inspect.signature(self._original)
        self._known: dict[Key, dict[str, Any]] = {}
        self._here: dict[Key, dict[str, Any]] = {}
        self._shares_only = shares_only
        self._step: str | None = None
        self._share = 0
        module.__dict__["log"] = self.log

    def remove(self) -> None:
        """Give the module its own method back."""
        self._module.__dict__.pop("log", None)

    @contextmanager
    def collect(self, step: str, share: int) -> Iterator[None]:
        """Collect what is logged within."""
        self._here, self._step, self._share = {}, step, share
        try:
            yield
        finally:
            self._step = None

    def log(self, *args: object, **kwargs: object) -> None:
        """Replace the module's own method."""
        given = self._signature.bind(*args, **kwargs).arguments
        reduce = given.get("reduce_fx", "mean")
        kind = _REDUCTIONS.get(getattr(reduce, "__name__", str(reduce)))
        value = given["value"]
        if self._step is None or kind is None or isinstance(value, Metric | MetricCollection | dict):
            self._original(**given)
            return
        if isinstance(value, Tensor) and value.numel() != 1:
            self._original(**given)  # which says what is wrong
            return
        if self._shares_only is not None and given.get("rank_zero_only"):
            raise ValueError(
                f"log({given['name']!r}, rank_zero_only=True): under {self._shares_only} each rank has some of the "
                "rows, so that all must log; leave rank_zero_only out"
            )
        count = sum(key[:2] == (self._step, given["name"]) for key in self._here)
        self._here[(self._step, given["name"], count)] = given

    @property
    def is_new(self) -> bool:
        """Whether something has been logged here that has no place in :meth:`row`."""
        return any(key not in self._known for key in self._here)

    def exchange_names(self) -> None:
        """Exchange the names and options of what is logged. Collective: every rank must call this."""
        mine = {key: {k: v for k, v in given.items() if k != "value"} for key, given in self._here.items()}
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        for known in everybody:
            for key, options in known.items():
                self._known.setdefault(key, options)

    def row(self) -> list[float | Tensor]:
        """Return a value and a weight for each name that is known, NaN as the weight where it is missing here."""
        # A rank without a share has none: its step has run on a seed of another rank's.
        numbers: list[float | Tensor] = []
        for key in self._known:
            given = self._here.get(key)
            if given is None or not self._share:
                numbers += [0.0, math.nan]
            else:
                size, value = None if self._shares_only is not None else given.get("batch_size"), given["value"]
                number = value.detach() if isinstance(value, Tensor) else float(value)
                numbers += [number, float(self._share if size is None else size)]
        return numbers

    def flush(self, step: str, rows: Sequence[Sequence[float]]) -> None:
        """Log the values of all ranks."""
        here, self._here = self._here, {}
        before, self._module._current_fx_name = self._module._current_fx_name, step
        try:
            for index, (key, options) in enumerate(self._known.items()):
                found = [(row[2 * index], row[2 * index + 1]) for row in rows if not math.isnan(row[2 * index + 1])]
                if key[0] != step or not found:
                    continue
                given = {**options, **here.get(key, {})}
                reduce = given.get("reduce_fx", "mean")
                value = _reduced(found, _REDUCTIONS[getattr(reduce, "__name__", str(reduce))])
                given["value"] = _tensor(value, here.get(key, {}).get("value"))
                whole = sum(weight for _, weight in found)
                self._original(**{**given, "batch_size": max(1, round(whole)), "sync_dist": False})
        finally:
            self._module._current_fx_name = before


def _reduced(found: Sequence[tuple[float, float]], kind: str) -> float:
    if kind == "mean":
        whole = math.fsum(weight for _, weight in found)
        if not whole:
            return math.fsum(value for value, _ in found) / len(found)
        # A mean over nothing may be NaN, which must not get in.
        return sum(value * weight for value, weight in found if weight) / whole
    values = [value for value, _ in found]
    if any(math.isnan(value) for value in values):
        return math.nan
    return math.fsum(values) if kind == "sum" else max(values) if kind == "max" else min(values)


def _tensor(value: float, like: object) -> Tensor:
    like = like if isinstance(like, Tensor) else torch.empty(0)
    return torch.tensor(value, dtype=like.dtype if like.is_floating_point() else None, device=like.device)
