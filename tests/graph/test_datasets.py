"""Published datasets: real Cora and CiteSeer, read-only roots, no network, damaged files, ogb's layouts."""

import gzip
import hashlib
import shutil
import sys
from pathlib import Path
from types import ModuleType
from urllib.error import URLError

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.datasets import OGB_MAG, Coauthor, Flickr, Planetoid, Reddit, Yelp

from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.datasets import registry as datasets
from lightning_gnn.datasets.registry import coauthor, flickr, mag240m, ogb_mag, ogbn, planetoid, reddit, yelp
from tests.graph.published import (
    SHARED,
    FakeOGB,
    assert_same,
    cora,
    install_ogb,
    write_cora,
    write_flickr,
    write_reddit,
)
from tests.refusals import refuses

needs_planetoid = pytest.mark.skipif(
    not (SHARED / "Cora" / "raw").exists(),
    reason=f"no Planetoid files in {SHARED}; they are not part of the repository",
)
AGAIN = "^delete and load again: "


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.delenv("LIGHTNING_GNN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def no_network(monkeypatch):
    def download(self):
        raise URLError("Name or service not known")

    for kind in (Planetoid, Reddit, Flickr, Yelp, Coauthor):
        monkeypatch.setattr(kind, "download", download)


def list_files(root):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}


@pytest.mark.medium
@needs_planetoid
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features", "classes", "train"),
    [("Cora", 2708, 10556, 1433, 7, 140), ("CiteSeer", 3327, 9104, 3703, 6, 120)],
)
def test_planetoid_sizes_and_content(tmp_path, name, nodes, edges, features, classes, train):
    shutil.copytree(SHARED / name / "raw", tmp_path / name / "raw", copy_function=shutil.copyfile)
    data = planetoid(tmp_path, name.lower())
    assert (data.x.shape, data.x.dtype) == ((nodes, features), torch.float32)
    assert (data.edge_index.shape, data.edge_index.dtype) == ((2, edges), torch.int64)
    assert (data.y.shape, data.y.dtype) == ((nodes,), torch.int64)
    assert int(data.y.max()) + 1 == classes
    assert [int(data[f"{split}_mask"].sum()) for split in ("train", "val", "test")] == [train, 500, 1000]
    sums = data.x.sum(dim=1)
    torch.testing.assert_close(sums[sums > 0], torch.ones_like(sums[sums > 0]))
    ours = planetoid(tmp_path, name, normalize_features=False)
    shutil.rmtree(tmp_path / name / "processed")
    assert_same(ours, Planetoid(str(tmp_path), name)[0])
    assert_same(planetoid(tmp_path, name, normalize_features=False), ours)  # processed by PyG
    assert set(ours.x.unique().tolist()) <= {0.0, 1.0}
    if name == "Cora":
        assert int(planetoid(tmp_path, name, split="full").train_mask.sum()) == 1208
        assert int(planetoid(tmp_path, name, split="random").val_mask.sum()) == 500


def test_a_read_only_root_is_read_where_it_is_processed_and_else_to_be_copied(tmp_path):
    root = tmp_path / "root"
    write_cora(root)
    first = cora(root)
    folders = [root, root / "Cora", *(root / "Cora").iterdir()]
    for folder in folders:
        folder.chmod(0o555)
    before = list_files(root)
    assert_same(cora(root), first)
    assert list_files(root) == before
    for folder in folders:
        folder.chmod(0o755)
    shutil.rmtree(root / "Cora" / "processed")
    (root / "Cora").chmod(0o555)
    before = list_files(root)
    said = rf"^{root}/Cora is read-only and lacks {root}/Cora/processed/data\.pt: copy it to .* as root \(data\.root\)$"
    refuses(FileNotFoundError, said, cora, root)
    assert list_files(root) == before
    (root / "Cora").chmod(0o755)
    assert_same(cora(shutil.copytree(root, tmp_path / "copy")), first)


def write_processed(root):
    write_cora(root)
    cora(root)


def write_ogbn(root):
    ogbn(root)
    shutil.rmtree(root / "ogbn_arxiv" / "processed")


DAMAGED = [
    *((write_cora, cora, f"Cora/raw/ind.cora.{suffix}", "Cora") for suffix in ("x", "ty", "graph", "test.index")),
    (write_processed, cora, "Cora/processed/data.pt", "Cora"),
    (write_reddit, reddit, "raw/reddit_graph.npz", ""),
    *((write_flickr, flickr, f"raw/{name}", "") for name in ("adj_full.npz", "class_map.json")),
    (write_ogbn, ogbn, "ogbn_arxiv/raw/node-feat.csv.gz", "ogbn_arxiv"),
]


