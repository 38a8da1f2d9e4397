"""Published datasets: real Cora and CiteSeer, read-only roots, no network, damaged files, ogb's layouts."""

import gzip
import hashlib
import json
import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.datasets import OGB_MAG, Coauthor, Flickr, Planetoid, Reddit, Yelp
from torch_geometric.utils import to_undirected

from lightning_gnn.graph import datasets
from lightning_gnn.graph.datasets import coauthor, convert_papers100m, flickr, ogb_mag, ogbn, planetoid, reddit, yelp
from lightning_gnn.graph.folder import load_folder
from lightning_gnn.runtime.store import is_writable
from lightning_gnn.sampling.node_datamodule import NeighborDataModule
from tests.cli.command import lgnn, weights_of

SHARED = Path(__file__).parents[3] / "shared" / "data" / "planetoid"
needs_planetoid = pytest.mark.skipif(
    not (SHARED / "Cora" / "raw").exists(),
    reason=f"no Planetoid files in {SHARED}; they are not part of the repository",
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.delenv("LIGHTNING_GNN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "lightning-gnn"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(self: InMemoryDataset) -> None:
        raise URLError("Name or service not known")

    for kind in (Planetoid, Reddit, Flickr, Yelp, Coauthor):
        monkeypatch.setattr(kind, "download", download)


@pytest.fixture
def cora(tmp_path: Path) -> Path:
    return copied(tmp_path, "Cora")


def copied(root: Path, name: str) -> Path:
    (root / name / "raw").mkdir(parents=True)
    for path in (SHARED / name / "raw").iterdir():
        shutil.copyfile(path, root / name / "raw" / path.name)
    return root


def listing(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def assert_same(a: Data, b: Data) -> None:
    assert a.keys() == b.keys()
    for key in a.keys():  # noqa: SIM118 (iterating over Data gives pairs)
        assert torch.equal(a[key], b[key]), key


@needs_planetoid
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features", "classes", "train"),
    [("Cora", 2708, 10556, 1433, 7, 140), ("citeseer", 3327, 9104, 3703, 6, 120)],
)
def test_planetoid_sizes(tmp_path: Path, name: str, nodes: int, edges: int, features: int, classes: int, train: int):
    root = copied(tmp_path, {"citeseer": "CiteSeer"}.get(name, name))
    data = planetoid(root, name)
    assert data.x.shape == (nodes, features)
    assert data.x.dtype == torch.float32
    assert data.edge_index.shape == (2, edges)
    assert data.edge_index.dtype == torch.int64
    assert data.y.shape == (nodes,)
    assert data.y.dtype == torch.int64
    assert int(data.y.max()) + 1 == classes
    assert [int(data[f"{split}_mask"].sum()) for split in ("train", "val", "test")] == [train, 500, 1000]
    sums = data.x.sum(dim=1)
    torch.testing.assert_close(sums[sums > 0], torch.ones_like(sums[sums > 0]))


@needs_planetoid
def test_planetoid_equals_pyg(cora: Path) -> None:
    ours = planetoid(cora, "Cora", normalize_features=False)
    assert_same(ours, Planetoid(str(cora), "Cora")[0])
    assert set(ours.x.unique().tolist()) == {0.0, 1.0}
    assert int(planetoid(cora, "Cora", split="full").train_mask.sum()) == 1208
    assert int(planetoid(cora, "Cora", split="random").val_mask.sum()) == 500


@needs_planetoid
def test_a_read_only_root_is_read_where_it_is_processed_and_else_to_be_copied(cora: Path) -> None:
    first = planetoid(cora, "Cora")
    folders = [cora, cora / "Cora", *(cora / "Cora").iterdir()]
    for folder in folders:
        folder.chmod(0o555)
    before = listing(cora)
    assert_same(planetoid(cora, "Cora"), first)
    assert listing(cora) == before
    for folder in folders:
        folder.chmod(0o755)
    shutil.rmtree(cora / "Cora" / "processed")
    (cora / "Cora").chmod(0o555)
    before = listing(cora)
    with pytest.raises(FileNotFoundError) as caught:
        planetoid(cora, "Cora")
    assert str(caught.value) == (
        f"{cora}/Cora is read-only and lacks {cora}/Cora/processed/data.pt: copy it to a folder that can be written "
        "to, and give that as root (data.root)"
    )
    assert listing(cora) == before
    (cora / "Cora").chmod(0o755)
    assert_same(planetoid(shutil.copytree(cora, cora.with_name("copy")), "Cora"), first)


@needs_planetoid
def test_locks_lie_with_all_that_is_cached(cora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "chosen"))
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))
    planetoid(cora, "Cora")
    assert not elsewhere.exists()
    assert [path.name for path in (tmp_path / "chosen").iterdir()] == ["locks"]


