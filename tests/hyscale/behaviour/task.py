"""The task of all scenarios, how a scenario is registered, and what it is given to run."""

import os
import pickle
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnn import FullGraphDataModule, NeighborDataModule
from lightning_gnn.nn import GraphSAGE

CLASSES, FEATURES, BATCH_SIZE = 3, 4, 10
SCENARIOS = {}
"""By name: the function and what it was registered with."""


@dataclass(frozen=True)
class Scenario:
    """What is run, and on what.

    Args:
        function: Takes a :class:`Run` and returns what was observed.
        full: Whether it makes sense with full graphs.
        tolerance: Between what is observed under one strategy and under another.
    """

    function: object
    full: bool
    tolerance: float


def scenario(function=None, *, full=True, tolerance=1e-9):
    """Register a scenario by its name."""

    def register(function):
        name = function.__name__
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(function, full, tolerance)
        return function

    return register if function is None else register(function)


def graph():
    """Return a random graph in float64, whose splits are of odd sizes: batches of 10 seeds, and some of fewer."""
    generator = torch.Generator().manual_seed(3)
    num_nodes = 60
    split = torch.arange(num_nodes)[torch.randperm(num_nodes, generator=generator)]
    masks = {"train_mask": split < 27, "val_mask": (split >= 27) & (split < 42), "test_mask": split >= 42}
    return Data(
        x=torch.randn(num_nodes, FEATURES, generator=generator, dtype=torch.float64),
        edge_index=torch.randint(num_nodes, (2, 150), generator=generator),
        y=torch.randint(CLASSES, (num_nodes,), generator=generator),
        **masks,
    )


class Repeated(FullGraphDataModule):
    """Hands out the graph three times an epoch, so that there is something to count, accumulate and interrupt."""

    def train_dataloader(self):
        return DataLoader([self.data] * 3, batch_size=None, collate_fn=lambda batch: batch)

    def val_dataloader(self):
        return DataLoader([self.data] * 2, batch_size=None, collate_fn=lambda batch: batch)

    test_dataloader = predict_dataloader = val_dataloader


def of_split(values, batch, split):
    """Return the rows that count: those of the seeds, or those that a full graph's mask tells."""
    return values[: batch.batch_size] if "batch_size" in batch else values[batch[f"{split}_mask"]]


class Task(pl.LightningModule):
    """Node classification with cross-entropy, which scenarios change in one place.

    Args:
        lr: Learning rate of plain SGD.
        logs: Whether the steps log their losses.
    """

    def __init__(self, lr=0.2, logs=True):
        super().__init__()
        torch.manual_seed(1)
        self.lr, self.logs = lr, logs
        self.net = GraphSAGE(FEATURES, 5, 2, CLASSES).double()

    def forward(self, batch):
        return self.net(batch.x, batch.edge_index)

    def loss(self, batch, split="train"):
        return F.cross_entropy(of_split(self(batch), batch, split), of_split(batch.y, batch, split))

    def tell(self, name, value, batch, split, **options):
        self.log(name, value, batch_size=of_split(batch.y, batch, split).numel(), **options)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.logs:
            self.tell("train_loss", loss, batch, "train", on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if self.logs:
            self.tell("val_loss", self.loss(batch, "val"), batch, "val")

    def test_step(self, batch, batch_idx):
        self.tell("test_loss", self.loss(batch, "test"), batch, "test")

    def predict_step(self, batch, batch_idx):
        out = self(batch)
        return out[: batch.batch_size] if "batch_size" in batch else out

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class ByHand(Task):
    """The same, stepping by itself."""

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Run:
    """What a scenario needs to know of where it runs.

    Args:
        strategy: Of the Trainer.
        num_ranks: Its devices.
        full: Batches are full graphs.
        folder: For files, the same on all ranks.
    """

    def __init__(self, strategy, num_ranks, full, folder):
        self.strategy, self.num_ranks, self.full, self.folder = strategy, num_ranks, full, Path(folder)

    def data(self, **options):
        """Return a new DataModule: three batches of training, two of validation, two of testing, some of prediction."""
        if self.full:
            return Repeated(graph())
        return NeighborDataModule(
            graph(), **{"num_neighbors": [-1, -1], "batch_size": BATCH_SIZE, "seed": 5, **options}
        )

    def trainer(self, **options):
        """Return a quiet Trainer for two epochs."""
        defaults = {
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": self.num_ranks,
            "strategy": self.strategy,
            "default_root_dir": self.folder,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            **dict.fromkeys(
                ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
                False,
            ),
        }
        return pl.Trainer(**{**defaults, **options})

    def fit(self, module, data=None, ckpt_path=None, **options):
        """Train; return what any training shows, and the trainer under ``"trainer"``."""
        trainer = self.trainer(**options)
        trainer.fit(module, datamodule=data or self.data(), ckpt_path=ckpt_path)
        return {**shown(trainer, module), "trainer": trainer}


def weights(module):
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in module.parameters()])


def metrics(trainer):
    """Return what can be monitored, as numbers."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def shown(trainer, module):
    """Return what any training shows."""
    return {
        "weights": weights(module),
        "metrics": metrics(trainer),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "batches": trainer.fit_loop.epoch_loop.total_batch_idx + 1,
        "stopped": trainer.should_stop,
    }


def perform(rank, names, way, folder):
    """Run scenarios one after another, and write down for each what was observed, or the error as a text.

    Ends after a scenario that failed on some ranks alone, which are in different places now.
    """
    warnings.simplefilter("ignore")
    for name in names:
        run = Run(*way, Path(folder) / name / "files")
        run.folder.mkdir(parents=True, exist_ok=True)
        try:
            pl.seed_everything(11, verbose=False)
            observed = SCENARIOS[name].function(run)
            observed.pop("trainer", None)
            kind, outcome = "seen", pickle.dumps(observed)
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
            kind, outcome = "raised", pickle.dumps(text)
        finally:
            os.environ.pop("PL_GLOBAL_SEED", None)
        part = Path(folder) / name / f"{rank}.part"
        part.write_bytes(outcome)
        part.rename(part.with_suffix(f".{kind}"))
        if not alike(kind, part.parent, run.num_ranks):
            break


def alike(kind, folder, num_ranks):
    """Say whether a scenario ended alike on all ranks."""
    deadline = time.monotonic() + 20
    while (ended := sum(path.suffix in (".seen", ".raised") for path in folder.iterdir())) < num_ranks:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return ended == num_ranks == len(list(folder.glob(f"*.{kind}")))


def outcomes_of(names, way, folder):
    """Return what :func:`perform` has written down: by name, for each rank ``"seen"`` or ``"raised"``, and what."""
    found = {}
    for name in names:
        paths = {int(path.stem): path for path in (Path(folder) / name).glob("*.*") if path.suffix != ".part"}
        if paths:
            missing = ("raised", "this rank ended before")
            read = {rank: (path.suffix[1:], pickle.loads(path.read_bytes())) for rank, path in paths.items()}
            found[name] = [read.get(rank, missing) for rank in range(way[1])]
    return found
