"""Loaders that are handed over without their DataModule are sharded as those of a Trainer that has it."""

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


def node(kind, **options):
    return lambda: kind(
        small_data(61, 500), num_neighbors=[3, 2], batch_size=4, seed=1, input_pred_nodes=torch.arange(9), **options
    )


def link(kind, **options):
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
    "node": node(NeighborDataModule),
    "ordered": node(NeighborDataModule, shuffle=False, drop_last=True),
    "persistent": node(PersistentSamplerDataModule),
    "collective": node(CollectiveDataModule),
    "on a GPU": node(PersistentSamplerDataModule, device="cpu"),  # Triton's interpreter stands for one
    "both routes": node(CollectiveDataModule, device="cpu", num_workers=1),
    "link": link(LinkDataModule),
    "persistent link": link(PersistentLinkDataModule),
}
WAYS = ("datamodule", "loaders", "outer", "module", "pair", "after another run")


class Seen(pl.LightningModule):
    """Notes the seeds and nodes of each mini-batch."""

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
    """Combines DataModules of ours, which no Trainer is attached to."""

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


def trainer(strategy, devices=2):
    return pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def hand_over(way, make, strategy):
    """Train, validate and predict; return what a rank has seen."""
    pl.seed_everything(3, verbose=False)
    run, module = trainer(strategy), Seen()
    if way == "datamodule":
        datamodule = make()
        run.fit(module, datamodule=datamodule)
        run.predict(module, datamodule=datamodule)
    elif way in ("loaders", "after another run"):
        datamodule = make()
        if way != "loaders":  # whose Trainer stays attached
            trainer("auto", 1).validate(Seen(), datamodule=datamodule, verbose=False)
        run.fit(module, datamodule.train_dataloader(), datamodule.val_dataloader())
        run.predict(module, datamodule.predict_dataloader())
    elif way == "module":
        module = Seen(make())
        run.fit(module)
        run.predict(module)
    else:
        outer = Outer(make, way == "pair")
        run.fit(module, datamodule=outer)
        run.predict(module, datamodule=outer)
    return module.seen


def by_fabric(make):
    """Go over the loaders as Fabric shards them; return what a rank has seen."""
    pl.seed_everything(3, verbose=False)
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    datamodule, seen = make(), {}
    for stage, epochs in (("train", 2), ("val", 2), ("predict", 1)):
        loader = fabric.setup_dataloaders(getattr(datamodule, f"{stage}_dataloader")())
        batches = [batch for _ in range(epochs) for batch in loader]
        seen[stage] = [(batch.input_id.tolist(), batch.n_id.tolist()) for batch in batches]
    return seen


def on_rank(rank, strategy):
    """Hand loaders over in every way; return by DataModule and way what this rank has seen."""
    torch.set_num_threads(1)
    hyscale = strategy == "hyscale"  # which refuses collective batching, and several loaders to train with
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
            seen[name]["fabric"] = by_fabric(make)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "hyscale"])
@pytest.mark.filterwarnings("ignore")
def test_however_loaders_are_handed_over_ranks_share_the_seeds(strategy):
    ranks = launch.run(on_rank, 2, strategy)
    for name in ranks[0]:
        for stage in STAGES:
            whole = [rank[name]["datamodule"][stage] for rank in ranks]
            # Of the first of two epochs; hyscale may give a rank nothing to predict.
            epochs = [rank if stage == "predict" else rank[: len(rank) // 2] for rank in whole]
            seeds = [{seed for ids, _ in rank for seed in ids} for rank in epochs]
            assert seeds[0], (name, stage)
            if strategy == "ddp":  # which repeats a seed where their number is odd
                assert len(seeds[0] & seeds[1]) <= (stage == "train"), (name, stage)
            for way in ranks[0][name]:
                for rank, expected in zip(ranks, whole, strict=True):
                    assert rank[name][way][stage] == expected, (name, way, stage)