@needs_planetoid
def test_the_shared_files_are_left_alone() -> None:
    if is_writable(SHARED / "Cora") or not (SHARED / "Cora" / "processed").is_dir():
        pytest.skip(f"{SHARED / 'Cora'} can be written to, or is not processed")
    before = sorted(SHARED.rglob("*"))
    assert planetoid(SHARED, "Cora").num_edges == 10556
    assert sorted(SHARED.rglob("*")) == before


@needs_planetoid
@pytest.mark.parametrize("suffix", ["x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"])
def test_truncated_planetoid_file_is_named(cora: Path, suffix: str) -> None:
    path = cora / "Cora" / "raw" / f"ind.cora.{suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"^delete and load again: {cora}/Cora/raw/ind\.cora\.{suffix} \("):
        planetoid(cora, "Cora")
    path.write_bytes(whole)
    assert planetoid(cora, "Cora").num_nodes == 2708


@needs_planetoid
def test_empty_planetoid_file_is_named(cora: Path) -> None:
    (cora / "Cora" / "raw" / "ind.cora.graph").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^delete and load again: .*/raw/ind\.cora\.graph \(EOFError"):
        planetoid(cora, "Cora")


@needs_planetoid
def test_damaged_processed_file_is_named(cora: Path) -> None:
    planetoid(cora, "Cora")
    path = cora / "Cora" / "processed" / "data.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"^delete and load again: .*processed/data\.pt \("):
        planetoid(cora, "Cora")
    path.unlink()
    assert planetoid(cora, "Cora").num_nodes == 2708


@needs_planetoid
@pytest.mark.usefixtures("no_network")
def test_one_missing_file_without_network(cora: Path) -> None:
    (cora / "Cora" / "raw" / "ind.cora.tx").unlink()
    with pytest.raises(RuntimeError, match=r"lacks ind\.cora\.tx, and the download failed .*: connect to the network"):
        planetoid(cora, "Cora")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("load", "missing"),
    [
        (planetoid, "ind.cora.x, ind.cora.tx"),
        (reddit, "reddit_data.npz, reddit_graph.npz"),
        (flickr, "adj_full.npz"),
        (yelp, "adj_full.npz"),
        (coauthor, "ms_academic_cs.npz"),
    ],
)
def test_no_network(tmp_path: Path, load: Any, missing: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        load(tmp_path / "nothing")
    message = str(caught.value)
    assert str(tmp_path / "nothing") in message
    assert missing in message
    assert "Name or service not known" in message
    assert "copy the files there" in message
    assert caught.value.__suppress_context__  # one message, no chain of tracebacks


def test_unknown_names_and_splits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name='Kora'.*Cora, CiteSeer, PubMed"):
        planetoid(tmp_path, "Kora")
    with pytest.raises(ValueError, match=r"split='geom'.*'public'"):
        planetoid(tmp_path, "Cora", split="geom")
    with pytest.raises(ValueError, match=r"name='ogbn-mag'.*ogbn-arxiv"):
        ogbn(tmp_path, "ogbn-mag")
    assert not list(tmp_path.iterdir())


def write_reddit(root: Path) -> None:
    (root / "raw").mkdir(parents=True)
    types = np.array([1, 1, 2, 3, 1, 3])
    np.savez(root / "raw" / "reddit_data.npz", feature=np.eye(6), label=np.arange(6) % 3, node_types=types)
    adj = scipy.sparse.coo_matrix((np.ones(4), ([0, 1, 2, 5], [1, 0, 3, 2])), (6, 6))
    scipy.sparse.save_npz(root / "raw" / "reddit_graph.npz", adj)


def test_reddit(tmp_path: Path) -> None:
    write_reddit(tmp_path)
    data = reddit(tmp_path)
    assert data.x.dtype == torch.float32
    assert data.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.edge_index.tolist() == [[0, 1, 2, 5], [1, 0, 3, 2]]
    assert data.test_mask.nonzero()[:, 0].tolist() == [3, 5]


def test_truncated_reddit_file_is_named(tmp_path: Path) -> None:
    write_reddit(tmp_path)
    path = tmp_path / "raw" / "reddit_graph.npz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=rf"^delete and load again: {tmp_path / 'raw'} \("):
        reddit(tmp_path)


def test_truncated_reddit_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(self: Reddit) -> None:
        Path(self.raw_dir, "reddit.zip").write_bytes(b"PK\x03\x04 cut off")
        zipfile.ZipFile(Path(self.raw_dir, "reddit.zip"))

    monkeypatch.setattr(Reddit, "download", download)
    with pytest.raises(ValueError, match=r"^delete and load again: .*/raw/reddit\.zip \("):
        reddit(tmp_path)


def write_flickr(root: Path) -> None:
    raw = root / "raw"
    raw.mkdir(parents=True)
    adj = scipy.sparse.csr_matrix((np.ones(3), ([0, 1, 2], [1, 0, 3])), (4, 4))
    np.savez(raw / "adj_full.npz", data=adj.data, indices=adj.indices, indptr=adj.indptr, shape=adj.shape)
    np.save(raw / "feats.npy", np.eye(4))
    (raw / "class_map.json").write_text(json.dumps({str(i): i % 2 for i in range(4)}))
    (raw / "role.json").write_text(json.dumps({"tr": [0, 1], "va": [2], "te": [3]}))


def test_flickr(tmp_path: Path) -> None:
    write_flickr(tmp_path)
    data = flickr(tmp_path)
    assert data.x.dtype == torch.float32
    assert data.y.tolist() == [0, 1, 0, 1]
    assert data.train_mask.tolist() == [True, True, False, False]


@pytest.mark.parametrize("name", ["adj_full.npz", "feats.npy", "class_map.json", "role.json"])
def test_truncated_flickr_file_is_named(tmp_path: Path, name: str) -> None:
    write_flickr(tmp_path)
    path = tmp_path / "raw" / name
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=rf"^delete and load again: {tmp_path / 'raw'} \("):
        flickr(tmp_path)


def test_yelp(tmp_path: Path) -> None:
    write_flickr(tmp_path)
    labels = [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]
    (tmp_path / "raw" / "class_map.json").write_text(json.dumps({str(i): row for i, row in enumerate(labels)}))
    data = yelp(tmp_path)
    assert data.x.dtype == data.y.dtype == torch.float32
    assert data.y.tolist() == labels
    assert data.edge_index.tolist() == [[0, 1, 2], [1, 0, 3]]
    assert [data[f"{split}_mask"].nonzero()[:, 0].tolist() for split in ("train", "val", "test")] == [[0, 1], [2], [3]]


@pytest.mark.parametrize("name", ["CS", "physics"])
def test_coauthor(tmp_path: Path, name: str) -> None:
    folder = tmp_path / {"CS": "CS", "physics": "Physics"}[name] / "raw"
    folder.mkdir(parents=True)
    ring = scipy.sparse.csr_matrix((np.ones(300), (np.arange(300), (np.arange(300) + 1) % 300)), (300, 300))
    words = scipy.sparse.eye(300, 7).tocsr()
    arrays = {f"{kind}_{part}": getattr(matrix, part) for kind, matrix in (("adj", ring), ("attr", words))
              for part in ("data", "indices", "indptr", "shape")}  # fmt: skip
    np.savez(folder / f"ms_academic_{name[:3].lower()}.npz", labels=np.arange(300) % 3, **arrays)
    state = torch.get_rng_state()
    data, again, other = coauthor(tmp_path, name), coauthor(tmp_path, name), coauthor(tmp_path, name, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert data.x.shape == (300, 7)
    assert data.num_edges == 600  # both directions
    assert data.y[data.train_mask].bincount().tolist() == [20, 20, 20]
    assert [int(data[f"{split}_mask"].sum()) for split in ("val", "test")] == [90, 150]
    assert (data.train_mask.int() + data.val_mask.int() + data.test_mask.int() == 1).all()
    assert torch.equal(data.train_mask, again.train_mask)
    assert not torch.equal(data.train_mask, other.train_mask)
    with pytest.raises(ValueError, match=r"name='maths' is no Coauthor dataset; use one of CS, Physics"):
        coauthor(tmp_path, "maths")


class FakeOGB(InMemoryDataset):
    """Loads its processed file the way ogb 1.3.6 does, which torch 2.6 and later refuse by default."""

    fails: BaseException | None = None

    def __init__(self, name: str, root: str) -> None:
        super().__init__(str(Path(root) / name.replace("-", "_")))
        self.data, self.slices = torch.load(self.processed_paths[0])

    @property
    def raw_file_names(self) -> list[str]:
        return ["edge.csv.gz", "node-feat.csv.gz"]

    @property
    def processed_file_names(self) -> str:
        return "geometric_data_processed.pt"

    def download(self) -> None:
        if self.fails is not None:
            raise self.fails
        for path in self.raw_paths:
            with gzip.open(path, "wt") as file:
                file.write("0,1\n" * 100)

    def process(self) -> None:
        for path in self.raw_paths:
            with gzip.open(path) as file:
                file.read()
        data = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2], [1, 0, 3]]), y=torch.arange(4)[:, None])
        data.node_year = torch.zeros(4, 1)
        data.num_nodes = 4
        torch.save(self.collate([data]), self.processed_paths[0])

    def get_idx_split(self) -> dict[str, torch.Tensor]:
        return {"train": torch.tensor([2, 0]), "valid": torch.tensor([1]), "test": torch.tensor([3])}


