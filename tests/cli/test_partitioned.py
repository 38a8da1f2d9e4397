"""``lgnn datamodule=partitioned``: a partitioned graph from the command line."""

import pytest
import torch

from lightning_gnn.cli.commands import partition as partition_command
from tests.cli.command import NODE, lgnn, load_weights, metrics_of

GRAPH = [item for item in NODE if item.startswith("data.")]
SAMPLED = [item for item in NODE if item not in GRAPH]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    out = tmp_path_factory.mktemp("parts") / "parts"
    assert partition_command.main([*GRAPH, "parts=3", "method=ldg", f"out={out}"]) == 0
    return out


def assert_same_runs(folder):
    """Compare a run on the whole graph with one on its partitions: weights bit for bit, and all scores."""
    weights, scores = [], []
    for name in ("whole", "parts"):
        weights.append(load_weights(folder / name / "checkpoints" / "last.ckpt"))
        metrics = metrics_of(folder / name).items()
        scores.append({score: value for score, value in metrics if score.startswith(("val_", "test_"))})
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    return scores


@pytest.mark.slow
def test_trains_as_on_the_whole_graph(parts, tmp_path, capfd, monkeypatch):
    assert lgnn(tmp_path / "whole") == 0
    monkeypatch.chdir(parts.parent)
    of_parts = ["datamodule=partitioned", "datamodule.root=parts", "datamodule.cache=1MB"]
    assert lgnn(tmp_path / "parts", *of_parts, base=SAMPLED) == 0
    assert "GraphSAGE on partitioned · fanouts [4, 4], batch 64 · 600 nodes, 4,000 edges" in capfd.readouterr().out
    whole, trained = assert_same_runs(tmp_path)
    assert trained["test_acc"] == whole["test_acc"]
    best = tmp_path / "parts" / "checkpoints" / "best.ckpt"
    monkeypatch.chdir(tmp_path)
    assert lgnn(tmp_path / "again", "mode=test", f"ckpt_path={best}", base=["trainer.enable_progress_bar=false"]) == 0
    assert metrics_of(tmp_path / "again")["test_acc"] == trained["test_acc"]


RATINGS = ["data.num_users=200", "data.num_items=80", "data.num_ratings=4000", "data.num_classes=4"]


@pytest.mark.slow
def test_recommends_as_on_the_whole_graph(tmp_path, capfd):
    drawn = RATINGS
    split = ["task=recommend", "task.split.num_val=0.01"]
    sampled = [
        "model.hidden_channels=8", "model.num_layers=2", "datamodule.num_neighbors=[3,3]", "datamodule.batch_size=64",
        "datamodule.num_workers=0", "datamodule.eval_loader_kwargs.neg_sampling.amount=9", "trainer.max_epochs=2",
        "trainer.enable_progress_bar=false", "torch_threads=1", "task.lr=0.02",
    ]  # fmt: skip
    parts = tmp_path / "cut"
    assert partition_command.main([*drawn, *split, "parts=3", "method=ldg", f"out={parts}"]) == 0
    assert lgnn(tmp_path / "whole", *split, base=[*drawn, *sampled]) == 0
    of_parts = ["data=partitioned", "datamodule=partitioned_link", f"datamodule.root={parts}"]
    assert lgnn(tmp_path / "parts", *split, *of_parts, base=sampled) == 0
    whole, in_parts = assert_same_runs(tmp_path)
    assert in_parts == whole
    assert "test_mrr" in whole
    capfd.readouterr()
    assert lgnn(tmp_path / "exact", *split, *of_parts, "inference=full", base=sampled) == 2
    assert "inference='full' uses all edges at once, so it cannot be combined with time_attr" in capfd.readouterr().err
    for other in ("item__rev_rates__user", "[item,rev_rates,user]"):
        assert lgnn(tmp_path / "other", *split, *of_parts, f"task.target={other}", base=sampled) == 2
        assert "but the folder was partitioned to predict user__rates__item: leave it out" in capfd.readouterr().err


PARTS = "datamodule=partitioned datamodule.root=nowhere "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("datamodule=partitioned", "datamodule.root is missing; give datamodule.root=VALUE"),
        (PARTS, "nowhere is not a partitioned graph; make one with"),
        (PARTS + "data=synthetic", "trains only on the graph in datamodule.root: give data=part"),
        ("data=partitioned", "data=partitioned works only with datamodule=partitioned"),
        (PARTS + "inference=full", "is not a partitioned graph"),
        (
            "task=link datamodule=partitioned_link datamodule.root=PARTS",
            "so give training edges, or partition with some (lgnn partition task=link, or task=recommend)",
        ),
    ],
)
def test_what_does_not_go_together_is_said(overrides, said, parts, tmp_path, capfd):
    base = [item for item in SAMPLED if not item.startswith("datamodule=")]
    assert lgnn(tmp_path, *overrides.replace("PARTS", str(parts)).split(), base=base) == 2
    assert said in capfd.readouterr().err
