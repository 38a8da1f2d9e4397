"""NodeClassifier: both kinds of batches, logged means, errors, checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnn.nn import GCN, GraphSAGE, NodeClassifier
from tests.nn.quiet import trainer


def make_batch(seed: int, batch_size: int, num_nodes: int = 40) -> Data:
    generator = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(num_nodes, 8, generator=generator),
        edge_index=torch.randint(num_nodes, (2, 150), generator=generator),
        y=torch.randint(4, (num_nodes,), generator=generator),
        batch_size=batch_size,
    )


def make_full() -> Data:
    data = make_batch(0, 1)
    del data.batch_size
    split = torch.arange(40) % 4
    data.train_mask, data.val_mask, data.test_mask = split < 2, split == 2, split == 3
    return data


def make_loader(*batches: Data) -> DataLoader[Any]:
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


def make_module(**kwargs: Any) -> NodeClassifier:
    torch.manual_seed(0)
    return NodeClassifier(GraphSAGE(8, 16, 2, 4, dropout=0.5), **{"num_classes": 4, **kwargs})


def score(module: NodeClassifier, batch: Data, nodes: Tensor | slice) -> tuple[float, float, int]:
    module.eval()
    with torch.no_grad():
        logits = module.model(batch.x, batch.edge_index)[nodes]
    y = batch.y[nodes]
    loss = F.cross_entropy(logits, y, reduction="sum").item()
    return loss, (logits.argmax(-1) == y).sum().item(), y.numel()


def test_epoch_means_weigh_every_seed_alike(tmp_path: Path) -> None:
    module = make_module()
    batches = [make_batch(1, 30), make_batch(2, 3), make_batch(3, 1, num_nodes=90)]
    run = trainer(tmp_path)
    (val,) = run.validate(module, make_loader(*batches), verbose=False)
    (test,) = run.test(module, make_loader(*batches), verbose=False)
    sums = torch.tensor([score(module, b, slice(0, b.batch_size)) for b in batches]).sum(0).tolist()
    assert sums[2] == 34
    assert val == pytest.approx({"val_loss": sums[0] / 34, "val_acc": sums[1] / 34})
    assert test == pytest.approx({"test_loss": sums[0] / 34, "test_acc": sums[1] / 34})


def test_training_means(tmp_path: Path) -> None:
    batches = [make_batch(1, 30), make_batch(2, 3)]
    module = NodeClassifier(GraphSAGE(8, 16, 2, 4), 4, optimizer=partial(torch.optim.SGD, lr=1e-12))
    run = trainer(tmp_path)
    run.fit(module, make_loader(*batches))
    sums = torch.tensor([score(module, b, slice(0, b.batch_size)) for b in batches]).sum(0).tolist()
    metrics = run.callback_metrics
    assert metrics["train_loss"].item() == metrics["train_loss_epoch"].item() == pytest.approx(sums[0] / 33, rel=1e-5)
    assert metrics["train_acc"].item() == pytest.approx(sums[1] / 33)
    assert metrics["train_loss_step"].item() == pytest.approx(score(module, batches[1], slice(0, 3))[0] / 3, rel=1e-5)


@pytest.mark.parametrize("column", [False, True])
def test_full_graph_takes_the_split_of_the_stage(column: bool, tmp_path: Path) -> None:
    module, data = make_module(), make_full()
    batch = data.clone()
    batch.y = batch.y.view(-1, 1) if column else batch.y
    run = trainer(tmp_path)
    (val,) = run.validate(module, make_loader(batch), verbose=False)
    (test,) = run.test(module, make_loader(batch), verbose=False)
    loss, correct, size = score(module, data, data.val_mask)
    assert val == pytest.approx({"val_loss": loss / size, "val_acc": correct / size})
    loss, correct, size = score(module, data, data.test_mask)
    assert test == pytest.approx({"test_loss": loss / size, "test_acc": correct / size})


def test_only_training_nodes_train() -> None:
    module, data = make_module(), make_full()
    module.model.eval()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    data.y[~data.train_mask] = 99
    loss, _, size = score(module, make_full(), data.train_mask)
    output = module.training_step(data, 0)
    assert output["loss"].item() == pytest.approx(loss / size)
    assert output["weight"] == size


def test_predict_returns_the_seeds(tmp_path: Path) -> None:
    batches = [make_batch(1, 30), make_batch(2, 3)]
    for batch in batches:
        del batch.y
    module = make_module()
    rows = trainer(tmp_path).predict(module, make_loader(*batches, make_full()))
    rows = cast(list[Tensor], rows)
    assert [tuple(r.shape) for r in rows] == [(30, 4), (3, 4), (40, 4)]
    assert torch.equal(rows[1], module.model.eval()(batches[1].x, batches[1].edge_index)[:3])


def test_edge_weights_reach_a_model_that_takes_them() -> None:
    batch = make_batch(1, 5)
    batch.edge_weight = torch.rand(150)
    model = GCN(8, 16, 2, 4)
    expected = model(batch.x, batch.edge_index, batch.edge_weight)[:5]
    assert torch.equal(NodeClassifier(model, 4).predict_step(batch, 0), expected)
    make_module().predict_step(batch, 0)


def remove(name: str, batch: Data) -> Data:
    del batch[name]
    return batch


def replace(batch: Data, **values: Any) -> Data:
    for name, value in values.items():
        batch[name] = value
    return batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (remove("x", make_batch(0, 5)), "no 'x'"),
        (remove("edge_index", make_batch(0, 5)), "no 'edge_index'"),
        (remove("y", make_batch(0, 5)), "no labels 'y'"),
        (replace(make_batch(0, 5), y=torch.full((40,), 4)), "label 4, but num_classes=4 allows 0 to 3"),
        (replace(make_batch(0, 5), y=torch.full((40,), -1)), "a seed node has no label"),
        (replace(make_batch(0, 5), y=torch.full((40,), -1)), "label -1"),
        (replace(make_batch(0, 5), y=torch.rand(40, 112)), r"got torch.float32 \[40, 112\]"),
        (replace(make_batch(0, 5), y=torch.full((40, 1), float("nan"))), "one integer class per node"),
        (replace(make_batch(0, 5), batch_size=0), "batch_size=0"),
        (remove("train_mask", make_full()), "neither 'batch_size' .* nor 'train_mask'"),
        (replace(make_full(), train_mask=torch.zeros(40, dtype=torch.bool)), "train_mask selects none of the 40 nodes"),
        (replace(make_full(), train_mask=torch.ones(40, 10, dtype=torch.bool)), r"bool tensor \[40\]"),
        (replace(make_full(), train_mask=torch.arange(40)), "train_mask must be a bool tensor"),
    ],
)
def test_bad_batches(batch: Data, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path).fit(make_module(), make_loader(batch))


def test_bad_arguments(tmp_path: Path) -> None:
    model = GraphSAGE(8, 16, 2, 4)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        NodeClassifier("gcn", 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        NodeClassifier(model, 1)
    with pytest.raises(ValueError, match="lr must be positive, got 0"):
        NodeClassifier(model, 4, lr=0)
    with pytest.raises(ValueError, match="the model has 4 outputs, but num_classes is 5"):
        trainer(tmp_path).fit(NodeClassifier(model, 5), make_loader(make_batch(0, 5)))
    with pytest.raises(ValueError, match="is not initialized"):
        trainer(tmp_path).fit(NodeClassifier(GraphSAGE(-1, 16, 2, 4), 4), make_loader(make_batch(0, 5)))


@pytest.mark.medium
def test_checkpoint_reload_and_resume(tmp_path: Path) -> None:
    module = make_module(lr=0.02, weight_decay=1e-4, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1))
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, make_loader(make_batch(0, 20)), make_loader(make_batch(1, 20)))
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = NodeClassifier.load_from_checkpoint(
        tmp_path / "a.ckpt", model=GraphSAGE(8, 16, 2, 4, dropout=0.5), weights_only=True
    )
    wanted = {"num_classes": 4, "lr": 0.02, "weight_decay": 1e-4, "target": None, "kind": "multiclass"}
    assert dict(again.hparams) == wanted | {"class_weights": None, "label_smoothing": 0.0, "metrics": ()}
    batch = make_batch(2, 7)
    assert torch.equal(again.eval().predict_step(batch, 0), module.eval().predict_step(batch, 0))
    resumed = trainer(tmp_path, max_epochs=3)
    resumed.fit(again, make_loader(make_batch(0, 20)), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert resumed.current_epoch == 3


def test_optimizer_and_scheduler_are_built_from_partials(tmp_path: Path) -> None:
    module = make_module(
        optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        scheduler=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e9),
    )
    run = trainer(tmp_path, max_epochs=3)
    run.fit(module, make_loader(make_batch(0, 20)), make_loader(make_batch(1, 20)))
    optimizer = run.optimizers[0]
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] < 0.5
    config = make_module(
        scheduler=lambda o: {"scheduler": torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10), "interval": "step"}
    ).configure_optimizers()
    assert config["lr_scheduler"]["interval"] == "step"
    assert isinstance(make_module().configure_optimizers(), torch.optim.Adam)
