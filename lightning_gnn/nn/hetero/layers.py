"""One layer of a graph with types, all its relations in one operator."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import HeteroConv
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.nn.conv.attention import FUSED_DTYPES
from lightning_gnn.nn.conv.fused import AUTOCAST_DTYPES, Fused, has_hooks, obstacle, runs_here
from lightning_gnn.nn.conv.gat import GATConv
from lightning_gnn.nn.conv.sage import SAGEConv
from lightning_gnn.nn.hetero.attention import attend_types, pays
from lightning_gnn.nn.hetero.rows import LayerInput, TypedRows
from lightning_gnn.nn.type_modules import TypeModules
from lightning_gnn.ops.aggregate_update.definition import Relation, relation_update
from lightning_gnn.ops.aggregate_update.reference import ReluDropout, activated


def update_types(
    rows: TypedRows,
    part: LayerInput,
    weights: Mapping[EdgeType, Tensor],  # W of each edge type, [out, in]
    self_weights: Mapping[NodeType, Tensor],  # S of each type that has one, [out, in]
    biases: Mapping[NodeType, Tensor],  # b of each type that has one, [out]
    mean: bool,
    then: ReluDropout | None,
) -> TypedRows:
    """Return ``sum_r mean_r(x) W_r^T + x S_t^T + b_t`` for the targets of all types."""
    types = list(part.sources)  # as they lie in the tables; what is computed is among them
    number = {name: at for at, name in enumerate(types)}
    out: Tensor | None = None
    for table, counts in zip(rows.tables, rows.counts, strict=True):
        read = sorted((kind for kind in part.edges if kind[0] in counts), key=lambda kind: number[kind[2]])
        if len(rows.tables) > 1 and not read and not any(name in counts for name in self_weights):
            continue
        given = [self_weights.get(name) if name in counts else None for name in types]
        like = next((w for w in (*given, *weights.values()) if w is not None and w.size(1) == table.size(1)), None)
        assert like is not None
        shift = biases if out is None else {}
        result = relation_update(
            table,
            [counts.get(name, 0) for name in types],
            [part.targets.get(name, 0) for name in types],
            [Relation(number[kind[0]], number[kind[2]], part.edges[kind]) for kind in read],
            torch.stack([weights[kind] for kind in read]) if read else like.new_zeros(0, *like.shape),
            _stacked(given, like),
            _stacked([shift.get(name) for name in types], like[:, 0]),
            mean,
            then if len(rows.tables) == 1 else None,
        )
        out = result if out is None else out + result
    assert out is not None
    return TypedRows([out if len(rows.tables) == 1 else activated(out, then)], [dict(part.targets)])


def _stacked(given: list[Tensor | None], like: Tensor) -> Tensor | None:
    """Stack weights, with zeros for types that have none; None if none has."""
    if all(tensor is None for tensor in given):
        return None
    return torch.stack([like.new_zeros(like.shape) if tensor is None else tensor for tensor in given])


class RelationalConv(pyg.RGCNConv):  # type: ignore[misc]
    """PyG's ``RGCNConv`` (arXiv:1703.06103) on the rows of all types; relation i is ``edge_types[i]``."""

    fused = Fused(
        pyg.RGCNConv,
        "aggregation (sum, mean) and products of all relations, with ReLU and dropout",
        ("sum", "mean"),
        lambda layer: {},
        0,
    )

    def __init__(self, in_channels: int, out_channels: int, edge_types: list[EdgeType], **kwargs: Any) -> None:
        if kwargs.get("aggr", "mean") not in ("mean", "sum", "add"):
            raise ValueError(f"aggr={kwargs['aggr']!r} is unknown; use mean or sum")
        super().__init__(in_channels, out_channels, len(edge_types), **kwargs)
        self.edge_types = edge_types

    def forward(self, rows: TypedRows, part: LayerInput, then: ReluDropout | None = None) -> TypedRows:
        """Return the rows of the targets of all types."""
        weight = self.weight
        if self.num_bases is not None:
            weight = (self.comp @ weight.flatten(1)).view(-1, *weight.shape[1:])
        elif self.num_blocks is not None:
            weight = torch.stack([torch.block_diag(*blocks) for blocks in weight])  # type: ignore[no-untyped-call]
        weights = dict(zip(self.edge_types, weight.transpose(1, 2), strict=True))
        own: dict[NodeType, Any] = {} if self.root is None else dict.fromkeys(part.targets, self.root.t())
        shift: dict[NodeType, Any] = {} if self.bias is None else dict.fromkeys(part.targets, self.bias)
        return update_types(rows, part, weights, own, shift, self.aggr == "mean", then)


