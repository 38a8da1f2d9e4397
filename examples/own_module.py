"""A LightningModule of your own under each of the four systems: the line that changes, and the module, which does not.

python examples/own_module.py plain          # CPU threads prepare mini-batches; what the others are compared with
python examples/own_module.py persistent     # PGSampler: the GPU samples
python examples/own_module.py collective     # MorphGL: CPU and GPU prepare mini-batches together
python examples/own_module.py hyscale        # HyScale-GNN: CPU and accelerators train one model together
python examples/own_module.py ascend_hybrid  # NeutronAscend: the whole graph, shared out over two processes

Without a GPU, the second and the third say so, and train on the same mini-batches, which CPU threads prepare.
"""

import argparse

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE
from torchmetrics import Accuracy

import lightning_gnn.nn
from lightning_gnn import (
    CollectiveDataModule,
    FullGraphDataModule,
    HyScaleStrategy,
    NeighborDataModule,
    PersistentSamplerDataModule,
)
from lightning_gnn.datasets.synthetic import planted_power_law


class Mine(pl.LightningModule):
    """A network, a loss and an optimizer; it does not know who prepares its batches, or how many train beside it."""

    def __init__(self, network: torch.nn.Module, num_classes: int) -> None:
        super().__init__()
        self.network = network
        self.test_acc = Accuracy(task="multiclass", num_classes=num_classes)

    def rows_of(self, batch, split):
        """Return logits and labels: of the seeds of a mini-batch, or of a split of the whole graph."""
        out = self.network(batch.x, batch.edge_index)
        chosen = slice(batch.batch_size) if "batch_size" in batch else batch[f"{split}_mask"]
        return out[chosen], batch.y[chosen]

    def training_step(self, batch, batch_idx):
        logits, labels = self.rows_of(batch, "train")
        loss = F.cross_entropy(logits, labels)  # a mean over the nodes, as all strategies expect
        self.log("train_loss", loss, batch_size=len(labels))
        return loss

    def test_step(self, batch, batch_idx):
        logits, labels = self.rows_of(batch, "test")
        self.test_acc(logits.softmax(dim=-1), labels)
        self.log("test_acc", self.test_acc, batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


SAMPLING = {"num_neighbors": [10, 5], "batch_size": 256, "num_workers": 1, "seed": 1}


def plain(data, options):
    """Mini-batches of CPU threads, under Lightning's own strategy."""
    return NeighborDataModule(data, **SAMPLING), pl.Trainer(**options)


def persistent(data, options):
    """Change the DataModule: the GPU samples."""
    return PersistentSamplerDataModule(data, **SAMPLING), pl.Trainer(**options)


def collective(data, options):
    """Change the DataModule: CPU and GPU prepare mini-batches, by a plan that is measured in the first epoch."""
    return CollectiveDataModule(data, **SAMPLING), pl.Trainer(**options)


def hyscale(data, options):
    """Change the strategy: the CPU trains beside the accelerators. Without one, the CPU stands for it."""
    devices = None if torch.accelerator.is_available() else ["cpu"]
    strategy = HyScaleStrategy(cpu_trainers=1, devices=devices)  # strategy="hyscale" trains on the CPU where it pays
    return NeighborDataModule(data, **SAMPLING), pl.Trainer(strategy=strategy, **options)


def ascend_hybrid(data, options):
    """Change both: no sampling, and the graph is shared out over the devices. An epoch is one step, so take more."""
    options = options | {"max_epochs": 15 * options["max_epochs"], "accelerator": "cpu", "devices": 2}
    return FullGraphDataModule(data), pl.Trainer(strategy="ascend_hybrid", **options)


SYSTEMS = {system.__name__: system for system in (plain, persistent, collective, hyscale, ascend_hybrid)}


def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS, nargs="?", default="plain")
    parser.add_argument("--num-nodes", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    pl.seed_everything(1, verbose=False)
    data = planted_power_law(args.num_nodes, 20 * args.num_nodes)
    num_classes = int(data.y.max()) + 1
    # A whole graph comes compressed: it needs layers that can read that, with the parameters of PyG's.
    kind = lightning_gnn.nn.GraphSAGE if args.system == "ascend_hybrid" else GraphSAGE
    module = Mine(kind(data.num_features, 64, num_layers=2, out_channels=num_classes), num_classes)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    datamodule, trainer = SYSTEMS[args.system](data, {**quiet, "max_epochs": args.epochs})
    trainer.fit(module, datamodule)
    accuracy = trainer.test(module, datamodule, verbose=False)[0]["test_acc"]
    if trainer.is_global_zero:
        print(f"{args.system}: {trainer.world_size} training, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
