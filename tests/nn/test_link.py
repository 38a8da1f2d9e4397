"""LinkPredictor: learns a small graph from every kind of batch; logged means, errors, checkpoints."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import stochastic_blockmodel_graph
from torchmetrics.functional.classification import binary_auroc

from lightning_gnn.nn import GCN, GraphSAGE, LinkPredictor
from tests.nn.quiet import trainer


@cache
def make_splits() -> tuple[Data, Data, Data]:
    torch.manual_seed(0)
    edge_index = stochastic_blockmodel_graph([25] * 4, torch.full((4, 4), 0.01) + torch.eye(4) * 0.4)
    data = Data(x=torch.eye(100), edge_index=edge_index)
    train, val, test = RandomLinkSplit(is_undirected=True)(data)
    return train, val, test


def triplets(data: Data) -> Data:
    positive = data.edge_label_index[:, data.edge_label == 1]
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=data.x,
        edge_index=data.edge_index,
        src_index=positive[0],
        dst_pos_index=positive[1],
        dst_neg_index=torch.randint(100, (positive.size(1), 2), generator=generator),
    )


def make_loader(*batches: Data) -> DataLoader[Any]:
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


@pytest.mark.medium
@pytest.mark.parametrize("make", [lambda data: data, triplets], ids=["binary", "triplet"])
def test_learns_a_small_graph(make: Any, tmp_path: Path) -> None:
    train, val, test = make_splits()
    torch.manual_seed(0)
    module = LinkPredictor(GCN(100, 32, 2, 16), lr=0.01)
    run = trainer(tmp_path, max_epochs=60)
    run.fit(module, make_loader(make(train)), make_loader(val))
    (metrics,) = run.test(module, make_loader(test), verbose=False)
    assert metrics["test_auc"] > 0.8
    assert run.callback_metrics["test_loss"] < 0.69


def select_edges(data: Data, edges: slice) -> Data:
    out = data.clone()
    out.edge_label_index, out.edge_label = data.edge_label_index[:, edges], data.edge_label[edges]
    return out


def test_epoch_means_weigh_every_edge_alike(tmp_path: Path) -> None:
    _, val, _ = make_splits()
    # Scaled up, so that a float32 sigmoid would round many scores to exactly 1.
    module = LinkPredictor(GraphSAGE(100, 32, 2, 16))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(8)
    batches = [select_edges(val, slice(0, 30)), select_edges(val, slice(30, 37)), select_edges(val, slice(37, None))]
    (metrics,) = trainer(tmp_path).validate(module, make_loader(*batches), verbose=False)
    scores = module.predict_step(val, 0).detach()
    assert scores.max() > 50
    expected = F.binary_cross_entropy_with_logits(scores, val.edge_label)
    assert metrics["val_loss"] == pytest.approx(expected.item(), rel=1e-5)
    ranks = scores.double().argsort().argsort() / scores.numel()
    assert metrics["val_auc"] == pytest.approx(binary_auroc(ranks, val.edge_label.long()).item(), abs=1e-3)


def test_triplets_score_like_pairs() -> None:
    batch = triplets(make_splits()[1])
    module = LinkPredictor(GraphSAGE(100, 32, 2, 16))
    z = module(batch)
    scores = module.predict_step(batch, 0)
    size = batch.src_index.numel()
    torch.testing.assert_close(scores[:size], (z[batch.src_index] * z[batch.dst_pos_index]).sum(-1))
    torch.testing.assert_close(
        scores[size:].view(size, 2), (z[batch.src_index].unsqueeze(1) * z[batch.dst_neg_index]).sum(-1)
    )
    single = batch.clone()
    single.dst_neg_index = batch.dst_neg_index[:, 0]
    torch.testing.assert_close(module.predict_step(single, 0), torch.cat([scores[:size], scores[size::2]]))


def replace(**values: Any) -> Data:
    out = make_splits()[0].clone()
    for name, value in values.items():
        out[name] = value
    return out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": None}, "no 'x'"),
        ({"edge_label_index": None}, "no labeled edges: neither 'edge_label_index' nor 'src_index'"),
        ({"edge_label": None}, "no 'edge_label': give the loader labels or neg_sampling"),
        ({"edge_label": torch.tensor([1.0])}, r"edge_label must be \["),
        ({"edge_label": make_splits()[0].edge_label + 1}, "edge_label holds 2.0, but must be 0 or 1"),
        ({"edge_label_index": torch.zeros(3, 5).long()}, r"edge_label_index must be \[2, P\], got \[3, 5\]"),
        ({"edge_label_index": torch.zeros(2, 0).long(), "edge_label": torch.zeros(0)}, "has no labeled edges"),
    ],
)
def test_bad_batches(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path).fit(LinkPredictor(GraphSAGE(100, 8, 2, 8)), make_loader(replace(**values)))


def test_checkpoint_reload(tmp_path: Path) -> None:
    train, val, _ = make_splits()
    module = LinkPredictor(GraphSAGE(100, 8, 2, 8), lr=0.02)
    run = trainer(tmp_path)
    run.fit(module, make_loader(train), make_loader(val))
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = LinkPredictor.load_from_checkpoint(tmp_path / "a.ckpt", model=GraphSAGE(100, 8, 2, 8), weights_only=True)
    assert dict(again.hparams) == {"lr": 0.02, "weight_decay": 0.0, "target": None, "metrics": ["auc"]}
    assert torch.equal(again.eval().predict_step(val, 0), module.eval().predict_step(val, 0))
