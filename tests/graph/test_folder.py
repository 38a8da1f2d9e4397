"""Folders of .npy files: round trips, sampling as in memory, memory use, and one clear message per broken file."""

import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.datasets import topology_files
from lightning_gnn.datasets.folder import load_folder, save_folder
from lightning_gnn.graph import CSCGraph
from lightning_gnn.runtime import manifest
from tests.refusals import refuses

N, F, E = 50, 4, 300


def graph(num_nodes=N, num_edges=E, seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = Data(
        x=torch.rand(num_nodes, F, generator=generator),
        y=torch.randint(-1, 5, (num_nodes,), generator=generator),
        edge_index=torch.randint(max(num_nodes, 1), (2, num_edges), generator=generator),
    )
    part = torch.randint(3, (num_nodes,), generator=generator)
    for i, split in enumerate(("train", "val", "test")):
        data[f"{split}_mask"] = part == i
    return data


def write(root, **arrays):
    root.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(root / f"{name}.npy", array)
    return root


def to_arrays(data):
    return {key: data[key].numpy() for key in data.keys()}  # noqa: SIM118 (iterating over Data gives pairs)


def assert_same(loaded, data):
    assert loaded.num_nodes == data.num_nodes
    assert set(loaded.keys()) - {"graph"} == set(data.keys()) - {"edge_index"}
    for key in loaded.keys():  # noqa: SIM118
        if key != "graph":
            assert loaded[key].dtype == data[key].dtype
            assert torch.equal(loaded[key], data[key]), key
    assert torch.equal(loaded.graph.to_edge_index(), data.edge_index)
    expected = CSCGraph.from_data(data)
    assert torch.equal(loaded.graph.indptr, expected.indptr)
    assert torch.equal(loaded.graph.indices, expected.indices)


@settings(max_examples=25, deadline=None)
@given(
    num_nodes=st.integers(1, 20),
    num_edges=st.integers(0, 60),
    seed=st.integers(0, 2**20),
    half=st.booleans(),
    as_ids=st.booleans(),
    as_edges=st.booleans(),
    options=st.tuples(st.booleans(), st.booleans()),
)
def test_round_trip_of_any_graph(tmp_path_factory, num_nodes, num_edges, seed, half, as_ids, as_edges, options):
    data = graph(num_nodes, num_edges, seed)
    if half:
        data.x = data.x.half()
    if as_ids:
        data.train_idx = data.train_mask.nonzero()[:, 0]
        del data["train_mask"]
    root = tmp_path_factory.mktemp("folder")
    if as_edges:
        write(root, **to_arrays(data))
    else:
        save_folder(data, root)
    assert_same(load_folder(root, *options), data)
    again = root / "again"
    assert_same(load_folder(save_folder(load_folder(root), again)), data)


@pytest.mark.parametrize("form", ["csc", "edge_index"])
def test_batches_equal_those_of_the_graph_in_memory(tmp_path, form):
    data = graph(200, 3000)
    root = tmp_path / "g"
    if form == "csc":
        save_folder(data, root)
    else:
        write(root, **to_arrays(data))
    options = {"num_neighbors": [3, 2], "batch_size": 16, "seed": 7}
    memory = NeighborDataModule(data, **options)
    disk = NeighborDataModule(load_folder(root), **options)
    for stage in ("train_dataloader", "val_dataloader", "test_dataloader"):
        ours, theirs = list(getattr(disk, stage)()), list(getattr(memory, stage)())
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs, strict=True):
            assert set(a.keys()) == set(b.keys())
            for key in ("n_id", "edge_index", "e_id", "input_id", "x", "y", "train_mask"):
                assert torch.equal(a[key], b[key]), key


def test_split_ids_are_the_seeds(tmp_path):
    data = graph()
    arrays = to_arrays(data)
    ids = {}
    for split, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        ids[split] = arrays.pop(f"{split}_mask").nonzero()[0]
        arrays[f"{name}_idx"] = ids[split].astype(np.int32)
    loaded = load_folder(write(tmp_path, **arrays))
    assert all(loaded[f"{split}_idx"].tolist() == ids[split].tolist() for split in ids)
    assert loaded.train_idx.dtype == torch.int64
    module = NeighborDataModule(loaded, num_neighbors=[2], batch_size=8)
    for split in ids:
        seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in getattr(module, f"{split}_dataloader")()])
        assert sorted(seeds.tolist()) == ids[split].tolist()


