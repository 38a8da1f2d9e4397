"""Files from elsewhere that are pickles: no code in them is run, unless the user says so."""

import ast
import gzip
import os
import pickle
import shutil
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.datasets import Planetoid

import lightning_gnn
from lightning_gnn.graph.datasets import flickr, ogbn, planetoid, reddit

N, KNOWN, TRAIN = 620, 580, 20
PICKLED = ("x", "tx", "allx", "y", "ty", "ally", "graph")
SHARED = Path(__file__).parents[3] / "shared" / "data" / "planetoid"


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"import os; os.mkdir({str(self.marker)!r})",)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code was run"


def parts() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = scipy.sparse.csr_matrix((rng.random((N, 8)) < 0.3).astype(np.float32))
    y = np.eye(3, dtype=np.int32)[rng.integers(3, size=N)]
    graph = defaultdict(list, {v: rng.integers(N, size=3).tolist() for v in range(N)})
    return {"x": x[:TRAIN], "tx": x[KNOWN:], "allx": x[:KNOWN], "graph": graph} | {
        "y": y[:TRAIN],
        "ty": y[KNOWN:],
        "ally": y[:KNOWN],
    }


def write_planetoid(root: Path, protocol: int = 2, **changes: Any) -> Path:
    raw = root / "Cora" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for suffix, part in {**parts(), **changes}.items():
        (raw / f"ind.cora.{suffix}").write_bytes(pickle.dumps(part, protocol))
    order = np.random.default_rng(1).permutation(np.arange(KNOWN, N))
    np.savetxt(raw / "ind.cora.test.index", order, fmt="%d")
    return root


def assert_same(a: Data, b: Data) -> None:
    assert set(a.keys()) == set(b.keys())
    for key in a.keys():  # noqa: SIM118 (iterating over Data gives pairs)
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_raw_planetoid_files_are_read_as_pyg_reads_them(tmp_path: Path, protocol: int) -> None:
    write_planetoid(tmp_path, protocol)
    ours = planetoid(tmp_path, "Cora", normalize_features=False)
    shutil.rmtree(tmp_path / "Cora" / "processed")
    assert_same(ours, Planetoid(str(tmp_path), "Cora")[0])


@pytest.mark.skipif(not (SHARED / "Cora" / "raw").exists(), reason=f"no Planetoid files in {SHARED}")
@pytest.mark.parametrize("name", ["Cora", "CiteSeer"])
def test_real_planetoid_files_are_read_as_pyg_reads_them(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "raw").symlink_to((SHARED / name / "raw").resolve())
    ours = planetoid(tmp_path, name, normalize_features=False)
    shutil.rmtree(tmp_path / name / "processed")
    theirs = Planetoid(str(tmp_path), name)[0]
    assert_same(ours, theirs)
    assert_same(planetoid(tmp_path, name, normalize_features=False), theirs)  # processed by PyG


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("suffix", PICKLED)
def test_a_raw_planetoid_file_runs_no_code(tmp_path: Path, marker: Path, suffix: str, trust: bool) -> None:
    write_planetoid(tmp_path, **{suffix: Evil(marker)})
    with pytest.raises(ValueError, match=rf"again: .*ind\.cora\.{suffix} \(.*asks for \w+\.exec, which no file of num"):
        planetoid(tmp_path, "Cora", trust=trust)
    assert not marker.exists()


@pytest.mark.parametrize(
    "wanted",
    [
        "builtins\neval",
        "builtins\ngetattr",
        "numpy\nload",
        "numpy.lib._npyio_impl\nload",
        "scipy.sparse\nload_npz",
        "numpy._core.multiarray\nfromstring",
    ],
)
def test_names_of_numpy_and_the_builtins_are_refused_too(tmp_path: Path, wanted: str) -> None:
    write_planetoid(tmp_path)
    (tmp_path / "Cora" / "raw" / "ind.cora.x").write_bytes(f"c{wanted}\n.".encode())
    with pytest.raises(ValueError, match=r"again: .*ind\.cora\.x \(.*asks for"):
        planetoid(tmp_path, "Cora")


