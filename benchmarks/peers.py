"""Peers: PyG's samplers, loader and training example, as far as their packages can be imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn.models import GAT, GCN, GraphSAGE
from torch_geometric.typing import SparseTensor
from torchmetrics.classification import MulticlassAccuracy

OpSampler = Callable[[Tensor], int]
"""Samples neighborhoods of some seeds, discards them and returns the number of edges."""


def importable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except (ImportError, OSError):  # OSError: built for another version of torch
        return False
    return True


def can_sample() -> bool:
    """Return whether PyG's NeighborLoader can run, which requires one of the two packages."""
    return importable("pyg_lib") or importable("torch_sparse")


def pyg_lib_sampler(indptr: Tensor, indices: Tensor, fanouts: Sequence[int]) -> OpSampler | None:
    """Return pyg-lib's operator, called as PyG's NeighborSampler calls it, or None if it is not installed."""
    if not importable("pyg_lib"):
        return None
    operator, fanouts = torch.ops.pyg.neighbor_sample, list(fanouts)
    known = {argument.name for argument in operator.default._schema.arguments}
    options = {"csc": True, "replace": False, "directed": True, "disjoint": False, "return_edge_id": True}
    options = {name: value for name, value in options.items() if name in known}
    return lambda seeds: operator(indptr, indices, seeds, fanouts, **options)[0].numel()


def torch_sparse_sampler(indptr: Tensor, indices: Tensor, fanouts: Sequence[int]) -> OpSampler | None:
    """Return torch-sparse's operator, called as PyG's NeighborSampler calls it, or None if it is not installed."""
    if not importable("torch_sparse"):
        return None
    operator, fanouts = torch.ops.torch_sparse.neighbor_sample, list(fanouts)
    return lambda seeds: operator(indptr, indices, seeds, fanouts, False, True)[1].numel()


def neighbor_loader(data: Data, **kwargs: Any) -> Any:
    """Return PyG's NeighborLoader."""
    from torch_geometric.loader import NeighborLoader

    return NeighborLoader(data, **kwargs)


FORMS = ("tensor", "EdgeIndex", "SparseTensor", "Intel's extension")
"""Edge formats of a mini-batch for PyG's layers, and Intel's extension of torch."""
_NEEDS = {"SparseTensor": "torch_sparse", "Intel's extension": "intel_extension_for_pytorch"}


def forms() -> list[str]:
    """Return the formats whose packages can be imported."""
    return [form for form in FORMS if form not in _NEEDS or importable(_NEEDS[form])]


def in_form(edge_index: Tensor, num_nodes: int, form: str) -> Any:
    """Convert the edges of a mini-batch, sorted by target, to another format."""
    if form == "EdgeIndex":
        return EdgeIndex(edge_index, sparse_size=(num_nodes, num_nodes), sort_order="col")
    if form == "SparseTensor":
        sizes = (num_nodes, num_nodes)
        return SparseTensor(row=edge_index[1], col=edge_index[0], sparse_sizes=sizes, is_sorted=True, trust_data=True)
    return edge_index


class PyGNodeData(pl.LightningDataModule):
    """PyG's ``LightningNodeData``, which inherits from ``lightning`` where both packages of Lightning are installed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        from torch_geometric.data.lightning import LightningNodeData

        self._data = LightningNodeData(*args, **kwargs)

    def train_dataloader(self) -> Any:
        """Return its loader of training seeds."""
        return self._data.train_dataloader()

    def val_dataloader(self) -> Any:
        """Return its loader of validation seeds, if it has one."""
        return self._data.val_dataloader() if self._data.val_dataloader is not None else []


class PyGClassifier(pl.LightningModule):
    """The model of PyG's Lightning example (without its batch normalization, which no contestant uses here)."""

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        num_classes: int,
        trim: bool,
        model: str = "SAGE",
        form: str = "tensor",
    ) -> None:
        super().__init__()
        kind, more = {"SAGE": (GraphSAGE, {}), "GCN": (GCN, {}), "GAT": (GAT, {"heads": 4})}[model]
        self.gnn = kind(in_channels, hidden_channels, num_layers, num_classes, dropout=0.5, **more)
        if form == "Intel's extension":
            self.gnn = importlib.import_module(_NEEDS[form]).optimize(self.gnn.train(), dtype=torch.float32)
        self.trim = trim
        self.form = form
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        """Return the cross-entropy of the seeds."""
        hops = {}
        if self.trim:
            hops = {
                "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
                "num_sampled_edges_per_hop": batch.num_sampled_edges,
            }
        edges = in_form(batch.edge_index, batch.num_nodes, self.form)
        logits = self.gnn(batch.x, edges, **hops)[: batch.batch_size]
        labels = batch.y[: batch.batch_size]
        self.train_acc(logits.softmax(dim=-1), labels)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True, batch_size=labels.size(0))
        return F.cross_entropy(logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the example's Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)
