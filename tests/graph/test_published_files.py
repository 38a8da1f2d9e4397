"""Graphs in published formats are converted to the same folder as equal edges in a table."""

import gzip

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.utils import to_undirected

from lightning_gnn.cli.commands import convert as convert_command
from lightning_gnn.datasets import convert_tables
from lightning_gnn.datasets import published_files as module
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.graph import CSCGraph
from tests.refusals import refuses

pytest.importorskip("duckdb", reason="lgnn convert needs it")

EDGES = [(0, 2), (2, 0), (2, 1), (2, 2), (4, 0)]
NODES = 6  # the last one is isolated


def encode_webgraph(edges, num_nodes):
    rows = [" ".join(str(t) for s, t in edges if s == row) for row in range(num_nodes)]
    return "\n".join([str(num_nodes), *rows, ""]).encode()


def write(folder, form, edges, num_nodes):
    """Write ascending edges in a published format; return its path."""
    source, target = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    matrix = scipy.sparse.csr_matrix((np.ones(len(edges)), (source, target)), (num_nodes, num_nodes))
    if form == "folder":
        np.save(folder / "indptr.npy", matrix.indptr)
        np.save(folder / "indices.npy", matrix.indices)
        return folder
    if form == "mtx":
        scipy.io.mmwrite(folder / "graph.mtx", matrix)
        return folder / "graph.mtx"
    if form in ("csr", "csc", "coo"):
        scipy.sparse.save_npz(folder / "graph.npz", matrix.asformat(form))
        return folder / "graph.npz"
    if form == "webgraph":
        (folder / "graph.graph-txt").write_bytes(encode_webgraph(edges, num_nodes))
        return folder / "graph.graph-txt"
    (folder / "graph.graph-txt.gz").write_bytes(gzip.compress(encode_webgraph(edges, num_nodes)))
    return folder / "graph.graph-txt.gz"


def assert_same_topology(graph, edges, num_nodes):
    expected = CSCGraph.from_edge_index(torch.tensor(edges).reshape(-1, 2).t(), num_nodes)
    assert torch.equal(graph.indptr, expected.indptr)
    for target in range(num_nodes):
        ends = slice(*expected.indptr[target : target + 2].tolist())
        assert graph.indices[ends].sort().values.tolist() == expected.indices[ends].sort().values.tolist()


@settings(max_examples=10)
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), min_size=1))
    ),
    st.sampled_from(["folder", "csr", "csc", "coo", "mtx", "webgraph", "webgraph.gz"]),
    st.integers(1, 4),
)
def test_matrices_and_webgraph(tmp_path_factory, drawn, form, block):
    num_nodes, edges = drawn
    folder = tmp_path_factory.mktemp("graph")
    source = write(folder, form, sorted(edges), num_nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_EDGES_PER_BLOCK", block)
        patch.setattr(module, "_BYTES_PER_READ", 4 * block)
        counts = convert_tables(source, folder / "out", random_features=2)
    assert counts == {"node": num_nodes, "node__to__node": len(edges)}
    found = load_folder(folder / "out")
    assert_same_topology(found.graph, sorted(edges), num_nodes)
    assert found.x.shape == (num_nodes, 2)
    assert not (folder / "out.partial").exists()
    assert not (folder / "out/id.npy").exists()  # the node numbers are the names


@pytest.mark.parametrize("form", ["folder", "webgraph.gz"])
def test_both_directions_and_drawn_labels(tmp_path, form):
    source = write(tmp_path, form, EDGES, NODES)
    arguments = [f"source={source}", f"out={tmp_path / 'out'}", "undirected=true", "random_features=3"]
    assert convert_command.main([*arguments, "random_labels=4"]) == 0
    found = load_folder(tmp_path / "out")
    assert_same_topology(found.graph, to_undirected(torch.tensor(EDGES).t(), num_nodes=NODES).t().tolist(), NODES)
    assert found.y.shape == (NODES,)
    assert 0 <= int(found.y.min()) <= int(found.y.max()) < 4
    assert not (found.train_mask & found.val_mask | found.train_mask & found.test_mask).any()


def write_ogb(root, arrays=False):
    """Write a folder in OGB's layout; return features, labels and each node's split."""
    raw, split = root / "raw", root / "split" / "time"
    raw.mkdir(parents=True)
    split.mkdir(parents=True)
    x = np.arange(2 * NODES, dtype=np.float32).reshape(NODES, 2) / 4
    y = np.array([3, 0, 1, 0, 2, 1])
    parts = {"train": [0, 3], "valid": [5], "test": [1, 4]}

    def table(path, rows):
        lines = [",".join(map(str, row)) for row in rows]
        path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))

    for name, ids in parts.items():
        table(split / f"{name}.csv.gz", [[i] for i in ids])
    if arrays:
        np.savez(raw / "data.npz", edge_index=np.array(EDGES).T, node_feat=x, num_nodes_list=np.array([NODES]))
        labels = y.astype(np.float32)
        labels[2] = np.nan
        np.savez(raw / "node-label.npz", node_label=labels[:, None])
    else:
        table(raw / "edge.csv.gz", EDGES)
        table(raw / "node-feat.csv.gz", x)
        table(raw / "node-label.csv.gz", y[:, None])
        table(raw / "num-node-list.csv.gz", [[NODES]])
    return x, y, parts


