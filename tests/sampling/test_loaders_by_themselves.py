"""Loaders passed without their DataModule are sharded like those of a Trainer with the DataModule."""

import lightning_fabric
import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn import (
    CollectiveDataModule,
    HyScaleStrategy,
    LinkDataModule,
    NeighborDataModule,
    PersistentLinkDataModule,
    PersistentSamplerDataModule,
)
from tests.batching_data import small_data
from tests.full_graph import launch

STAGES = ("train", "val", "predict")


def make_node_case(kind, **options):
    return lambda: kind(
        small_data(61, 500), num_neighbors=[3, 2], batch_size=4, seed=1, input_pred_nodes=torch.arange(9), **options
    )


def make_link_case(kind, **options):
    def make():
        edges = small_data(61, 500).edge_index
        return kind(
            small_data(61, 500),
            num_neighbors=[2, 2],
            batch_size=4,
            seed=1,
            input_train_edges=edges[:, :23],
            input_val_edges=edges[:, 23:40],
            input_pred_edges=edges[:, 40:49],
            neg_sampling="binary",
            **options,
        )

    return make


MODULES = {
    "node": make_node_case(NeighborDataModule),
    "ordered": make_node_case(NeighborDataModule, shuffle=False, drop_last=True),
    "persistent": make_node_case(PersistentSamplerDataModule),
    "collective": make_node_case(CollectiveDataModule),
    "on a GPU": make_node_case(PersistentSamplerDataModule, device="cpu"),  # Triton's interpreter stands in for a GPU
    "both routes": make_node_case(CollectiveDataModule, device="cpu", num_workers=1),
    "link": make_link_case(LinkDataModule),
    "persistent link": make_link_case(PersistentLinkDataModule),
}
WAYS = ("datamodule", "loaders", "outer", "module", "pair", "after another run")


class SeedRecorder(pl.LightningModule):
    """Records the seeds and nodes of each mini-batch."""

    def __init__(self, datamodule=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen = {stage: [] for stage in STAGES}
        if datamodule is not None:
            self.train_dataloader = datamodule.train_dataloader
            self.val_dataloader = datamodule.val_dataloader
            self.predict_dataloader = datamodule.predict_dataloader

    def note(self, stage, batch):
        batch = batch["one"] if isinstance(batch, dict) else batch
        self.seen[stage].append((batch.input_id.tolist(), batch.n_id.tolist()))
        return self.weight * batch.x.sum()

    def training_step(self, batch, batch_idx):
        return self.note("train", batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if dataloader_idx == 0:
            self.note("val", batch)

    def predict_step(self, batch, batch_idx):
        self.note("predict", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


class Outer(pl.LightningDataModule):
    """Combines DataModules of ours that have no Trainer."""

    def __init__(self, make, pair):
        super().__init__()
        self.one, self.other = make(), make()
        self.pair = pair

    def train_dataloader(self):
        loader = self.one.train_dataloader()
        return {"one": loader, "other": self.other.train_dataloader()} if self.pair else loader

    def val_dataloader(self):
        loader = self.one.val_dataloader()
        return [loader, self.other.val_dataloader()] if self.pair else loader

    def predict_dataloader(self):
        return self.one.predict_dataloader()


def make_trainer(strategy, devices=2):
    return pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def hand_over(way, make, strategy):
    """Train, validate and predict; return what a rank has seen."""
    pl.seed_everything(3, verbose=False)
    run, module = make_trainer(strategy), SeedRecorder()
    if way == "datamodule":
        datamodule = make()
        run.fit(module, datamodule=datamodule)
        run.predict(module, datamodule=datamodule)
    elif way in ("loaders", "after another run"):
        datamodule = make()
        if way != "loaders":  # its Trainer stays attached
            make_trainer("auto", 1).validate(SeedRecorder(), datamodule=datamodule, verbose=False)
        run.fit(module, datamodule.train_dataloader(), datamodule.val_dataloader())
        run.predict(module, datamodule.predict_dataloader())
    elif way == "module":
        module = SeedRecorder(make())
        run.fit(module)
        run.predict(module)
    else:
        outer = Outer(make, way == "pair")
        run.fit(module, datamodule=outer)
        run.predict(module, datamodule=outer)
    return module.seen


def iterate_with_fabric(make):
    """Iterate over the loaders as Fabric shards them; return what a rank has seen."""
    pl.seed_everything(3, verbose=False)
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    datamodule, seen = make(), {}
    for stage, epochs in (("train", 2), ("val", 2), ("predict", 1)):
        loader = fabric.setup_dataloaders(getattr(datamodule, f"{stage}_dataloader")())
        batches = [batch for _ in range(epochs) for batch in loader]
        seen[stage] = [(batch.input_id.tolist(), batch.n_id.tolist()) for batch in batches]
    return seen


def run_rank(rank, strategy):
    """Pass loaders in every way; return by DataModule and way what this rank has seen."""
    torch.set_num_threads(1)
    hyscale = strategy == "hyscale"  # refuses collective batching, and several loaders to train with
    seen = {
        name: {
            way: hand_over(way, make, HyScaleStrategy(drm=False) if hyscale else strategy)
            for way in WAYS
            if not (hyscale and way == "pair")
        }
        for name, make in MODULES.items()
        if not (hyscale and make().__class__ is CollectiveDataModule)
    }
    if not hyscale:
        for name, make in MODULES.items():
            seen[name]["fabric"] = iterate_with_fabric(make)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "hyscale"])
@pytest.mark.filterwarnings("ignore")
def test_however_loaders_are_handed_over_ranks_share_the_seeds(strategy):
    ranks = launch.run(run_rank, 2, strategy)
    for name in ranks[0]:
        for stage in STAGES:
            whole = [rank[name]["datamodule"][stage] for rank in ranks]
            # Of the first of two epochs; hyscale may give a rank no nodes to predict.
            epochs = [rank if stage == "predict" else rank[: len(rank) // 2] for rank in whole]
            seeds = [{seed for ids, _ in rank for seed in ids} for rank in epochs]
            assert seeds[0], (name, stage)
            if strategy == "ddp":  # repeats a seed if their number is odd
                assert len(seeds[0] & seeds[1]) <= (stage == "train"), (name, stage)
            for way in ranks[0][name]:
                for rank, expected in zip(ranks, whole, strict=True):
                    assert rank[name][way][stage] == expected, (name, way, stage)
