"""GCN, GraphSAGE, GIN, GAT and a graph transformer: PyG's models with input dropout and exact trimming."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import models as pyg
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models import MLP
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn.nn.conv import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, TransformerConv
from lightning_gnn.nn.conv.attention import add_bias, run_attention
from lightning_gnn.nn.conv.fused import can_fuse, find_obstacle, fold_dropout, has_hooks
from lightning_gnn.nn.dropout import Dropout
from lightning_gnn.nn.layers import LayerBlock, run_layers
from lightning_gnn.ops.aggregate_update.edge_order import first_edges, first_rows, is_sorted
from lightning_gnn.ops.aggregate_update.sums_ahead import with_all_rows
from lightning_gnn.ops.dropout import add_relu_drop


def trims_exactly(model: nn.Module, num_hops: int) -> bool:
    """Return whether trimming a batch of ``num_hops`` hops leaves the seeds' outputs unchanged, in evaluation."""
    if not isinstance(model, BasicGNN):
        return True
    # Trimming is exact with at least one hop per layer; with fewer hops, outer layers would lack edges.
    if num_hops < model.num_layers:
        return False
    # Jumping knowledge combines the outputs of all layers row by row, which need the same length.
    if model.jk_mode not in (None, "last"):
        return False
    # Norms with a batch vector average over all nodes in the batch.
    if model.supports_norm_batch and (model.norm_kwargs or {}).get("mode") != "node":
        return False
    # PyG's GCN computes the degrees from each layer's remaining edges.
    return isinstance(model, GCN) or not isinstance(model, pyg.GCN)


def num_layers(model: nn.Module) -> int | None:
    """Return the number of message-passing layers, or None if the modules do not match ``num_layers``."""
    model = getattr(model, "_orig_mod", model)
    layers = getattr(model, "num_layers", None)
    if not isinstance(layers, int) or isinstance(model, BasicGNN):
        return layers if isinstance(layers, int) else None
    passing = sum(isinstance(module, MessagePassing) for module in model.modules())
    convs = getattr(model, "convs", None)
    return layers if layers in (passing, len(convs) if isinstance(convs, nn.ModuleList) else None) else None


class _SampledEdges(NamedTuple):
    """The edges of a mini-batch, sorted by hop, and the number of nodes and edges of each hop."""

    edge_index: Tensor
    edge_weight: Tensor | None
    edge_attr: Tensor | None
    num_nodes: list[int]
    num_edges: list[int]
    every_hop: bool = False  # an edge belongs to the layer of its hop only


class LayeredGNN(BasicGNN):  # type: ignore[misc]
    """A PyG ``BasicGNN`` whose layers run one by one, with input dropout and argument checks, and PyG's parameters."""

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        *,
        input_dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        for name, value in (("dropout", dropout), ("input_dropout", input_dropout)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} is a probability in [0, 1), got {value}")
        for name, size in (("hidden_channels", hidden_channels), ("num_layers", num_layers)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if out_channels is not None and out_channels < 1:
            raise ValueError(f"out_channels must be at least 1, got {out_channels}")
        if isinstance(in_channels, int) and in_channels < 1 and in_channels != -1:
            raise ValueError(f"in_channels must be at least 1, or -1 to infer it, got {in_channels}")
        super().__init__(in_channels, hidden_channels, num_layers, out_channels, dropout, **kwargs)
        self.dropout = Dropout(dropout)
        self.input_dropout = Dropout(input_dropout)

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        num_sampled_nodes_per_hop: list[int] | None = None,
        num_sampled_edges_per_hop: list[int] | None = None,
        every_hop: bool = False,
    ) -> Tensor:
        """Return node outputs ``[N, out_channels]`` for features ``x`` ``[N, in_channels]``.

        ``edge_index`` is ``[2, E]`` int64 (source, target), or a compressed graph. With both ``num_sampled_*`` lists
        (edges sorted by hop, seeds first, one entry per hop, nodes with the seeds as entry 0) each layer computes only
        the rows that still reach a seed, unless that would change the seeds' rows; the output has only the seeds' rows.
        ``every_hop``: the edges of hop h are those of the h-th layer from the end (``semantics="every_hop"``).
        """
        if isinstance(self.in_channels, int) and self.in_channels > 0 and x.size(-1) != self.in_channels:
            raise ValueError(f"x has {x.size(-1)} features per node, but the model was built for {self.in_channels}")
        nodes, edges = num_sampled_nodes_per_hop, num_sampled_edges_per_hop
        if every_hop and (nodes is None or edges is None or not trims_exactly(self, len(edges))):
            raise ValueError("semantics='every_hop' needs a hop per layer, no jumping knowledge, and norms by node")
        if nodes is None or edges is None or not trims_exactly(self, len(edges)):
            out: Tensor = super().forward(self.input_dropout(x), edge_index, edge_weight, edge_attr, batch, batch_size)
            return out
        blocks = self._split_by_layer(x, _SampledEdges(edge_index, edge_weight, edge_attr, nodes, edges, every_hop))
        return run_layers(self, x[: sum(nodes[: self.num_layers + 1])], blocks)

    def _split_by_layer(self, x: Tensor, batch: _SampledEdges) -> list[LayerBlock]:
        """Split a mini-batch into layer inputs, the outermost first."""
        parts = []
        for hops in range(self.num_layers, 0, -1):
            edges = slice(sum(batch.num_edges[: hops - 1]) if batch.every_hop else 0, sum(batch.num_edges[:hops]))
            weight = None if batch.edge_weight is None else batch.edge_weight[edges]
            attr = None if batch.edge_attr is None else batch.edge_attr[edges]
            part = first_edges(batch.edge_index, edges.stop, edges.start)
            parts.append(LayerBlock(sum(batch.num_nodes[:hops]), part, weight, attr))
        return parts

    def apply_layer(self, layer: int, x: Tensor, block: LayerBlock, fuse: bool = True) -> tuple[Tensor, bool]:
        """Apply a layer to its source rows ``[num_sources, F]``; return its targets' outputs ``[num_targets, D]``.

        The second value is whether its normalization, activation and dropout have been applied already, by the layer's
        own operator; not with ``fuse=False``.
        """
        extra: dict[str, Any] = {"edge_attr": block.edge_attr} if self.supports_edge_attr else {}
        out: Tensor = self.convs[layer]((x, x[: block.num_targets]), block.edge_index, **extra)
        return out, False


