"""Trains on a small graph, optionally from a checkpoint: ``python -m tests.before.run KIND FOLDER [CHECKPOINT]``."""

import sys

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch_geometric.data import Data

from lightning_gnn import CollectiveDataModule, HyScaleStrategy, NeighborDataModule
from lightning_gnn.collective import CollectivePlan
from lightning_gnn.nn import GraphSAGE, NodeClassifier


def build_graph():
    random = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(60, 4, generator=random), y=torch.arange(60) % 3,
        edge_index=torch.randint(60, (2, 400), generator=random), train_mask=torch.arange(60) < 48,
    )  # fmt: skip


def main(kind, folder, ckpt_path=None):
    """Train two epochs of six steps, with a checkpoint after the eighth step, and save the weights."""
    pl.seed_everything(1, verbose=False)
    model = NodeClassifier(GraphSAGE(4, 6, 2, 3), num_classes=3)
    options = {"num_neighbors": [3, 2], "batch_size": 8, "num_workers": 1}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    keep = ModelCheckpoint(folder, every_n_train_steps=8, save_top_k=-1)
    strategy = HyScaleStrategy(cpu_trainers=2, shares=[0.5, 0.5], drm=False) if kind == "hyscale" else "auto"
    data = NeighborDataModule(build_graph(), **options)
    if kind == "collective":
        plan = CollectivePlan("collective", 2, 1)
        data = CollectiveDataModule(build_graph(), **options, plan=plan, gpu_route="cpu")
    trainer = pl.Trainer(max_epochs=2, strategy=strategy, callbacks=[keep], **quiet)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), f"{folder}/weights.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
