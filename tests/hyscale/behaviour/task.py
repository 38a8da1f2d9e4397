"""The task that all scenarios share, the registry of scenarios, and the environment in which they run."""

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
"""Registered scenarios by name."""


@dataclass(frozen=True)
class Scenario:
    """Function of a :class:`Run`, whether it applies to full graphs, and the tolerance between two strategies."""

    function: object
    full: bool
    tolerance: float


def scenario(function=None, *, full=True, tolerance=1e-9):
    """Register a function as a scenario under its name."""

    def register(function):
        name = function.__name__
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(function, full, tolerance)
        return function

    return register if function is None else register(function)


def make_graph():
    """Return a random float64 graph with splits of odd sizes: batches of 10 seeds and smaller ones."""
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
    """Yields the graph three times per epoch, so that scenarios can count, accumulate and interrupt."""

    def train_dataloader(self):
        return DataLoader([self.data] * 3, batch_size=None, collate_fn=lambda batch: batch)

    def val_dataloader(self):
        return DataLoader([self.data] * 2, batch_size=None, collate_fn=lambda batch: batch)

    test_dataloader = predict_dataloader = val_dataloader


def select_split(values, batch, split):
    """Return the rows of the seeds, or those that the split's mask of a full graph selects."""
    return values[: batch.batch_size] if "batch_size" in batch else values[batch[f"{split}_mask"]]


class Task(pl.LightningModule):
    """Node classification with cross-entropy and plain SGD; ``logs`` says whether the steps log their losses."""

    def __init__(self, lr=0.2, logs=True):
        super().__init__()
        torch.manual_seed(1)
        self.lr, self.logs = lr, logs
        self.net = GraphSAGE(FEATURES, 5, 2, CLASSES).double()

    def forward(self, batch):
        return self.net(batch.x, batch.edge_index)

    def loss(self, batch, split="train"):
        return F.cross_entropy(select_split(self(batch), batch, split), select_split(batch.y, batch, split))

    def log_value(self, name, value, batch, split, **options):
        self.log(name, value, batch_size=select_split(batch.y, batch, split).numel(), **options)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.logs:
            self.log_value("train_loss", loss, batch, "train", on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if self.logs:
            self.log_value("val_loss", self.loss(batch, "val"), batch, "val")

    def test_step(self, batch, batch_idx):
        self.log_value("test_loss", self.loss(batch, "test"), batch, "test")

    def predict_step(self, batch, batch_idx):
        out = self(batch)
        return out[: batch.batch_size] if "batch_size" in batch else out

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class ManualOptimization(Task):
    """The same task with manual optimization."""

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Run:
    """Strategy, number of ranks and kind of batches of a scenario, and a folder that all ranks share."""

    def __init__(self, strategy, num_ranks, full, folder):
        self.strategy, self.num_ranks, self.full, self.folder = strategy, num_ranks, full, Path(folder)

    def data(self, **options):
        """Return a new DataModule with 3 training, 2 validation and 2 test batches, and some to predict."""
        if self.full:
            return Repeated(make_graph())
        return NeighborDataModule(
            make_graph(), **{"num_neighbors": [-1, -1], "batch_size": BATCH_SIZE, "seed": 5, **options}
        )

    def trainer(self, **options):
        """Return a Trainer for two epochs without output."""
        defaults = {
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": self.num_ranks,
            "strategy": self.strategy,
            "default_root_dir": self.folder,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        }
        return pl.Trainer(**{**defaults, **options})

    def fit(self, module, data=None, ckpt_path=None, **options):
        """Train; return the values of :func:`shown`, and the trainer under ``"trainer"``."""
        trainer = self.trainer(**options)
        trainer.fit(module, datamodule=data or self.data(), ckpt_path=ckpt_path)
        return {**summarize_training(trainer, module), "trainer": trainer}


def flatten_weights(module):
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in module.parameters()])


def read_metrics(trainer):
    """Return the metrics that callbacks can monitor, as numbers."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def summarize_training(trainer, module):
    """Return the values to compare after any training."""
    return {
        "weights": flatten_weights(module),
        "metrics": read_metrics(trainer),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "batches": trainer.fit_loop.epoch_loop.total_batch_idx + 1,
        "stopped": trainer.should_stop,
    }


def run_scenarios(rank, names, way, folder):
    """Run scenarios and write the observed values, or the error as text, of each to a file.

    Stops after a scenario that fails on some ranks only, because the ranks are out of step afterwards.
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
        if not ends_equally(kind, part.parent, run.num_ranks):
            break


def ends_equally(kind, folder, num_ranks):
    """Return whether a scenario ended with the same ``kind`` of outcome on all ranks."""
    deadline = time.monotonic() + 20
    while (ended := sum(path.suffix in (".seen", ".raised") for path in folder.iterdir())) < num_ranks:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return ended == num_ranks == len(list(folder.glob(f"*.{kind}")))


def read_outcomes(names, way, folder):
    """Read the files of :func:`perform`: by name, for each rank ``"seen"`` or ``"raised"``, and the value."""
    found = {}
    for name in names:
        paths = {int(path.stem): path for path in (Path(folder) / name).glob("*.*") if path.suffix != ".part"}
        if paths:
            missing = ("raised", "this rank ended before")
            read = {rank: (path.suffix[1:], pickle.loads(path.read_bytes())) for rank, path in paths.items()}
            found[name] = [read.get(rank, missing) for rank in range(way[1])]
    return found