def test_float_labels_with_nan_and_no_labels_and_splits(tmp_path):
    data = graph()
    y = np.arange(N, dtype=np.float32)[:, None]
    y[3] = np.nan
    loaded = load_folder(write(tmp_path / "nan", **{**to_arrays(data), "y": y}))
    assert loaded.y.dtype == torch.int64
    assert loaded.y.tolist() == [-1 if v == 3 else v for v in range(N)]
    loaded = load_folder(write(tmp_path / "none", x=data.x.numpy(), edge_index=data.edge_index.numpy()))
    assert set(loaded.keys()) == {"x", "graph"}
    assert loaded.num_nodes == N


@pytest.fixture
def cache(cache, monkeypatch):
    """A separate cache that stores graphs of any size."""
    monkeypatch.setattr(topology_files, "MIN_CACHED_EDGES", 0)
    return cache


def test_sorted_edges_are_kept_until_the_edges_change(tmp_path, cache):
    data = graph()
    write(tmp_path, **to_arrays(data))
    files = sorted(path.name for path in tmp_path.iterdir())
    load_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    (entry,) = (cache / "topology").iterdir()
    assert sorted(path.name for path in (entry / "csc").iterdir()) == ["edge_ids.npy", "indices.npy", "indptr.npy"]
    before = (entry / "csc" / "indices.npy").stat().st_ino
    held = load_folder(tmp_path)
    assert (entry / "csc" / "indices.npy").stat().st_ino == before

    other = graph(seed=1)
    later = (tmp_path / "edge_index.npy").stat()
    write(tmp_path, edge_index=other.edge_index.numpy())
    os.utime(tmp_path / "edge_index.npy", ns=(later.st_atime_ns, later.st_mtime_ns))  # like cp -p, tar, rsync -t
    assert torch.equal(load_folder(tmp_path).graph.to_edge_index(), other.edge_index)
    assert torch.equal(held.graph.to_edge_index(), data.edge_index)

    indices = entry / "csc" / "indices.npy"
    indices.write_bytes(indices.read_bytes()[:-4])
    with pytest.warns(UserWarning, match=r"is damaged or out of date \(csc/indices\.npy has changed since"):
        assert torch.equal(load_folder(tmp_path).graph.to_edge_index(), other.edge_index)
    assert [path.name for path in (cache / "topology").iterdir()] == [entry.name]


