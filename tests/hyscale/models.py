"""A small graph and LightningModules for the tests of hybrid training."""

import threading
import time

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from lightning_gnn import NeighborDataModule
from lightning_gnn.hyscale.strategy import HyScaleStrategy

CLASSES = 4


def graph(num_nodes=120, degree=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(num_nodes, (num_nodes * degree,), generator=generator)
    target = torch.arange(num_nodes).repeat_interleave(degree)
    split = torch.rand(num_nodes, generator=generator)
    return Data(
        x=torch.randn(num_nodes, 6, generator=generator, dtype=dtype),
        edge_index=torch.stack([source, target]),
        y=torch.randint(CLASSES, (num_nodes,), generator=generator),
        train_mask=split < 0.7,
        val_mask=split >= 0.7,
        test_mask=split >= 0.7,
    )


class Net(torch.nn.Module):
    def __init__(self, conv="sage", dropout=0.0, norm=False):
        super().__init__()
        layer = {"sage": SAGEConv, "gat": GATConv, "gcn": GCNConv}[conv]
        self.first, self.second = layer(6, 8), layer(8, CLASSES)
        self.norm = torch.nn.BatchNorm1d(8) if norm else None
        self.dropout = dropout

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        if self.norm is not None:
            x = self.norm(x)
        return self.second(F.dropout(x.relu(), self.dropout, self.training), edge_index)


class Module(pl.LightningModule):
    """Trains the net, and keeps the gradients and weights of each step."""

    def __init__(self, optimizer="sgd", **options):
        super().__init__()
        torch.manual_seed(1)
        self.net = Net(**options)
        self.optimizer = optimizer

    def loss(self, batch):
        out = self.net(batch.x, batch.edge_index)[: batch.batch_size]
        return F.cross_entropy(out, batch.y[: batch.batch_size])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=batch.batch_size)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), batch_size=batch.batch_size)

    def predict_step(self, batch, batch_idx):
        return self.net(batch.x, batch.edge_index)[: batch.batch_size]

    def configure_optimizers(self):
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[self.optimizer]
        return kind(self.parameters(), 0.05)


class PyGStyle(pl.LightningModule):
    """As in PyG's example graph_sage.py for Lightning: a model with BatchNorm and one metric per split."""

    def __init__(self, in_channels=6, out_channels=CLASSES, hidden_channels=8, dropout=0.5):
        super().__init__()
        torch.manual_seed(1)
        self.dropout = dropout
        from torch_geometric.nn import BatchNorm, GraphSAGE

        self.gnn = GraphSAGE(
            in_channels, hidden_channels, 2, out_channels, dropout=dropout, norm=BatchNorm(hidden_channels)
        )
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=out_channels)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=out_channels)
        self.test_acc = torchmetrics.Accuracy(task="multiclass", num_classes=out_channels)

    def forward(self, x, edge_index):
        return self.gnn(x, edge_index)

    def training_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index)[: data.batch_size]
        y = data.y[: data.batch_size]
        loss = F.cross_entropy(y_hat, y)
        self.train_acc(y_hat.softmax(dim=-1), y)
        self.log("train_loss", loss, prog_bar=True, on_epoch=True, batch_size=data.batch_size)
        self.log("train_acc", self.train_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=data.batch_size)
        return loss

    def validation_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index)[: data.batch_size]
        self.val_acc(y_hat.softmax(dim=-1), data.y[: data.batch_size])
        self.log("val_acc", self.val_acc, on_step=False, on_epoch=True, batch_size=data.batch_size)

    def test_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index)[: data.batch_size]
        self.test_acc(y_hat.softmax(dim=-1), data.y[: data.batch_size])
        self.log("test_acc", self.test_acc, on_step=False, on_epoch=True, batch_size=data.batch_size)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Steps(pl.Callback):
    """Keeps gradients before each optimizer step, and logged values after each batch."""

    def __init__(self):
        self.gradients, self.logged = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def data_module(batch_size=20, fanouts=(-1, -1), data=None, **options):
    data = graph() if data is None else data
    return NeighborDataModule(data, num_neighbors=list(fanouts), batch_size=batch_size, **{"seed": 5, **options})


def trainer(strategy="auto", callbacks=(), **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "num_sanity_val_steps": 0, **quiet}
    return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**defaults, **options})


def hybrid(cpu_trainers=2, **options):
    """A strategy whose shares stay as they are."""
    return HyScaleStrategy(cpu_trainers, **{"drm": False, "stall_timeout": 60.0, **options})


def fit(module, strategy="auto", data=None, double=True, **options):
    """Train and return the module's gradients and logged values of each step, and the trainer."""
    steps = Steps()
    run = trainer(strategy, [steps, *options.pop("callbacks", ())], **options)
    run.fit(
        module.double() if double else module,
        datamodule=data or data_module(),
        ckpt_path=options.pop("ckpt_path", None),
    )
    return steps, run


def difference(a, b):
    """Largest difference of two lists of tensors, relative to the largest number in them."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            worst = max(worst, float((x - y).abs().max() / y.abs().max().clamp_min(1e-30)))
    return worst


def worst_difference(ours, theirs):
    """Likewise, over all steps."""
    assert len(ours) == len(theirs) > 0
    return max(difference(a, b) for a, b in zip(ours, theirs, strict=True))


def left_threads(patience=0.0):
    """Names of the threads of hybrid training that still run, after at most so many seconds."""
    deadline = time.monotonic() + patience
    while (names := [thread.name for thread in threading.enumerate() if thread.name.startswith("hy")]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    return names
