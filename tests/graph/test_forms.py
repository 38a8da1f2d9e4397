"""Each format in the table of docs/how-to/own-data.md is read as the table says."""

import gzip
import json
import re
import shlex
from pathlib import Path

import networkx
import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn.cli.commands import convert as convert_command
from lightning_gnn.datasets.folder import load_folder

duckdb = pytest.importorskip("duckdb", reason="lgnn convert needs it")

PAGE = (Path(__file__).parents[2] / "docs/how-to/own-data.md").read_text(encoding="utf-8")
EDGES = [(0, 1), (1, 2), (2, 0), (3, 1)]
X = np.array([[1, 0], [0, 1], [1, 1], [0, 1]], np.float32)
Y = [0, 1, 0, 1]
KINDS = ["blue", "red", "blue", "red"]
ROWS = {
    row[1]: row[2] for row in re.findall(r"^(\| (\w[\w, ]*) \| .+ \| (.+) \|)$", PAGE.partition("| form |")[2], re.M)
}
SCRIPTS = {found[1]: found[0] for found in re.findall(r"```python\n(# ([\w ,]+):.*?)```", PAGE, re.S)}


def lines(path, rows, between=","):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(between.join(map(str, row)) + "\n" for row in rows))


def snap():
    text = "".join(f"{s} {t}\n" for s, t in EDGES)
    Path("facebook_combined.txt.gz").write_bytes(gzip.compress(text.encode()))
    return {(s, t) for edge in EDGES for s, t in (edge, edge[::-1])}, None, None


def linqs():
    lines("cora.cites", [(f"p{s}", 100 + t) if s == 3 else (100 + s, 100 + t) for s, t in EDGES], "\t")
    names = [100, 101, 102, "p3"]
    lines("cora.content", [(names[n], *map(int, X[n]), KINDS[n]) for n in range(4)], "\t")
    return {*EDGES}, X, Y


def musae():
    lines("edges.csv", [("id_1", "id_2"), *EDGES])
    Path("features.json").write_text(json.dumps({n: [int(w) for w in X[n].nonzero()[0]] for n in range(4)}))
    lines("target.csv", [("id", "page_type"), *((n, KINDS[n]) for n in (2, 0, 1, 3))])
    return {*EDGES}, X, Y


def knowledge_graph():
    lines("train.txt", [(f"/m/{s}", f"/film/{'ab'[s % 2]}", f"/m/{t}") for s, t in EDGES], "\t")
    return {(s, t) for s, t in EDGES}, None, None


def movielens():
    lines("ratings.csv", [("userId", "movieId", "rating", "timestamp"), *((s + 1, 10 * t, 3.5, 9) for s, t in EDGES)])
    titles = [(0, '"Movie, The #1 (1995)"', "A|B"), (20, "#Horror (2015)", "C"), (10, '"A ""q"" (1)"', "A")]
    lines("movies.csv", [("movieId", "title", "genres"), *titles])
    places = {0: 0, 2: 1, 1: 2}
    return {(s, places[t]) for s, t in EDGES}, None, None


def gephi():
    lines(
        "edges.csv",
        [("Source", "Target", "Type", "Id", "Label", "Weight"), *((s, t, "Directed", 0, "", 1.0) for s, t in EDGES)],
    )
    lines("nodes.csv", [("Id", "Label", "a", "b"), *((n, KINDS[n], *X[n]) for n in range(4))])
    return {*EDGES}, X, Y


def matrix_market():
    matrix = scipy.sparse.coo_matrix((np.ones(4), np.array(EDGES).T), (4, 4))
    scipy.io.mmwrite("graph.mtx", matrix)
    return {*EDGES}, None, None


def graphml():
    graph = networkx.DiGraph()
    for n in range(4):
        graph.add_node(n, age=float(X[n, 0]), income=float(X[n, 1]), kind=Y[n])
    graph.add_edges_from(EDGES)
    networkx.write_graphml(graph, "graph.graphml")
    networkx.write_gml(graph, "graph.gml")
    return {*EDGES}, X, Y


def ogb():
    for name, rows in (("edge", EDGES), ("node-feat", X), ("node-label", [[y] for y in Y]), ("num-node-list", [[4]])):
        lines(f"ogbn_arxiv/raw/{name}.csv", rows)
        packed = Path(f"ogbn_arxiv/raw/{name}.csv")
        Path(f"{packed}.gz").write_bytes(gzip.compress(packed.read_bytes()))
        packed.unlink()
    return {*EDGES}, X, Y


def dgl():
    lines("edges_0.csv", [("src_id", "dst_id"), *((7 * s, 7 * t) for s, t in EDGES)])
    lines("nodes_0.csv", [("node_id", "label", "feat"), *((7 * n, Y[n], f'"{X[n, 0]}, {X[n, 1]}"') for n in range(4))])
    return {*EDGES}, X, Y


def graphbolt():
    lines("edges/edge.csv", EDGES)
    Path("data").mkdir()
    np.save("data/node-feat.npy", X)
    for split, nodes in (("train", [0, 3]), ("val", [1]), ("test", [2])):
        lines(f"set/{split}.csv", [(n, Y[n]) for n in nodes])
    return {*EDGES}, X, Y


def igb():
    for name, array in (
        ("paper/node_feat", X),
        ("paper/node_label_19", np.array(Y, np.float32)),
        ("paper__cites__paper/edge_index", np.array(EDGES)),
    ):
        Path(f"processed/{name}").parent.mkdir(parents=True, exist_ok=True)
        np.save(f"processed/{name}.npy", array)
    return {*EDGES}, X, Y


def jodie():
    header = "user_id,item_id,timestamp,state_label,comma_separated_list_of_features"
    lines("wikipedia.csv", [(header,), *((s, t, 0.5 * s, 0, *X[s]) for s, t in EDGES)])
    return {*EDGES}, None, None


FORMS = {
    "SNAP": snap, "LINQS": linqs, "MUSAE": musae, "knowledge graph": knowledge_graph, "MovieLens": movielens,
    "Gephi": gephi, "Matrix Market": matrix_market, "GraphML, GML": graphml, "OGB": ogb, "DGL": dgl,
    "GraphBolt": graphbolt, "IGB": igb, "JODIE": jodie,
}  # fmt: skip


def list_pairs(store):
    if "graph" not in store:
        return [*map(tuple, store.edge_index.t().tolist())]
    targets = torch.arange(store.graph.num_nodes).repeat_interleave(store.graph.indptr.diff())
    return [*zip(store.graph.indices.tolist(), targets.tolist(), strict=True)]


def test_every_form_of_the_table_is_tried():
    assert [*ROWS] == [*FORMS]
    assert {name for name, what in ROWS.items() if "below" in what} == {*SCRIPTS}


@pytest.mark.medium
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read_as_the_table_says(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    edges, x, y = FORMS[form]()
    if form in SCRIPTS:
        exec(SCRIPTS[form], {"np": np, "torch": torch, "Path": Path, "Data": Data})
    for command in re.findall("`(lgnn convert [^`]+)`", ROWS[form]):
        needed = ["random_features=2"] if x is None and "features=" not in command else []
        assert convert_command.main([*shlex.split(command)[2:], *needed]) == 0
    found = load_folder("graph")
    stores = found.edge_stores if isinstance(found, HeteroData) else [found]
    read = [pair for store in stores for pair in list_pairs(store)]
    assert sorted(read) == sorted(edges)
    if x is not None:
        assert found.x.tolist() == x.tolist()
        assert found.y.tolist() == y
    if form == "knowledge graph":
        assert len(found.edge_types) == 2
