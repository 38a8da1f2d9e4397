"""HeteroGraphSAGE, RGCN, RGAT and HGT: models for heterogeneous graphs."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch_geometric.typing import EdgeType, Metadata, NodeType

from lightning_gnn.nn.conv.fused import fold_dropout
from lightning_gnn.nn.conv.gat import GATConv
from lightning_gnn.nn.conv.sage import SAGEConv
from lightning_gnn.nn.dropout import Dropout
from lightning_gnn.nn.hetero.attention import TransformerConv
from lightning_gnn.nn.hetero.layers import RelationalConv, TypedConv
from lightning_gnn.nn.hetero.rows import LayerInput, TypedRows, split_layers
from lightning_gnn.nn.type_modules import TypeLinear

Channels = int | Mapping[NodeType, int]
Widths = dict[NodeType, int]
BACK = (  # remedy for node types without in-edges, for error messages
    "add reverse edges (lgnn convert … undirected=true, or PyG's ToUndirected), or choose RGCN or HGT, which support "
    "node types without in-edges"
)


class _HeteroGNN(nn.Module):
    """Heterogeneous layers with ReLU and dropout between them; :meth:`_conv` takes the ``layer_options``."""

    every = True  # whether a layer computes all node types, or only those with in-edges

    def __init__(
        self,
        metadata: Metadata,
        in_channels: Channels,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        dropout: float = 0.0,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        # Check the sizes and the types of the metadata.
        self.node_types, self.edge_types = list(metadata[0]), [tuple(kind) for kind in metadata[1]]
        sizes = {"hidden_channels": hidden_channels, "num_layers": num_layers, "out_channels": out_channels}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout is a probability in [0, 1), got {dropout}")
        if not self.edge_types:
            raise ValueError("metadata has no edge types; use data.metadata()")
        for kind in self.edge_types:
            for name in (kind[0], kind[2]):
                if name not in self.node_types:
                    raise ValueError(f"{kind} has the type {name!r}, which is not among {self.node_types}")
        # An integer is the width of all types.
        if isinstance(in_channels, int):
            in_channels = dict.fromkeys(self.node_types, in_channels)
        for name in self.node_types:
            if in_channels.get(name, 0) < 1:
                raise ValueError(f"in_channels must be at least 1 for {name!r}, got {in_channels.get(name)}")
        # Attributes shared with PyG's models.
        self.num_layers = num_layers
        self.act: nn.Module = nn.ReLU()
        self.norm = nn.Identity()
        self.dropout = Dropout(dropout)
        self.convs = nn.ModuleList()
        self.layers: list[list[EdgeType]] = []
        # Track the types that still have rows: without `every`, a layer drops types without in-edges.
        width, alive = dict(in_channels), set(self.node_types)
        width = self._prepare(width, hidden_channels)
        for layer in range(num_layers):
            types = [kind for kind in self.edge_types if kind[0] in alive and kind[2] in alive]
            if not types:
                raise ValueError(
                    f"no edge type is left for layer {layer + 1}: all start at node types without in-edges; {BACK}"
                )
            # The last layer maps to the output channels; layers have weights only for the edge types that they read.
            channels = out_channels if layer == num_layers - 1 else hidden_channels
            self.convs.append(self._conv(width, channels, types, last=layer == num_layers - 1, **layer_options))
            self.layers.append(types)
            alive = alive if self.every else {kind[2] for kind in types}
            width = dict.fromkeys(self.node_types, channels)

    def _prepare(self, width: Widths, hidden_channels: int) -> Widths:
        """Build the modules before the first layer, and return its input widths."""
        return width

    def _conv(self, width: Widths, channels: int, types: list[EdgeType], last: bool, **options: Any) -> nn.Module:
        """Build a layer."""
        raise NotImplementedError

    def forward(
        self,
        x_dict: Mapping[NodeType, Tensor],
        edge_index_dict: Mapping[EdgeType, Tensor],
        num_sampled_nodes_dict: Mapping[NodeType, Sequence[int]] | None = None,
        num_sampled_edges_dict: Mapping[EdgeType, Sequence[int]] | None = None,
    ) -> dict[NodeType, Tensor]:
        """Return outputs ``[N_t, out_channels]`` by type for features ``[N_t, F_t]`` and edges ``[2, E_r]``.

        With both ``num_sampled_*`` (edges sorted by hop, seeds first, one entry per hop, nodes with the seeds as entry
        0) each layer computes only the rows that still reach a seed, and the output has only the rows of the seeds.
        """
        types = [name for name in self.node_types if name in x_dict]
        x_dict = self.before({name: x_dict[name] for name in types})
        counts = num_sampled_nodes_dict, num_sampled_edges_dict
        blocks = split_layers(x_dict, edge_index_dict, self.layers, self.every, *counts)
        rows = TypedRows.of(x_dict, blocks[0].sources)
        for number, block in enumerate(blocks):
            rows = self.layer(number, rows, block)
        return self.after(rows.to_dict())

    def before(self, x_dict: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Transform the features ``[N_t, F_t]`` row by row to the input of the first layer."""
        return x_dict

    def layer(self, number: int, rows: TypedRows, block: LayerInput) -> TypedRows:
        """Apply a layer, and the activation and dropout after it, and return the rows of its targets."""
        conv = self.convs[number]
        if number == self.num_layers - 1:
            out: TypedRows = conv(rows, block)
            return out
        then = fold_dropout(conv, self.norm, self.act, self.dropout, rows.tables[0])
        out = conv(rows, block, then)
        return out if then is not None else TypedRows([self.dropout(self.act(out.tables[0]))], out.counts)

    def after(self, out: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Transform the outputs of the last layer row by row."""
        return out


class HeteroGraphSAGE(_HeteroGNN):
    """GraphSAGE with separate weights per relation, whose results are summed (arXiv:1706.02216 by type).

    Equals layers of PyG's ``HeteroConv({edge_type: SAGEConv((in, in), out)})`` with ReLU and dropout between them, and
    has the same parameter names. A node type without in-edges has no outputs; only the first layer reads it.

    Args:
        metadata: Node types and edge types, ``data.metadata()``.
        in_channels: Number of input features, for all node types or by type.
        hidden_channels: Number of features between layers.
        layer_options: Further arguments of ``SAGEConv``, such as ``aggr="sum"``.

    Raises:
        ValueError: An argument is out of range, or the metadata is incomplete.
    """

    every = False

    def _conv(self, width: Widths, channels: int, types: list[EdgeType], last: bool, **options: Any) -> nn.Module:
        return _create_conv({kind: SAGEConv((width[kind[0]], width[kind[2]]), channels, **options) for kind in types})


class RGAT(_HeteroGNN):
    """Graph attention with separate weights per relation, whose results are summed (arXiv:1710.10903 by type).

    Equals layers of PyG's ``HeteroConv({edge_type: GATConv((in, in), out, add_self_loops=False, residual=True)})``, and
    has the same parameter names; without ``residual`` a node would ignore its own features. ``hidden_channels`` is the
    total of all heads and must be a multiple of ``heads``; the last layer averages its heads.

    Args:
        layer_options: Further arguments of ``GATConv``, such as ``heads=4``; HeteroGraphSAGE documents the others.
    """

    every = False

    def _conv(self, width: Widths, channels: int, types: list[EdgeType], last: bool, **options: Any) -> nn.Module:
        heads = options.get("heads", 1)
        if heads < 1 or (not last and channels % heads):
            raise ValueError(f"hidden_channels={channels} counts all heads and must be a multiple of heads={heads}")
        options = {"add_self_loops": False, "residual": True, "concat": not last} | options
        channels = channels if last else channels // heads
        return _create_conv({kind: GATConv((width[kind[0]], width[kind[2]]), channels, **options) for kind in types})


def _create_conv(convs: dict[EdgeType, Any]) -> TypedConv:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There exist node types")  # documented for the models
        return TypedConv(convs)


class RGCN(_HeteroGNN):
    """Relational graph convolutional network (Schlichtkrull et al., ESWC 2018, arXiv:1703.06103).

    Layers are PyG's ``RGCNConv``, with its parameter names; relation i is the i-th edge type. Results equal those of
    PyG on ``data.to_homogeneous()``. If node types have different numbers of features, a linear layer per type,
    ``lin``, first maps them to ``hidden_channels``.

    Args:
        layer_options: Further arguments of ``RGCNConv``: ``num_bases``, ``num_blocks``, ``aggr``, ``root_weight``;
            HeteroGraphSAGE documents the others.
    """

    def _prepare(self, width: Widths, hidden_channels: int) -> Widths:
        self.lin = None
        if len(set(width.values())) == 1:
            return width
        self.lin = TypeLinear(width, hidden_channels)
        return dict.fromkeys(width, hidden_channels)

    def before(self, x_dict: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Map the features of all types to one width."""
        return x_dict if self.lin is None else self.lin(x_dict)

    def _conv(self, width: Widths, channels: int, types: list[EdgeType], last: bool, **options: Any) -> nn.Module:
        return RelationalConv(next(iter(width.values())), channels, types, **options)


class HGT(_HeteroGNN):
    """Heterogeneous graph transformer (Hu et al., WWW 2020, arXiv:2003.01332), with PyG's ``HGTConv``.

    As in PyG's example, a linear layer per type, ``lin``, and a ReLU come first, and a linear layer, ``lin_out``, last.
    ``hidden_channels`` is the total of all heads and must be a multiple of ``heads``.

    Args:
        layer_options: ``heads``; HeteroGraphSAGE documents the other arguments.
    """

    every = False

    def __init__(
        self,
        metadata: Metadata,
        in_channels: Channels,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        dropout: float = 0.0,
        **layer_options: Any,
    ) -> None:
        super().__init__(metadata, in_channels, hidden_channels, num_layers, hidden_channels, dropout, **layer_options)
        self.lin_out = nn.Linear(hidden_channels, out_channels)
        self.act = nn.Identity()  # HGTConv contains an activation

    def _prepare(self, width: Widths, hidden_channels: int) -> Widths:
        self.lin = TypeLinear(width, hidden_channels)
        return dict.fromkeys(width, hidden_channels)

    def before(self, x_dict: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Map the features to ``hidden_channels``, with a ReLU."""
        return {name: x.relu() for name, x in self.lin(x_dict).items()}

    def after(self, out: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Map the outputs to ``out_channels``."""
        return {name: self.lin_out(x) for name, x in out.items()}

    def _conv(self, width: Widths, channels: int, types: list[EdgeType], last: bool, **options: Any) -> nn.Module:
        return TransformerConv(next(iter(width.values())), channels, self.node_types, types, **options)
