"""Ranks and areas under curves among equal scores do not depend on the order of a sort, nor on squashed scores."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling
from torchmetrics.functional.classification import multilabel_average_precision

from lightning_gnn import LinkDataModule
from lightning_gnn.nn import GraphSAGE, HeteroGraphSAGE, LinkPredictor, NodeClassifier
from lightning_gnn.nn.metrics import mean_ranks, named_metric
from tests.batching_data import small_data
from tests.nn.quiet import trainer
from tests.nn.test_typed_classifier import make_featured_data
from tests.sampling.test_typed import WRITES

NAMES = ["auc", "mrr", "hits@1", "hits@3", "recall@3"]


class Constant(torch.nn.Module):
    """A collapsed model: all nodes have the same embedding."""

    def forward(self, x, edge_index):
        if isinstance(x, dict):
            return {name: rows.new_ones(rows.size(0), 4) for name, rows in x.items()}
        return x.new_ones(x.size(0), 4)


def rank_by_sorting(score, others):
    """Return the mean of the first and the last position that ``score`` has in any descending order."""
    positions = [i for i, value in enumerate(sorted([score, *others], reverse=True), 1) if value == score]
    return (positions[0] + positions[-1]) / 2


def auc_by_pairs(positive, negative):
    wins = [(a > b) + (a == b) / 2 for a in positive.tolist() for b in negative.tolist()]
    return sum(wins) / len(wins)


def expected(scores, negatives):
    """Return the metrics for lists of the scores of links, ``[P]``, and of their negatives, ``[P][K]``."""
    ranks = [rank_by_sorting(score, others) for score, others in zip(scores, negatives, strict=True)]
    return {
        "mrr": sum(1 / rank for rank in ranks) / len(ranks),
        "hits@1": sum(rank <= 1 for rank in ranks) / len(ranks),
        "hits@3": sum(rank <= 3 for rank in ranks) / len(ranks),
        "recall@3": sum(rank <= 3 for rank in ranks) / len(ranks),
        "auc": auc_by_pairs(torch.tensor(scores), torch.tensor(negatives).flatten()),
    }


@given(st.lists(st.lists(st.integers(-2, 2), min_size=5, max_size=5), min_size=1, max_size=8))
def test_ranks_are_those_of_a_sort(rows):
    scores = torch.tensor(rows, dtype=torch.float32)
    found = mean_ranks(scores[:, 0], scores[:, 1:])
    assert found.tolist() == [rank_by_sorting(row[0], row[1:]) for row in rows]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_that_are_nan_rank_last(dtype):
    scores, others = (
        torch.tensor([math.nan, 1.0], dtype=dtype),
        torch.tensor([[0.0, 2.0], [math.nan, 0.0]], dtype=dtype),
    )
    assert mean_ranks(scores, others).tolist() == [3.0, 2.0]


def make_links(kind, amount):
    """Return a DataModule that ranks 50 links, each among ``amount`` negatives, and the type of the links."""
    data = make_featured_data() if kind == "typed" else small_data()
    edges = data[WRITES].edge_index[:, :50] if kind == "typed" else data.edge_index[:, :50]
    times = {}
    if kind == "temporal":
        data.time = torch.arange(data.num_edges)
        times = dict.fromkeys(("input_train_time", "input_val_time"), torch.full((50,), 100)) | {"time_attr": "time"}
    seeds = (WRITES, edges) if kind == "typed" else edges
    datamodule = LinkDataModule(
        data, seeds, input_val_edges=seeds, num_neighbors=[2], batch_size=20, share_memory=False, seed=3,
        neg_sampling=NegativeSampling("triplet", amount=amount), **times,
    )  # fmt: skip
    return datamodule, WRITES if kind == "typed" else None


@pytest.mark.parametrize("kind", ["homogeneous", "typed", "temporal"])
@pytest.mark.parametrize("amount", [1, 2, 5, 50])
def test_a_constant_scorer_has_the_mean_rank(kind, amount, tmp_path):
    datamodule, target = make_links(kind, amount)
    module = LinkPredictor(Constant(), target=target, metrics=NAMES)
    (found,) = trainer(tmp_path).validate(module, datamodule, verbose=False)
    rank = (amount + 2) / 2
    assert found["val_mrr"] == pytest.approx(1 / rank)
    for top in ("hits@1", "hits@3", "recall@3"):
        assert found[f"val_{top}"] == (rank <= int(top[-1])), top
    assert found["val_auc"] == pytest.approx(0.5)


def test_a_constant_scorer_has_the_mean_rank_on_a_full_graph(tmp_path):
    data = small_data()
    source, positive = data.edge_index[:, :30]
    batch = Data(data.x, data.edge_index, src_index=source, dst_pos_index=positive, dst_neg_index=positive.view(-1, 1))
    (found,) = trainer(tmp_path).validate(
        LinkPredictor(Constant(), metrics=NAMES), DataLoader([batch], batch_size=None), verbose=False
    )
    assert found["val_mrr"] == pytest.approx(2 / 3)
    assert found["val_hits@1"] == 0.0
    assert found["val_auc"] == pytest.approx(0.5)


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e3])
def test_metrics_are_those_of_unsquashed_scores(typed, precision, scale, tmp_path):
    torch.manual_seed(0)
    datamodule, target = make_links("typed" if typed else "homogeneous", 5)
    if typed:
        widths = {name: datamodule.data[name].x.size(1) for name in datamodule.data.node_types}
        model = HeteroGraphSAGE(datamodule.data.metadata(), widths, 8, 1, 8)
    else:
        model = GraphSAGE(datamodule.data.num_features, 8, 1, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    module = LinkPredictor(model, target=target, metrics=NAMES)
    links, negatives = [], []
    outputs = module.forward

    def record(batch):
        """Keep the scores in float32 of the model's outputs, in the precision of the run."""
        z = outputs(batch)
        left, right = (z[WRITES[0]], z[WRITES[2]]) if typed else (z, z)
        left, right = (rows.to(torch.promote_types(rows.dtype, torch.float32)) for rows in (left, right))
        sources, targets = (batch[WRITES[0]], batch[WRITES[2]]) if typed else (batch, batch)
        source = left[sources.src_index]
        links.extend((source * right[targets.dst_pos_index]).sum(-1).tolist())
        negatives.extend((source.unsqueeze(1) * right[targets.dst_neg_index]).sum(-1).tolist())
        return z

    module.forward = record
    (found,) = trainer(tmp_path, precision=precision).validate(module, datamodule, verbose=False)
    assert len(links) == 50
    for name, value in expected(links, negatives).items():
        assert found[f"val_{name}"] == pytest.approx(value, abs=1e-5), name
    # The mean loss is in 32 bits too: a sum of ones in bfloat16 ends at 256, and there are 300 pairs.
    scores = torch.cat([torch.tensor(links), torch.tensor(negatives).flatten()])
    labels = torch.arange(300) < 50
    assert found["val_loss"] == pytest.approx(binary_cross_entropy_with_logits(scores, labels.float()).item(), rel=1e-5)