def test_a_pickle_changes_no_class(tmp_path: Path) -> None:
    write_planetoid(tmp_path)
    # BUILD with (None, {"data": []}) sets attributes of what lies below: here of a class.
    for kind in (b"scipy.sparse._csr\ncsr_matrix", b"_codecs\nencode", b"builtins\nlist", b"collections\nOrderedDict"):
        content = b"c" + kind + b"\n(N}U\x04data]stb."
        (tmp_path / "Cora" / "raw" / "ind.cora.x").write_bytes(content)
        with pytest.raises(ValueError, match=r"again: .*ind\.cora\.x \((Type|Attribute)Error"):
            planetoid(tmp_path, "Cora")


def test_an_index_out_of_a_sparse_matrix_writes_nowhere(tmp_path: Path) -> None:
    x = parts()["x"]
    x.indices[3] = 2**30
    write_planetoid(tmp_path, x=x)
    with pytest.raises(ValueError, match=r"again: .*ind\.cora\.x \(.*indices"):
        planetoid(tmp_path, "Cora")


@pytest.mark.parametrize("suffix", [*PICKLED, "test.index"])
def test_a_damaged_raw_file_is_an_error_or_leaves_a_graph_that_is_valid(tmp_path: Path, suffix: str) -> None:
    write_planetoid(tmp_path)
    path = tmp_path / "Cora" / "raw" / f"ind.cora.{suffix}"
    whole, rng, refused = path.read_bytes(), np.random.default_rng(len(suffix)), []
    for case in range(24):
        damaged = bytearray(whole)
        for at in rng.integers(0, min(300, len(whole)) if case % 2 else len(whole), size=1 + case % 4):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged if case % 3 else damaged[: rng.integers(len(whole))])
        shutil.rmtree(tmp_path / "Cora" / "processed", ignore_errors=True)
        try:
            assert planetoid(tmp_path, "Cora").validate()
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) >= 8
    assert all(message.startswith(f"delete and load again: {path.parent}") for message in refused)


def load_planetoid(root: Path, **options: Any) -> Data:
    return planetoid(root, "Cora", **options)


def write_reddit(root: Path) -> None:
    (root / "raw").mkdir(parents=True)
    types = np.array([1, 1, 2, 3])
    np.savez(root / "raw" / "reddit_data.npz", feature=np.eye(4), label=np.arange(4) % 3, node_types=types)
    scipy.sparse.save_npz(root / "raw" / "reddit_graph.npz", scipy.sparse.coo_matrix(np.eye(4)))


def write_flickr(root: Path) -> None:
    (root / "raw").mkdir(parents=True)
    for name in ("adj_full.npz", "feats.npy", "class_map.json", "role.json"):
        (root / "raw" / name).touch()


@pytest.mark.parametrize("file", ["data.pt", "pre_transform.pt", "pre_filter.pt"])
@pytest.mark.parametrize(
    ("write", "load", "folder"),
    [(write_planetoid, load_planetoid, "Cora"), (write_reddit, reddit, "."), (write_flickr, flickr, ".")],
)
def test_a_processed_file_runs_no_code_unless_it_is_trusted(
    tmp_path: Path, marker: Path, write: Callable, load: Callable, folder: str, file: str
) -> None:
    write(tmp_path)
    data = Data(x=torch.eye(3), edge_index=torch.tensor([[0], [1]]), y=torch.arange(3))
    processed = tmp_path / folder / "processed"
    processed.mkdir()
    torch.save((data.to_dict(), None, Data), processed / "data.pt")
    safe = load(tmp_path)
    assert safe.num_nodes == 3
    evil = Evil(marker)
    torch.save(({**data.to_dict(), "more": evil}, None, Data) if file == "data.pt" else evil, processed / file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=rf"processed/{file} \(it holds more than .*exec.*trust=True") as caught:
            load(tmp_path)
    assert "data.trust=true" in str(caught.value)
    assert caught.value.__suppress_context__
    assert not marker.exists()
    assert not os.environ.keys() & {"TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(load(tmp_path, trust=True).x, safe.x)
    assert marker.is_dir()


def test_what_torch_blocks_stays_closed_without_advice_in_circles(tmp_path: Path, marker: Path) -> None:
    class Blocked(Evil):
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(self.marker),)

    write_planetoid(tmp_path)
    planetoid(tmp_path, "Cora")
    torch.save(Blocked(marker), tmp_path / "Cora" / "processed" / "data.pt")
    with pytest.raises(ValueError, match=r"data\.pt \(it holds more .*mkdir[^)]*\)$"):
        planetoid(tmp_path, "Cora", trust=True)
    assert not marker.exists()