@pytest.mark.usefixtures("ogb")
@pytest.mark.parametrize(("write", "load", "file", "folder"), DAMAGED)
def test_the_folder_of_a_truncated_file_is_named(tmp_path, write, load, file, folder):
    write(tmp_path)
    whole = (tmp_path / file).read_bytes()
    for content in (whole[: len(whole) // 2], *([b""] if load is cora else [])):
        (tmp_path / file).write_bytes(content)
        refuses(ValueError, rf"{AGAIN}{tmp_path / folder} \(", load, tmp_path)
    (tmp_path / file).write_bytes(whole)
    assert load(tmp_path).num_nodes > 3


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("load", "missing"),
    [
        (cora, "ind.cora.x, ind.cora.tx"),
        (reddit, "reddit_data.npz, reddit_graph.npz"),
        (flickr, "adj_full.npz"),
        (yelp, "adj_full.npz"),
        (coauthor, "ms_academic_cs.npz"),
    ],
)
def test_no_network(tmp_path, load, missing):
    said = rf"{tmp_path / 'nothing'}.*{missing}.*Name or service not known.*copy the files there"
    with pytest.raises(RuntimeError, match=said) as caught:
        load(tmp_path / "nothing")
    assert caught.value.__suppress_context__  # one message, no chained tracebacks
    if load is cora:
        write_cora(tmp_path)
        (tmp_path / "Cora" / "raw" / "ind.cora.tx").unlink()
        refuses(RuntimeError, r"lacks ind\.cora\.tx, and the download failed .*: connect to the net", load, tmp_path)


@pytest.mark.parametrize(
    ("said", "load", "options"),
    [
        (r"name='Kora'.*Cora, CiteSeer, PubMed", planetoid, {"name": "Kora"}),
        (r"split='geom'.*'public'", planetoid, {"name": "Cora", "split": "geom"}),
        (r"name='ogbn-mag'.*ogbn-arxiv", ogbn, {"name": "ogbn-mag"}),
        (r"name='maths' is not a Coauthor dataset; use one of CS, Physics", coauthor, {"name": "maths"}),
        ("preprocess='node2vec' is unknown; use 'metapath2vec', 'TransE' or None", ogb_mag, {"preprocess": "node2vec"}),
    ],
)
def test_unknown_names_and_splits(tmp_path, said, load, options):
    refuses(ValueError, said, load, tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_reddit(tmp_path):
    write_reddit(tmp_path)
    data = reddit(tmp_path)
    assert data.x.dtype == torch.float32
    assert data.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.edge_index.tolist() == [[0, 1, 2, 5], [1, 0, 3, 2]]
    assert data.test_mask.nonzero()[:, 0].tolist() == [3, 5]


SEVERAL = [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]


@pytest.mark.parametrize(
    ("load", "labels", "dtype"), [(flickr, [0, 1, 0, 1], torch.int64), (yelp, SEVERAL, torch.float32)]
)
def test_flickr_and_yelp(tmp_path, load, labels, dtype):
    write_flickr(tmp_path, labels)
    data = load(tmp_path)
    assert (data.x.dtype, data.y.dtype) == (torch.float32, dtype)
    assert data.y.tolist() == labels
    assert data.edge_index.tolist() == [[0, 1, 2], [1, 0, 3]]
    assert [data[f"{split}_mask"].nonzero()[:, 0].tolist() for split in ("train", "val", "test")] == [[0, 1], [2], [3]]


@pytest.mark.parametrize("name", ["CS", "physics"])
def test_coauthor(tmp_path, name):
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


@pytest.fixture
def ogb(monkeypatch):
    install_ogb(monkeypatch)


@pytest.mark.usefixtures("ogb")
def test_ogbn(tmp_path):
    arxiv = ogbn(tmp_path)
    assert set(arxiv.keys()) == {"x", "y", "edge_index", "train_mask", "val_mask", "test_mask"}
    assert arxiv.y.tolist() == [0, 1, 2, 3]
    assert arxiv.edge_index.tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]
    assert arxiv.train_mask.tolist() == [True, False, True, False]
    assert arxiv.val_mask.tolist() == [False, True, False, False]
    directed = [[0, 1, 2], [1, 0, 3]]
    assert ogbn(tmp_path, undirected=False).edge_index.tolist() == directed
    assert ogbn(tmp_path, "ogbn-products").edge_index.tolist() == directed


@pytest.mark.usefixtures("ogb")
@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (URLError("no route"), r"ogbn_arxiv/raw lacks edge\.csv\.gz, node-feat\.csv\.gz, and .*no route"),
        (EOFError("EOF when reading a line"), "ogb asks a question"),
    ],
)
def test_ogbn_without_network(tmp_path, fails, said, monkeypatch):
    monkeypatch.setattr(FakeOGB, "fails", fails)
    refuses(RuntimeError, said, ogbn, tmp_path)


