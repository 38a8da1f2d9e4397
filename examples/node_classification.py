"""GraphSAGE on neighbour-sampled mini-batches, with a LightningModule of your own.

The style is that of PyG's Lightning examples; the one line that differs is the DataModule. Run it with a data set that
PyG can download, or without any on a synthetic graph:

    python examples/node_classification.py
    python examples/node_classification.py --dataset reddit --epochs 10
"""

import argparse

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch_geometric.datasets import Flickr, Reddit
from torch_geometric.nn import GraphSAGE
from torchmetrics import Accuracy

from lightning_gnn import NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law


class Model(pl.LightningModule):
    """A plain PyG model in a plain LightningModule."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.gnn = GraphSAGE(in_channels, 128, num_layers=2, out_channels=num_classes, dropout=0.3)
        self.train_acc = Accuracy(task="multiclass", num_classes=num_classes)
        self.val_acc = Accuracy(task="multiclass", num_classes=num_classes)
        self.test_acc = Accuracy(task="multiclass", num_classes=num_classes)

    def seeds(self, batch):
        """Return logits and labels of the seeds, which stand first in a mini-batch."""
        out = self.gnn(
            batch.x,
            batch.edge_index,
            num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )
        return out[: batch.batch_size], batch.y[: batch.batch_size]

    def training_step(self, batch, batch_idx):
        logits, labels = self.seeds(batch)
        loss = F.cross_entropy(logits, labels)
        self.train_acc(logits.softmax(dim=-1), labels)
        self.log("train_loss", loss, batch_size=batch.batch_size)
        self.log("train_acc", self.train_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=batch.batch_size)
        return loss

    def validation_step(self, batch, batch_idx):
        logits, labels = self.seeds(batch)
        self.val_acc(logits.softmax(dim=-1), labels)
        self.log("val_acc", self.val_acc, prog_bar=True, batch_size=batch.batch_size)

    def test_step(self, batch, batch_idx):
        logits, labels = self.seeds(batch)
        self.test_acc(logits.softmax(dim=-1), labels)
        self.log("test_acc", self.test_acc, batch_size=batch.batch_size)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.005)


def main() -> None:
    """Load a graph, train, test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=["synthetic", "reddit", "flickr"], default="synthetic")
    parser.add_argument("--root", default="data", help="where PyG keeps its data sets")
    parser.add_argument("--num-nodes", type=int, default=20_000, help="size of the synthetic graph")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    pl.seed_everything(1)
    if args.dataset == "synthetic":
        data = planted_power_law(args.num_nodes, 20 * args.num_nodes)
    else:
        kind = Reddit if args.dataset == "reddit" else Flickr
        data = kind(f"{args.root}/{args.dataset}")[0]

    # The one line: PyG's LightningNodeData takes the same keywords, but its workers are processes and need pyg-lib.
    datamodule = NeighborDataModule(data, num_neighbors=[25, 10], batch_size=1024, num_workers=2)

    model = Model(data.num_features, int(data.y.max()) + 1)
    trainer = pl.Trainer(max_epochs=args.epochs, logger=False, enable_checkpointing=False)
    trainer.fit(model, datamodule)
    trainer.test(model, datamodule)


if __name__ == "__main__":
    main()
