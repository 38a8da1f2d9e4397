"""Folders of .npy files: round trips, sampling equal to memory, memory use, and one clear message per broken file."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData

from lightning_gnn.graph import CSCGraph, topology_files
from lightning_gnn.graph.folder import load_folder, save_folder
from lightning_gnn.runtime import manifest
from lightning_gnn.runtime.store import is_writable
from lightning_gnn.sampling.node_datamodule import NeighborDataModule

N, F, E = 50, 4, 300


def graph(num_nodes: int = N, num_edges: int = E, seed: int = 0) -> Data:
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


def write(root: Path, **arrays: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(root / f"{name}.npy", array)
    return root


def raw(data: Data) -> dict[str, np.ndarray]:
    return {key: data[key].numpy() for key in data.keys()}  # noqa: SIM118 (iterating over Data gives pairs)


def assert_same(loaded: Data, data: Data) -> None:
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


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("check", [True, False])
def test_round_trip(tmp_path: Path, mmap: bool, check: bool, recwarn: pytest.WarningsRecorder) -> None:
    data = graph()
    assert_same(load_folder(save_folder(data, tmp_path / "g"), mmap, check), data)
    assert not [w for w in recwarn if "num_nodes" in str(w.message)]


@settings(max_examples=25, deadline=None)
@given(
    num_nodes=st.integers(1, 20),
    num_edges=st.integers(0, 60),
    seed=st.integers(0, 2**20),
    half=st.booleans(),
    as_ids=st.booleans(),
    as_edges=st.booleans(),
)
def test_round_trip_of_any_graph(
    tmp_path_factory: pytest.TempPathFactory,
    num_nodes: int,
    num_edges: int,
    seed: int,
    half: bool,
    as_ids: bool,
    as_edges: bool,
) -> None:
    data = graph(num_nodes, num_edges, seed)
    if half:
        data.x = data.x.half()
    if as_ids:
        data.train_idx = data.train_mask.nonzero()[:, 0]
        del data["train_mask"]
    root = tmp_path_factory.mktemp("folder")
    if as_edges:
        write(root, **raw(data))
    else:
        save_folder(data, root)
    assert_same(load_folder(root), data)
    again = root / "again"
    assert_same(load_folder(save_folder(load_folder(root), again)), data)


@pytest.mark.parametrize("form", ["csc", "edge_index"])
def test_batches_equal_those_of_the_graph_in_memory(tmp_path: Path, form: str) -> None:
    data = graph(200, 3000)
    root = tmp_path / "g"
    if form == "csc":
        save_folder(data, root)
    else:
        write(root, **raw(data))
    options: dict[str, Any] = {"num_neighbors": [3, 2], "batch_size": 16, "seed": 7}
    memory = NeighborDataModule(data, **options)
    disk = NeighborDataModule(load_folder(root), **options)
    for stage in ("train_dataloader", "val_dataloader", "test_dataloader"):
        ours, theirs = list(getattr(disk, stage)()), list(getattr(memory, stage)())
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs, strict=True):
            assert set(a.keys()) == set(b.keys())
            for key in ("n_id", "edge_index", "e_id", "input_id", "x", "y", "train_mask"):
                assert torch.equal(a[key], b[key]), key


def test_split_ids_are_the_seeds(tmp_path: Path) -> None:
    data = graph()
    arrays = raw(data)
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


def test_float_labels_with_nan(tmp_path: Path) -> None:
    y = np.arange(N, dtype=np.float32)[:, None]
    y[3] = np.nan
    arrays = {**raw(graph()), "y": y}
    loaded = load_folder(write(tmp_path, **arrays))
    assert loaded.y.dtype == torch.int64
    assert loaded.y.tolist() == [-1 if v == 3 else v for v in range(N)]


def test_labels_and_splits_are_optional(tmp_path: Path) -> None:
    data = graph()
    loaded = load_folder(write(tmp_path, x=data.x.numpy(), edge_index=data.edge_index.numpy()))
    assert set(loaded.keys()) == {"x", "graph"}
    assert loaded.num_nodes == N


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which graphs of any size are kept."""
    root = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(root))
    monkeypatch.setattr(topology_files, "KEPT_FROM", 0)
    return root


