"""GCN, GraphSAGE and GAT: PyG's own models, with dropout on the input features and exact trimming."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import models as pyg
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn.nn.conv import GATConv, GCNConv, SAGEConv
from lightning_gnn.nn.conv.known import KnownAggregation


def trims_exactly(model: nn.Module, num_hops: int) -> bool:
    """Say whether ``model`` gives the seeds the same rows when it trims a batch of ``num_hops`` hops.

    A model that is no PyG ``BasicGNN`` brings its own trimming and is trusted with it. Batch normalisation counts as
    exact: it is in evaluation; in training its statistics are those of the nodes that are left.
    """
    if not isinstance(model, BasicGNN):
        return True
    # With more hops than layers trimming is exact; with fewer, outer layers would lack the edges that they need.
    if num_hops < model.num_layers:
        return False
    # Jumping knowledge joins the outputs of all layers row by row: they need the same length.
    if model.jk_mode not in (None, "last"):
        return False
    # Norms that take a batch vector average over all nodes present.
    if model.supports_norm_batch and (model.norm_kwargs or {}).get("mode") != "node":
        return False
    # PyG's GCN takes the degrees from each layer's remaining edges.
    return isinstance(model, GCN) or not isinstance(model, pyg.GCN)


def num_layers(model: nn.Module) -> int | None:
    """Return how often a model passes messages; None where that cannot be told.

    A model of the user's tells by its attribute ``num_layers``, if it has as many modules that pass messages.
    """
    model = getattr(model, "_orig_mod", model)
    layers = getattr(model, "num_layers", None)
    if not isinstance(layers, int) or isinstance(model, BasicGNN):
        return layers if isinstance(layers, int) else None
    return layers if sum(isinstance(module, MessagePassing) for module in model.modules()) == layers else None


class _InputDropoutGNN(BasicGNN):  # type: ignore[misc]
    """A PyG ``BasicGNN`` that drops input features and checks its arguments.

    Neither adds a parameter or a buffer, so state dicts are those of PyG's class.
    """

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
        self.input_dropout = nn.Dropout(input_dropout)

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
        x_aggregated: Tensor | None = None,
    ) -> Tensor:
        """Return node outputs ``[N, out_channels]`` for features ``x`` ``[N, in_channels]``.

        ``edge_index`` is ``[2, E]`` int64 (source, target), or a compressed graph. With both ``num_sampled_*`` lists
        (edges sorted by hop, seeds first, one entry per hop, nodes with the seeds as entry 0) each layer computes only
        the rows that still reach a seed, unless that would change the seeds' rows; the output then has the rows of the
        seeds alone. With ``x_aggregated`` ``[N, in_channels]``, what the first layer's aggregation comes to for each
        row of ``x``, the first layer reads no edges: a mini-batch needs a hop less.

        Raises:
            ValueError: ``x`` has not ``in_channels`` columns; ``x_aggregated`` has another shape, or meets input
                dropout or ``jk``.
        """
        if isinstance(self.in_channels, int) and self.in_channels > 0 and x.size(-1) != self.in_channels:
            raise ValueError(f"x has {x.size(-1)} features per node, but the model was built for {self.in_channels}")
        nodes, edges = num_sampled_nodes_per_hop, num_sampled_edges_per_hop
        if x_aggregated is not None:
            self._check_aggregated(x, x_aggregated)
            if nodes is None or edges is None or not trims_exactly(self, len(edges) + 1):
                nodes, edges = ([size] + [0] * (self.num_layers - 1) for size in (x.size(0), edge_index.size(1)))
            return self._trimmed(x, edge_index, edge_weight, edge_attr, nodes, edges, x_aggregated)
        if nodes is None or edges is None or not trims_exactly(self, len(edges)):
            out: Tensor = super().forward(self.input_dropout(x), edge_index, edge_weight, edge_attr, batch, batch_size)
            return out
        return self._trimmed(x, edge_index, edge_weight, edge_attr, nodes, edges)

    def _trimmed(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        edge_attr: Tensor | None,
        num_nodes: list[int],
        num_edges: list[int],
        x_aggregated: Tensor | None = None,
    ) -> Tensor:
        """Run each layer as a bipartite one, from the nodes that it reads to those that the next layer needs.

        PyG's ``trim_to_layer`` leaves out a hop after each layer, so that a layer still computes rows of its own last
        hop, which nobody reads: nearly all rows of the first layer.
        """
        x = self.input_dropout(x[: sum(num_nodes[: self.num_layers + (x_aggregated is None)])])
        last = self.num_layers - 1
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            hops = self.num_layers - i
            edges = sum(num_edges[:hops])
            if i == 0 and x_aggregated is not None:
                x = conv(x, KnownAggregation(x_aggregated[: x.size(0)]))
            else:
                x = self._bipartite(
                    conv,
                    x,
                    sum(num_nodes[:hops]),
                    edge_index[:, :edges],
                    None if edge_weight is None else edge_weight[:edges],
                    None if edge_attr is None else edge_attr[:edges],
                )
            if i == last and self.jk_mode is None:
                break
            if self.act is not None and self.act_first:
                x = self.act(x)
            x = norm(x)
            if self.act is not None and not self.act_first:
                x = self.act(x)
            x = self.dropout(x)
        return self.lin(x) if self.jk_mode is not None else x

    def _check_aggregated(self, x: Tensor, x_aggregated: Tensor) -> None:
        if x_aggregated.shape != x.shape:
            raise ValueError(f"x_aggregated is {list(x_aggregated.shape)}, but must be {list(x.shape)} as x is")
        if self.training and getattr(self.input_dropout, "p", 0.0):
            raise ValueError("x_aggregated holds all features, but input_dropout drops some; give input_dropout=0")
        if self.jk_mode not in (None, "last"):
            raise ValueError(
                f"jk={self.jk_mode!r} joins the outputs of all layers, which x_aggregated has not; use jk=None"
            )

    def _bipartite(
        self,
        conv: MessagePassing,
        x: Tensor,
        num_targets: int,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        edge_attr: Tensor | None,
    ) -> Tensor:
        """Apply one layer to ``x`` ``[num_sources, F]``, whose first ``num_targets`` rows are the targets."""
        extra: dict[str, Any] = {"edge_attr": edge_attr} if self.supports_edge_attr else {}
        out: Tensor = conv((x, x[:num_targets]), edge_index, **extra)
        return out


class GCN(_InputDropoutGNN, pyg.GCN):  # type: ignore[misc]
    """Graph convolutional network (Kipf and Welling, ICLR 2017, arXiv:1609.02907).

    Takes ``torch_geometric.nn.models.GCN``'s arguments, and ``input_dropout``, the probability of dropping an input
    feature. Parameter names are those of PyG's class.

    In a mini-batch the symmetric normalisation uses the in-degrees inside the mini-batch, not those of the graph:
    sampled neighbours weigh more, and nodes of the last hop count as isolated. PyG's class, when it trims, also takes
    these degrees anew from each layer's remaining edges, so that its trimmed output differs from the untrimmed one.
    Here they are taken once, from the whole mini-batch: trimming changes the cost, not the result.

    Raises:
        ValueError: an argument is out of range, or a trimmed batch meets ``cached=True``.
    """

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        """Build one layer, which also takes a compressed graph."""
        return GCNConv(in_channels, out_channels, **kwargs)

    def _trimmed(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        edge_attr: Tensor | None,
        num_nodes: list[int],
        num_edges: list[int],
        x_aggregated: Tensor | None = None,
    ) -> Tensor:
        conv = self.convs[0]
        if conv.cached:
            raise ValueError("cached=True keeps the first batch's graph for all others: use it for full graphs only")
        if conv.normalize:
            edge_index, edge_weight, num_edges = self._normalize(x, edge_index, edge_weight, num_nodes, num_edges)
        return super()._trimmed(x, edge_index, edge_weight, edge_attr, num_nodes, num_edges, x_aggregated)

    def _bipartite(
        self,
        conv: MessagePassing,
        x: Tensor,
        num_targets: int,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        edge_attr: Tensor | None,
    ) -> Tensor:
        # GCNConv.forward without its normalisation, which would see the trimmed edges only.
        x = conv.lin(x)
        x = conv.propagate(edge_index, x=x, edge_weight=edge_weight, size=(x.size(0), num_targets))
        return x if conv.bias is None else x + conv.bias

    def _normalize(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, num_nodes: list[int], num_edges: list[int]
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Normalise by the whole mini-batch's degrees, and put each self-loop into the hop of its node's in-edges."""
        conv, size = self.convs[0], x.size(0)
        _, weight = gcn_norm(edge_index, edge_weight, size, conv.improved, conv.add_self_loops, conv.flow, x.dtype)
        if not conv.add_self_loops:
            return edge_index, weight, num_edges
        # gcn_norm moves the graph's own self-loops to the end: give them weight 0 where they were, so that the number
        # of edges per hop stays known without a device synchronisation.
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
        return (
            torch.cat(indices, dim=1),
            torch.cat(weights),
            [edges + nodes for edges, nodes in zip(num_edges, inner, strict=True)],
        )