def test_ogbn_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    refuses(ImportError, r'pip install "lightning-gnn\[ogb\]"', ogbn, tmp_path)


MAG_FILES = (
    "num-node-dict.csv.gz",
    "node-feat/paper/node-feat.csv.gz",
    "node-label/paper/node-label.csv.gz",
    "relations/paper___cites___paper/edge.csv.gz",
    "split/time/paper/train.csv.gz",
)


class FakeMAG(OGB_MAG):
    """PyG's class with other reading functions: without pandas, and with a small graph."""

    def download(self):
        raise URLError("no route")

    def process(self):
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
def mag(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "OGB_MAG", FakeMAG)
    monkeypatch.setitem(sys.modules, "pandas", ModuleType("pandas"))
    for name in MAG_FILES:
        path = tmp_path / "mag" / "raw" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(b"1"))
    return tmp_path


def test_ogb_mag(mag, monkeypatch):
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
    # Processed data needs no pandas.
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert ogb_mag(mag).num_nodes == data.num_nodes


def test_ogb_mag_mistakes(mag, monkeypatch):
    raw, path = mag / "mag" / "raw", mag / "mag" / "raw" / MAG_FILES[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    refuses(ValueError, rf"{AGAIN}{raw.parent} \(", ogb_mag, mag)
    path.unlink()
    refuses(ValueError, rf"{AGAIN}{raw.parent} \(", ogb_mag, mag)
    shutil.rmtree(raw / "node-feat")
    refuses(RuntimeError, r"lacks node-feat, and the download failed \(.*no route", ogb_mag, mag)
    path.parent.mkdir(parents=True)
    path.write_bytes(whole)

    def process(self):
        import pandas  # noqa: F401

    monkeypatch.setattr(FakeMAG, "process", process)
    monkeypatch.setitem(sys.modules, "pandas", None)
    refuses(ImportError, r"FakeMAG needs another package \(.*\): pip install pandas", ogb_mag, mag)


def write_papers(root, num_nodes=300, num_edges=2000, ids=None, **changes):
    rng = np.random.default_rng(0)
    arrays = {
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


def test_papers100m(tmp_path):
    source, expected = write_papers(tmp_path)
    data = ogbn(tmp_path, "ogbn-papers100M")
    assert sorted(path.name for path in source.iterdir()) == ["npy", "raw", "split"]
    for key in ("x", "y", "train_idx", "val_idx", "test_idx"):
        assert data[key].dtype == expected[key].dtype
        assert torch.equal(data[key], expected[key]), key
    order = expected.edge_index[1].sort(stable=True).indices
    assert torch.equal(data.graph.to_edge_index(), expected.edge_index[:, order])

    options = {"num_neighbors": [3, 2], "batch_size": 10, "seed": 1}
    theirs = NeighborDataModule(expected, **options).train_dataloader()
    for a, b in zip(NeighborDataModule(data, **options).train_dataloader(), theirs, strict=True):
        assert torch.equal(a.n_id, b.n_id)
        assert torch.equal(a.edge_index, b.edge_index)
        assert torch.equal(a.x, b.x)
        assert torch.equal(order[a.e_id], b.e_id)

    shutil.rmtree(source / "raw")  # converted data needs no raw files
    assert ogbn(tmp_path, "ogbn-papers100M").num_nodes == expected.num_nodes


def test_papers100m_missing_and_truncated_files(tmp_path):
    said = r"lacks raw/data\.npz, .*papers100M-bin\.zip .*unpack it"
    refuses(FileNotFoundError, said, ogbn, tmp_path, "ogbn-papers100M")
    source, _ = write_papers(tmp_path)
    for name in ("raw/data.npz", "raw/node-label.npz", "split/time/test.csv.gz"):
        whole = (source / name).read_bytes()
        (source / name).write_bytes(whole[:-40])
        refuses(ValueError, rf"{name} is damaged .*download it again", ogbn, tmp_path, "ogbn-papers100M")
        (source / name).write_bytes(whole)
    assert not (source / "npy").exists()
    (source / "split" / "time" / "valid.csv.gz").unlink()
    refuses(FileNotFoundError, r"lacks split/time/valid\.csv\.gz;", ogbn, tmp_path, "ogbn-papers100M")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"edge_index": np.array([[0, 300], [1, 2]])}, ValueError, "the source of row 1, 300, is not a node"),
        ({"node_feat": np.zeros((300, 2))}, TypeError, r"x\.npy: .*float64"),
        ({"node_label": np.zeros((299, 1))}, ValueError, r"node_label of .*\[299, 1\]"),
        ({"num_nodes": 20, "ids": 300}, ValueError, r"idx\.npy holds node \d+, but the graph has 20"),
    ],
)
def test_papers100m_wrong_arrays(tmp_path, changes, error, message):
    source, _ = write_papers(tmp_path, **changes)
    refuses(error, message, ogbn, tmp_path, "ogbn-papers100M")
    assert not (source / "npy").exists()


