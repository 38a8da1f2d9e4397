"""Batches of PyG in the dtype of the Trainer's precision: Lightning converts tensors in collections, not in these."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import recursive_apply


def convert_batches(trainer: pl.Trainer) -> None:
    """Let the trainer's precision plugin convert floating tensors in batches of PyG, too, as ``"64-true"`` needs."""
    plugin: Any = trainer.precision_plugin
    if input_dtype(plugin) is not None and not isinstance(plugin.convert_input, _Conversion):
        plugin.convert_input = _Conversion(plugin.convert_input)


def input_dtype(precision: Any) -> torch.dtype | None:
    """Return what a precision plugin converts floating inputs to; None where it leaves them as they are."""
    dtype: torch.dtype = precision.convert_input(torch.zeros((), dtype=torch.float32)).dtype
    return None if dtype == torch.float32 else dtype


def converted(batch: Any, dtype: torch.dtype | None) -> Any:
    """Return a copy of a batch with floating attributes of another dtype."""
    if dtype is None or not isinstance(batch, BaseData):
        return batch
    batch = copy.copy(batch)
    for store in batch.stores:
        # e_id are integers, which may not have been looked up yet.
        for key in [key for key in store.keys() if key != "e_id"]:  # noqa: SIM118
            store[key] = recursive_apply(store[key], lambda value: _floating_as(value, dtype))
    return batch


def _floating_as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


class _Conversion:
    """A plugin's ``convert_input`` for batches of PyG as well."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert
        self._kept: tuple[Any, Any] | None = None

    def __call__(self, data: Any) -> Any:
        return apply_to_collection(self._convert(data), BaseData, self._batch)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": None}

    def _batch(self, batch: BaseData) -> BaseData:
        if self._kept is not None and self._kept[0]() is batch:
            made: BaseData = self._kept[1]
            return made
        made = converted(batch, self._convert(torch.zeros(())).dtype)
        if getattr(type(batch), "is_handed_out_again", False):
            self._kept = weakref.ref(batch), made
        return made