class GCN(LayeredGNN, pyg.GCN):  # type: ignore[misc]
    """Graph convolutional network (Kipf and Welling, ICLR 2017, arXiv:1609.02907).

    Takes the arguments of ``torch_geometric.nn.models.GCN``, and ``input_dropout``, the probability of dropping an
    input feature. Parameter names are those of PyG's class.

    In a mini-batch the symmetric normalization uses the in-degrees inside the mini-batch, not those of the graph. When
    PyG's class trims, it recomputes them from each layer's remaining edges. This class computes them once, from the
    whole mini-batch: trimming changes the cost, not the result.

    Raises:
        ValueError: An argument is out of range, or ``cached=True`` is used with a trimmed batch.
    """

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        """Build one layer, which also supports a compressed graph."""
        return GCNConv(in_channels, out_channels, **kwargs)

    def _split_by_layer(self, x: Tensor, batch: _SampledEdges) -> list[LayerBlock]:
        conv, edge_index, num_nodes = self.convs[0], batch.edge_index, batch.num_nodes
        if batch.every_hop:
            raise ValueError(
                "GCN normalizes by one degree per node, but semantics='every_hop' has one per layer: use GraphSAGE"
            )
        if conv.cached:
            raise ValueError("cached=True reuses the first batch's graph for all batches: use it for full graphs only")
        if self._can_fuse(x, edge_index, batch.edge_weight):
            targets = [sum(num_nodes[:hops]) for hops in range(self.num_layers, 0, -1)]
            edges = conv.sorted_edges(edge_index, batch.edge_weight, x, targets[0])
            # The sources of a layer are the targets of the previous one; PyG's path raises errors for other edges.
            sources = [sum(num_nodes[: self.num_layers + 1]), *targets]
            if is_sorted(edge_index) or torch.compiler.is_compiling():  # take the counts, not to ask a device
                loops = conv.normalize and conv.add_self_loops
                counts = [sum(batch.num_edges[:hops]) for hops in range(self.num_layers, 0, -1)]
                cut = [
                    first_rows(edges, rows, count + rows * loops) for rows, count in zip(targets, counts, strict=True)
                ]
                if torch.compiler.is_compiling():
                    _assert_counts(cut, sources)
                return [
                    LayerBlock(rows, edge_index, sorted_edges=part) for rows, part in zip(targets, cut, strict=True)
                ]
            cut = [with_all_rows(first_rows(edges, count), edges) for count in targets]
            read = zip((part[1] for part in cut), sources, strict=False)
            if all(not indices.numel() or int(indices.max()) < count for indices, count in read):
                return [
                    LayerBlock(count, edge_index, sorted_edges=part) for count, part in zip(targets, cut, strict=True)
                ]
        return super()._split_by_layer(x, self._normalize(x, batch) if conv.normalize else batch)

    def _can_fuse(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> bool:
        """Return whether all layers are fused; they share the normalization."""
        first, *others = self.convs
        if not all(type(conv) is GCNConv for conv in self.convs):
            return False
        if len({(conv.normalize, conv.improved, conv.add_self_loops) for conv in self.convs}) > 1:
            return False
        if not can_fuse(first, x, x, edge_index, edge_weight):
            return False
        return all(find_obstacle(conv) is None and conv.lin.weight.dtype == first.lin.weight.dtype for conv in others)

    def apply_layer(self, layer: int, x: Tensor, block: LayerBlock, fuse: bool = True) -> tuple[Tensor, bool]:
        """Apply a layer, as :meth:`LayeredGNN.apply_layer`; the edges' weights are already normalized."""
        conv = self.convs[layer]
        if block.sorted_edges is not None:
            then = fold_dropout(conv, self.norms[layer], self.act, self.dropout, x) if fuse else None
            return conv.run_fused(x, block.sorted_edges, then), then is not None
        # GCNConv.forward would normalize by the degrees of the trimmed edges only.
        x = conv.lin(x)
        size = (x.size(0), block.num_targets)
        x = conv.propagate(block.edge_index, x=x, edge_weight=block.edge_weight, size=size)
        return x if conv.bias is None else x + conv.bias, False

    def _normalize(self, x: Tensor, batch: _SampledEdges) -> _SampledEdges:
        """Normalize by the whole mini-batch's degrees, and add each self-loop to the hop of its node's in-edges."""
        conv, size, (edge_index, edge_weight, _, num_nodes, num_edges, _) = self.convs[0], x.size(0), batch
        _, weight = gcn_norm(edge_index, edge_weight, size, conv.improved, conv.add_self_loops, conv.flow, x.dtype)
        if not conv.add_self_loops:
            return batch._replace(edge_weight=weight)
        # gcn_norm moves existing self-loops to the end: set their weight to 0 at the old position, so that the number
        # of edges per hop stays known without a device synchronization.
        weight, loop_weight = weight[:-size], weight[-size:]
        weight = weight.new_zeros(edge_index.size(1)).masked_scatter(edge_index[0] != edge_index[1], weight)
        loops = torch.arange(size, device=x.device)
        # Nodes of the last hop get no self-loop: no seed needs their outputs.
        inner = num_nodes[: len(num_edges)]
        loop_parts = torch.split(loops[: sum(inner)], inner)
        loop_weights = torch.split(loop_weight[: sum(inner)], inner)
        indices, weights = [], []
        for edges, edge_part, loop_part, loop_part_weight in zip(
            torch.split(edge_index, num_edges, 1), torch.split(weight, num_edges), loop_parts, loop_weights, strict=True
        ):
            indices += [edges, loop_part.expand(2, -1)]
            weights += [edge_part, loop_part_weight]
        counts = [edges + nodes for edges, nodes in zip(num_edges, inner, strict=True)]
        return batch._replace(edge_index=torch.cat(indices, dim=1), edge_weight=torch.cat(weights), num_edges=counts)


def _assert_counts(blocks: list[list[Tensor]], sources: list[int]) -> None:
    """Assert asynchronously that each layer's edges end with its last row, and that its sources have rows."""
    for (indptr, indices, *_), count in zip(blocks, sources, strict=False):
        if indices.numel():
            is_right = (indptr[-1] == indices.numel()) & (indices < count).all()
            torch._assert_async(is_right, "num_sampled_nodes_per_hop or num_sampled_edges_per_hop do not fit the edges")


class GraphSAGE(LayeredGNN, pyg.GraphSAGE):  # type: ignore[misc]
    """GraphSAGE (Hamilton, Ying and Leskovec, NeurIPS 2017, arXiv:1706.02216), mean aggregation by default.

    Takes the arguments of ``torch_geometric.nn.models.GraphSAGE`` and ``input_dropout`` (see :class:`GCN`).
    """

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        """Build one layer, which also supports a compressed graph."""
        return SAGEConv(in_channels, out_channels, **kwargs)

    def apply_layer(self, layer: int, x: Tensor, block: LayerBlock, fuse: bool = True) -> tuple[Tensor, bool]:
        """Apply a layer, as :meth:`LayeredGNN.apply_layer`."""
        conv, target = self.convs[layer], x[: block.num_targets]
        if type(conv) is not SAGEConv or has_hooks(conv) or not can_fuse(conv, x, target, block.edge_index):
            return super().apply_layer(layer, x, block, fuse)
        then = fold_dropout(conv, self.norms[layer], self.act, self.dropout, x) if fuse else None
        return conv.run_fused(x, target, block.edge_index, then, is_first=True), then is not None


class GIN(LayeredGNN, pyg.GIN):  # type: ignore[misc]
    """Graph isomorphism network (Xu, Hu, Leskovec and Jegelka, ICLR 2019, arXiv:1810.00826).

    Takes the arguments of ``torch_geometric.nn.models.GIN`` and ``input_dropout`` (see :class:`GCN`).
    """

    def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> MessagePassing:
        """Build one layer, which also supports a compressed graph."""
        options = {name: getattr(self, name) for name in ("act", "act_first", "norm", "norm_kwargs")}
        return GINConv(MLP([in_channels, out_channels, out_channels], **options), **kwargs)


class _AttentionGNN(LayeredGNN):
    """A model of attention layers, whose output layer averages its heads."""

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        *,
        heads: int = 1,
        output_heads: int | None = None,
        **kwargs: Any,
    ) -> None:
        # Check the number of heads before PyG divides by it.
        for name, value in (("heads", heads), ("output_heads", output_heads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if kwargs.get("concat", True) and hidden_channels % heads:
            raise ValueError(
                f"hidden_channels={hidden_channels} counts all heads together and must be a multiple of heads={heads}"
            )
        if output_heads is not None and (out_channels is None or kwargs.get("jk") is not None):
            raise ValueError(f"output_heads={output_heads} needs out_channels and jk=None")
        # By default, the output layer has the same number of heads as the other layers.
        super().__init__(
            in_channels,
            hidden_channels,
            num_layers,
            out_channels,
            dropout,
            heads=heads,
            output_heads=output_heads or heads,
            **kwargs,
        )

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        """Build one layer; PyG sets ``_is_conv_to_out`` before it builds the output layer."""
        heads, output_heads = kwargs.pop("heads"), kwargs.pop("output_heads")
        to_out = getattr(self, "_is_conv_to_out", False)
        if to_out:
            heads = output_heads
        concat = kwargs.pop("concat", True) and not to_out
        channels = out_channels // heads if concat else out_channels
        options = {"heads": heads, "concat": concat, "dropout": self.dropout.p, **kwargs}
        return self._build_layer(in_channels, channels, **options)

    def _build_layer(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        raise NotImplementedError


class GAT(_AttentionGNN, pyg.GAT):  # type: ignore[misc]
    """Graph attention network (Velickovic et al., ICLR 2018, arXiv:1710.10903; ``v2=True``: arXiv:2105.14491).

    Takes the arguments of ``torch_geometric.nn.models.GAT``, ``input_dropout`` (see :class:`GCN`), and
    ``output_heads``, the number of averaged heads of the output layer (default: ``heads``, as in PyG).
    ``hidden_channels`` is the total of all heads; ``dropout`` also drops attention weights. ``v2=True`` and
    ``edge_dim`` do not support a compressed graph. Parameter names are those of PyG's class. The paper's setting for
    Cora and CiteSeer is ``hidden_channels=64, heads=8, output_heads=1, dropout=0.6, input_dropout=0.6, act="elu"``.

    Raises:
        ValueError: An argument is out of range, ``heads`` does not divide ``hidden_channels``, or ``output_heads`` is
            given to a model without an output layer (no ``out_channels``, or jumping knowledge).
    """

    def _build_layer(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        return (GATv2Conv if kwargs.pop("v2", False) else GATConv)(in_channels, out_channels, **kwargs)

    def apply_layer(self, layer: int, x: Tensor, block: LayerBlock, fuse: bool = True) -> tuple[Tensor, bool]:
        """Apply a layer, as :meth:`LayeredGNN.apply_layer`."""
        conv, target = self.convs[layer], x[: block.num_targets]
        is_plain = type(conv) in (GATConv, GATv2Conv) and block.edge_attr is None and not has_hooks(conv)
        if not (fuse and is_plain and can_fuse(conv, x, target, block.edge_index)):
            return super().apply_layer(layer, x, block, fuse)
        out = run_attention(conv, x, target, block.edge_index)
        # Keys are drawn in the order of the unfused layers: attention first.
        then = fold_dropout(conv, self.norms[layer], self.act, self.dropout, out)
        if then is None:
            return add_bias(conv, out), False
        bias = None if conv.bias is None else conv.bias.to(out.dtype)
        return add_relu_drop(out, bias, then.p, then.key), True


class GraphTransformer(_AttentionGNN):
    """Graph transformer of dot-product attention (Shi et al., IJCAI 2021, arXiv:2009.03509), without label propagation.

    Takes the arguments of :class:`GAT` except ``v2``, and those of ``torch_geometric.nn.TransformerConv``: ``beta``
    mixes a layer's attention and its own features by a gate. ``edge_dim`` does not support a compressed graph.

    Raises:
        ValueError: Same as :class:`GAT`.
    """

    supports_edge_weight = False
    supports_edge_attr = True

    def _build_layer(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        return TransformerConv(in_channels, out_channels, **kwargs)
