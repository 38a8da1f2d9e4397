"""Full-graph training: the whole graph is the batch."""

from __future__ import annotations

import warnings

import pytorch_lightning as pl
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnn.graph.checks import check_node_data, check_nodes
from lightning_gnn.graph.csc import CSCGraph


class FullGraphDataModule(pl.LightningDataModule):
    """One batch per epoch, the graph itself; the module picks the split by ``train_mask``, ``val_mask``, ``test_mask``.

    Args:
        data: The graph, with ``edge_index`` and the three masks, bool ``[num_nodes]``.
        check_features: Look for NaN and infinity in ``data.x`` first.

    Raises:
        TypeError: The graph is not homogeneous.
        ValueError: A mask is missing or of the wrong length, the training split is empty, an edge is out of range.
    """

    def __init__(self, data: Data, check_features: bool = False) -> None:
        super().__init__()
        check_node_data(data, check_features)
        graph = CSCGraph.from_data(data)
        if "graph" in data:  # a folder of arrays holds the topology in CSC order alone
            data = data.clone()
            data.edge_index = graph.to_edge_index()
            del data["graph"]
        for split in ("train", "val", "test"):
            mask = data.get(f"{split}_mask")
            if mask is None and split == "train":
                raise ValueError("data has no train_mask: full-graph training picks its nodes by masks")
            if mask is not None:
                check_nodes(mask, data.num_nodes, f"data.{split}_mask")
        if not bool(data.train_mask.any()):
            raise ValueError("the training split is empty: data.train_mask has no true entry")
        self.data = data

    def setup(self, stage: str) -> None:
        """Refuse several devices, which would all train on the same batch.

        Raises:
            ValueError: The trainer uses more than one device.
        """
        if self.trainer is not None and self.trainer.world_size > 1:
            raise ValueError(
                f"full-graph training runs on one device here, but the trainer has {self.trainer.world_size}"
            )

    def train_dataloader(self) -> DataLoader:
        """Return the graph as the only batch."""
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*number of training batches .* is smaller than the logging interval.*")
        return DataLoader([self.data], batch_size=None, collate_fn=_only)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def _only(data: Data) -> Data:
    return data
