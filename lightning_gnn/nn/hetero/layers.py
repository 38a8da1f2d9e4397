"""Heterogeneous layers that process all relations in one operator."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import HeteroConv
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.nn.conv.backends import accepted_dtypes
from lightning_gnn.nn.conv.fused import FusedSpec, are_usable, can_run, find_obstacle, has_hooks
from lightning_gnn.nn.conv.gat import GATConv
from lightning_gnn.nn.conv.sage import SAGEConv
from lightning_gnn.nn.hetero.attention import aggregates_first, attend_types
from lightning_gnn.nn.hetero.rows import LayerInput, TypedRows
from lightning_gnn.nn.type_modules import TypeModules
from lightning_gnn.ops.aggregate_update.definition import Relation, relation_update
from lightning_gnn.ops.aggregate_update.reference import ReluDropout, activated


def update_types(
    rows: TypedRows,
    block: LayerInput,
    weights: Mapping[EdgeType, Tensor],  # W of each edge type, [out, in]
    self_weights: Mapping[NodeType, Tensor],  # S of each type with a root weight, [out, in]
    biases: Mapping[NodeType, Tensor],  # b of each type with a bias, [out]
    mean: bool,
    then: ReluDropout | None,
) -> TypedRows:
    """Return ``sum_r mean_r(x) W_r^T + x S_t^T + b_t`` for the targets of all types."""
    types = list(block.sources)  # in table order; includes all target types
    number = {name: i for i, name in enumerate(types)}
    out: Tensor | None = None
    for table, counts in zip(rows.tables, rows.counts, strict=True):
        read = sorted((kind for kind in block.edges if kind[0] in counts), key=lambda kind: number[kind[2]])
        if len(rows.tables) > 1 and not read and not any(name in counts for name in self_weights):
            continue
        roots = [self_weights.get(name) if name in counts else None for name in types]
        like = next((w for w in (*roots, *weights.values()) if w is not None and w.size(1) == table.size(1)), None)
        assert like is not None
        shift = biases if out is None else {}
        result = relation_update(
            table,
            [counts.get(name, 0) for name in types],
            [block.targets.get(name, 0) for name in types],
            [Relation(number[kind[0]], number[kind[2]], block.edges[kind]) for kind in read],
            torch.stack([weights[kind] for kind in read]) if read else like.new_zeros(0, *like.shape),
            _stack(roots, like),
            _stack([shift.get(name) for name in types], like[:, 0]),
            mean,
            then if len(rows.tables) == 1 else None,
        )
        out = result if out is None else out + result
    assert out is not None
    return TypedRows([out if len(rows.tables) == 1 else activated(out, then)], [dict(block.targets)])


def _stack(given: list[Tensor | None], like: Tensor) -> Tensor | None:
    """Stack weights, with zeros for types without one; return None if no type has one."""
    if all(tensor is None for tensor in given):
        return None
    return torch.stack([like.new_zeros(like.shape) if tensor is None else tensor for tensor in given])


class RelationalConv(pyg.RGCNConv):  # type: ignore[misc]
    """PyG's ``RGCNConv`` (arXiv:1703.06103) on the rows of all types; relation i is ``edge_types[i]``."""

    fused = FusedSpec(
        pyg.RGCNConv,
        "aggregation (sum, mean) and products of all relations, with ReLU and dropout",
        ("sum", "mean"),
        lambda layer: {},
        "relations",
        node_dim=0,
    )

    def __init__(self, in_channels: int, out_channels: int, edge_types: list[EdgeType], **kwargs: Any) -> None:
        if kwargs.get("aggr", "mean") not in ("mean", "sum", "add"):
            raise ValueError(f"aggr={kwargs['aggr']!r} is unknown; use mean or sum")
        super().__init__(in_channels, out_channels, len(edge_types), **kwargs)
        self.edge_types = edge_types

    def forward(self, rows: TypedRows, block: LayerInput, then: ReluDropout | None = None) -> TypedRows:
        """Return the rows of the targets of all types."""
        weight = self.weight
        if self.num_bases is not None:
            weight = (self.comp @ weight.flatten(1)).view(-1, *weight.shape[1:])
        elif self.num_blocks is not None:
            weight = torch.stack([torch.block_diag(*blocks) for blocks in weight])  # type: ignore[no-untyped-call]
        weights = dict(zip(self.edge_types, weight.transpose(1, 2), strict=True))
        own: dict[NodeType, Any] = {} if self.root is None else dict.fromkeys(block.targets, self.root.t())
        shift: dict[NodeType, Any] = {} if self.bias is None else dict.fromkeys(block.targets, self.bias)
        return update_types(rows, block, weights, own, shift, self.aggr == "mean", then)