def test_sorted_edges_are_kept_until_the_edges_change(tmp_path: Path, cache: Path) -> None:
    data = graph()
    write(tmp_path, **raw(data))
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
    os.utime(tmp_path / "edge_index.npy", ns=(later.st_atime_ns, later.st_mtime_ns))  # as cp -p, tar and rsync -t do
    assert torch.equal(load_folder(tmp_path).graph.to_edge_index(), other.edge_index)
    assert torch.equal(held.graph.to_edge_index(), data.edge_index)

    indices = entry / "csc" / "indices.npy"
    indices.write_bytes(indices.read_bytes()[:-4])
    with pytest.warns(UserWarning, match=r"is damaged or out of date \(csc/indices\.npy holds something else"):
        assert torch.equal(load_folder(tmp_path).graph.to_edge_index(), other.edge_index)
    assert [path.name for path in (cache / "topology").iterdir()] == [entry.name]


def test_a_copy_of_the_same_edges_keeps_what_was_sorted(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, **raw(graph()))
    load_folder(tmp_path)
    (entry,) = (cache / "topology").iterdir()
    before = entry.stat().st_ino
    edges = tmp_path / "edge_index.npy"
    content = edges.read_bytes()
    edges.unlink()
    edges.write_bytes(content)
    load_folder(tmp_path)
    assert entry.stat().st_ino == before


def test_small_graphs_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "cache"))
    load_folder(write(tmp_path / "g", **raw(graph())))
    assert not (tmp_path / "cache").exists()