@pytest.fixture
def ogb(monkeypatch: pytest.MonkeyPatch) -> type[FakeOGB]:
    module = ModuleType("ogb.nodeproppred")
    module.PygNodePropPredDataset = FakeOGB  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ogb", ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    monkeypatch.setattr(FakeOGB, "fails", None)
    return FakeOGB


@pytest.mark.usefixtures("ogb")
def test_ogbn(tmp_path: Path) -> None:
    arxiv = ogbn(tmp_path)
    assert set(arxiv.keys()) == {"x", "y", "edge_index", "train_mask", "val_mask", "test_mask"}
    assert arxiv.y.tolist() == [0, 1, 2, 3]
    assert arxiv.edge_index.tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]
    assert arxiv.train_mask.tolist() == [True, False, True, False]
    assert arxiv.val_mask.tolist() == [False, True, False, False]
    directed = [[0, 1, 2], [1, 0, 3]]
    assert ogbn(tmp_path, undirected=False).edge_index.tolist() == directed
    assert ogbn(tmp_path, "ogbn-products").edge_index.tolist() == directed


def test_ogbn_without_network(tmp_path: Path, ogb: type[FakeOGB], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ogb, "fails", URLError("no route"))
    with pytest.raises(RuntimeError, match=r"ogbn_arxiv/raw lacks edge\.csv\.gz, node-feat\.csv\.gz, and .*no route"):
        ogbn(tmp_path)
    monkeypatch.setattr(ogb, "fails", EOFError("EOF when reading a line"))
    with pytest.raises(RuntimeError, match="ogb asks a question on the terminal"):
        ogbn(tmp_path)


