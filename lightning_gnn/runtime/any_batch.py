"""Functions on the tensors of a mini-batch, which is a PyG graph or whatever a user's transform returned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from numbers import Number
from types import NoneType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.utils import is_sparse

_CONSTANTS = (str, bytes, Number, NoneType, torch.dtype, torch.device)


def map_tensors(
    batch: Any, function: Callable[[Tensor], Tensor], on_graph: Callable[[BaseData], BaseData] | None = None
) -> Any:
    """Apply a function to all tensors of a graph in place, or to those of a copy of a (nested) collection.

    ``on_graph`` replaces ``graph.apply(function)``. Collections are those that Lightning moves to a device.

    Raises:
        TypeError: An object may hold tensors that cannot be found.
    """
    apply = on_graph or (lambda graph: graph.apply(function))
    if isinstance(batch, BaseData):
        return apply(batch)

    def visit(part: Any) -> Any:
        if isinstance(part, BaseData):
            return apply(copy.copy(part))
        if isinstance(part, Tensor) or is_sparse(part):
            return function(part)
        raise TypeError(
            f"a transform returned a {type(part).__name__}, whose tensors cannot be found: return a graph, or a dict, "
            "list, tuple or dataclass of graphs and tensors"
        )

    return apply_to_collection(batch, _Part, visit)


def copy_to(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Copy a batch to a device."""
    return map_tensors(
        batch,
        lambda tensor: tensor.to(device, non_blocking=non_blocking),
        lambda graph: graph.to(device, non_blocking=non_blocking),
    )


class _PartType(type):
    def __instancecheck__(cls, value: object) -> bool:
        is_collection = isinstance(value, Mapping | list | tuple) or (is_dataclass(value) and not is_sparse(value))
        return not is_collection and not isinstance(value, _CONSTANTS)


class _Part(metaclass=_PartType):
    """Any object that is neither a collection nor a constant."""
