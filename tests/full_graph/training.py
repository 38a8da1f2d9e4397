"""A small task that any number of ranks can train, and the comparison of results."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.full_graph.strategy import AscendHybridParallelStrategy
from lightning_gnn.nn import GAT, GCN, GraphSAGE
from tests.patience import NEVER


def small_data(num_nodes=90, dtype=torch.float64, seed=0):
    """Return a graph with skewed degrees, self-loops and isolated nodes, and splits of odd sizes."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(num_nodes, (5 * num_nodes,), generator=generator)
    col = (torch.rand(row.numel(), generator=generator) ** 2 * (num_nodes - 3)).long()
    split = torch.rand(num_nodes, generator=generator)
    return Data(
        x=torch.randn(num_nodes, 6, generator=generator, dtype=dtype),
        edge_index=torch.stack([row, col]),
        y=torch.randint(7, (num_nodes,), generator=generator),
        train_mask=split < 0.4,
        val_mask=(split >= 0.4) & (split < 0.7),
        test_mask=split >= 0.8,
    )


def model_of(name, dropout=0.0):
    sizes = {"in_channels": 6, "hidden_channels": 8, "num_layers": 2, "out_channels": 7, "dropout": dropout}
    if name == "gcn":
        return GCN(**sizes, input_dropout=dropout)
    if name == "sage":
        return GraphSAGE(**sizes, input_dropout=dropout)
    if name == "sage-max":
        return GraphSAGE(**sizes, input_dropout=dropout, aggr="max")
    return GAT(**sizes, input_dropout=dropout, heads=4)


DROPPING = (("gcn", 0.5), ("sage", 0.5), ("gat", 0.5))
ALL = (*DROPPING, ("gcn", 0.0), ("sage", 0.0), ("gat", 0.0), ("sage-max", 0.0))


class SideBySide(pl.LightningModule):
    """Trains several independent models at once, since starting many runs would take longer."""

    def __init__(self, models=ALL, dtype=torch.float64, logs=True):
        super().__init__()
        torch.manual_seed(1)
        self.names = [f"{name}-{dropout}" for name, dropout in models]
        self.models = torch.nn.ModuleList([model_of(name, dropout) for name, dropout in models]).to(dtype)
        self.unused = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        self.logs = logs
        self.accuracy = torch.nn.ModuleDict(
            {f"of_{split}": MulticlassAccuracy(7) for split in ("train", "val", "test")}
        )

    def outputs(self, batch):
        return [model(batch.x, batch.edge_index) for model in self.models]

    def step(self, batch, split):
        mask = batch[f"{split}_mask"]
        outputs = self.outputs(batch)
        losses = [F.cross_entropy(out[mask], batch.y[mask]) for out in outputs]
        if not self.logs:
            return sum(losses)
        self.accuracy[f"of_{split}"](outputs[0][mask], batch.y[mask])
        self.log(f"{split}_accuracy", self.accuracy[f"of_{split}"], on_step=False, on_epoch=True)
        both = {"on_step": split == "train", "on_epoch": True}
        self.log(f"{split}_loss", losses[0], **both)
        self.log_dict({f"{split}_{name}": loss for name, loss in zip(self.names, losses, strict=True)})
        self.log(f"{split}_largest", outputs[0][mask].max(), reduce_fx="max", **both)
        self.log(f"{split}_smallest", outputs[0][mask].min(), reduce_fx=torch.min, **both)
        self.log(f"{split}_nodes", float(mask.sum()), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log(f"{split}_const", 0.25)
        return sum(losses)

    def training_step(self, batch, index):
        return self.step(batch, "train")

    def validation_step(self, batch, index):
        self.step(batch, "val")

    def test_step(self, batch, index):
        self.step(batch, "test")

    def predict_step(self, batch, index):
        return {"logits": self.outputs(batch), "constant": torch.ones(2)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


class ManualOptimization(SideBySide):
    """Manual optimization: one optimizer per model, two backward passes per step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for model, optimizer in zip(self.models, self.optimizers(), strict=True):
            optimizer.zero_grad()
            for _ in range(2):
                out = model(batch.x, batch.edge_index)
                self.manual_backward(F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask]))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in self.models]


class Recorder(pl.Callback):
    """Stores the gradients of every step and the logs of every epoch."""

    def __init__(self):
        self.gradients, self.logs = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.gradients.append(torch.cat([gradient.reshape(-1) for gradient in gradients]).clone())

    def on_train_epoch_end(self, trainer, module):
        self.logs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def trainer_of(strategy, devices, **options):
    defaults = {
        "max_epochs": 20,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": 20,
    }
    return pl.Trainer(strategy=strategy, devices=devices, **{**defaults, **options})


class Twice(FullGraphDataModule):
    """Yields the graph twice per epoch."""

    def train_dataloader(self):
        return DataLoader([self.data, self.data], batch_size=None, collate_fn=lambda batch: batch)


def train(devices, groups="auto", module=None, data=None, batches=FullGraphDataModule, grouping="balanced", **options):
    """Fit, test and predict; return the values that must not depend on the number of ranks."""
    pl.seed_everything(7, verbose=False)
    recorder = Recorder()
    strategy = AscendHybridParallelStrategy(num_groups=groups, timeout=NEVER, grouping=grouping)
    trainer = trainer_of(strategy, devices, callbacks=[recorder], **options)
    module = SideBySide() if module is None else module
    datamodule = batches(small_data() if data is None else data)
    trainer.fit(module, datamodule=datamodule)
    test = trainer.test(module, datamodule=datamodule, verbose=False)[0]
    return {
        "gradients": torch.stack(recorder.gradients) if module.automatic_optimization else recorder.gradients,
        "weights": torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]),
        "logs": recorder.logs,
        "test": test,
        "predictions": trainer.predict(module, datamodule=datamodule)[0],
    }


def assert_same(expected, actual, tolerance):
    """Compare two results of :func:`train`; logs are float32."""
    for name in ("gradients", "weights", "predictions"):
        torch.testing.assert_close(actual[name], expected[name], rtol=tolerance, atol=tolerance)
    for one, other in zip([*expected["logs"], expected["test"]], [*actual["logs"], actual["test"]], strict=True):
        assert one.keys() == other.keys()
        torch.testing.assert_close(
            torch.tensor(list(other.values())), torch.tensor(list(one.values())), rtol=3e-6, atol=3e-6
        )
