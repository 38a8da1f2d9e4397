"""Common text formats become the same graph as a plain table of the same rows."""

import csv
import gzip
import io
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.cli.commands import convert as convert_command
from lightning_gnn.datasets import convert_tables
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.datasets.hetero_folder import node_folder

duckdb = pytest.importorskip("duckdb", reason="lgnn convert needs it")

DRAWN = {"random_features": 1}
LONG = 30_000
"""More rows than DuckDB's type detection samples."""


def read_ids(folder):
    """Return the node ids in the order of their numbers, as strings."""
    if (folder / "id.npy").exists():
        return [str(i) for i in np.load(folder / "id.npy")]
    found = duckdb.sql(f"SELECT id::VARCHAR FROM '{folder}/id.parquet' ORDER BY number").fetchall()
    return [row[0] for row in found]


def list_pairs(graph, names):
    targets = torch.arange(graph.num_nodes).repeat_interleave(graph.indptr.diff()).tolist()
    return sorted((names[s], names[t]) for s, t in zip(graph.indices.tolist(), targets, strict=True))


def convert(folder, name, content, nodes=None, kind=None, **options):
    """Convert a text of edges, and one of nodes; return the folder and the messages."""
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    tables = None
    if nodes is not None:
        (folder / "nodes.csv").write_text(nodes)
        tables = folder / "nodes.csv"
    messages = []
    source = {kind: folder / name} if kind else folder / name
    convert_tables(source, folder / "out", tables, say=messages.append, **(options if nodes else DRAWN | options))
    return folder / "out", messages


def convert_edges(folder, name, content, **options):
    out, messages = convert(folder, name, content, **options)
    return list_pairs(load_folder(out).graph, read_ids(out)), messages


# Strings that are not read as numbers, and that every reader can parse unquoted in a CSV file.
WORDS = st.text("abcXYZ#%é/.:-' ", min_size=1, max_size=6).map(lambda word: f"w{word.strip()}")
SEPARATORS = [",", "\t", ";", "|", "::", " "]


