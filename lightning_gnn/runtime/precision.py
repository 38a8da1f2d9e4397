"""Convert PyG batches to the dtype of the Trainer's precision; Lightning converts only tensors in collections."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import recursive_apply

from lightning_gnn.runtime.lightning import pl, rank_zero_warn


def convert_batches(trainer: pl.Trainer) -> None:
    """Make the trainer's precision plugin also convert floating tensors in PyG batches, as ``"64-true"`` needs.

    If parameters are float16, training begins with a warning about an optimizer that would divide by 0.
    """
    plugin: Any = trainer.precision_plugin
    dtype = input_dtype(plugin)
    if dtype is not None and not isinstance(plugin.convert_input, _Conversion):
        plugin.convert_input = _Conversion(plugin.convert_input)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    model = trainer.lightning_module
    dtypes = {dtype} | {value.dtype for value in (model.parameters() if model else ())}
    if torch.float16 in dtypes and not any(isinstance(callback, _EpsilonCheck) for callback in callbacks):
        callbacks.insert(0, _EpsilonCheck())


def input_dtype(precision: Any) -> torch.dtype | None:
    """Return the dtype to which a precision plugin converts float32 inputs; None if it keeps float32."""
    dtype: torch.dtype = precision.convert_input(torch.zeros((), dtype=torch.float32)).dtype
    return None if dtype == torch.float32 else dtype


def converted(batch: Any, dtype: torch.dtype | None) -> Any:
    """Return a copy of a batch with its floating attributes converted to ``dtype``; None returns it unchanged."""
    if dtype is None or not isinstance(batch, BaseData):
        return batch

    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    batch = copy.copy(batch)
    for store in batch.stores:
        # e_id holds integers, and may be evaluated lazily.
        for key in [key for key in store.keys() if key != "e_id"]:  # noqa: SIM118
            store[key] = recursive_apply(store[key], convert)
    return batch


class _EpsilonCheck(pl.Callback):
    """Warns at the start of training if an optimizer adds an epsilon to divisors that is 0 in their dtype, float16."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check all optimizers, which Lightning creates after the modules are set up."""
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                eps = group.get("eps")
                rounds_to_zero = isinstance(eps, float) and eps > 0 and not torch.tensor(eps, dtype=torch.float16)
                if rounds_to_zero and any(value.dtype == torch.float16 for value in group["params"]):
                    rank_zero_warn(
                        f"the parameters are float16, in which eps={eps:g} of {type(optimizer).__name__} is 0: updates "
                        "may divide by 0, and the model become NaN; use Trainer(precision='16-mixed') or 'bf16-mixed', "
                        "or an optimizer with eps=1e-4"
                    )
                    return


class _Conversion:
    """A plugin's ``convert_input`` that also converts PyG batches."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert
        self._cached: tuple[Any, Any] | None = None

    def __call__(self, data: Any) -> Any:
        return apply_to_collection(self._convert(data), BaseData, self._convert_batch)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cached": None}

    def _convert_batch(self, batch: BaseData) -> BaseData:
        if self._cached is not None and self._cached[0]() is batch:
            result: BaseData = self._cached[1]
            return result
        result = converted(batch, self._convert(torch.zeros(())).dtype)
        if getattr(type(batch), "is_handed_out_again", False):
            self._cached = weakref.ref(batch), result
        return result