def evaluate_rows(kind, rows, labels, names, precision, tmp_path):
    """Return the metrics of a NodeClassifier whose outputs are ``rows``."""
    data = Data(rows, torch.zeros((2, 0), dtype=torch.int64), y=labels, val_mask=torch.ones(len(rows)).bool())
    module = NodeClassifier(Outputs(), rows.size(1), kind=kind, metrics=names)
    loader = DataLoader([data], batch_size=None)
    (found,) = trainer(tmp_path, precision=precision).validate(module, loader, verbose=False)
    return found


class Outputs(torch.nn.Module):
    """A model whose outputs are its features."""

    def forward(self, x, edge_index):
        return x


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e3])
def test_curves_of_classes_and_labels_are_those_of_unsquashed_outputs(scale, tmp_path):
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 3, generator=random) * scale
    classes, labels = torch.randint(3, (60,), generator=random), torch.randint(2, (60, 3), generator=random)
    found = evaluate_rows("multilabel", rows, labels, ["macro_auroc", "macro_ap"], "32-true", tmp_path)
    pairs = [(rows[:, k][labels[:, k] == 1], rows[:, k][labels[:, k] == 0]) for k in range(3)]
    assert found["val_macro_auroc"] == pytest.approx(sum(auc_by_pairs(*pair) for pair in pairs) / 3, abs=1e-6)
    exact = torch.linspace(0, 1, 180)[rows.flatten().argsort().argsort()].view(60, 3)  # the same order, in [0, 1]
    expected_ap = multilabel_average_precision(exact, labels, 3, average="macro")
    assert found["val_macro_ap"] == pytest.approx(expected_ap.item(), abs=1e-6)
    found = evaluate_rows("multiclass", rows, classes, ["macro_auroc"], "32-true", tmp_path)
    # The odds p / (1 - p) have the order of p.
    wide = rows.double()
    others = [wide[:, [j for j in range(3) if j != k]].logsumexp(1) for k in range(3)]
    odds = wide - torch.stack(others, dim=1)
    pairs = [(odds[classes == k, k], odds[classes != k, k]) for k in range(3)]
    assert found["val_macro_auroc"] == pytest.approx(sum(auc_by_pairs(*pair) for pair in pairs) / 3, abs=1e-6)


@given(st.lists(st.lists(st.integers(-2, 2), min_size=5, max_size=5), min_size=1, max_size=8))
def test_the_top_classes_are_by_mean_ranks(rows):
    logits, classes = torch.tensor(rows, dtype=torch.float32), torch.arange(len(rows)) % 5
    ranks = [rank_by_sorting(row[k], row[:k] + row[k + 1 :]) for row, k in zip(rows, classes.tolist(), strict=True)]
    for top in (1, 3):
        metric = named_metric(f"top{top}", "multiclass", 5)
        metric.update(logits, classes)
        assert metric.compute() == pytest.approx(sum(rank <= top for rank in ranks) / len(ranks))


def test_a_constant_classifier_has_no_curve(tmp_path):
    classes = torch.arange(60) % 3
    names = ["top1", "top2", "macro_auroc"]
    for precision in ("32-true", "bf16-mixed"):
        found = evaluate_rows("multiclass", torch.full((60, 3), 0.3), classes, names, precision, tmp_path)
        assert [found[f"val_{name}"] for name in names] == pytest.approx([0.0, 1.0, 0.5])
