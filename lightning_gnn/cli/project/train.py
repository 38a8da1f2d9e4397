"""Train your model on your graph, with the settings of conf/config.yaml and of the command line.

Set any key on the command line; with -m, several values make a sweep:

    python train.py
    python train.py model.hidden_channels=128 trainer.max_epochs=10
    python train.py -m model.lr=0.003,0.01 seed=1,2,3
"""

from pathlib import Path
from typing import Any

import hydra
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor
from torch_geometric.data import Data
from torchmetrics.functional.classification import multiclass_accuracy

from lightning_gnn import NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE


def load(**options: Any) -> Data:
    """Return the graph. Return yours here, such as ``Planetoid("data", "Cora")[0]``, with masks of the three splits."""
    return planted_power_law(**options)


class Classifier(pl.LightningModule):
    """Your own LightningModule; the model may also be one of PyG's."""

    def __init__(
        self, in_channels: int, num_classes: int, hidden_channels: int, num_layers: int, dropout: float, lr: float
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.num_classes = num_classes
        self.model = GraphSAGE(in_channels, hidden_channels, num_layers, num_classes, dropout=dropout)

    def forward(self, batch: Data) -> Tensor:
        """Return the logits of the seed nodes, ``[batch_size, num_classes]``: they come first in a mini-batch."""
        logits: Tensor = self.model(
            batch.x,
            batch.edge_index,
            num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )
        return logits[: batch.batch_size]

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        """Return the loss."""
        return self._score(batch, "train")

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._score(batch, "val")

    def test_step(self, batch: Data, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._score(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def _score(self, batch: Data, stage: str) -> Tensor:
        logits, labels = self(batch), batch.y[: batch.batch_size]
        loss = F.cross_entropy(logits, labels)
        accuracy = multiclass_accuracy(logits, labels, self.num_classes, average="micro")
        figures = {f"{stage}_loss": loss, f"{stage}_acc": accuracy}
        self.log_dict(figures, prog_bar=True, on_step=False, on_epoch=True, batch_size=batch.batch_size)
        return loss


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Train, test the best checkpoint, and return its accuracy on the validation nodes."""
    pl.seed_everything(cfg.seed, workers=True)
    data = load(**cfg.data)
    datamodule = NeighborDataModule(data, **{**cfg.datamodule, "num_neighbors": list(cfg.datamodule.num_neighbors)})
    module = Classifier(data.num_features, int(data.y.max()) + 1, **cfg.model)
    folder = Path(HydraConfig.get().runtime.output_dir)
    best = ModelCheckpoint(folder / "checkpoints", "best", monitor="val_acc", mode="max")
    trainer = pl.Trainer(**cfg.trainer, callbacks=[best], logger=CSVLogger(folder, "logs", ""))
    trainer.fit(module, datamodule)
    trainer.test(module, datamodule, ckpt_path="best")
    print(f"files in {folder}")
    return float(best.best_model_score)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
