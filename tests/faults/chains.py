"""Training runs that are interrupted and resumed repeatedly, and their expected results."""

import functools
import os
import signal
import tempfile
from functools import partial

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers.logger import Logger
from torch import nn
from torch.nn import functional
from torch.utils.data import RandomSampler, WeightedRandomSampler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import lightning_gnn
from lightning_gnn.callbacks import LearningCurves, StopOnSignal
from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.nn import GCN
from lightning_gnn.partitioned import partition_graph
from lightning_gnn.systems import SYSTEMS
from tests.batching_data import small_data

DATA = small_data(num_nodes=80, num_edges=400)


class Node(pl.LightningModule):
    """A module with all kinds of state: dropout, momentum, a plateau schedule, metrics over whole epochs."""

    def __init__(self, plateau="epoch"):
        super().__init__()
        self.plateau = plateau
        self.model = GCN(12, 8, 2, 4, dropout=0.5)
        self.train_acc, self.seen = MulticlassAccuracy(4), MeanMetric()

    def scores(self, batch, split):
        logits, y = self.model(batch.x, batch.edge_index), batch.y
        if "input_id" in batch:
            return logits[: batch.batch_size], y[: batch.batch_size]
        mask = batch[f"{split}_mask"]
        return logits[mask], y[mask]

    def training_step(self, batch, batch_idx):
        logits, y = self.scores(batch, "train")
        loss = functional.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max", batch_size=len(y))
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True, batch_size=len(y))
        self.seen.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("seen", self.seen.compute())
        self.seen.reset()

    def validation_step(self, batch, batch_idx):
        logits, y = self.scores(batch, "val")
        noise = torch.rand(())  # a user's validation may use random numbers
        self.log("val_loss", functional.cross_entropy(logits, y) + 1e-3 * noise, batch_size=len(y))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        if self.plateau is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.5)
        config = {"scheduler": schedule, "monitor": "val_loss", "interval": self.plateau, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Link(Node):
    def scores(self, batch, split):
        rows = self.model(batch.x, batch.edge_index)
        left, right = batch.edge_label_index
        product = (rows[left] * rows[right]).sum(dim=-1, keepdim=True)
        other = torch.zeros(len(left), 2)
        return torch.cat([-product, product, other], dim=1), (batch.edge_label > 0).long()


SPLITS = {f"input_{name}_nodes": DATA[f"{name}_mask"] for name in ("train", "val")}
SAMPLED = {"num_neighbors": [3, 2], "batch_size": 10, "num_workers": 2, "seed": 3, **SPLITS}


@functools.cache
def build_partitions():
    """Partition the graph; the folder is removed when this process exits."""
    folder = tempfile.TemporaryDirectory()
    partition_graph(DATA, folder.name, 3, "ldg")
    return folder


LINKS = {
    "input_train_edges": DATA.edge_index[:, :40],
    "input_val_edges": DATA.edge_index[:, 40:60],
    "neg_sampling": "binary",
    "num_neighbors": [3, 2],
    "batch_size": 10,
    "num_workers": 0,
    "seed": 3,
}


def build(name, **options):
    """Build a DataModule by the name of its class."""
    kind = getattr(lightning_gnn, name)
    if issubclass(kind, FullGraphDataModule):
        return kind(DATA, **options)
    graph = build_partitions().name if name.startswith("Partitioned") else DATA
    return kind(graph, **{**(LINKS if issubclass(kind, LinkDataModule) else SAMPLED), **options})


DATA_MODULES = {plugin.option: partial(build, plugin.name) for system in SYSTEMS for plugin in system.datamodules} | {
    "collective routes": partial(build, "CollectiveDataModule", gpu_route="cpu"),
    "own sampler": lambda: build("NeighborDataModule", sampler=WeightedRandomSampler(torch.ones(30), 60)),
    "own sampler, collective": lambda: build("CollectiveDataModule", gpu_route="cpu", sampler=RandomSampler(range(35))),
    "partitioned, cache": partial(build, "PartitionedDataModule", cache=2000),
    "partitioned, elastic": partial(build, "PartitionedDataModule", elastic=True),
    "full, uncompressed": partial(build, "FullGraphDataModule", compress=False),
}


class History(Logger):
    def __init__(self):
        super().__init__()
        self.rows = {}

    name = version = "history"

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.update({(step, name): value for name, value in metrics.items()})


class Killed(BaseException):
    """Simulates the end of the process."""


HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
)