@pytest.mark.usefixtures("ogb")
def test_damaged_ogbn_file_is_named(tmp_path: Path) -> None:
    ogbn(tmp_path)
    shutil.rmtree(tmp_path / "ogbn_arxiv" / "processed")
    path = tmp_path / "ogbn_arxiv" / "raw" / "node-feat.csv.gz"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=rf"^delete and load again: {tmp_path / 'ogbn_arxiv' / 'raw'} \("):
        ogbn(tmp_path)


MAG_FILES = (
    "num-node-dict.csv.gz",
    "node-feat/paper/node-feat.csv.gz",
    "node-label/paper/node-label.csv.gz",
    "relations/paper___cites___paper/edge.csv.gz",
    "split/time/paper/train.csv.gz",
)


class FakeMAG(OGB_MAG):  # type: ignore[misc]
    """PyG's class but for what it reads: no pandas, and a graph of seconds."""

    def download(self) -> None:
        raise URLError("no route")

    def process(self) -> None:
        for path in MAG_FILES:
            with gzip.open(Path(self.raw_dir) / path) as file:
                file.read()
        data, generator = HeteroData(), torch.Generator().manual_seed(0)
        sizes = {"paper": 60, "author": 30, "institution": 4, "field_of_study": 9}
        for name, count in sizes.items():
            data[name].num_nodes = count
            if name == "paper" or self.preprocess is not None:
                data[name].x = torch.randn(count, 8, generator=generator)
        data["paper"].y = (data["paper"].x[:, 0] > 0).long()
        data["paper"].year = torch.arange(60) % 10 + 2010
        for part, name in enumerate(("train", "val", "test")):
            data["paper"][f"{name}_mask"] = torch.arange(60) % 3 == part
        for kind in (("author", "affiliated_with", "institution"), ("author", "writes", "paper"),
                     ("paper", "cites", "paper"), ("paper", "has_topic", "field_of_study")):  # fmt: skip
            ends = [torch.randint(sizes[end], (150,), generator=generator) for end in (kind[0], kind[2])]
            data[kind].edge_index = torch.stack(ends)
        self.save([data], self.processed_paths[0])