@pytest.mark.medium
@settings(max_examples=40)
@given(
    st.lists(st.tuples(WORDS, WORDS), min_size=2, max_size=8),
    st.sampled_from(SEPARATORS),
    st.sampled_from(["\n", "\r\n", "\r\r\n", "\r"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1"]),
    st.booleans(),
    st.lists(st.sampled_from(["# a comment", "% 3 4", "", "#"]), max_size=2),
    st.sampled_from(["csv", "tsv", "txt", "edges", "edgelist", "cites", "dat", "data", "txt.gz"]),
)
def test_rows_are_the_same_in_every_layout(tmp_path_factory, rows, between, newline, encoding, header, above, ending):
    folder = tmp_path_factory.mktemp("text")
    rows = [(a, b.replace(" ", "_")) for a, b in [*rows, (rows[0][0], rows[0][0]), (rows[0][1], rows[0][1])]]
    if between in ("::", "|", ";") or between == " ":  # no words that contain the separator
        rows = [tuple(word.replace("::", ".").replace(" ", "_").replace(":", ".") for word in row) for row in rows]
    lines = [*above, *([f"source{between}target"] if header else []), *(between.join(row) for row in rows)]
    content = newline.join([*lines, ""]).encode(encoding)
    content = gzip.compress(content) if ending.endswith("gz") else content
    found, messages = convert_edges(folder, f"edges.{ending}", content)
    assert found == sorted(tuple(word.strip() for word in row) for row in rows)
    assert any(("is the header" if header else "no header") in line for line in messages)


@pytest.mark.medium
def test_a_number_sign_within_rows_and_ids_is_data(tmp_path):
    edges = "source,target\n0,1\n1,2\n2,3\n"
    for case, colors in enumerate((["C", "C#", "F#", "C#"], ["#f00", "#0f0", "%a", "#f00"])):
        nodes = "label,id,title,f\n" + "".join(f'{c},{n},"Love #{n}, 100%",1.5\n' for n, c in enumerate(colors))
        (tmp_path / str(case)).mkdir()
        out, _ = convert(tmp_path / str(case), "edges.csv", edges, nodes)
        names = json.loads((out / "classes.json").read_text())
        assert [names[n] for n in np.load(out / "y.npy")] == colors
        assert load_folder(out).x.tolist() == [[1.5]] * 4
    content = "# by hand\nsource,target\n#a,http://x.org/y#1\n#b,http://x.org/y#2\n%c,#a\n"
    found, _ = convert_edges(tmp_path, "edges.csv", content)
    assert found == sorted([("#a", "http://x.org/y#1"), ("#b", "http://x.org/y#2"), ("%c", "#a")])


@pytest.mark.medium
@pytest.mark.parametrize("row", ["5 6", "x  y", "x y "])
def test_what_comes_late_in_a_list_is_read_as_if_it_came_first(tmp_path, row):
    begin = "a b\nb a\n" if row.startswith("x") else "0 1\n1 0\n"
    found, _ = convert_edges(tmp_path, "edges.txt", begin * (LONG // 2) + "# a comment\n% 7 8\n" + row + "\n")
    assert len(found) == LONG + 1
    assert tuple(row.split()) in found


@pytest.mark.medium
@pytest.mark.parametrize(
    ("rows", "is_header"),
    [
        (["a b", "b c", "c a"], False),
        (["u1 c#1", "u2 c#2", "u3 c#3"], False),
        (["http://a#x http://b#y", "http://c#x http://d#y"], False),
        (["2001:db8::1 2001:db8::2", "2001:db8::3 2001:db8::4"], False),
        (["p1 p2", *["3 4"] * 9, "p1 p2"], False),
        (["follower followee", "ann bob", "bob cy"], True),
        (["ann bob", *["x y"] * LONG, "bob x"], False),
        (["who whom", *["x y"] * LONG], True),
        (["Source Target", "source target", "b c"], True),
        (["FromNodeId ToNodeId", "a b"], True),
        (["paper cited", "1 2", "2 3"], True),
    ],
)
def test_a_header_names_columns_or_occurs_nowhere_below(tmp_path, rows, is_header):
    found, messages = convert_edges(tmp_path, "edges.tsv", "\n".join(rows).replace(" ", "\t"))
    assert found == sorted(tuple(row.split()) for row in rows[is_header:])
    assert any(("first row is the header" if is_header else "no header") in line for line in messages)


RELATIONS = st.text("abAB/_.# %", min_size=1, max_size=5).filter(lambda name: name.strip("_") == name.strip() != "")


@pytest.mark.medium
@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 5), RELATIONS, st.integers(0, 5)), min_size=1, max_size=12), st.booleans())
def test_triples_have_a_type_of_edges_for_each_relation(tmp_path_factory, triples, named):
    folder = tmp_path_factory.mktemp("triples")
    triples = [(f"/m/{s}", f"r{relation}r", f"/m/{t}") for s, relation, t in triples]
    if not named:  # heads and tails overlap
        triples.append((triples[0][2], triples[0][1], triples[0][0]))
    buffer = io.StringIO()
    csv.writer(buffer, delimiter="\t").writerows([*([("head", "relation", "tail")] * named), *triples])
    out, _ = convert(folder, "train.txt", buffer.getvalue())
    found, names = load_folder(out), read_ids(node_folder(out, "node"))
    assert names == sorted({end for s, _, t in triples for end in (s, t)})
    expected = {}
    for s, relation, t in triples:
        expected.setdefault(relation, []).append((s, t))
    assert {kind: list_pairs(found[kind].graph, names) for kind in found.edge_types} == {
        ("node", relation, "node"): sorted(edges) for relation, edges in expected.items()
    }