class GraphSAGE(_InputDropoutGNN, pyg.GraphSAGE):  # type: ignore[misc]
    """GraphSAGE (Hamilton, Ying and Leskovec, NeurIPS 2017, arXiv:1706.02216), mean aggregation by default.

    Takes ``torch_geometric.nn.models.GraphSAGE``'s arguments, and ``input_dropout``, the probability of dropping an
    input feature. Parameter names are those of PyG's class.

    Raises:
        ValueError: an argument is out of range.
    """

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        """Build one layer, which also takes a compressed graph."""
        return SAGEConv(in_channels, out_channels, **kwargs)


class GAT(_InputDropoutGNN, pyg.GAT):  # type: ignore[misc]
    """Graph attention network (Velickovic et al., ICLR 2018, arXiv:1710.10903; ``v2=True``: arXiv:2105.14491).

    Takes ``torch_geometric.nn.models.GAT``'s arguments, and ``input_dropout``, the probability of dropping an input
    feature, and ``output_heads``, the heads of the layer that computes ``out_channels``, which are averaged (default:
    ``heads``, as in PyG). ``hidden_channels`` counts all heads together; ``dropout`` also drops attention weights.
    The paper's setting for Cora and CiteSeer is ``hidden_channels=64, heads=8, output_heads=1, dropout=0.6,
    input_dropout=0.6, act="elu"``. Parameter names are those of PyG's class, and so are the shapes as long as
    ``output_heads`` equals ``heads``. ``v2=True`` and ``edge_dim`` do not take a compressed graph.

    Raises:
        ValueError: an argument is out of range, ``heads`` does not divide ``hidden_channels``, or ``output_heads`` is
            given to a model whose last layer is no output layer (no ``out_channels``, or jumping knowledge).
    """

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
        for name, value in (("heads", heads), ("output_heads", output_heads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if kwargs.get("concat", True) and hidden_channels % heads:
            raise ValueError(
                f"hidden_channels={hidden_channels} counts all heads together and must be a multiple of heads={heads}"
            )
        if output_heads is not None and (out_channels is None or kwargs.get("jk") is not None):
            raise ValueError(f"output_heads={output_heads} needs out_channels and jk=None")
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
        """Build one layer; PyG marks the layer to ``out_channels`` before it asks for it."""
        heads, output_heads = kwargs.pop("heads"), kwargs.pop("output_heads")
        to_out = getattr(self, "_is_conv_to_out", False)
        if to_out:
            heads = output_heads
        if kwargs.get("v2", False):  # PyG's own layer, which needs an edge_index tensor
            return super().init_conv(in_channels, out_channels, heads=heads, **kwargs)
        kwargs.pop("v2", None)
        concat = kwargs.pop("concat", True) and not to_out
        channels = out_channels // heads if concat else out_channels
        return GATConv(in_channels, channels, heads=heads, concat=concat, dropout=self.dropout.p, **kwargs)
