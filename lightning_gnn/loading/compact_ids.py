"""Compact encoding of sampled subgraphs that wait for their features: int32 ids, and uint8 deltas for edge targets.

Samplers list edges by target, so consecutive targets usually differ by less than 256, which fits into one byte.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor
from torch_geometric.typing import NodeType

from lightning_gnn.graph.stores import StoreType
from lightning_gnn.sampling.deferred_edges import LazyEdgeIds
from lightning_gnn.sampling.neighbor import Output

_INT32 = torch.iinfo(torch.int32)
_FIELDS = ("node", "row", "col", "edge", "batch")
_EMPTY_INT64 = torch.empty(0, dtype=torch.int64)

EncodedIds: TypeAlias = "Tensor | LazyEdgeIds | _Int32Ids | _DeltaIds | _EncodedEdges | None"  # original or encoded ids
CompactIdsByType: TypeAlias = "EncodedIds | dict[Any, EncodedIds]"  # a dictionary by type in a heterogeneous graph


@dataclass(frozen=True)
class _Int32Ids:
    """int64 ids ``[n]`` stored as int32 on the CPU, with their original device."""

    ids: Tensor
    device: torch.device

    def decode(self) -> Tensor:
        return self.ids.to(self.device).to(torch.int64)


@dataclass(frozen=True)
class _DeltaIds:
    """Non-decreasing int64 ids ``[n]``: the first id, uint8 deltas ``[n]`` on the CPU, and the original device."""

    first: int
    ids: Tensor
    device: torch.device

    def decode(self) -> Tensor:
        return torch.cumsum(self.ids.to(self.device), 0, dtype=torch.int64).add_(self.first)


@dataclass(frozen=True)
class _EncodedEdges:
    """Edges whose ids are looked up lazily, with encoded positions."""

    edges: LazyEdgeIds
    positions: EncodedIds


class CompactIds:
    """A sampler's output in compact form."""

    def __init__(self, out: Output) -> None:
        self._out = copy.copy(out)
        self._out.node = _map_types(out.node, _encode_int32)
        self._out.row, self._out.col = _map_types(out.row, _encode_int32), _map_types(out.col, _encode_deltas)
        self._out.edge, self._out.batch = _map_types(out.edge, _encode_int32), _map_types(out.batch, _encode_int32)
        self._shared_base_types = {
            type_name
            for type_name, row in _items(out.row)
            if isinstance(row, Tensor) and shared_base(row, _select_type(out.col, type_name)) is not None
        }

    def decode(self) -> Output:
        """Return an output equal to the original; row and column share one tensor again if they did."""
        out = copy.copy(self._out)
        for name in _FIELDS:
            setattr(out, name, _map_types(getattr(out, name), _decode))
        for type_name in self._shared_base_types:
            base = torch.stack([cast(Tensor, _select_type(ends, type_name)) for ends in (out.row, out.col)])
            if type_name is None:
                out.row, out.col = base[0], base[1]
            else:
                out.row[type_name], out.col[type_name] = base[0], base[1]
        return out

    def nodes(self, type_name: NodeType | None) -> Tensor | None:
        """Return the nodes of a type (None in a homogeneous graph), int64 or int32 ``[n]``."""
        node = _select_type(self._out.node, type_name)
        return node.ids if isinstance(node, _Int32Ids) else cast("Tensor | None", node)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all types."""
        type_names = [type_name for type_name, _ in _items(self._out.node)]
        return sum(ids.numel() for type_name in type_names if (ids := self.nodes(type_name)) is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the nodes and edges."""
        parts = (getattr(self._out, name) for name in _FIELDS)
        return sum(_num_bytes(value) for part in parts for _, value in _items(part))


def shared_base(row: Tensor, col: object) -> Tensor | None:
    """Return the tensor ``[2, m]`` whose rows are ``row`` and ``col``, or None."""
    base = row._base
    is_shared = (
        base is not None
        and isinstance(col, Tensor)
        and base is col._base
        and base.shape == (2, row.numel())
        and base[1].data_ptr() == col.data_ptr()
    )
    return base if is_shared else None


def _items(values: CompactIdsByType) -> list[tuple[StoreType, EncodedIds]]:
    return [*values.items()] if isinstance(values, dict) else [(None, values)]


def _select_type(values: CompactIdsByType, type_name: StoreType) -> EncodedIds:
    return values.get(type_name) if isinstance(values, dict) else values


def _map_types(values: CompactIdsByType, function: Callable[[EncodedIds], EncodedIds]) -> CompactIdsByType:
    return {key: function(value) for key, value in values.items()} if isinstance(values, dict) else function(values)


def _is_encodable(ids: EncodedIds) -> TypeGuard[Tensor]:
    return type(ids) is Tensor and ids.dtype == torch.int64 and ids.dim() == 1 and ids.numel() > 0


def _encode_int32(ids: EncodedIds) -> EncodedIds:
    if type(ids) is LazyEdgeIds:
        edges = copy.copy(ids)
        edges.positions = _EMPTY_INT64  # else the original positions would stay in memory
        return _EncodedEdges(edges, _encode_int32(ids.positions))
    if not _is_encodable(ids):
        return ids
    low, high = ids.aminmax()
    fits = low >= _INT32.min and high <= _INT32.max
    return _Int32Ids(ids.to(torch.int32).cpu(), ids.device) if fits else ids


def _encode_deltas(ids: EncodedIds) -> EncodedIds:
    if not _is_encodable(ids):
        return ids
    steps = ids.diff(prepend=ids[:1])
    low, high = steps.aminmax()
    rises = low >= 0 and high < 256
    return _DeltaIds(int(ids[0]), steps.to(torch.uint8).cpu(), ids.device) if rises else _encode_int32(ids)


def _decode(value: EncodedIds) -> EncodedIds:
    if isinstance(value, _EncodedEdges):
        edges = copy.copy(value.edges)
        edges.positions = cast(Tensor, _decode(value.positions))
        return edges
    if isinstance(value, _Int32Ids | _DeltaIds):
        return value.decode()
    return value


def _num_bytes(value: EncodedIds) -> int:
    if isinstance(value, _EncodedEdges):
        return _num_bytes(value.positions)
    ids = value.ids if isinstance(value, _Int32Ids | _DeltaIds) else value
    return ids.nbytes if isinstance(ids, Tensor) else 0
