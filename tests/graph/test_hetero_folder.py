import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from torch_geometric.data import HeteroData

from lightning_gnn import CSCGraph, HeteroCSCGraph, LinkDataModule, NeighborDataModule, NeighborSampler
from lightning_gnn.datasets import topology_files
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.datasets.hetero_folder import load_hetero_folder, save_hetero_folder
from lightning_gnn.datasets.synthetic_hetero import planted_papers
from lightning_gnn.graph.csc import count_edges
from tests.graph.names import NAMES
from tests.refusals import refuses
from tests.sampling.test_typed import CITES, WRITES, typed_data


def assert_same(one, other):
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
    assert_same(data, load_hetero_folder(tmp_path / "graph", mmap))
    assert_same(data, load_folder(tmp_path / "graph"))


def write_folder(tmp_path):
    return save_hetero_folder(typed_data(), tmp_path / "graph")


PAPER, OF_WRITES = "nodes/paper", "edges/author__writes__paper"


def wrong(kind, name, value=None):
    """Return a function that replaces a file by an array or a text, or removes it."""

    def change(root):
        path = root / kind / name
        if value is None:
            path.unlink()
        elif isinstance(value, str):
            path.write_text(value)
        else:
            np.save(path, value)

    return change


def without_features(root):
    for name in ("x", "num_nodes"):
        (root / PAPER / f"{name}.npy").unlink()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (wrong(OF_WRITES, "edge_index.npy"), FileNotFoundError, "edge_index.npy does not exist"),
        (wrong(OF_WRITES, "edge_index.npy", np.array([[10**6], [0]])), ValueError, r"edge_index\[0\]"),
        (without_features, FileNotFoundError, "neither x.npy nor num_nodes.npy"),
        (wrong(PAPER, "x.npy", np.zeros((3, 2), np.float32)), ValueError, "x.npy has 3 rows"),
        (wrong(PAPER, "y.npy", np.zeros(3)), ValueError, r"y.npy has the shape \[3\], but 'paper' has"),
        (wrong(PAPER, "names.json", "[1]"), ValueError, "names.json does not hold a list of"),
        (
            lambda root: (root / OF_WRITES).rename(root / "edges/author__writes__book"),
            ValueError,
            "must be called SOURCE__RELATION__TARGET, with the node types",
        ),
    ],
)
def test_damage_is_named(tmp_path, change, error, said):
    root = write_folder(tmp_path)
    change(root)
    refuses(error, said, load_hetero_folder, root)


def convert_to_csc(data):
    """Return the graph with each edge type's topology as CSC, without edge lists."""
    for kind in data.edge_types:
        sizes = [data[end].num_nodes for end in (kind[2], kind[0])]
        data[kind].graph = CSCGraph.from_edge_index(data[kind].edge_index, *sizes)
        del data[kind].edge_index
    return data


@pytest.fixture
def cache(cache, monkeypatch):
    """A separate cache that stores any number of edges."""
    monkeypatch.setattr(topology_files, "MIN_CACHED_EDGES", 0)
    return cache