class TypedConv(HeteroConv):  # type: ignore[misc]
    """PyG's ``HeteroConv`` that computes no more rows than are asked for, in one operator where it can."""

    def __init__(self, convs: dict[EdgeType, Any]) -> None:
        super().__init__(convs)
        self.convs = TypeModules(convs)

    def forward(self, rows: TypedRows, part: LayerInput, then: ReluDropout | None = None) -> TypedRows:
        """Return the rows of the targets of all types, and what comes then."""
        convs = {kind: self.convs[kind] for kind in part.edges}
        if self._fuses(rows, part):
            if type(next(iter(convs.values()))) is SAGEConv:
                return _sage(convs, rows, part, then)
            if pays(convs, rows, part):
                return TypedRows([activated(attend_types(convs, rows, part), then)], [dict(part.targets)])
        x = rows.to_dict()
        pairs = {kind: (x[kind[0]], x[kind[2]][: part.targets[kind[2]]]) for kind in part.edges}
        found = super().forward(pairs, part.edges)
        out = torch.cat([found[name] for name in part.targets])
        return TypedRows([activated(out, then)], [dict(part.targets)])

    def _fuses(self, rows: TypedRows, part: LayerInput) -> bool:
        convs = [self.convs[kind] for kind in part.edges]
        if not runs_here([*rows.tables, *part.edges.values()]) or has_hooks(self):
            return False
        kind, attends = type(convs[0]), type(convs[0]) is GATConv
        if kind not in _ALIKE or not all(type(conv) is kind and obstacle(conv) is None for conv in convs):
            return False
        if any(has_hooks(conv) or not _plain(conv) for conv in convs):
            return False
        if len({tuple(getattr(conv, name) for name in _ALIKE[kind]) for conv in convs}) > 1:
            return False
        products = [list(conv.fused.products(conv).values()) for conv in convs]
        residuals = [conv.res for conv in convs if attends and conv.res is not None]
        weights = [lin.weight for lin in (*(lin for lins in products for lin in lins), *residuals)]
        if any(nn.parameter.is_lazy(weight) for weight in weights):
            return False
        dtype, autocast = rows.tables[0].dtype, torch.is_autocast_enabled("cpu")
        dtypes: tuple[torch.dtype, ...] = AUTOCAST_DTYPES if autocast else (dtype,)
        if any(table.dtype not in dtypes for table in rows.tables):
            return False
        if attends:
            dtypes = (torch.float32,) if autocast else tuple({dtype} & {*FUSED_DTYPES})
        if any(weight.dtype not in dtypes for weight in weights):
            return False
        width = {name: table.size(1) for table, names in zip(rows.tables, rows.counts, strict=True) for name in names}
        # Shapes that do not fit are PyG's to complain about.
        return all(
            lins[0].weight.size(1) == width[kind[0]] and (len(lins) == 1 or lins[1].weight.size(1) == width[kind[2]])
            for kind, lins in zip(part.edges, products, strict=True)
        )


_ALIKE: dict[type, tuple[str, ...]] = {
    SAGEConv: ("aggr",),
    GATConv: ("heads", "out_channels", "concat", "negative_slope", "dropout", "training"),
}
"""Layers of which those of all relations run as one operator, and what these must have in common."""


def _plain(conv: SAGEConv | GATConv) -> bool:
    if isinstance(conv, GATConv):
        return not conv.add_self_loops and (conv.res is None or (type(conv.res) is Linear and not has_hooks(conv.res)))
    return conv.aggr in ("mean", "sum", "add") and not conv.project and not conv.normalize


def _sage(convs: dict[EdgeType, Any], rows: TypedRows, part: LayerInput, then: ReluDropout | None) -> TypedRows:
    weights = {kind: conv.lin_l.weight for kind, conv in convs.items()}
    own: dict[NodeType, Any] = {}
    shift: dict[NodeType, Any] = {}
    for (_, _, name), conv in convs.items():
        if conv.root_weight:
            own[name] = own.get(name, 0) + conv.lin_r.weight
        if conv.lin_l.bias is not None:
            shift[name] = shift.get(name, 0) + conv.lin_l.bias
    aggr = next(iter(convs.values())).aggr
    return update_types(rows, part, weights, own, shift, aggr == "mean", then)
