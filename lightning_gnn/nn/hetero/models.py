"""HeteroGraphSAGE, RGCN, RGAT and HGT: models of graphs with several types of nodes and edges."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch_geometric.typing import EdgeType, Metadata, NodeType

from lightning_gnn.nn.conv.fused import relu_dropout
from lightning_gnn.nn.conv.gat import GATConv
from lightning_gnn.nn.conv.sage import SAGEConv
from lightning_gnn.nn.dropout import Dropout
from lightning_gnn.nn.hetero.attention import TransformerConv
from lightning_gnn.nn.hetero.layers import RelationalConv, TypedConv
from lightning_gnn.nn.hetero.rows import LayerInput, TypedRows, parts
from lightning_gnn.nn.type_modules import TypeLinear

Channels = int | Mapping[NodeType, int]
Widths = dict[NodeType, int]
BACK = (
    "add reverse edges (lgnn convert … undirected=true, or PyG's ToUndirected), or choose RGCN or HGT, which keep the "
    "types that no edges reach"
)
"""What to do about a type of nodes without edges to it."""


class _HeteroGNN(nn.Module):
    """Layers with ReLU and dropout between them, by type; ``layer_options`` are those of :meth:`_conv`."""

    every = True  # whether a layer computes the nodes of all types, or of those only that a relation reaches

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
        # One width may be given for all types.
        if isinstance(in_channels, int):
            in_channels = dict.fromkeys(self.node_types, in_channels)
        for name in self.node_types:
            if in_channels.get(name, 0) < 1:
                raise ValueError(f"in_channels must be at least 1 for {name!r}, got {in_channels.get(name)}")
        # Attributes that PyG's models have too.
        self.num_layers = num_layers
        self.act: nn.Module = nn.ReLU()
        self.norm = nn.Identity()
        self.dropout = Dropout(dropout)
        self.convs = nn.ModuleList()
        self.layers: list[list[EdgeType]] = []
        # Follow the types whose rows still depend on edges, as a layer may leave out those that none reach.
        width, alive = dict(in_channels), set(self.node_types)
        width = self._prepare(width, hidden_channels)
        for layer in range(num_layers):
            read = [kind for kind in self.edge_types if kind[0] in alive and kind[2] in alive]
            if not read:
                raise ValueError(
                    f"no edge type is left for layer {layer + 1}: none comes from a type that edges reach; {BACK}"
                )
            # The last layer maps to the output channels; a layer has weights only for the edge types that it reads.
            channels = out_channels if layer == num_layers - 1 else hidden_channels
            self.convs.append(self._conv(width, channels, read, last=layer == num_layers - 1, **layer_options))
            self.layers.append(read)
            alive = alive if self.every else {kind[2] for kind in read}
            width = dict.fromkeys(self.node_types, channels)

    def _prepare(self, width: Widths, hidden_channels: int) -> Widths:
        """Build what comes before the layers, and return the features that the first one gets."""
        return width

    def _conv(self, width: Widths, channels: int, read: list[EdgeType], last: bool, **options: Any) -> nn.Module:
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
        0) each layer computes only the rows that still reach a seed, and the output has the rows of the seeds alone.
        """
        types = [name for name in self.node_types if name in x_dict]
        x_dict = self.before({name: x_dict[name] for name in types})
        todo = parts(x_dict, edge_index_dict, self.layers, self.every, num_sampled_nodes_dict, num_sampled_edges_dict)
        rows = TypedRows.of(x_dict, todo[0].sources)
        for number, part in enumerate(todo):
            rows = self.layer(number, rows, part)
        return self.after(rows.to_dict())

    def before(self, x_dict: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Return what the first layer reads, row by row of the features ``[N_t, F_t]``."""
        return x_dict

    def layer(self, number: int, rows: TypedRows, part: LayerInput) -> TypedRows:
        """Return the rows of the targets of one layer, and of what follows it."""
        conv = self.convs[number]
        if number == self.num_layers - 1:
            out: TypedRows = conv(rows, part)
            return out
        then = relu_dropout(conv, self.norm, self.act, self.dropout, rows.tables[0])
        out = conv(rows, part, then)
        return out if then is not None else TypedRows([self.dropout(self.act(out.tables[0]))], out.counts)

    def after(self, out: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Return the outputs, row by row of those of the last layer."""
        return out


class HeteroGraphSAGE(_HeteroGNN):
    """GraphSAGE with weights for each relation, whose results are added up (arXiv:1706.02216 by type).

    Equals layers of PyG's ``HeteroConv({edge_type: SAGEConv((in, in), out)})``, whose parameter names it has, with ReLU
    and dropout between them. A type that no relation reaches has no outputs, and is read by the first layer only.

    Args:
        metadata: Node types and edge types, ``data.metadata()``.
        in_channels: Features of the nodes of all types, or of each type.
        hidden_channels: Features between layers.
        layer_options: Further arguments of ``SAGEConv``, as ``aggr="sum"``.

    Raises:
        ValueError: An argument is out of range, or the metadata is not complete.
    """

    every = False

    def _conv(self, width: Widths, channels: int, read: list[EdgeType], last: bool, **options: Any) -> nn.Module:
        return _typed({kind: SAGEConv((width[kind[0]], width[kind[2]]), channels, **options) for kind in read})


class RGAT(_HeteroGNN):
    """Graph attention with weights for each relation, whose results are added up (arXiv:1710.10903 by type).

    Equals layers of PyG's ``HeteroConv({edge_type: GATConv((in, in), out, add_self_loops=False, residual=True)})``,
    whose parameter names it has; without ``residual`` a node would not see itself. ``hidden_channels`` counts all heads
    together, and must be a multiple of ``heads``; those of the last layer are averaged.

    Args:
        layer_options: Further arguments of ``GATConv``, as ``heads=4``; the others are those of HeteroGraphSAGE.
    """

    every = False

    def _conv(self, width: Widths, channels: int, read: list[EdgeType], last: bool, **options: Any) -> nn.Module:
        heads = options.get("heads", 1)
        if heads < 1 or (not last and channels % heads):
            raise ValueError(f"hidden_channels={channels} counts all heads and must be a multiple of heads={heads}")
        options = {"add_self_loops": False, "residual": True, "concat": not last} | options
        channels = channels if last else channels // heads
        return _typed({kind: GATConv((width[kind[0]], width[kind[2]]), channels, **options) for kind in read})


def _typed(convs: dict[EdgeType, Any]) -> TypedConv:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There exist node types")  # said in the docstring of the model
        return TypedConv(convs)


class RGCN(_HeteroGNN):
    """Relational graph convolutional network (Schlichtkrull et al., ESWC 2018, arXiv:1703.06103).

    Layers are PyG's ``RGCNConv``, with its parameter names, relation i being the i-th edge type: they give what PyG's
    give on ``data.to_homogeneous()``. Where types have different numbers of features, these are first mapped to
    ``hidden_channels`` by a linear layer per type, ``lin``.

    Args:
        layer_options: Further arguments of ``RGCNConv``: ``num_bases``, ``num_blocks``, ``aggr``, ``root_weight``; the
            others are those of HeteroGraphSAGE.
    """

    def _prepare(self, width: Widths, hidden_channels: int) -> Widths:
        self.lin = None
        if len(set(width.values())) == 1:
            return width
        self.lin = TypeLinear(width, hidden_channels)
        return dict.fromkeys(width, hidden_channels)

    def before(self, x_dict: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Return features that all types have as many of."""
        return x_dict if self.lin is None else self.lin(x_dict)

    def _conv(self, width: Widths, channels: int, read: list[EdgeType], last: bool, **options: Any) -> nn.Module:
        return RelationalConv(next(iter(width.values())), channels, read, **options)


class HGT(_HeteroGNN):
    """Heterogeneous graph transformer (Hu et al., WWW 2020, arXiv:2003.01332), with PyG's ``HGTConv``.

    As in PyG's example, a linear layer per type and a ReLU come first, ``lin``, and a linear layer last, ``lin_out``.
    ``hidden_channels`` counts all heads together, and must be a multiple of ``heads``.

    Args:
        layer_options: ``heads``; the others are those of HeteroGraphSAGE.
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
        self.act = nn.Identity()  # a layer has an activation of its own

    def _prepare(self, width: Widths, hidden_channels: int) -> Widths:
        self.lin = TypeLinear(width, hidden_channels)
        return dict.fromkeys(width, hidden_channels)

    def before(self, x_dict: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Return features of ``hidden_channels``."""
        return {name: x.relu() for name, x in self.lin(x_dict).items()}

    def after(self, out: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Return outputs of ``out_channels``."""
        return {name: self.lin_out(x) for name, x in out.items()}

    def _conv(self, width: Widths, channels: int, read: list[EdgeType], last: bool, **options: Any) -> nn.Module:
        return TransformerConv(next(iter(width.values())), channels, self.node_types, read, **options)