def find_files(tensor):
    """Return the names of the files that are mapped at a tensor's address."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = []
    for line in maps:
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end and "/" in line:
            found.append(Path(line[line.index("/") :]).name)
    return found


def load_batches(data, **options):
    settings = {"num_neighbors": [4, 3], "batch_size": 30, "seed": 5} | options
    seeds = ("paper", torch.arange(150))
    return list(NeighborDataModule(data, seeds, **settings).train_dataloader())


def assert_same_batches(one, other):
    for ours, theirs in zip(one, other, strict=True):
        assert_same(ours, theirs)
        assert_same(theirs, ours)


@pytest.mark.medium
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("how", ["written in CSC order", "kept sorted"])
def test_a_mapped_topology_gives_the_same_batches(tmp_path, cache, how):
    data = typed_data()
    if how == "kept sorted":
        save_hetero_folder(data, tmp_path / "graph")
    else:
        save_hetero_folder(convert_to_csc(typed_data()), tmp_path / "graph")
        assert not list((tmp_path / "graph").rglob("edge_index.npy"))
    for _ in range(2):
        loaded = load_folder(tmp_path / "graph")
        assert len(list(cache.glob("topology/*"))) == (5 if how == "kept sorted" else 0)
        graph = NeighborSampler(loaded, [4, 3]).graph
        assert isinstance(graph, HeteroCSCGraph)
        assert not any("edge_index" in store for store in loaded.edge_stores)
        for relation in graph.relations.values():
            # There is no copy between the file and the sampler.
            for name in ("indptr", "indices", "edge_ids"):
                tensor = getattr(relation, name)
                assert tensor is None or find_files(tensor) == [f"{name}.npy"]
        assert graph.relations[CITES].edge_ids is not None
        assert count_edges(loaded) == count_edges(data) == 4900
        assert_same_batches(load_batches(loaded), load_batches(data))
        assert_same_batches(load_batches(loaded, weight_attr=None, replace=True), load_batches(data, replace=True))
    module = LinkDataModule(loaded, WRITES, num_neighbors=[3], batch_size=64, seed=2)
    other = LinkDataModule(data, WRITES, num_neighbors=[3], batch_size=64, seed=2)
    assert_same_batches(module.train_dataloader(), other.train_dataloader())


ALL = r"author__writes__paper \(indptr.npy, indices.npy, edge_ids.npy\): "


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (wrong(OF_WRITES, "indptr.npy"), FileNotFoundError, "indptr.npy does not exist; expected"),
        (wrong(OF_WRITES, "edge_index.npy", np.zeros((2, 900), int)), ValueError, "both give the topology; remove one"),
        (wrong(OF_WRITES, "indices.npy", np.full(900, 120)), ValueError, f"{ALL}indices holds node 120, but the graph"),
        (wrong(OF_WRITES, "indices.npy", np.zeros(900)), TypeError, "indices must be int32 or int64"),
        (wrong(OF_WRITES, "indptr.npy", np.array([0, 900])), ValueError, "has 2 entries, but there are 120 .* 301"),
        (wrong(OF_WRITES, "edge_ids.npy", np.arange(899)), ValueError, f"{ALL}edge_ids must hold one id per edge, 900"),
        (wrong(OF_WRITES, "time.npy", np.zeros(899)), ValueError, r"time.npy has the shape \[899\], .* 900 edges"),
    ],
)
def test_damage_of_a_sorted_topology_is_named(tmp_path, change, error, said):
    root = save_hetero_folder(convert_to_csc(typed_data()), tmp_path / "graph")
    change(root)
    refuses(error, said, load_folder, root)


def with_unknown_type(data):
    data["reader", "reads", "paper"].edge_index = torch.zeros(2, 1, dtype=torch.int64)


def with_both_topologies(data):
    convert_to_csc(data)[CITES].edge_index = torch.zeros(2, 2500, dtype=torch.int64)


def with_weights(data):
    store = convert_to_csc(data)[CITES]
    store.graph = store.graph.with_weight(torch.ones(2500))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda data: data["paper"].update({"name": ["a", 1]}), TypeError, r"data\['paper'\].name is not a dense"),
        (lambda data: data["paper"].update({"a/b": torch.ones(300)}), ValueError, "'a/b', which is not a valid file"),
        (with_unknown_type, ValueError, r"data has edges of \('reader', 'reads', 'paper'\), but its node types"),
        (with_both_topologies, ValueError, "has both graph and edge_index; remove one of them"),
        (with_weights, ValueError, r"graph has times or weights, which are not saved"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path, change, error, said):
    data = typed_data()
    change(data)
    refuses(error, said, save_hetero_folder, data, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    refuses(FileExistsError, "holds a graph already", save_hetero_folder, typed_data(), write_folder(tmp_path))
    refuses(FileNotFoundError, r"holds no folder; expected nodes/TYPE/x\.npy", load_hetero_folder, tmp_path)


def draw_named_graph(nodes, edges):
    """Return a heterogeneous graph with the given type names; each type has other rows."""
    data = HeteroData()
    for place, name in enumerate(nodes):
        data[name].x = torch.full((3, 2), float(place))
    for place, kind in enumerate(edges):
        data[kind].edge_index = torch.tensor([[0, 1, 2], [place % 3, 2, 0]])
        data[kind].place = torch.full((3,), place)
        data[kind].names = [f"of {place}"]
    return data


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:There exist type names")
@given(NAMES)
@example((["a", "a_", "b"], [("a_", "r", "b"), ("a", "_r", "b")]))
@example((["a", "a__b", "b__c", "c"], [("a__b", "c", "c"), ("a", "b__c", "c")]))
@example((["A", "a"], [("A", "r", "a"), ("a", "r", "A"), ("a", "R", "A")]))
@example((["n" * 300, "m" * 90], [("m" * 90, "r" * 90, "m" * 90), ("n" * 300, "r", "m" * 90)]))
@example((["0", "1", "a/b", ".."], [("0", "", "1"), ("a/b", "..", "..")]))
@settings(deadline=None, max_examples=100)
def test_types_of_any_name_are_read_back(names):
    data = draw_named_graph(*names)
    with TemporaryDirectory() as root:
        save_hetero_folder(data, root)
        read = load_hetero_folder(root, mmap=False)
        folders = [str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_dir()]
        numbered = (Path(root) / "types.json").exists()
    assert_same(data, read)
    assert len({folder.casefold() for folder in folders}) == len(folders) == 2 + len(names[0]) + len(set(names[1]))
    if numbered:
        assert read.metadata() == data.metadata()


def write_old_folder(root, nodes, folders):
    """Write a graph in the layout of releases before ``types.json``."""
    for name in nodes:
        (root / "nodes" / name).mkdir(parents=True)
        np.save(root / "nodes" / name / "x.npy", np.zeros((3, 2), np.float32))
    for place, name in enumerate(folders):
        (root / "edges" / name).mkdir(parents=True)
        np.save(root / "edges" / name / "edge_index.npy", np.full((2, 4), place))
    return root


@pytest.mark.parametrize(
    ("nodes", "folders", "kinds"),
    [
        (["a", "b"], ["a__r__b", "a___r__b"], [("a", "_r", "b"), ("a", "r", "b")]),
        (["a%2Fb", "50%"], ["a%2Fb__%20__50%"], [("a%2Fb", "%20", "50%")]),
        (["a_", "b"], ["a___r__b", "b__rev___a_"], [("a_", "r", "b"), ("b", "rev_", "a_")]),
        (["a", "b"], ["a____b"], [("a", "", "b")]),
    ],
)
def test_folders_of_earlier_releases_are_read(tmp_path, nodes, folders, kinds):
    data = load_folder(write_old_folder(tmp_path, nodes, folders))
    assert sorted(data.node_types) == sorted(nodes)
    assert sorted(data.edge_types) == sorted(kinds)


def test_a_folder_that_may_hold_two_types_is_refused(tmp_path):
    write_old_folder(tmp_path, ["a", "a_", "b"], ["a___r__b"])
    said = r"may hold edges of \('a', '_r', 'b'\) or \('a_', 'r', 'b'\); number the folders"
    refuses(ValueError, said, load_folder, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong("", "types.json", "{"), "must hold"),
        (wrong("", "types.json", '{"nodes": ["a/b"], "edges": [["a/b", "r"]]}'), "must hold"),
        (wrong("", "types.json", '{"nodes": [1], "edges": [["a/b", "r", "b"]]}'), "not a string"),
        (wrong("", "types.json", '{"nodes": ["b"], "edges": [["c", "r", "b"]]}'), "not listed"),
        (lambda root: (root / "nodes/2").mkdir(), "lists 2 types under 'nodes', but .* holds the folders 0, 1, 2"),
        (lambda root: shutil.rmtree(root / "edges/1"), "lists 2 types under 'edges', but .* holds the folders 0"),
    ],
)
def test_types_that_do_not_fit_the_folders_are_refused(tmp_path, change, message):
    root = save_hetero_folder(draw_named_graph(["a/b", "b"], [("a/b", "r", "b"), ("b", "r", "b")]), tmp_path)
    change(root)
    refuses(ValueError, rf"types.json .*{message}", load_folder, root)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_topics": 3}, "num_topics=3; use at least 4"),
        ({"authors": -1}, "authors=-1; use at least 0"),
        ({"homophily": 2.0}, "=2.0; use a probability from 0 to 1"),
    ],
)
def test_arguments_of_drawn_papers_are_checked(change, said):
    sizes = {"num_papers": 30, "num_authors": 20, "num_topics": 9, "num_classes": 4}
    refuses(ValueError, said, planted_papers, **{**sizes, **change})