class Trigger(pl.Callback):
    """Runs ``act`` the ``count``-th time that a hook is called."""

    def __init__(self, hook, count, act):
        self.hook, self.count, self.act = hook, count, act
        self.done = False
        setattr(self, hook, self._called)

    def _called(self, trainer, *args, **kwargs):
        if trainer.sanity_checking:
            return
        self.count -= 1
        if self.count == 0:
            self.done = True
            self.act()


def interrupt():
    signal.raise_signal(signal.SIGINT)


def kill():
    raise Killed


class StepCounter(pl.Callback):
    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, *args):
        self.count += 1


class Chain:
    """Runs of one training, each resumed from the previous one's last checkpoint."""

    def __init__(self, tmp_path, data, module=Node, strategy=lambda: "auto", more=None, **options):
        self.tmp_path, self.data, self.module, self.strategy = tmp_path, data, module, strategy
        self.options = {"max_epochs": 5, "log_every_n_steps": 1, **options}
        self.more = more
        self.history, self.steps, self.kills = {}, StepCounter(), 0
        self.checkpoint = None

    def run(self, kill=None, last=None):
        """Train from the last checkpoint on; return whether it finished. ``last``: options of a ModelCheckpoint."""
        torch.manual_seed(0 if self.checkpoint is None else 1 + self.kills)
        module = self.module()
        history, curves = History(), LearningCurves()
        stop = StopOnSignal(self.tmp_path)
        callbacks = [stop, self.steps, curves, *([self.more()] if self.more is not None else [])]
        if last is not None:
            periodic = {"dirpath": self.tmp_path, "filename": "last", "enable_version_counter": False, **last}
            callbacks.append(ModelCheckpoint(**periodic))
        if kill is not None:
            callbacks.append(kill)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=self.options.get("devices", 1),
            strategy=self.strategy(),
            logger=history,
            callbacks=callbacks,
            enable_checkpointing=last is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{name: value for name, value in self.options.items() if name != "devices"},
        )
        try:
            trainer.fit(module, datamodule=self.data(), ckpt_path=self.checkpoint, weights_only=True)
        except (Killed, SystemExit, KeyboardInterrupt):
            assert kill is not None
            assert kill.done
            self.kills += 1
            self.history.update(history.rows)
            path = self.tmp_path / "last.ckpt" if last is not None else stop.checkpoint
            self.checkpoint = path if path is None or os.path.isfile(path) else None
            return False
        self.history.update(history.rows)
        self.trainer, self.final, self.epochs = trainer, module, curves.epochs
        return True

    def results(self, steps=True):
        """Return the weights, the states of optimizer and schedule, the number of steps, and the logs."""
        optimizer = self.trainer.optimizers[0].state_dict()
        schedules = [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs]
        return {
            "weights": self.final.state_dict(),
            "optimizer": optimizer,
            "schedules": schedules,
            "global_step": self.trainer.global_step,
            "epoch": self.trainer.current_epoch,
            "history": self.history,
            "epochs": self.epochs,
            **({"steps": self.steps.count} if steps else {}),
        }


def find_difference(left, right, where=""):
    """Return where two nested results differ, or None if they are equal bit for bit."""
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return f"{where}: {sorted(map(str, left.keys() ^ right.keys()))} are in one of them alone"
        found = (find_difference(left[key], right[key], f"{where}[{key!r}]") for key in left)
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return f"{where}: lengths {len(left)} and {len(right)}"
        found = (find_difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(left, right, strict=True)))
    elif isinstance(left, torch.Tensor):
        return None if torch.equal(left, right) else f"{where}: {left.flatten()[:3]} and {right.flatten()[:3]}"
    elif isinstance(left, nn.Module):
        return None
    else:
        return None if left == right else f"{where}: {left} and {right}"
    return next((difference for difference in found if difference is not None), None)
