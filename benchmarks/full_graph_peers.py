"""What full-graph training is measured against: graphs of the usual sizes, and PyG's GCN over sparse matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models import GCN

from lightning_gnn.graph.synthetic import planted_power_law

SHAPES = {
    # nodes, directed edges, features, classes, exponent of the degrees
    "Cora": (2_708, 10_556, 1_433, 7, 2.9),
    "CiteSeer": (3_327, 9_104, 3_703, 6, 3.0),
    "PubMed": (19_717, 88_648, 500, 3, 2.2),
    "Reddit": (29_120, 2_860_000, 602, 41, 2.1),
    "Products": (122_451, 3_090_000, 100, 47, 2.2),
}
"""The five graphs of the paper's table 1. Reddit keeps an eighth of its nodes and a fortieth of its edges, Products a
twentieth of both: PyG's gather and scatter write rows per edge, several at a time, which have to fit the memory."""


def make_graph(name: str, root: str | None = None, shrink: int = 1) -> Data:
    """Return a graph with features, labels and masks.

    Args:
        name: One of ``SHAPES``.
        root: Where PyG's Planetoid files lie, for the real Cora and CiteSeer; by default they are generated too.
        shrink: Divide nodes, edges and features by this.
    """
    if root is not None and name in ("Cora", "CiteSeer"):
        from lightning_gnn.graph.datasets import planetoid

        return planetoid(name=name, root=str(Path(root)))
    nodes, edges, features, classes, exponent = SHAPES[name]
    return planted_power_law(
        max(nodes // shrink, 4 * classes),
        edges // shrink,
        classes,
        max(features // shrink, 4),
        exponent=exponent,
        homophily=0.6 if shrink == 1 else 0.0,
        seed=0,
    )


class _SparseProduct(torch.autograd.Function):
    """``matrix @ x`` whose backward multiplies with a transpose that was built once."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transpose: Tensor, x: Tensor) -> Tensor:
        ctx.transpose = transpose
        return matrix @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.transpose @ grad


def sparse_pair(edge_index: Tensor, weight: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return the adjacency matrix (targets by sources) and its transpose, both ``torch.sparse_csr``."""
    shape = (num_nodes, num_nodes)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), weight, shape).coalesce().to_sparse_csr()
    transpose = torch.sparse_coo_tensor(edge_index, weight, shape).coalesce().to_sparse_csr()
    return matrix, transpose


class SparseGCNConv(GCNConv):
    """PyG's layer over torch.sparse (MKL, cuSPARSE): normalised once, transposed once."""

    pair: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Return the layer's rows; the first graph is kept for all calls."""
        if self.pair is None:
            normalised = gcn_norm(edge_index, edge_weight, x.size(0), dtype=x.dtype)
            self.pair = sparse_pair(*normalised, x.size(0))
        out = _SparseProduct.apply(*self.pair, self.lin(x))
        return out if self.bias is None else out + self.bias


class SparseGCN(GCN):
    """PyG's model of these layers."""

    def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> SparseGCNConv:
        """Build one layer."""
        return SparseGCNConv(in_channels, out_channels, **kwargs)