def test_a_large_topology_is_checked_once(tmp_path, cache, monkeypatch, record_calls):
    monkeypatch.setattr(topology_files, "MIN_REMEMBERED_BYTES", 0)
    monkeypatch.setattr(manifest, "_SETTLED_NS", 0)
    passes = record_calls(CSCGraph, "from_csc")
    save_folder(graph(), tmp_path / "g")
    passes.clear()
    for _ in range(3):
        load_folder(tmp_path / "g")
    assert len(passes) == 1
    indices = tmp_path / "g" / "indices.npy"
    before = indices.stat()
    damaged = np.load(indices)
    damaged[5] = 77
    np.save(indices, damaged)
    os.utime(indices, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        refuses(ValueError, "indices holds node 77", load_folder, tmp_path / "g")


def make_csc_arrays():
    csc = CSCGraph.from_data(graph())
    assert csc.edge_ids is not None
    return {"indptr": csc.indptr.numpy(), "indices": csc.indices.numpy(), "edge_ids": csc.edge_ids.numpy()}


def add_edge(value):
    edge_index = graph().edge_index.numpy().copy()
    edge_index[1, 7] = value
    return edge_index


def replace(name, at=None, value=None, change=None):
    """Return sorted edges with one changed array, and without edge list."""
    arrays = make_csc_arrays()
    if change is None:
        arrays[name][at] = value
    else:
        arrays[name] = change(arrays[name])
    return {"edge_index": None, **arrays}


ONES = np.ones(N, np.int64)
WRONG = [
    ({"x": None}, FileNotFoundError, r"x\.npy does not exist; expected x\.npy, either"),
    ({"edge_index": None}, FileNotFoundError, r"indptr\.npy does not exist; expected indptr\.npy"),
    (make_csc_arrays(), ValueError, r"edge_index\.npy and indptr\.npy both give .* remove one"),
    ({"x": np.zeros((N, F))}, TypeError, r"x\.npy: .*float64; convert it with"),
    ({"edge_index": add_edge(N)}, ValueError, r"edge_index\.npy: edge_index\[1\] holds node 50, .* 50"),
    ({"y": ONES[1:]}, ValueError, r"y\.npy has the shape \[49\].* 50 rows"),
    ({"y": np.full(N, 0.5)}, ValueError, r"y\.npy holds 0\.5 for node 0"),
    ({"y": np.zeros(N, bool)}, TypeError, r"y\.npy must be int64"),
    ({"y": np.array(["a"] * N)}, ValueError, r"y\.npy holds texts \(<U1\), shape .* instead of numbers"),
    ({"y": ONES, "labels": "several"}, ValueError, r"is torch.int64 \[50\], but labels='several' needs \[N, L\], .*50"),
    ({"y": ONES[1:], "labels": "numbers"}, ValueError, r"\[49\], but labels='numbers' needs \[N\] or \[N, T\]"),
    ({"labels": "some"}, ValueError, "labels='some' is unknown; use classes, several or numbers"),
    ({"val_mask": np.zeros(N - 2, bool)}, ValueError, r"val_mask\.npy is a mask of 48 .* 50 rows"),
    ({"val_mask": np.zeros(N, np.uint8)}, TypeError, r"val_mask\.npy is torch\.uint8, but must be bool"),
    ({"val_mask": None, "val_idx": np.array([3, 99])}, ValueError, r"val_idx\.npy holds node 99"),
    ({"val_idx": np.array([3])}, ValueError, r"val_mask\.npy and val_idx\.npy both give the val split"),
    (replace("indptr", change=lambda a: np.append(a, a[-1])), ValueError, r"indptr\.npy has 52 entries.*needs 51"),
    (replace("indices", change=lambda a: a[:-1]), ValueError, "indptr must .* 299"),
    (replace("edge_ids", change=lambda a: a[:-1]), ValueError, "edge_ids must hold one"),
    (replace("indptr", 1, 10**6) | {"check": False}, ValueError, "indptr must not descend"),
    (replace("indices", 5, 77) | {"check": False}, ValueError, "indices holds node 77, .* 50 nodes"),
    (replace("edge_ids", 5, E) | {"check": False}, ValueError, "edge_ids holds edge 300"),
]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(("changes", "error", "said"), WRONG)
def test_wrong_files(tmp_path, changes, error, said, mmap):
    arrays = {**to_arrays(graph()), **changes}
    labels, finds = arrays.pop("labels", "classes"), arrays.pop("check", True)
    write(tmp_path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(error, match=said) as caught:
        load_folder(tmp_path, mmap, labels=labels)
    assert labels == "some" or str(tmp_path) in str(caught.value)
    if "indptr" in arrays:  # found by the check only, which can be disabled
        with pytest.raises(error) if finds else nullcontext():
            load_folder(tmp_path, mmap, check=False)


GRAPH = graph()
X, EDGES = GRAPH.x, GRAPH.edge_index


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (Data(x=X, edge_index=EDGES, edge_time=torch.rand(E)), ValueError, r"cannot store data\.edge_time"),
        (Data(edge_index=EDGES, num_nodes=N), ValueError, "data has no x"),
        (Data(x=X), ValueError, "no topology"),
        (Data(x=X, edge_index=EDGES, train_idx=torch.tensor([99])), ValueError, r"data\.train_idx holds node 99"),
        (Data(x=X[:7], graph=CSCGraph.from_data(GRAPH)), ValueError, r"data\.graph has 50 nodes, but data\.x has 7 r"),
    ],
)
def test_saving_refuses(tmp_path, data, error, said):
    refuses(error, said, save_folder, data, tmp_path / "h")
    assert not (tmp_path / "h").exists()
    save_folder(GRAPH, tmp_path / "g")
    refuses(FileExistsError, r"holds x\.npy already", save_folder, GRAPH, tmp_path / "g")


@pytest.mark.parametrize(
    ("labels", "y", "expected"),
    [
        ("several", np.ones((N, 3), np.int64), torch.int64),
        ("several", np.ones((N, 3), np.float32), torch.float32),
        ("numbers", np.ones(N, np.int64), torch.float32),
        ("numbers", np.ones((N, 2), np.float64), torch.float64),
    ],
)
def test_labels_of_other_kinds(tmp_path, labels, y, expected):
    write(tmp_path, **{**to_arrays(graph()), "y": y})
    loaded = load_folder(tmp_path, labels=labels)
    assert loaded.y.dtype == expected
    assert loaded.y.tolist() == y.tolist()