class TypedConv(HeteroConv):  # type: ignore[misc]
    """PyG's ``HeteroConv`` that computes only the requested rows, in one operator if possible."""

    def __init__(self, convs: dict[EdgeType, Any]) -> None:
        super().__init__(convs)
        self.convs = TypeModules(convs)

    def forward(self, rows: TypedRows, block: LayerInput, then: ReluDropout | None = None) -> TypedRows:
        """Return the rows of the targets of all types, followed by ``then``."""
        convs = {kind: self.convs[kind] for kind in block.edges}
        if self._can_fuse(rows, block):
            if type(next(iter(convs.values()))) is SAGEConv:
                return _run_sage(convs, rows, block, then)
            if aggregates_first(convs, rows, block):
                return TypedRows([activated(attend_types(convs, rows, block), then)], [dict(block.targets)])
        x = rows.to_dict()
        pairs = {kind: (x[kind[0]], x[kind[2]][: block.targets[kind[2]]]) for kind in block.edges}
        found = super().forward(pairs, block.edges)
        out = torch.cat([found[name] for name in block.targets])
        return TypedRows([activated(out, then)], [dict(block.targets)])

    def _can_fuse(self, rows: TypedRows, block: LayerInput) -> bool:
        convs = [self.convs[kind] for kind in block.edges]
        attends = any(type(conv) is GATConv for conv in convs)
        operator = "relation_attention" if attends else "relations"
        if not can_run(operator, [*rows.tables, *block.edges.values()]) or has_hooks(self):
            return False
        kind = type(convs[0])
        if kind not in _SHARED_ATTRS or not all(type(conv) is kind and find_obstacle(conv) is None for conv in convs):
            return False
        if any(has_hooks(conv) or not _is_plain(conv) for conv in convs):
            return False
        if len({tuple(getattr(conv, name) for name in _SHARED_ATTRS[kind]) for conv in convs}) > 1:
            return False
        products = [list(conv.fused.products(conv).values()) for conv in convs]
        residuals = [conv.res for conv in convs if attends and conv.res is not None]
        weights = [lin.weight for lin in (*(lin for lins in products for lin in lins), *residuals)]
        dtypes = accepted_dtypes(rows.tables[0])
        # Attention computes in the first of the dtypes.
        fits = are_usable(weights, dtypes[:1] if attends else dtypes)
        if not fits or any(table.dtype not in dtypes for table in rows.tables):
            return False
        width = {name: table.size(1) for table, names in zip(rows.tables, rows.counts, strict=True) for name in names}
        # PyG's path raises the errors for wrong shapes.
        return all(
            lins[0].weight.size(1) == width[kind[0]] and (len(lins) == 1 or lins[1].weight.size(1) == width[kind[2]])
            for kind, lins in zip(block.edges, products, strict=True)
        )


_SHARED_ATTRS: dict[type, tuple[str, ...]] = {  # layers fused across relations -> attributes that must be equal
    SAGEConv: ("aggr",),
    GATConv: ("heads", "out_channels", "concat", "negative_slope", "dropout", "training"),
}


def _is_plain(conv: SAGEConv | GATConv) -> bool:
    if isinstance(conv, GATConv):
        return not conv.add_self_loops and (conv.res is None or (type(conv.res) is Linear and not has_hooks(conv.res)))
    return conv.aggr in ("mean", "sum", "add") and not conv.project and not conv.normalize


def _run_sage(convs: dict[EdgeType, Any], rows: TypedRows, block: LayerInput, then: ReluDropout | None) -> TypedRows:
    weights = {kind: conv.lin_l.weight for kind, conv in convs.items()}
    own: dict[NodeType, Any] = {}
    shift: dict[NodeType, Any] = {}
    for (_, _, name), conv in convs.items():
        if conv.root_weight:
            own[name] = own.get(name, 0) + conv.lin_r.weight
        if conv.lin_l.bias is not None:
            shift[name] = shift.get(name, 0) + conv.lin_l.bias
    aggr = next(iter(convs.values())).aggr
    return update_types(rows, block, weights, own, shift, aggr == "mean", then)
