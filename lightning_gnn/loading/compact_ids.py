"""A sampled subgraph in few bytes, while it waits for its features: ids in 32 bits where these hold them, and steps.

Targets of edges rise by less than 256 from edge to edge where samplers list one after another: a byte says by how much.
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

_FITS = torch.iinfo(torch.int32)
_PARTS = ("node", "row", "col", "edge", "batch")
_NOTHING = torch.empty(0, dtype=torch.int64)

EncodedIds: TypeAlias = (
    "Tensor | LazyEdgeIds | _Narrow | _Steps | _Positions | None"  # ids as they came, or in few bytes
)
CompactIdsByType: TypeAlias = "EncodedIds | dict[Any, EncodedIds]"  # those of each type in a heterogeneous graph


@dataclass(frozen=True)
class _Narrow:
    """int64 ids ``[n]`` in 32 bits, and where they were."""

    ids: Tensor
    device: torch.device

    def wide(self) -> Tensor:
        return self.ids.to(self.device).to(torch.int64)


@dataclass(frozen=True)
class _Steps:
    """int64 ids ``[n]`` that never fall: the first, by how much each is above the one before, uint8 ``[n]``, where."""

    first: int
    ids: Tensor
    device: torch.device

    def wide(self) -> Tensor:
        return torch.cumsum(self.ids.to(self.device), 0, dtype=torch.int64).add_(self.first)


@dataclass(frozen=True)
class _Positions:
    """Edges whose ids are yet to be looked up, with their positions packed."""

    edges: LazyEdgeIds
    positions: EncodedIds


class CompactIds:
    """What a sampler gave, in few bytes."""

    def __init__(self, out: Output) -> None:
        self._out = copy.copy(out)
        self._out.node = _each(out.node, _narrow)
        self._out.row, self._out.col = _each(out.row, _narrow), _each(out.col, _steps)
        self._out.edge, self._out.batch = _each(out.edge, _narrow), _each(out.batch, _narrow)
        self._together = {
            kind
            for kind, row in _items(out.row)
            if isinstance(row, Tensor) and both_of(row, _part(out.col, kind)) is not None
        }

    def unpacked(self) -> Output:
        """Return what was packed, equal to it; rows and columns of one tensor are so again."""
        out = copy.copy(self._out)
        for name in _PARTS:
            setattr(out, name, _each(getattr(out, name), _unpacked))
        for kind in self._together:
            both = torch.stack([cast(Tensor, _part(ends, kind)) for ends in (out.row, out.col)])
            if kind is None:
                out.row, out.col = both[0], both[1]
            else:
                out.row[kind], out.col[kind] = both[0], both[1]
        return out

    def nodes(self, kind: NodeType | None) -> Tensor | None:
        """Return the nodes of a type, or of a graph without types for None, int64 or int32 ``[n]``."""
        node = _part(self._out.node, kind)
        return node.ids if isinstance(node, _Narrow) else cast("Tensor | None", node)

    @property
    def num_nodes(self) -> int:
        """Of all types."""
        kinds = [kind for kind, _ in _items(self._out.node)]
        return sum(ids.numel() for kind in kinds if (ids := self.nodes(kind)) is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of its nodes and edges."""
        parts = (getattr(self._out, name) for name in _PARTS)
        return sum(_bytes(value) for part in parts for _, value in _items(part))


def both_of(row: Tensor, col: object) -> Tensor | None:
    """Return the tensor ``[2, m]`` of which these are the rows, or None."""
    base = row._base
    one = (
        base is not None
        and isinstance(col, Tensor)
        and base is col._base
        and base.shape == (2, row.numel())
        and base[1].data_ptr() == col.data_ptr()
    )
    return base if one else None


def _items(values: CompactIdsByType) -> list[tuple[StoreType, EncodedIds]]:
    return [*values.items()] if isinstance(values, dict) else [(None, values)]


def _part(values: CompactIdsByType, kind: StoreType) -> EncodedIds:
    return values.get(kind) if isinstance(values, dict) else values


def _each(values: CompactIdsByType, function: Callable[[EncodedIds], EncodedIds]) -> CompactIdsByType:
    return {kind: function(value) for kind, value in values.items()} if isinstance(values, dict) else function(values)


def _is_plain(ids: EncodedIds) -> TypeGuard[Tensor]:
    return type(ids) is Tensor and ids.dtype == torch.int64 and ids.dim() == 1 and ids.numel() > 0


def _narrow(ids: EncodedIds) -> EncodedIds:
    if type(ids) is LazyEdgeIds:
        edges = copy.copy(ids)
        edges.positions = _NOTHING  # else they would be held beside
        return _Positions(edges, _narrow(ids.positions))
    if not _is_plain(ids):
        return ids
    low, high = ids.aminmax()
    fits = low >= _FITS.min and high <= _FITS.max
    return _Narrow(ids.to(torch.int32).cpu(), ids.device) if fits else ids


def _steps(ids: EncodedIds) -> EncodedIds:
    if not _is_plain(ids):
        return ids
    steps = ids.diff(prepend=ids[:1])
    low, high = steps.aminmax()
    rises = low >= 0 and high < 256
    return _Steps(int(ids[0]), steps.to(torch.uint8).cpu(), ids.device) if rises else _narrow(ids)


def _unpacked(value: EncodedIds) -> EncodedIds:
    if isinstance(value, _Positions):
        edges = copy.copy(value.edges)
        edges.positions = cast(Tensor, _unpacked(value.positions))
        return edges
    if isinstance(value, _Narrow | _Steps):
        return value.wide()
    return value


def _bytes(value: EncodedIds) -> int:
    if isinstance(value, _Positions):
        return _bytes(value.positions)
    ids = value.ids if isinstance(value, _Narrow | _Steps) else value
    return ids.nbytes if isinstance(ids, Tensor) else 0