@pytest.mark.medium
def test_labels_that_are_names_are_refused_and_classes_counted(tmp_path):
    edges = "Source,Target\n1,2\n2,3\n"
    with pytest.raises(ValueError, match=r"the column Label has 3 distinct values for 3 nodes, so it holds names"):
        convert(tmp_path, "edges.csv", edges, "Id,Label,age\n1,Ann,3\n2,Bob,4\n3,Cy,5\n")
    many = "".join(f"{n},name {n},1\n" for n in range(1, 9))
    with pytest.raises(ValueError, match=r"the column label has 8 distinct values for 8 nodes"):
        convert(tmp_path, "edges.csv", edges, f"id,label,age\n{many}")
    _, messages = convert(tmp_path, "edges.csv", edges, "Id,Label,age\n1,red,3\n2,blue,4\n3,red,5\n")
    assert any("labels" in line and "2 classes" in line for line in messages)
    (tmp_path / "without").mkdir()
    out, _ = convert(tmp_path / "without", "edges.csv", edges, "Id,Label,age\n1,,3\n2,,4\n3,,5\n")
    assert not (out / "y.npy").exists()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("nodes", "x", "said"),
    [
        ("node_id,f\n2,10\n0,20\n1,30\n", [[10], [20], [30]], "in the column node_id"),
        ("f,nodeId\n10,2\n20,0\n30,1\n", [[10], [20], [30]], "in the column nodeId"),
        ("id,new_id,f\n77,2,10\n88,0,20\n99,1,30\n", [[10], [20], [30]], "in the column new_id"),
        ("2,10\n0,20\n1,30\n", [[10], [20], [30]], "in the column column0"),
        ("f,rank\n10,2\n20,0\n30,1\n", [[10, 2], [20, 0], [30, 1]], "numbered by row"),
        ("page_id,f\n77,10\n88,20\n99,30\n", [[77, 10], [88, 20], [99, 30]], "numbered by row"),
        ("a_id,b_id\n2,1\n0,2\n1,0\n", [[2, 1], [0, 2], [1, 0]], "a_id, b_id hold all ids of the edges"),
    ],
)
def test_the_ids_of_nodes_are_what_edges_refer_to(tmp_path, nodes, x, said):
    out, messages = convert(tmp_path, "edges.csv", "source,target\n0,1\n1,2\n", nodes)
    found = load_folder(out)
    assert found.x.tolist() == x
    numbers = ["2", "0", "1"] if "by row" not in said and "hold" not in said else ["0", "1", "2"]
    assert list_pairs(found.graph, numbers) == [("0", "1"), ("1", "2")]
    assert any(said in line for line in messages)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("source,target\n", r"holds no edges; its first line is 'source,target'"),
        ("hello\n", r"edges\.csv holds no edges; its first line is 'hello'"),
        ("# a\n# b\n", r"holds no rows; its first line is '# a'"),
        ("", r"holds no rows; its first line is ''"),
        ("\n<!DOCTYPE html>\n<html><body>a,b</body>\n", r"is a web page.*'<!DOCTYPE html>'"),
        ("{\"a\": [1, 2]}", r"is JSON"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n", r"is a Git LFS pointer.*git lfs pull"),
        (b"PK\x03\x04\x00\x00\x01\x02", r"is not a text file: it begins with b'PK"),
        ("source,target\n1,2\n3,4,5\n", r"edges\.csv: line 3 has 3 fields, but most lines have 2.*: '3,4,5'"),
        ("# x\nsource,target\n" + "1,2\n" * LONG + "3\n", r"line 30003 has 1 fields, but most lines have 2.*: '3'"),
        ('a,b\n1,"A, b"\n2,"Great" Perf, x\n3,"C, d"\n', r"line 3: .*expected after.*: '2,\"Great\" Perf, x'"),
        (gzip.compress(b"0 1\n" * 999, mtime=0)[:-20], r"is damaged .*; download it again"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused_with_the_line(tmp_path, content, error):
    with pytest.raises(ValueError, match=error) as caught:
        convert(tmp_path, "edges.csv", content)
    assert len(str(caught.value)) < 400
    assert not (tmp_path / "out").exists()


def test_the_command_prints_how_a_text_is_read(tmp_path, capsys):
    (tmp_path / "edges.txt").write_bytes("# x\nJosé  Ann\nAnn José\n".encode("latin-1"))
    assert convert_command.main([f"source={tmp_path}/edges.txt", f"out={tmp_path}/out", "random_features=1"]) == 0
    shown = capsys.readouterr().err
    assert (
        "edges.txt: 2 columns separated by blanks, no header, 1 lines of comments before it, read as latin-1" in shown
    )