def test_a_users_own_switch_does_not_open_foreign_files(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    write_planetoid(tmp_path)
    planetoid(tmp_path, "Cora")
    torch.save(Evil(marker), tmp_path / "Cora" / "processed" / "data.pt")
    with pytest.raises(ValueError, match="trust=True"):
        planetoid(tmp_path, "Cora")
    assert not marker.exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"


class FakeOGB(InMemoryDataset):
    """Loads its files the way ogb does; a version of it may ask for anything in them."""

    asks: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, name: str, root: str) -> None:
        super().__init__(str(Path(root) / name.replace("-", "_")))
        self.data, self.slices = torch.load(self.processed_paths[0], **self.asks)[:2]

    raw_file_names = ("edge.csv.gz", "node-feat.csv.gz")
    processed_file_names = "geometric_data_processed.pt"

    def download(self) -> None:
        for path in self.raw_paths:
            with gzip.open(path, "wt") as file:
                file.write("0,1\n")

    def process(self) -> None:
        data = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1], [1, 0]]), y=torch.arange(4)[:, None])
        torch.save(self.collate([data]), self.processed_paths[0])

    def get_idx_split(self) -> dict[str, torch.Tensor]:
        path = Path(self.root) / "split" / "time" / "split_dict.pt"
        if path.exists():
            return torch.load(path, **self.asks)
        return {name: torch.tensor([i]) for i, name in enumerate(("train", "valid", "test"))}


@pytest.mark.parametrize("asks", [{}, {"weights_only": False}], ids=["for the default", "for anything"])
@pytest.mark.parametrize("file", ["processed/geometric_data_processed.pt", "split/time/split_dict.pt"])
def test_ogbs_files_run_no_code_unless_they_are_trusted(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, asks: dict[str, Any], file: str
) -> None:
    module = ModuleType("ogb.nodeproppred")
    module.PygNodePropPredDataset = FakeOGB  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ogb", ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    monkeypatch.setattr(FakeOGB, "asks", asks)
    first = ogbn(tmp_path, "ogbn-arxiv")
    path = tmp_path / "ogbn_arxiv" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.startswith("split"):
        stored: Any = {name: torch.tensor([0]) for name in ("train", "valid", "test")} | {"more": Evil(marker)}
    else:
        stored = (*torch.load(path, weights_only=False), Evil(marker))
    torch.save(stored, path)
    with pytest.raises(ValueError, match=rf"{file} \(it holds more than tensors .*exec.*trust=True"):
        ogbn(tmp_path, "ogbn-arxiv")
    assert not marker.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(ogbn(tmp_path, "ogbn-arxiv", trust=True).x, first.x)
    assert marker.is_dir()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.parametrize("file", ["raw/ind.cora.tx", "processed/data.pt"])
def test_a_fifo_is_not_waited_for(tmp_path: Path, file: str) -> None:
    write_planetoid(tmp_path)
    planetoid(tmp_path, "Cora")
    path = tmp_path / "Cora" / file
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=rf"{path.name} is a FIFO, but must be a file"):
        planetoid(tmp_path, "Cora")


def test_nothing_of_ours_unpickles_anything() -> None:
    root = Path(lightning_gnn.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads"):
                safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
                found.add((path.name, safe))
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", path
    assert ("datasets.py", True) in found
    # What a notebook hands to ranks that it starts itself is no file that comes from elsewhere, nor is what the ranks
    # of one job say to each other, in the process group through which torch sends objects likewise.
    assert {name for name, safe in found if not safe} == {"notebook.py", "exchange.py"}