@pytest.fixture
def mag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a root with all raw files."""
    monkeypatch.setattr(datasets, "OGB_MAG", FakeMAG)
    monkeypatch.setitem(sys.modules, "pandas", ModuleType("pandas"))
    for name in MAG_FILES:
        path = tmp_path / "mag" / "raw" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(b"1"))
    return tmp_path


def test_ogb_mag(mag: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ogb_mag(mag)
    assert data["paper"].x.shape == (60, 8)
    assert {name for name in data.node_types if "x" not in data[name]} == {"author", "institution", "field_of_study"}
    assert data["author"].num_nodes == 30
    assert ("paper", "rev_writes", "author") in data.edge_types
    assert ("paper", "rev_cites", "paper") not in data.edge_types
    assert data["paper", "cites", "paper"].is_undirected()
    directed = ogb_mag(mag, undirected=False)
    assert len(directed.edge_types) == 4
    written = directed["author", "writes", "paper"].edge_index
    assert torch.equal(data["paper", "rev_writes", "author"].edge_index, written.flip(0))
    # What is processed needs no pandas.
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert ogb_mag(mag).num_nodes == data.num_nodes


def test_ogb_mag_with_features_of_all_types(mag: Path) -> None:
    (mag / "mag" / "raw" / "mag_transe_emb.pt").write_bytes(b"")
    ogb_mag(mag)
    assert all("x" in store for store in ogb_mag(mag, preprocess="TransE").node_stores)
    assert sorted(path.name for path in (mag / "mag" / "processed").glob("data*.pt")) == ["data.pt", "data_transe.pt"]


def test_ogb_mag_mistakes(mag: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="preprocess='node2vec' is unknown; use 'metapath2vec', 'TransE' or None"):
        ogb_mag(mag, preprocess="node2vec")
    path = mag / "mag" / "raw" / MAG_FILES[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=rf"^delete and load again: {mag / 'mag' / 'raw'} \("):
        ogb_mag(mag)
    path.unlink()
    with pytest.raises(ValueError, match=rf"^delete and load again: {mag / 'mag' / 'raw'} \("):
        ogb_mag(mag)
    shutil.rmtree(mag / "mag" / "raw" / "node-feat")
    with pytest.raises(RuntimeError, match=r"lacks node-feat, and the download failed \(.*no route"):
        ogb_mag(mag)
    path.parent.mkdir(parents=True)
    path.write_bytes(whole)

    def process(self: FakeMAG) -> None:
        import pandas  # noqa: F401

    monkeypatch.setattr(FakeMAG, "process", process)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"FakeMAG needs another package \(.*\): pip install pandas"):
        ogb_mag(mag)


def test_ogb_mag_trains_from_the_command_line(mag: Path, tmp_path: Path) -> None:
    base = [
        "data=ogb_mag", f"data.root={mag}", "model=rgcn", "model.hidden_channels=8", "model.num_layers=2",
        "torch_threads=1", "task.embeddings=4", "datamodule.num_neighbors=[3,3]", "datamodule.batch_size=16",
        "datamodule.num_workers=0", "trainer.max_epochs=1", "trainer.enable_progress_bar=false",
    ]  # fmt: skip
    assert lgnn(tmp_path / "out", base=base) == 0
    weights = weights_of(tmp_path / "out/checkpoints/best.ckpt")
    assert weights["embeddings.tables.institution.weight"].shape == (4, 4)


def test_ogbn_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(ImportError, match=r'pip install "lightning-gnn\[ogb\]"'):
        ogbn(tmp_path)


def write_papers(
    root: Path, num_nodes: int = 300, num_edges: int = 2000, ids: int | None = None, **changes: Any
) -> tuple[Path, Data]:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "edge_index": rng.integers(num_nodes, size=(2, num_edges)),
        "node_feat": rng.random((num_nodes, 8), dtype=np.float32),
        "node_label": np.where(rng.random((num_nodes, 1)) < 0.7, np.nan, rng.integers(5, size=(num_nodes, 1))),
        "node_year": np.zeros((num_nodes, 1)),
        "num_nodes_list": [num_nodes],
        "num_edges_list": [num_edges],
        **changes,
    }
    label = arrays.pop("node_label").astype(np.float32)
    source = root / "ogbn_papers100M"
    (source / "raw").mkdir(parents=True)
    (source / "split" / "time").mkdir(parents=True)
    np.savez_compressed(source / "raw" / "data.npz", **arrays)
    np.savez_compressed(source / "raw" / "node-label.npz", node_label=label)
    chosen = np.split(rng.permutation(ids or num_nodes)[:60], [30, 40])
    nodes_of = dict(zip(("train", "valid", "test"), chosen, strict=True))
    for split, nodes in nodes_of.items():
        np.savetxt(source / "split" / "time" / f"{split}.csv.gz", nodes, fmt="%d")
    data = Data(
        x=torch.from_numpy(arrays["node_feat"]),
        y=torch.from_numpy(np.where(np.isnan(label), -1, label).astype(np.int64)[:, 0]),
        edge_index=torch.from_numpy(arrays["edge_index"]),
    )
    data.train_idx, data.val_idx, data.test_idx = (torch.from_numpy(nodes) for nodes in chosen)
    return source, data


def test_papers100m(tmp_path: Path) -> None:
    source, expected = write_papers(tmp_path)
    data = ogbn(tmp_path, "ogbn-papers100M")
    assert sorted(path.name for path in source.iterdir()) == ["npy", "raw", "split"]
    for key in ("x", "y", "train_idx", "val_idx", "test_idx"):
        assert data[key].dtype == expected[key].dtype
        assert torch.equal(data[key], expected[key]), key
    order = expected.edge_index[1].sort(stable=True).indices
    assert torch.equal(data.graph.to_edge_index(), expected.edge_index[:, order])

    options: dict[str, Any] = {"num_neighbors": [3, 2], "batch_size": 10, "seed": 1}
    theirs = NeighborDataModule(expected, **options).train_dataloader()
    for a, b in zip(NeighborDataModule(data, **options).train_dataloader(), theirs, strict=True):
        assert torch.equal(a.n_id, b.n_id)
        assert torch.equal(a.edge_index, b.edge_index)
        assert torch.equal(a.x, b.x)
        assert torch.equal(order[a.e_id], b.e_id)

    shutil.rmtree(source / "raw")  # what is converted needs no raw files
    assert ogbn(tmp_path, "ogbn-papers100M").num_nodes == expected.num_nodes


def test_papers100m_in_both_directions(tmp_path: Path) -> None:
    source, expected = write_papers(tmp_path)
    data = ogbn(tmp_path, "ogbn-papers100M", undirected=True)
    assert sorted(path.name for path in source.iterdir()) == ["npy_undirected", "raw", "split"]
    assert torch.equal(data.x, expected.x)
    assert torch.equal(data.y, expected.y)
    for split in ("train", "val", "test"):
        assert torch.equal(data[f"{split}_mask"].nonzero()[:, 0], expected[f"{split}_idx"].sort().values)
    edge_index = to_undirected(expected.edge_index, num_nodes=expected.num_nodes)
    assert torch.equal(data.graph.to_edge_index(), edge_index.flip(0))  # which is sorted by its first row


def test_papers100m_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"lacks raw/data\.npz, .*papers100M-bin\.zip .*unpack it"):
        ogbn(tmp_path, "ogbn-papers100M")
    source, _ = write_papers(tmp_path)
    (source / "split" / "time" / "valid.csv.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks split/time/valid\.csv\.gz;"):
        ogbn(tmp_path, "ogbn-papers100M")


@pytest.mark.parametrize("name", ["raw/data.npz", "raw/node-label.npz", "split/time/test.csv.gz"])
def test_papers100m_truncated_files(tmp_path: Path, name: str) -> None:
    source, _ = write_papers(tmp_path)
    path = source / name
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=rf"{name} is damaged .*download it again"):
        ogbn(tmp_path, "ogbn-papers100M")
    assert sorted(path.name for path in source.iterdir()) == ["raw", "split"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_index": np.array([[0, 300], [1, 2]])}, r"edge_index\[0\] holds node 300, but the graph has 300"),
        ({"node_feat": np.zeros((300, 2))}, r"float64"),
        ({"node_label": np.zeros((299, 1))}, r"node_label of .*\[299, 1\]"),
        ({"num_nodes": 20, "ids": 300}, r"idx\.npy holds node \d+, but the graph has 20"),
    ],
)
def test_papers100m_wrong_arrays(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source, _ = write_papers(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"ogbn_papers100M cannot be converted: .*{message}"):
        convert_papers100m(source, tmp_path / "npy")
    assert not list(tmp_path.glob("npy*"))


def test_papers100m_refuses_to_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = write_papers(tmp_path)
    convert_papers100m(source, tmp_path / "npy")
    assert load_folder(tmp_path / "npy").num_nodes == 300
    with pytest.raises(FileExistsError, match="remove it first"):
        convert_papers100m(source, tmp_path / "npy")
    monkeypatch.setattr(datasets, "is_writable", lambda folder: False)
    with pytest.raises(FileNotFoundError, match="read-only"):
        convert_papers100m(source, tmp_path / "other")
