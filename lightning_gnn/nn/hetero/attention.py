"""Heterogeneous attention layers that process all relations in one operator."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import HGTConv
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.nn.conv.attention import costs, draw_factor, fold_weight
from lightning_gnn.nn.conv.backends import accepted_dtypes
from lightning_gnn.nn.conv.fused import FusedSpec, are_usable, can_run, find_obstacle, has_hooks
from lightning_gnn.nn.conv.gat import GATConv
from lightning_gnn.nn.hetero.rows import LayerInput, TypedRows
from lightning_gnn.nn.type_modules import type_key
from lightning_gnn.ops.aggregate_update.definition import Relation, sort_relations
from lightning_gnn.ops.attention.definition import attend_relations
from lightning_gnn.ops.attention.reference import Layout


def as_float32(rows: TypedRows) -> tuple[TypedRows, str]:
    """Return the rows in the dtype of attention (float32 under autocast), and the device type."""
    device = rows.tables[0].device.type
    if not torch.is_autocast_enabled(device):
        return rows, device
    return TypedRows([table.float() for table in rows.tables], rows.counts), device


class _SortedEdges(NamedTuple):
    """The sorted edges of the relations whose source types are in one table."""

    read: list[EdgeType]  # the edge types, by type of target
    edges: list[Tensor]  # sorted by target and relation
    layout: Layout  # rows of the targets and relations
    slots: dict[NodeType, slice]  # target type -> its edge types in read


def _sort_edges(block: LayerInput, counts: Mapping[NodeType, int], across: bool) -> _SortedEdges:
    types = list(block.sources)  # in table order; includes all target types
    number = {name: i for i, name in enumerate(types)}
    read = sorted((kind for kind in block.edges if kind[0] in counts), key=lambda kind: number[kind[2]])
    targets = [block.targets.get(name, 0) for name in types]
    relations = [Relation(number[kind[0]], number[kind[2]], block.edges[kind]) for kind in read]
    edges, reached = sort_relations([counts.get(name, 0) for name in types], targets, relations)
    slots, start = {}, 0
    for name, count in zip(types, reached, strict=True):
        if count:
            slots[name] = slice(start, start + count)
        start += count
    return _SortedEdges(read, edges, Layout(targets, reached, across), slots)


def aggregates_first(convs: Mapping[EdgeType, GATConv], rows: TypedRows, block: LayerInput) -> bool:
    """Return whether aggregating features of all relations per head before the product costs less."""
    before, after = 0.0, 0.0
    tables = {name: table for table, counts in zip(rows.tables, rows.counts, strict=True) for name in counts}
    for edge_type, conv in convs.items():
        weight = next(iter(conv.fused.products(conv).values())).weight
        of_type = tables[edge_type[0]][: block.sources[edge_type[0]]]
        cost = costs(of_type, block.edges[edge_type].size(1), block.targets[edge_type[2]], weight, conv.heads)
        before, after = before + cost[0], after + cost[1]
    return before <= after


def attend_types(convs: Mapping[EdgeType, GATConv], rows: TypedRows, block: LayerInput) -> Tensor:
    """Return the sum of one ``GATConv`` per relation, for the targets of all types."""
    rows, device = as_float32(rows)
    with torch.autocast(device, enabled=False):
        x, first_conv = rows.to_dict(), next(iter(convs.values()))
        heads, total = first_conv.heads, sum(block.targets.values())
        out = rows.tables[0].new_zeros(total, heads * first_conv.out_channels)
        for table, counts in zip(rows.tables, rows.counts, strict=True):
            relations = _sort_edges(block, counts, across=False)
            if not relations.read:
                continue
            weights, by_target = {}, {}
            for kind in relations.read:
                weights[kind], *others = (lin.weight for lin in first_conv.fused.products(convs[kind]).values())
                by_target[kind] = fold_weight(convs[kind].att_dst, others[0] if others else weights[kind])
            side = torch.stack([fold_weight(convs[kind].att_src, weights[kind]) for kind in relations.read])
            shift = torch.cat([
                (x[name][: block.targets[name]] @ torch.cat([by_target[kind] for kind in relations.read[slot]]).t())
                .view(-1, heads)
                for name, slot in relations.slots.items()
            ])  # fmt: skip
            weight = torch.stack([weights[kind].view(heads, -1, table.size(1)) for kind in relations.read])
            p = first_conv.dropout if first_conv.training else 0.0
            factor = draw_factor(table, relations.edges, heads, p)
            summed, _ = attend_relations(
                relations.edges, table, side, shift, weight, relations.layout, factor, first_conv.negative_slope
            )  # fmt: skip
            out = out + summed
        if not first_conv.concat:
            out = out.view(total, heads, first_conv.out_channels).mean(1)
        return out + _sum_own(convs, x, block, out) if any(_has_own(conv) for conv in convs.values()) else out


def _has_own(conv: GATConv) -> bool:
    return conv.res is not None or conv.bias is not None


def _sum_own(convs: Mapping[EdgeType, GATConv], x: Mapping[NodeType, Tensor], block: LayerInput, z: Tensor) -> Tensor:
    """Return the residuals and biases of all relations, summed for the targets of all types."""
    outputs = []
    for name, count in block.targets.items():
        reached = [conv for edge_type, conv in convs.items() if edge_type[2] == name]
        weight = [conv.res.weight for conv in reached if conv.res is not None]
        bias = [conv.bias for conv in reached if conv.bias is not None]
        out = z.new_zeros(count, z.size(1))
        if weight:
            out = F.linear(x[name][:count], torch.stack(weight).sum(0))
        outputs.append(out + torch.stack(bias).sum(0) if bias else out)
    return torch.cat(outputs)


def _encode_type(name: str) -> str:
    """Encode a type so that names joined by ``__`` stay unique."""
    return type_key(name).replace("__", "_%5F")


def _encode_edge_type(kind: EdgeType) -> EdgeType:
    source, name, target = map(_encode_type, kind)
    return source, name, target


def _encode_counts(counts: Mapping[NodeType, int]) -> dict[str, int]:
    return {_encode_type(name): count for name, count in counts.items()}


def _list_lins(layer: Any) -> dict[str, Any]:
    lins = {"kqv_lin": layer.kqv_lin, "out_lin": layer.out_lin}
    return {f"{name}.{node_type}": lin for name, module in lins.items() for node_type, lin in module.lins.items()}


class TransformerConv(HGTConv):  # type: ignore[misc]
    """PyG's ``HGTConv`` (arXiv:2003.01332) on the rows of all types, fused on the CPU and on a GPU."""

    fused = FusedSpec(
        HGTConv,
        "scores, softmax, sums and products of all relations",
        ("sum",),
        _list_lins,
        "relation_attention",
        node_dim=0,
    )

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        node_types: Sequence[NodeType],
        edge_types: Sequence[EdgeType],
        **kwargs: Any,
    ) -> None:
        keys = [_encode_type(name) for name in node_types], [_encode_edge_type(kind) for kind in edge_types]
        super().__init__(in_channels, out_channels, keys, **kwargs)

    def forward(self, rows: TypedRows, block: LayerInput, then: None = None) -> TypedRows:
        """Return the rows of the targets of all types."""
        targets = dict(block.targets)
        rows = TypedRows(rows.tables, [_encode_counts(counts) for counts in rows.counts])
        edges = {_encode_edge_type(kind): edges for kind, edges in block.edges.items()}
        block = LayerInput(_encode_counts(block.sources), _encode_counts(block.targets), edges)
        if self._can_fuse(rows, block):
            return TypedRows([torch.cat(self._attend(rows, block))], [targets])
        out = super().forward(rows.to_dict(), block.edges)
        return TypedRows([torch.cat([out[name][:count] for name, count in block.targets.items()])], [targets])

    def _can_fuse(self, rows: TypedRows, block: LayerInput) -> bool:
        tensors = [*rows.tables, *block.edges.values()]
        if len(rows.tables) > 1 or not can_run(self.fused.operator, tensors) or find_obstacle(self):
            return False
        if any(has_hooks(module) for module in (self.kqv_lin, self.out_lin, self.k_rel, self.v_rel, self.p_rel)):
            return False
        weights = [lin.weight for lin in self.kqv_lin.lins.values()]
        weights += [self.k_rel.weight, self.v_rel.weight, *self.p_rel.values()]
        # PyG's path raises the errors for wrong shapes. Attention computes in the first of the dtypes.
        fits, width = are_usable(weights, accepted_dtypes(rows.tables[0])[:1]), rows.tables[0].size(1)
        return fits and all(self.kqv_lin.lins[name].weight.size(1) == width for name in rows.counts[0])

    def _attend(self, rows: TypedRows, block: LayerInput) -> list[Tensor]:
        """Return the rows of the targets of each type."""
        rows, device = as_float32(rows)
        with torch.autocast(device, enabled=False):
            x, heads, width = rows.to_dict(), self.heads, self.out_channels // self.heads
            relations = _sort_edges(block, rows.counts[0], across=True)
            # Products [R, heads, width after the relation, channels], and the shifts from the biases.
            keys, key_shift, values, value_shift = self._multiply_by_relation(relations.read, heads, width)
            sides, shifts = [], []
            for name, slot in relations.slots.items():
                lin = self.kqv_lin.lins[name]
                span = slice(self.out_channels, 2 * self.out_channels)
                q = F.linear(x[name][: block.targets[name]], lin.weight[span], lin.bias[span]).view(-1, heads, width)
                sides.append(torch.einsum("nhd,rhdc->nrhc", q, keys[slot]).flatten(0, 1))
                shifts.append(torch.einsum("nhd,rhd->nrh", q, key_shift[slot]).flatten(0, 1))
            summed, mass = attend_relations(
                relations.edges, rows.tables[0], torch.cat(sides), torch.cat(shifts), values, relations.layout
            )  # fmt: skip
            by_type = dict(zip(block.targets, torch.split(summed, list(block.targets.values())), strict=True))
            counts = [block.targets[name] * (slot.stop - slot.start) for name, slot in relations.slots.items()]
            for (name, slot), type_mass in zip(relations.slots.items(), torch.split(mass, counts), strict=True):
                type_mass = type_mass.view(block.targets[name], slot.stop - slot.start, heads)
                by_type[name] = by_type[name] + torch.einsum("nrh,rhd->nhd", type_mass, value_shift[slot]).flatten(1)
            out = self.out_lin({name: F.gelu(by_type[name]) for name in block.targets})
            return [self._add_skip(name, out[name], x[name][:count]) for name, count in block.targets.items()]

    def _multiply_by_relation(self, read: list[EdgeType], heads: int, width: int) -> list[Tensor]:
        """Return weights and biases of keys (scaled for scores) and values, multiplied by each relation's weights."""
        num_relations = len(self.edge_types)
        numbers = [self.edge_types_map[kind] for kind in read]
        lins = [self.kqv_lin.lins[kind[0]] for kind in read]
        weight = torch.stack([lin.weight.view(3, heads, width, -1) for lin in lins], 1)
        bias = torch.stack([lin.bias.view(3, heads, width) for lin in lins], 1)
        scale = torch.cat([self.p_rel["__".join(kind)] for kind in read]) / math.sqrt(width)
        products = []
        for index, relation_lin in ((0, self.k_rel), (2, self.v_rel)):
            # Not indexed by a list, which a GPU would wait for.
            relation = torch.stack(
                [relation_lin.weight.view(heads, num_relations, width, width)[:, n] for n in numbers], 1
            )
            relation = relation * scale.t().view(heads, len(read), 1, 1) if index == 0 else relation
            products.append(torch.einsum("hrio,rhic->rhoc", relation, weight[index]))
            products.append(torch.einsum("hrio,rhi->rho", relation, bias[index]))
        return products

    def _add_skip(self, name: NodeType, out: Tensor, x: Tensor) -> Tensor:
        if out.size(1) != x.size(1):
            return out
        alpha = self.skip[name].sigmoid()
        mixed: Tensor = alpha * out + (1 - alpha) * x
        return mixed
