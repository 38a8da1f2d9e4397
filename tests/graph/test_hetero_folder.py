"""Graphs with types on disk, and drawn."""

import numpy as np
import pytest
import torch

from lightning_gnn.graph.folder import load_folder
from lightning_gnn.graph.hetero_folder import load_hetero_folder, save_hetero_folder
from lightning_gnn.graph.synthetic_hetero import planted_papers, planted_ratings
from tests.sampling.test_typed import WRITES, typed_data


def same(one, other):
    assert set(one.node_types) == set(other.node_types)
    assert set(one.edge_types) == set(other.edge_types)
    for store in (*one.node_stores, *one.edge_stores):
        for name, value in store.items():
            found = other[store._key][name]
            assert torch.equal(value, found) if isinstance(value, torch.Tensor) else value == found, (store._key, name)


@pytest.mark.parametrize("mmap", [True, False])
def test_what_is_written_is_read(tmp_path, mmap):
    data = typed_data()
    data["paper"].feature_names = ["año", 'a "b"']
    data["author", "writes", "paper"].sources = []
    save_hetero_folder(data, tmp_path / "graph")
    same(data, load_hetero_folder(tmp_path / "graph", mmap))
    same(data, load_folder(tmp_path / "graph"))


def written(tmp_path):
    return save_hetero_folder(typed_data(), tmp_path / "graph")


def replace(path, array):
    np.save(path, array)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda root: (root / "edges/author__writes__paper/edge_index.npy").unlink(),
            FileNotFoundError,
            "edge_index.npy does not exist",
        ),
        (
            lambda root: [(root / f"nodes/paper/{name}.npy").unlink() for name in ("x", "num_nodes")],
            FileNotFoundError,
            "neither x.npy nor num_nodes.npy",
        ),
        (
            lambda root: replace(root / "nodes/paper/x.npy", np.zeros((3, 2), np.float32)),
            ValueError,
            "x.npy has 3 rows",
        ),
        (
            lambda root: replace(root / "edges/author__writes__paper/edge_index.npy", np.array([[10**6], [0]])),
            ValueError,
            r"edge_index\[0\]",
        ),
        (
            lambda root: replace(root / "nodes/paper/y.npy", np.zeros(3)),
            ValueError,
            r"y.npy has the shape \[3\], but 'paper' has",
        ),
        (
            lambda root: (root / "edges/author__writes__paper").rename(root / "edges/author__writes__book"),
            ValueError,
            "must be called SOURCE__RELATION__TARGET, with types of nodes that there are",
        ),
        (lambda root: replace(root / "nodes/paper/x.npy", np.zeros((3, 2), np.int64)), TypeError, "x.npy"),
        (lambda root: (root / "nodes/paper/names.json").write_text("[1]"), ValueError, "names.json holds no list of"),
        (lambda root: (root / "nodes/paper/names.json").write_text("["), ValueError, "names.json"),
    ],
)
def test_damage_is_named(tmp_path, change, error, message):
    root = written(tmp_path)
    change(root)
    with pytest.raises(error, match=message):
        load_hetero_folder(root)


def test_what_cannot_be_written_is_named(tmp_path):
    data = typed_data()
    root = written(tmp_path)
    with pytest.raises(FileExistsError, match="holds a graph already"):
        save_hetero_folder(data, root)
    data["paper"].name = ["a", 1]
    with pytest.raises(TypeError, match=r"data\['paper'\].name is no dense tensor"):
        save_hetero_folder(data, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    del data["paper"].name
    data["a__b"].x = torch.ones(2, 2)
    with pytest.raises(ValueError, match="'a__b' cannot be the name of a folder"):
        save_hetero_folder(data, tmp_path / "other")
    with pytest.raises(FileNotFoundError, match=r"holds no folder; expected nodes/TYPE/x\.npy"):
        load_hetero_folder(tmp_path)


def test_drawn_papers_have_the_shape_asked_for():
    sizes = {"num_papers": 300, "num_authors": 200, "num_topics": 40, "num_classes": 4, "num_features": 8}
    data = planted_papers(**sizes, citations=5, authors=2, topics=1)
    data.validate()
    assert data["paper"].x.shape == (300, 8)
    assert data["paper"].y.unique().tolist() == [0, 1, 2, 3]
    assert data["paper", "cites", "paper"].num_edges == 5 * 300
    assert data["author", "writes", "paper"].num_edges == data["paper", "rev_writes", "author"].num_edges == 600
    assert torch.equal(data["topic", "describes", "paper"].edge_index[1], torch.arange(300))
    masks = [data["paper"][f"{split}_mask"] for split in ("train", "val", "test")]
    assert [int(mask.sum()) for mask in masks] == [30, 15, 75]
    assert not (masks[0] & masks[1]).any()
    same(data, planted_papers(**sizes, citations=5, authors=2, topics=1))
    assert not torch.equal(data["paper"].x, planted_papers(**sizes, seed=1)["paper"].x)
    community = data["paper"].y
    source, target = data["paper", "cites", "paper"].edge_index
    assert (community[source] == community[target]).float().mean() > 0.5
    assert WRITES == ("author", "writes", "paper")


def test_drawn_ratings_have_the_shape_asked_for():
    data = planted_ratings(100, 50, 900, 4, 8)
    data.validate()
    kind = ("user", "rates", "item")
    assert data[kind].num_edges == 900
    assert torch.equal(data[kind].edge_index, data["item", "rev_rates", "user"].edge_index.flip(0))
    assert torch.equal(data[kind].time, torch.arange(900))
    same(data, planted_ratings(100, 50, 900, 4, 8))
    with pytest.raises(ValueError, match="num_items=3 must be at least num_classes=4"):
        planted_ratings(100, 3, 900, 4)
    with pytest.raises(ValueError, match="num_ratings=0; use at least 1"):
        planted_ratings(num_ratings=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_topics": 3}, "num_topics=3 must be at least num_classes=4"),
        ({"num_features": 0}, "num_classes=4 and num_features=0 must be at least 1"),
        ({"authors": -1}, "authors=-1; use at least 0"),
        ({"homophily": 2.0}, "homophily=2.0; use a probability from 0 to 1"),
        ({"feature_noise": -1.0}, "feature_noise=-1.0; use a finite number of at least 0"),
        ({"split": (1, 1, 1)}, "use three fractions of at least 0 that sum to at most 1"),
        ({"seed": -1}, "seed=-1; use a non-negative integer"),
    ],
)
def test_arguments_of_drawn_papers_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        planted_papers(**({"num_papers": 30, "num_authors": 20, "num_topics": 9, "num_classes": 4} | change))