def test_a_large_topology_is_checked_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology_files, "CHECKED_ONCE", 0)
    monkeypatch.setattr(manifest, "_SETTLED_NS", 0)
    passes = []
    check = CSCGraph.from_csc.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(CSCGraph, "from_csc", classmethod(lambda cls, *args: passes.append(1) or check(cls, *args)))
    save_folder(graph(), tmp_path / "g")
    passes.clear()
    for _ in range(3):
        load_folder(tmp_path / "g")
    assert passes == [1]
    indices = tmp_path / "g" / "indices.npy"
    before = indices.stat()
    damaged = np.load(indices)
    damaged[5] = 77
    np.save(indices, damaged)
    os.utime(indices, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(ValueError, match="indices holds node 77"):
            load_folder(tmp_path / "g")


def test_edges_in_csc_order_need_no_ids(tmp_path: Path) -> None:
    data = graph()
    data.edge_index = data.edge_index[:, data.edge_index[1].sort(stable=True).indices]
    loaded = load_folder(write(tmp_path, **raw(data)))
    assert loaded.graph.edge_ids is None
    assert_same(loaded, data)


def test_read_only_folder(tmp_path: Path) -> None:
    data = graph()
    write(tmp_path / "g", **raw(data))
    (tmp_path / "g").chmod(0o555)
    try:
        assert not is_writable(tmp_path / "g" / "missing" / "deeper")
        assert_same(load_folder(tmp_path / "g"), data)
        assert not (tmp_path / "g" / "csc").exists()
    finally:
        (tmp_path / "g").chmod(0o755)


def test_full_disk(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = graph()
    write(tmp_path, **raw(data))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.warns(UserWarning, match=r"edge_index\.npy, 50 nodes: cannot be kept .* disk has 1000 bytes left"):
        assert_same(load_folder(tmp_path), data)
    assert list((cache / "topology").iterdir()) == []


def test_writes_do_not_reach_the_files(tmp_path: Path) -> None:
    data = graph()
    save_folder(data, tmp_path / "g")
    loaded = load_folder(tmp_path / "g")
    loaded.x.zero_()
    loaded.train_mask.zero_()
    assert_same(load_folder(tmp_path / "g"), data)


def cut(root: Path, name: str) -> None:
    path = root / f"{name}.npy"
    path.write_bytes(path.read_bytes()[:-8])


def csc_arrays() -> dict[str, np.ndarray]:
    csc = CSCGraph.from_data(graph())
    assert csc.edge_ids is not None
    return {"indptr": csc.indptr.numpy(), "indices": csc.indices.numpy(), "edge_ids": csc.edge_ids.numpy()}


def bad_edge(value: int) -> np.ndarray:
    edge_index = graph().edge_index.numpy().copy()
    edge_index[1, 7] = value
    return edge_index


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no x": ({"x": None}, FileNotFoundError, r"x\.npy does not exist; expected x\.npy, either"),
    "no topology": ({"edge_index": None}, FileNotFoundError, r"indptr\.npy does not exist; expected indptr\.npy"),
    "half a topology": (
        {"edge_index": None, "indptr": np.zeros(N + 1, np.int64)},
        FileNotFoundError,
        r"indices\.npy does not exist",
    ),
    "two topologies": (csc_arrays(), ValueError, r"edge_index\.npy and indptr\.npy both give .* remove one"),
    "double x": ({"x": np.zeros((N, F))}, TypeError, r"x\.npy: .*float64; convert it with"),
    "flat x": ({"x": np.zeros(N, np.float32)}, ValueError, r"x\.npy: .*\[50\]"),
    "edge too high": (
        {"edge_index": bad_edge(N)},
        ValueError,
        r"edge_index\.npy: edge_index\[1\] holds node 50, .* 50",
    ),
    "edge negative": ({"edge_index": bad_edge(-1)}, ValueError, r"edge_index\.npy: edge_index\[1\] holds node -1"),
    "float edges": ({"edge_index": np.zeros((2, 3), np.float32)}, TypeError, r"edge_index\.npy: .*float32"),
    "turned edges": ({"edge_index": np.zeros((3, 2), np.int64)}, ValueError, r"edge_index\.npy: .*\[3, 2\]"),
    "short y": ({"y": np.zeros(N - 1, np.int64)}, ValueError, r"y\.npy has the shape \[49\].* 50 rows"),
    "wide y": ({"y": np.zeros((N, 3), np.int64)}, ValueError, r"y\.npy has the shape \[50, 3\]"),
    "real y": ({"y": np.full(N, 0.5)}, ValueError, r"y\.npy holds 0\.5 for node 0"),
    "infinite y": ({"y": np.full(N, np.inf)}, ValueError, r"y\.npy holds inf for node 0"),
    "bool y": ({"y": np.zeros(N, bool)}, TypeError, r"y\.npy must be int64"),
    "short mask": ({"val_mask": np.zeros(N - 2, bool)}, ValueError, r"val_mask\.npy is a mask of 48 .* 50 rows"),
    "byte mask": ({"val_mask": np.zeros(N, np.uint8)}, TypeError, r"val_mask\.npy is torch\.uint8, but must be bool"),
    "mask as ids": ({"val_mask": None, "val_idx": np.zeros(N, bool)}, TypeError, r"val_idx\.npy is torch\.bool"),
    "id too high": ({"val_mask": None, "val_idx": np.array([3, 99])}, ValueError, r"val_idx\.npy holds node 99"),
    "float ids": ({"val_mask": None, "val_idx": np.array([3.0])}, TypeError, r"val_idx\.npy .*float64"),
    "two splits": ({"val_idx": np.array([3])}, ValueError, r"val_mask\.npy and val_idx\.npy both give the val split"),
    "strings": ({"y": np.array(["a"] * N)}, ValueError, r"y\.npy is not a complete \.npy file"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("mmap", [True, False])
def test_wrong_files(tmp_path: Path, case: str, mmap: bool) -> None:
    changes, error, message = WRONG[case]
    arrays = {key: value for key, value in {**raw(graph()), **changes}.items() if value is not None}
    write(tmp_path, **arrays)
    with pytest.raises(error, match=message) as caught:
        load_folder(tmp_path, mmap)
    assert str(tmp_path) in str(caught.value)


def replaced(name: str, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    arrays = csc_arrays()
    arrays[name] = change(arrays[name].copy())
    return arrays


def with_value(array: np.ndarray, at: int, value: int) -> np.ndarray:
    array[at] = value
    return array


@pytest.mark.parametrize(
    ("arrays", "error", "message", "always"),
    [
        (replaced("indptr", lambda a: a[:-1]), ValueError, "indptr", True),
        (replaced("indptr", lambda a: np.append(a, a[-1])), ValueError, r"indptr\.npy has 52 entries.*needs 51", True),
        (replaced("indptr", lambda a: a.astype(np.float32)), TypeError, "indptr must be int32 or int64", True),
        (replaced("indptr", lambda a: with_value(a, 1, 10**6)), ValueError, "indptr must not descend", False),
        (replaced("indices", lambda a: with_value(a, 5, 77)), ValueError, "indices holds node 77, .* 50 nodes", False),
        (replaced("indices", lambda a: a[:-1]), ValueError, "indptr must .* 299", True),
        (replaced("edge_ids", lambda a: a[:-1]), ValueError, "edge_ids must hold one", True),
        (replaced("edge_ids", lambda a: with_value(a, 5, E)), ValueError, "edge_ids holds edge 300", False),
    ],
)
def test_wrong_topology(
    tmp_path: Path, arrays: dict[str, np.ndarray], error: type[Exception], message: str, always: bool
) -> None:
    write(tmp_path, x=graph().x.numpy(), **arrays)
    with pytest.raises(error, match=message) as caught:
        load_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)
    if always:
        with pytest.raises(error):
            load_folder(tmp_path, check=False)
    else:
        load_folder(tmp_path, check=False)


@pytest.mark.parametrize("name", ["x", "y", "edge_index", "train_mask"])
@pytest.mark.parametrize("mmap", [True, False])
def test_truncated_files(tmp_path: Path, name: str, mmap: bool) -> None:
    write(tmp_path, **raw(graph()))
    cut(tmp_path, name)
    with pytest.raises(ValueError, match=rf"{name}\.npy is not a complete .npy file.*write it again"):
        load_folder(tmp_path, mmap)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path / 'none'} is no folder; expected")):
        load_folder(tmp_path / "none")


def test_saving_refuses(tmp_path: Path) -> None:
    data = graph()
    save_folder(data, tmp_path / "g")
    with pytest.raises(FileExistsError, match=r"holds x\.npy already"):
        save_folder(data, tmp_path / "g")
    data.edge_attr = torch.rand(E)
    with pytest.raises(ValueError, match=r"no place for data\.edge_attr"):
        save_folder(data, tmp_path / "h")
    with pytest.raises(ValueError, match="data has no x"):
        save_folder(Data(edge_index=data.edge_index, num_nodes=N), tmp_path / "h")
    with pytest.raises(ValueError, match="no topology"):
        save_folder(Data(x=data.x), tmp_path / "h")
    with pytest.raises(TypeError, match="float64"):
        save_folder(Data(x=data.x.double(), edge_index=data.edge_index), tmp_path / "h")
    with pytest.raises(ValueError, match=r"data\.train_idx holds node 99"):
        save_folder(Data(x=data.x, edge_index=data.edge_index, train_idx=torch.tensor([99])), tmp_path / "h")
    with pytest.raises(ValueError, match=r"data\.graph has 50 nodes, but data\.x has 7 rows"):
        save_folder(Data(x=data.x[:7], graph=CSCGraph.from_data(data)), tmp_path / "h")
    with pytest.raises(TypeError, match="homogeneous"):
        save_folder(HeteroData(), tmp_path / "h")  # type: ignore[arg-type]
    assert not (tmp_path / "h").exists()


def resident() -> int:
    """Bytes of this process in memory, mapped files included."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_features_stay_on_disk(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_neighbors": [3, 3], "batch_size": 8, "seed": 0, "check_features": False}
    next(iter(NeighborDataModule(graph(), **options).train_dataloader()))  # compiles, which takes memory too

    num_nodes, num_features = 100_000, 512
    size = num_nodes * num_features * 4
    edge_index = torch.randint(num_nodes, (2, 5 * num_nodes), generator=torch.Generator().manual_seed(0))
    write(tmp_path, edge_index=edge_index.numpy(), train_idx=np.arange(1000))
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (num_nodes, num_features))  # a sparse file of zeros
    load_folder(tmp_path)

    before = resident()
    data = load_folder(tmp_path)
    batch = next(iter(NeighborDataModule(data, **options).train_dataloader()))
    assert batch.x.shape == (batch.num_nodes, num_features)
    assert batch.num_nodes > 50
    assert resident() - before < size // 5

    whole = load_folder(tmp_path, mmap=False)
    assert resident() - before > size * 0.9  # the measure sees what it should
    assert whole.num_nodes == num_nodes


@pytest.mark.parametrize(
    ("labels", "y", "expected"),
    [
        ("several", np.ones((N, 3), np.int64), torch.int64),
        ("several", np.ones((N, 3), np.float32), torch.float32),
        ("numbers", np.ones(N, np.int64), torch.float32),
        ("numbers", np.ones((N, 2), np.float64), torch.float64),
    ],
)
def test_labels_of_other_kinds(tmp_path: Path, labels: Any, y: Any, expected: torch.dtype) -> None:
    write(tmp_path, **{**raw(graph()), "y": y})
    loaded = load_folder(tmp_path, labels=labels)
    assert loaded.y.dtype == expected
    assert loaded.y.tolist() == y.tolist()


@pytest.mark.parametrize(
    ("labels", "y", "message"),
    [
        (
            "several",
            np.ones(N, np.int64),
            r"is torch.int64 \[50\], but labels='several' needs \[N, L\], and x has 50",
        ),
        ("numbers", np.ones(N - 1), r"is torch.float64 \[49\], but labels='numbers' needs \[N\] or \[N, T\]"),
        ("some", np.ones(N), "labels='some' is unknown; use classes, several or numbers"),
    ],
)
def test_labels_that_are_of_another_kind(tmp_path: Path, labels: Any, y: Any, message: str) -> None:
    write(tmp_path, **{**raw(graph()), "y": y})
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path, labels=labels)
