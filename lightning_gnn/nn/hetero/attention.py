"""One layer of attention on a graph with types, all its relations in one operator."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import HGTConv
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.nn.conv.attention import FUSED_DTYPES, costs, through
from lightning_gnn.nn.conv.fused import AUTOCAST_DTYPES, Fused, has_hooks, obstacle, runs_here
from lightning_gnn.nn.conv.gat import GATConv
from lightning_gnn.nn.hetero.rows import LayerInput, TypedRows
from lightning_gnn.nn.type_modules import type_key
from lightning_gnn.ops.aggregate_update.definition import Relation, sort_relations
from lightning_gnn.ops.attention.definition import attend_relations
from lightning_gnn.ops.attention.reference import Layout
from lightning_gnn.ops.dropout import dropout


def in_float32(rows: TypedRows) -> tuple[TypedRows, str]:
    """Return the rows as attention is computed, in float32 also under autocast, and on which kind of device."""
    device = rows.tables[0].device.type
    if not torch.is_autocast_enabled(device):
        return rows, device
    return TypedRows([table.float() for table in rows.tables], rows.counts), device


class _Sorted(NamedTuple):
    """The edges of the relations that come from the types in one table."""

    read: list[EdgeType]  # the edge types, by type of target
    edges: list[Tensor]  # sorted by target and relation
    layout: Layout  # how their rows lie
    slots: dict[NodeType, slice]  # of each type that relations reach, which of read these are


def _sorted(part: LayerInput, counts: Mapping[NodeType, int], across: bool) -> _Sorted:
    types = list(part.sources)  # as they lie in the tables; what is computed is among them
    number = {name: at for at, name in enumerate(types)}
    read = sorted((kind for kind in part.edges if kind[0] in counts), key=lambda kind: number[kind[2]])
    targets = [part.targets.get(name, 0) for name in types]
    relations = [Relation(number[kind[0]], number[kind[2]], part.edges[kind]) for kind in read]
    edges, reached = sort_relations([counts.get(name, 0) for name in types], targets, relations)
    slots, at = {}, 0
    for name, count in zip(types, reached, strict=True):
        if count:
            slots[name] = slice(at, at + count)
        at += count
    return _Sorted(read, edges, Layout(targets, reached, across), slots)


def pays(convs: Mapping[EdgeType, GATConv], rows: TypedRows, part: LayerInput) -> bool:
    """Say whether it costs less to aggregate the features of all relations for each head, and then to multiply."""
    before, after = 0.0, 0.0
    tables = {name: table for table, counts in zip(rows.tables, rows.counts, strict=True) for name in counts}
    for kind, conv in convs.items():
        weight = next(iter(conv.fused.products(conv).values())).weight
        of_type = tables[kind[0]][: part.sources[kind[0]]]
        found = costs(of_type, part.edges[kind].size(1), part.targets[kind[2]], weight, conv.heads)
        before, after = before + found[0], after + found[1]
    return before <= after


def attend_types(convs: Mapping[EdgeType, GATConv], rows: TypedRows, part: LayerInput) -> Tensor:
    """Return the sum of what a ``GATConv`` per relation returns, for the targets of all types."""
    rows, device = in_float32(rows)
    with torch.autocast(device, enabled=False):
        x, like = rows.to_dict(), next(iter(convs.values()))
        heads, total = like.heads, sum(part.targets.values())
        out = rows.tables[0].new_zeros(total, heads * like.out_channels)
        for table, counts in zip(rows.tables, rows.counts, strict=True):
            found = _sorted(part, counts, across=False)
            if not found.read:
                continue
            weights, by_target = {}, {}
            for kind in found.read:
                weights[kind], *others = (lin.weight for lin in like.fused.products(convs[kind]).values())
                by_target[kind] = through(convs[kind].att_dst, others[0] if others else weights[kind])
            side = torch.stack([through(convs[kind].att_src, weights[kind]) for kind in found.read])
            shift = torch.cat([
                (x[name][: part.targets[name]] @ torch.cat([by_target[kind] for kind in found.read[slot]]).t())
                .view(-1, heads)
                for name, slot in found.slots.items()
            ])  # fmt: skip
            weight = torch.stack([weights[kind].view(heads, -1, table.size(1)) for kind in found.read])
            factor = None
            if like.training and like.dropout > 0.0:
                factor = dropout(table.new_ones(found.edges[1].numel(), heads), like.dropout)
            summed, _ = attend_relations(
                found.edges, table, side, shift, weight, found.layout, factor, like.negative_slope
            )  # fmt: skip
            out = out + summed
        if not like.concat:
            out = out.view(total, heads, like.out_channels).mean(1)
        return out + _own(convs, x, part, out) if any(_has_own(conv) for conv in convs.values()) else out


def _has_own(conv: GATConv) -> bool:
    return conv.res is not None or conv.bias is not None


def _own(convs: Mapping[EdgeType, GATConv], x: Mapping[NodeType, Tensor], part: LayerInput, like: Tensor) -> Tensor:
    """Return what the targets of all types get besides: residuals and biases of all their relations."""
    parts = []
    for name, count in part.targets.items():
        reached = [conv for kind, conv in convs.items() if kind[2] == name]
        weight = [conv.res.weight for conv in reached if conv.res is not None]
        bias = [conv.bias for conv in reached if conv.bias is not None]
        own = like.new_zeros(count, like.size(1))
        if weight:
            own = F.linear(x[name][:count], torch.stack(weight).sum(0))
        parts.append(own + torch.stack(bias).sum(0) if bias else own)
    return torch.cat(parts)


def _key(name: str) -> str:
    """Return a name for a type that stays another one for each type where names are joined by ``__``."""
    return type_key(name).replace("__", "_%5F")


def _keys(kind: EdgeType) -> EdgeType:
    source, name, target = map(_key, kind)
    return source, name, target


def _by_key(counts: Mapping[NodeType, int]) -> dict[str, int]:
    return {_key(name): count for name, count in counts.items()}


def _products(layer: Any) -> dict[str, Any]:
    lins = {"kqv_lin": layer.kqv_lin, "out_lin": layer.out_lin}
    return {f"{name}.{kind}": lin for name, of in lins.items() for kind, lin in of.lins.items()}


class TransformerConv(HGTConv):  # type: ignore[misc]
    """PyG's ``HGTConv`` (arXiv:2003.01332) on the rows of all types, on the CPU in one operator."""

    fused = Fused(HGTConv, "scores, softmax, sums and products of all relations", ("sum",), _products, node_dim=0)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        node_types: Sequence[NodeType],
        edge_types: Sequence[EdgeType],
        **kwargs: Any,
    ) -> None:
        keys = [_key(name) for name in node_types], [_keys(kind) for kind in edge_types]
        super().__init__(in_channels, out_channels, keys, **kwargs)

    def forward(self, rows: TypedRows, part: LayerInput, then: None = None) -> TypedRows:
        """Return the rows of the targets of all types."""
        targets = dict(part.targets)
        rows = TypedRows(rows.tables, [_by_key(counts) for counts in rows.counts])
        edges = {_keys(kind): edges for kind, edges in part.edges.items()}
        part = LayerInput(_by_key(part.sources), _by_key(part.targets), edges)
        if self._fuses(rows, part):
            return TypedRows([torch.cat(self._attend(rows, part))], [targets])
        out = super().forward(rows.to_dict(), part.edges)
        return TypedRows([torch.cat([out[name][:count] for name, count in part.targets.items()])], [targets])

    def _fuses(self, rows: TypedRows, part: LayerInput) -> bool:
        if len(rows.tables) > 1 or not runs_here([*rows.tables, *part.edges.values()]) or obstacle(self) is not None:
            return False
        if any(has_hooks(module) for module in (self.kqv_lin, self.out_lin, self.k_rel, self.v_rel, self.p_rel)):
            return False
        weights = [lin.weight for lin in self.kqv_lin.lins.values()]
        weights += [self.k_rel.weight, self.v_rel.weight, *self.p_rel.values()]
        if any(nn.parameter.is_lazy(weight) for weight in weights):
            return False
        autocast, table = torch.is_autocast_enabled(rows.tables[0].device.type), rows.tables[0]
        computed_in = torch.float32 if autocast else table.dtype
        fits = computed_in in FUSED_DTYPES and table.dtype in (AUTOCAST_DTYPES if autocast else (table.dtype,))
        # Shapes that do not fit are PyG's to complain about.
        fits = fits and all(weight.dtype == computed_in for weight in weights)
        return fits and all(self.kqv_lin.lins[name].weight.size(1) == table.size(1) for name in rows.counts[0])

    def _attend(self, rows: TypedRows, part: LayerInput) -> list[Tensor]:
        """Return the rows of the targets of each type."""
        rows, device = in_float32(rows)
        with torch.autocast(device, enabled=False):
            x, heads, width = rows.to_dict(), self.heads, self.out_channels // self.heads
            found = _sorted(part, rows.counts[0], across=True)
            # [R, heads, width out of the product by relation, channels], and what belongs to the biases.
            keys, key_shift, values, value_shift = self._products_by_relation(found.read, heads, width)
            sides, shifts = [], []
            for name, slot in found.slots.items():
                lin = self.kqv_lin.lins[name]
                span = slice(self.out_channels, 2 * self.out_channels)
                query = F.linear(x[name][: part.targets[name]], lin.weight[span], lin.bias[span]).view(-1, heads, width)
                sides.append(torch.einsum("nhd,rhdc->nrhc", query, keys[slot]).flatten(0, 1))
                shifts.append(torch.einsum("nhd,rhd->nrh", query, key_shift[slot]).flatten(0, 1))
            summed, mass = attend_relations(
                found.edges, rows.tables[0], torch.cat(sides), torch.cat(shifts), values, found.layout
            )  # fmt: skip
            by_type = dict(zip(part.targets, torch.split(summed, list(part.targets.values())), strict=True))
            counts = [part.targets[name] * (slot.stop - slot.start) for name, slot in found.slots.items()]
            for (name, slot), of in zip(found.slots.items(), torch.split(mass, counts), strict=True):
                of = of.view(part.targets[name], slot.stop - slot.start, heads)
                by_type[name] = by_type[name] + torch.einsum("nrh,rhd->nhd", of, value_shift[slot]).flatten(1)
            out = self.out_lin({name: F.gelu(by_type[name]) for name in part.targets})
            return [self._with_skip(name, out[name], x[name][:count]) for name, count in part.targets.items()]

    def _products_by_relation(self, read: list[EdgeType], heads: int, width: int) -> list[Tensor]:
        """Return the weights and biases of keys, scaled as scores are, and of values, times those of each relation."""
        every = len(self.edge_types)
        numbers = [self.edge_types_map[kind] for kind in read]
        lins = [self.kqv_lin.lins[kind[0]] for kind in read]
        weight = torch.stack([lin.weight.view(3, heads, width, -1) for lin in lins], 1)
        bias = torch.stack([lin.bias.view(3, heads, width) for lin in lins], 1)
        scale = torch.cat([self.p_rel["__".join(kind)] for kind in read]) / math.sqrt(width)
        found = []
        for part, of in ((0, self.k_rel), (2, self.v_rel)):
            by = of.weight.view(heads, every, width, width)[:, numbers]
            by = by * scale.t().view(heads, len(read), 1, 1) if part == 0 else by
            found.append(torch.einsum("hrio,rhic->rhoc", by, weight[part]))
            found.append(torch.einsum("hrio,rhi->rho", by, bias[part]))
        return found

    def _with_skip(self, name: NodeType, out: Tensor, x: Tensor) -> Tensor:
        if out.size(1) != x.size(1):
            return out
        alpha = self.skip[name].sigmoid()
        mixed: Tensor = alpha * out + (1 - alpha) * x
        return mixed
