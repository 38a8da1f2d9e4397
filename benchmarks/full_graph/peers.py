"""Graphs and peers of the full-graph benchmark: PyG's models on each of its graph formats.

Preprocessing that a format needs (self-loops, GCN normalization, sorting, transposes) runs once, before the first
epoch. PyG's layers leave this to their users, so each peer is at its best.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models import GAT, GCN
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor
from torch_geometric.utils import add_remaining_self_loops, sort_edge_index

from lightning_gnn.datasets.synthetic import planted_power_law

SHAPES = {
    # nodes, directed edges, features, classes, exponent of the degrees
    "Reddit": (29_120, 2_860_000, 602, 41, 2.1),
    "Products": (122_451, 3_090_000, 100, 47, 2.2),
    "PubMed": (19_717, 88_648, 500, 3, 2.2),
}
"""Graphs of the paper's table 1. Reddit has an eighth of its nodes and a fortieth of its edges, Products a twentieth
of both, so that PyG's gather and scatter, which write several rows per edge, fit into memory."""


@cache
def make_graph(name: str, shrink: int = 1) -> Data:
    """Return a graph with features, labels and masks."""
    nodes, edges, features, classes = shape(name, shrink)
    return planted_power_law(
        nodes,
        edges,
        classes,
        features,
        exponent=SHAPES[name][-1],
        homophily=0.6 if shrink == 1 else 0.0,
        seed=0,
    )


def shape(name: str, shrink: int = 1) -> tuple[int, int, int, int]:
    """Return nodes, edges, features and classes of the graph."""
    nodes, edges, features, classes, _ = SHAPES[name]
    return max(nodes // shrink, 4 * classes), edges // shrink, max(features // shrink, 4), classes


def sparse_pair(edge_index: Tensor, weight: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return the adjacency matrix (targets by sources) and its transpose, both ``torch.sparse_csr``."""
    return _csr(edge_index.flip(0), weight, num_nodes), _csr(edge_index, weight, num_nodes)


def _csr(places: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    """Return a matrix with int32 indices, which MKL uses directly; it converts int64 indices at every product."""
    matrix = torch.sparse_coo_tensor(places, weight, (num_nodes, num_nodes)).coalesce().to_sparse_csr()
    indices = matrix.crow_indices().int(), matrix.col_indices().int()
    return torch.sparse_csr_tensor(*indices, matrix.values(), matrix.shape)


class _SparseProduct(torch.autograd.Function):
    """``matrix @ x`` with a backward that uses a precomputed transpose."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transpose: Tensor, x: Tensor) -> Tensor:
        ctx.transpose = transpose
        return matrix @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.transpose @ grad


class ProductGCNConv(GCNConv):
    """PyG's layer with a product with the normalized adjacency matrix, passed as ``edge_index``."""

    def forward(self, x: Tensor, edge_index: Callable[[Tensor], Tensor], edge_weight: Tensor | None = None) -> Tensor:
        """Return the layer's rows."""
        out = edge_index(self.lin(x))
        return out if self.bias is None else out + self.bias


class ProductGCN(GCN):
    """PyG's model with these layers."""

    def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> ProductGCNConv:
        """Build one layer."""
        return ProductGCNConv(in_channels, out_channels, **kwargs)


class Prepared(nn.Module):
    """A model on a graph format that is created at the first call."""

    def __init__(self, model: nn.Module, form: Callable[[Tensor, int], tuple[Any, ...]]) -> None:
        super().__init__()
        self.model = model
        self._form = form
        self._made: tuple[Any, ...] | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the model's rows; the converted first graph is reused for all calls."""
        if self._made is None:
            with torch.no_grad():
                self._made = self._form(edge_index, x.size(0))
        out: Tensor = self.model(x, *self._made)
        return out


def _normalised(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    edge_index = sort_edge_index(edge_index, num_nodes=num_nodes, sort_by_row=False)
    return gcn_norm(edge_index, None, num_nodes)


def _product(edge_index: Tensor, num_nodes: int) -> tuple[Callable[[Tensor], Tensor]]:
    return (partial(_SparseProduct.apply, *sparse_pair(*_normalised(edge_index, num_nodes), num_nodes)),)


def _sorted_index(edge_index: Tensor, num_nodes: int) -> tuple[EdgeIndex, Tensor]:
    index, order = EdgeIndex(edge_index, sparse_size=(num_nodes, num_nodes)).sort_by("col")
    return index.fill_cache_(), order


def _index_product(edge_index: Tensor, num_nodes: int) -> tuple[Callable[[Tensor], Tensor]]:
    edge_index, weight = _normalised(edge_index, num_nodes)
    index, order = _sorted_index(edge_index, num_nodes)
    return (partial(index.matmul, input_value=weight[order], transpose=True),)


def _matrix(edge_index: Tensor, num_nodes: int, weight: Tensor | None = None) -> tuple[Any]:
    matrix = SparseTensor(
        row=edge_index[1], col=edge_index[0], value=weight, sparse_sizes=(num_nodes, num_nodes)
    ).fill_cache_()
    return (matrix,)


def _normalised_matrix(edge_index: Tensor, num_nodes: int) -> tuple[Any]:
    edge_index, weight = _normalised(edge_index, num_nodes)
    return _matrix(edge_index, num_nodes, weight)


def _looped(edge_index: Tensor, num_nodes: int) -> tuple[Tensor]:
    edge_index, _ = add_remaining_self_loops(edge_index, num_nodes=num_nodes)
    return (sort_edge_index(edge_index, num_nodes=num_nodes, sort_by_row=False),)


def _looped_index(edge_index: Tensor, num_nodes: int) -> tuple[EdgeIndex]:
    return (_sorted_index(*_looped(edge_index, num_nodes), num_nodes)[0],)


def _looped_matrix(edge_index: Tensor, num_nodes: int) -> tuple[Any]:
    return _matrix(*_looped(edge_index, num_nodes), num_nodes)


_GCN, _GAT = {"normalize": False}, {"add_self_loops": False}
PEERS: dict[str, dict[str, tuple[Any, dict[str, Any], Callable[[Tensor, int], tuple[Any, ...]]]]] = {
    "GCN": {
        "PyG, edge_index": (GCN, _GCN, _normalised),
        "PyG, SparseTensor": (GCN, _GCN, _normalised_matrix),
        "PyG, EdgeIndex": (ProductGCN, _GCN, _index_product),
        "PyG, torch.sparse": (ProductGCN, _GCN, _product),
    },
    "GAT": {
        "PyG, edge_index": (GAT, _GAT, _looped),
        "PyG, SparseTensor": (GAT, _GAT, _looped_matrix),
        "PyG, EdgeIndex": (GAT, _GAT, _looped_index),
    },
}
"""By model and name: PyG's class, its options, and the graph format. GCN on EdgeIndex multiplies by
``EdgeIndex.matmul``, which PyG's own layer does not use."""


def installed(peer: str) -> bool:
    """Return whether a peer can run."""
    return WITH_TORCH_SPARSE or "SparseTensor" not in peer


def make_peer(model: str, peer: str, *sizes: int, **kwargs: Any) -> Prepared:
    """Return a peer's model."""
    kind, options, form = PEERS[model][peer]
    return Prepared(kind(*sizes, **options, **kwargs), form)
