"""Every folder of ``lgnn convert`` trains with each task that its content supports; errors list these tasks."""

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module

from lightning_gnn.cli.assemble import build_data, build_task
from lightning_gnn.cli.commands.convert import _task
from lightning_gnn.cli.splits import fill_splits
from lightning_gnn.datasets import convert_tables
from lightning_gnn.graph.hetero import edges_of
from tests.cli.command import lgnn, metrics_of

pytest.importorskip("duckdb")
LEAN = [
    "data=custom", "model.hidden_channels=8", "model.num_layers=2", "datamodule.num_neighbors=[3,3]",
    "datamodule.batch_size=32", "datamodule.num_workers=0", "torch_threads=1", "trainer.enable_progress_bar=false",
    "trainer.max_epochs=1",
]  # fmt: skip
USERS, ITEMS, EDGES = 60, 40, 400
SCORES = {"node": "acc", "regression": "mae", "link": "auc", "recommend": "mrr"}


def write(path, **columns):
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    split = random.choice(["train", "val", "test"], USERS)
    of_users = {"id": range(USERS), "a": random.random(USERS), "b": random.random(USERS)}
    classes = random.integers(3, size=USERS)
    users = {
        "bare": of_users,
        "classes": {**of_users, "label": classes},
        "split": {**of_users, "label": classes, "split": split},
        "no val": {**of_users, "label": classes, "split": np.where(split == "val", "train", split)},
        "numbers": {**of_users, "label": random.random(USERS).round(3), "split": split},
        "id": {"id": range(USERS)},
    }
    ends = {"source": random.integers(USERS, size=EDGES), "target": random.integers(USERS, size=EDGES)}
    rated = {**ends, "target": random.integers(ITEMS, size=EDGES)}
    return {
        "users": {name: write(folder / f"{name}.csv", **columns) for name, columns in users.items()},
        "items": write(folder / "items.csv", id=range(ITEMS), price=random.random(ITEMS)),
        "follows": write(folder / "follows.csv", **ends),
        "rates": write(folder / "rates.csv", **rated),
        "timed": write(folder / "timed.csv", **rated, time=random.permutation(EDGES)),
    }


def convert_folder(tables, out, users, edges="follows", undirected=False):
    found = tables["users"][users]
    if edges == "follows":
        convert_tables(tables["follows"], out, found, undirected=undirected)
    else:
        source = {"user__follows__user": tables["follows"], "user__rates__item": tables[edges]}
        source = source if edges == "rates" else {"user__rates__item": tables[edges]}
        nodes = {"user": found, "item": tables["items"]}
        convert_tables(source, out, nodes, undirected=undirected)
    return f"data.root={out}"