def write_mag240m(root, num_nodes=40, num_edges=300):
    """Write the files of OGB's MAG240M that belong to papers; return their graph in memory."""
    rng = np.random.default_rng(0)
    source = root / "mag240m_kddcup2021"
    papers, citations = source / "processed" / "paper", source / "processed" / "paper___cites___paper"
    papers.mkdir(parents=True)
    citations.mkdir()
    x = rng.random((num_nodes, 8)).astype(np.float16)
    edges, chosen = rng.integers(num_nodes, size=(2, num_edges)), rng.permutation(num_nodes)
    y = np.full(num_nodes, np.nan, np.float32)
    y[chosen[:30]] = rng.integers(5, size=30)
    np.save(papers / "node_feat.npy", x)
    np.save(papers / "node_label.npy", y)
    np.save(citations / "edge_index.npy", edges)
    split = {"train": chosen[:20], "valid": chosen[20:30], "test-dev": chosen[30:]}
    torch.save(split, source / "split_dict.pt")
    labels = torch.from_numpy(np.nan_to_num(y, nan=-1)).long()
    data = Data(x=torch.from_numpy(x), y=labels, edge_index=torch.from_numpy(edges))
    data.train_idx, data.val_idx = (torch.from_numpy(split[name]) for name in ("train", "valid"))
    return source, data


def test_mag240m_stays_in_its_files(tmp_path):
    source, expected = write_mag240m(tmp_path)
    before = sorted(source.rglob("*"))
    data = mag240m(tmp_path)
    assert "test_idx" not in data
    options = {"num_neighbors": [3, 2], "batch_size": 4, "seed": 1}
    theirs = NeighborDataModule(expected, **options)
    ours = NeighborDataModule(data, **options)
    for loader in ("train_dataloader", "val_dataloader"):
        for a, b in zip(getattr(ours, loader)(), getattr(theirs, loader)(), strict=True):
            assert all(torch.equal(a[key], b[key]) for key in ("n_id", "edge_index", "x", "y"))
    assert sorted(source.rglob("*")) == before
    with (source / "processed" / "paper" / "node_feat.npy").open("r+b") as file:  # mapped, not read
        file.seek(-2, 2)
        file.write(np.float16(7).tobytes())
    assert float(data.x[-1, -1]) == 7


def test_mag240m_missing_and_damaged_files(tmp_path):
    refuses(FileNotFoundError, r"lacks processed/paper/node_feat\.npy, .*split_dict\.pt.*200 GB", mag240m, tmp_path)
    source, _ = write_mag240m(tmp_path)
    few, many = np.arange(3), np.arange(41)
    for name, split in {"train": {"valid": few}, "40": {"train": many, "valid": few}}.items():
        torch.save(split, source / "split_dict.pt")
        refuses(ValueError, rf"split_dict\.pt is damaged .*{name}.*download it again", mag240m, tmp_path)
    np.save(source / "processed" / "paper" / "node_label.npy", np.zeros(39))
    refuses(ValueError, r"node_label\.npy has the shape \[39\], but x has 40 rows", mag240m, tmp_path)