@pytest.mark.medium
@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("undirected", [False, True])
def test_a_folder_of_ogb(tmp_path, arrays, undirected):
    x, y, parts = write_ogb(tmp_path / "ogbn", arrays)
    convert_tables(tmp_path / "ogbn", tmp_path / "out", undirected=undirected)
    found = load_folder(tmp_path / "out")
    edge_index = torch.tensor(EDGES).t()
    edge_index = to_undirected(edge_index, num_nodes=NODES) if undirected else edge_index
    assert_same_topology(found.graph, edge_index.t().tolist(), NODES)
    assert torch.equal(found.x, torch.from_numpy(x))
    y[2] = -1 if arrays else y[2]
    assert found.y.tolist() == y.tolist()
    for ours, theirs in (("train", "train"), ("val", "valid"), ("test", "test")):
        ids = found[f"{ours}_idx"] if arrays else found[f"{ours}_mask"].nonzero()[:, 0]
        assert ids.tolist() == parts[theirs]


def test_an_interrupted_reading_begins_anew(tmp_path, monkeypatch):
    source = write(tmp_path, "webgraph", EDGES, NODES)
    monkeypatch.setattr(module, "_BYTES_PER_READ", 2)
    real, calls = np.repeat, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(module.np, "repeat", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_tables(source, tmp_path / "out", random_features=1)
    messages = []
    convert_tables(source, tmp_path / "out", random_features=1, say=messages.append)
    assert messages[0] == "resuming an interrupted conversion"
    assert_same_topology(load_folder(tmp_path / "out").graph, EDGES, NODES)


def truncate(folder, form, size):
    path = write(folder, form, EDGES, NODES)
    path.write_bytes(path.read_bytes()[:-size])
    return path


def save(folder, content, name="graph.graph-txt"):
    (folder / name).write_bytes(content)
    return folder / name


def save_matrix(folder, kind):
    scipy.sparse.save_npz(folder / f"{kind.format}.npz", kind)
    return folder / f"{kind.format}.npz"


def other(folder):
    np.savez(folder / "other.npz", a=np.ones(3))
    return folder / "other.npz"


def arrays(folder, indptr):
    np.save(folder / "indptr.npy", np.array(indptr))
    np.save(folder / "indices.npy", np.arange(5) % 3)
    return folder


MARKET = b"%%MatrixMarket matrix coordinate real general\n3 3 2\n1 2 1.0\n"
DAMAGES = [
    (lambda folder: save(folder, b"six\n\n"), "begins with b'six', not with the number of nodes"),
    (lambda folder: save(folder, b"3\n1 2\n0\n"), "has lines for 2 nodes, but declares 3; it is truncated or damaged"),
    (lambda folder: save(folder, b"2\n1\n0 x\n"), "line 3 holds words that are not numbers"),
    (lambda folder: save(folder, b"2\n1\n0 2\n"), "the target of row 2, 2, is not a node"),
    (lambda folder: truncate(folder, "webgraph.gz", 9), r"graph\.graph-txt\.gz is damaged"),
    (lambda folder: truncate(folder, "csr", 30), r"graph\.npz is damaged"),
    (other, r"other\.npz is not a SciPy sparse matrix: it holds a"),
    (lambda folder: save_matrix(folder, scipy.sparse.dia_matrix(np.eye(3))), r"dia\.npz is .* in dia format; save it"),
    (lambda folder: save_matrix(folder, scipy.sparse.coo_matrix((3, 3))), r"coo\.npz holds no edges"),
    (lambda folder: save(folder, MARKET, "cut.mtx"), r"cut\.mtx is not a Matrix Market file: "),
    (lambda folder: arrays(folder, [0, 2, 1, 5]), "indptr decreases at row 1"),
    (lambda folder: arrays(folder, [0, 2, 3, 4]), "to the number of edges, 5"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_damaged_files_are_named(tmp_path, damage, said):
    source = damage(tmp_path)
    refuses(ValueError, said, convert_tables, source, tmp_path / "out", random_features=1)
    assert not (tmp_path / "out").exists()
    (tmp_path / "none").mkdir()
    said = r"holds neither indptr\.npy and indices\.npy, nor OGB's"
    refuses(FileNotFoundError, said, convert_tables, tmp_path / "none", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("node-feat", gzip.compress(b"1,2\n3,4\n", mtime=0), r"has 2 rows, but the graph has 6 nodes"),
        ("node-feat", gzip.compress(b"1,2\n" * 6, mtime=0)[:-20], "is damaged"),
        ("node-label", gzip.compress(b"1\n2\n", mtime=0), r"has 2 rows, but .*node-feat\.csv\.gz has 6"),
    ],
    ids=["too few features", "cut", "too few labels"],
)
def test_damaged_folders_of_ogb_are_named(tmp_path, name, content, said):
    write_ogb(tmp_path / "ogbn")
    (tmp_path / f"ogbn/raw/{name}.csv.gz").write_bytes(content)
    refuses(ValueError, rf"{name}\.csv\.gz {said}", convert_tables, tmp_path / "ogbn/raw", tmp_path / "out")