RATES = "task.target=user__rates__item"
TRAINED = [
    ("bare", "follows", {}, ["task=link"]),
    ("bare", "follows", {"undirected": True}, ["task=link", "datamodule=persistent_link"]),
    ("classes", "follows", {}, ["task=node"]),
    ("split", "follows", {}, ["task=node", "datamodule=full"]),
    ("no val", "follows", {}, ["task=node"]),
    ("numbers", "follows", {}, ["task=regression"]),
    ("bare", "rates", {}, ["task=link", "model=hetero_sage", RATES]),
    ("id", "rates", {}, ["task=link", "model=rgcn", "task.target=user__follows__user"]),
    ("id", "timed", {}, ["task=recommend", "model=rgcn"]),
    ("numbers", "timed", {"undirected": True}, ["task=recommend"]),
    ("no val", "timed", {}, ["task=node", "model=rgcn"]),
    ("classes", "rates", {}, ["task=node", "model=rgat"]),
    ("numbers", "rates", {"undirected": True}, ["task=regression", "model=hgt"]),
]
REFUSED = [
    ("bare", "follows", "task=node", "the graph has no labels y; use one with labels, or task=link"),
    ("numbers", "follows", "task=node", "class numbers must be integers; for other numbers give task=regression"),
    ("bare", "follows", "task=recommend", "this one is homogeneous; use task=link, or convert one table per edge type"),
    ("bare", "rates", "task=link", "task.target=None must select one edge type; give one of "
     "user__follows__user, user__rates__item"),
    ("bare", "timed", "task=link", "model: GraphSAGE is for homogeneous graphs, but this one has the node types item, "
     "user; use model=rgcn, hetero_sage, rgat or hgt"),
    ("bare", "timed", "task=recommend", "no edge type is left for layer 2: all start at node types without in-edges; "
     "add reverse edges (lgnn convert … undirected=true"),
    ("bare", "timed", "task=link model=rgat model.num_layers=1 datamodule.num_neighbors=[3]", "model: RGAT has no "
     "output for 'user', which no edges reach; add reverse edges"),
    ("bare", "rates", "task=recommend", "no edge type has the attribute 'time'; task=link needs no times"),
    ("bare", "timed", "task=recommend task.time=when", "no edge type has the attribute 'when'; give the time's "
     "name by task.time=NAME, if it is one of time; task=link needs no times"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("users", "edges", "options", "task"), TRAINED, ids=str)
def test_a_folder_trains_with_what_it_holds(tables, tmp_path, users, edges, options, task, capfd):
    root = convert_folder(tables, tmp_path / "graph", users, edges, **options)
    lean = [item for item in LEAN if "datamodule=full" not in task or not item.startswith("datamodule")]
    assert lgnn(tmp_path / "run", *task, root, base=lean) == 0
    score = metrics_of(tmp_path / "run")
    name = SCORES[task[0].removeprefix("task=")]
    assert np.isfinite(score[f"val_{name}"])
    assert np.isfinite(score[f"test_{name}"])
    drawn = "data has no nodes for" in capfd.readouterr().out
    assert drawn == (task[0] in ("task=node", "task=regression") and users in ("classes", "no val"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("users", "edges", "undirected"),
    [("bare", "follows", True), ("numbers", "follows", False), ("bare", "rates", False), ("classes", "rates", True),
     ("numbers", "timed", True), ("bare", "timed", False)],
)  # fmt: skip
def test_the_command_that_a_conversion_ends_with_trains(tables, tmp_path, users, edges, undirected):
    root = convert_folder(tables, tmp_path / "graph", users, edges, undirected)
    assert lgnn(tmp_path / "run", *_task(tmp_path / "graph").split(), root, base=LEAN) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("users", "edges", "task", "said"), REFUSED, ids=str)
def test_a_task_that_a_folder_has_nothing_for_names_one_that_does(tables, tmp_path, capfd, users, edges, task, said):
    root = convert_folder(tables, tmp_path / "graph", users, edges)
    assert lgnn(tmp_path / "run", *task.split(), root, base=LEAN) == 2
    assert said in capfd.readouterr().err


def test_predicted_links_and_their_reverses_are_no_messages(tables, tmp_path):
    root = convert_folder(tables, tmp_path / "graph", "bare", "rates", undirected=True)
    with initialize_config_module("lightning_gnn.conf", version_base="1.3"):
        given = [f"output_dir={tmp_path}", *LEAN, root, "task=link", "model=hetero_sage", RATES]
        cfg = compose("train", overrides=[*given, "task.split.num_val=50", "task.split.num_test=30"])
    data, kind = build_data(cfg), ("user", "rates", "item")
    datamodule, module = build_task(cfg, data)
    assert module.target == kind
    whole = [tuple(pair) for pair in edges_of(data, kind).t().tolist()]
    left = [tuple(pair) for pair in edges_of(datamodule.data, kind).t().tolist()]
    back = [tuple(pair) for pair in edges_of(datamodule.data, ("item", "rev_rates", "user")).flip(0).t().tolist()]
    hidden = {}
    for stage, (edges, labels) in datamodule._edges.items():
        if edges is not None:
            positive = edges if labels is None else edges[:, labels > 0]
            hidden[stage] = [tuple(pair) for pair in positive.t().tolist()]
    assert [len(hidden[stage]) for stage in ("val", "test")] == [50, 30]
    assert sorted(left) == sorted(back)
    assert sorted([*left, *(pair for pairs in hidden.values() for pair in pairs)]) == sorted(whole)
    assert torch.equal(
        edges_of(datamodule.data, ("user", "follows", "user")), edges_of(data, ("user", "follows", "user"))
    )


@pytest.mark.parametrize("given", [{}, {"test": 7}, {"train": 30, "test": 0}, {"train": 30, "val": 5, "test": 9}])
def test_splits_that_a_graph_lacks_are_drawn_among_the_labelled_nodes(given):
    from torch_geometric.data import Data

    y, first = torch.arange(50) % 3, 0
    y[40:] = -1
    data = Data(x=torch.rand(50, 2), y=y)
    for stage, count in given.items():
        data[f"{stage}_mask"] = (torch.arange(50) >= first) & (torch.arange(50) < first + count)
        first += count
    before = {stage: data[f"{stage}_mask"].clone() for stage, count in given.items() if count}
    note = fill_splits(data)
    masks = {stage: data[f"{stage}_mask"] for stage in ("train", "val", "test") if f"{stage}_mask" in data}
    assert bool(note) == (set(before) != {"train", "val", "test"})
    assert "test" in masks or given.get("test") == 0
    whole = torch.stack(list(masks.values())).sum(0)
    assert int(whole.max()) == 1
    assert int(whole.sum()) == (40 if "train" not in given else sum(given.values()))
    for stage, mask in before.items():
        if stage != "train":
            assert torch.equal(masks[stage], mask)
    assert not note or fill_splits(data) == ""
