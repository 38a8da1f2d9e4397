"""Tables in files are converted to the same folder as equal tables in memory, even if interrupted."""

import csv
import errno
import gzip
import os
import queue
import re
import shutil
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import HeteroData
from torch_geometric.transforms import ToUndirected
from torch_geometric.utils import to_undirected

from lightning_gnn.cli.commands import convert as convert_command
from lightning_gnn.datasets import convert, convert_tables, edge_order, table_files
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.graph import CSCGraph
from tests.full_graph.launch import observe
from tests.refusals import refuses

duckdb = pytest.importorskip("duckdb", reason="lgnn convert needs it")

ENDINGS = ("csv", "csv.gz", "parquet", "npy")


def write(path, header, rows):
    """Write a table in the format given by the path's ending."""
    if path.suffix == ".npy":
        np.save(path, np.array(rows, dtype=np.int64).reshape(-1, 2).T)
        return path
    plain = path.parent / "plain" / path.name
    plain.parent.mkdir(exist_ok=True)
    with plain.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    if path.suffix == ".parquet":
        duckdb.sql(f"COPY (SELECT * FROM read_csv('{plain}', header = true)) TO '{path}'")
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        path.write_bytes(plain.read_bytes())
    return path


@st.composite
def graphs(draw):
    """Draw (node ids, edges between positions in them), at least one of each."""
    named = draw(st.booleans())
    ids = draw(st.lists(st.integers(0, 10**12), min_size=1, max_size=9, unique=True))
    count = len(ids)
    edges = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), min_size=1, max_size=20))
    return [f"node {number}" for number in ids] if named else ids, edges


def assert_same_topology(graph, edge_index, num_targets, num_sources=None):
    expected = CSCGraph.from_edge_index(edge_index, num_targets, num_sources)
    assert torch.equal(graph.indptr, expected.indptr)
    assert torch.equal(graph.indices, expected.indices)
    assert graph.edge_ids is None
    return expected


@settings(max_examples=12)
@given(graphs(), st.sampled_from(ENDINGS[:3]), st.booleans(), st.data())
def test_a_graph_without_types(tmp_path_factory, drawn, ending, undirected, data):
    ids, edges = drawn
    folder = tmp_path_factory.mktemp("tables")
    labels = data.draw(st.lists(st.sampled_from(["red", "blue", ""]), min_size=len(ids), max_size=len(ids)))
    splits = data.draw(st.lists(st.sampled_from(["train", "valid", "test", ""]), min_size=len(ids), max_size=len(ids)))
    labels[0], splits[0] = "red", "train"  # an empty column has no type
    rows = [
        [id_, f"a{n}", label, split, n, 0.5 * n]
        for n, (id_, label, split) in enumerate(zip(ids, labels, splits, strict=True))
    ]
    nodes = write(folder / f"nodes.{ending}", ["id", "name", "label", "split", "a", "b"], rows)
    source = write(folder / f"edges.{ending}", ["source", "target"], [(ids[s], ids[t]) for s, t in edges])
    counts = convert_tables(source, folder / "graph", nodes, undirected=undirected)
    found = load_folder(folder / "graph")
    edge_index = torch.tensor(edges).t()
    if undirected:
        edge_index = to_undirected(edge_index, num_nodes=len(ids))
        edge_index = edge_index[:, (edge_index[1] * len(ids) + edge_index[0]).argsort()]
    assert_same_topology(found.graph, edge_index, len(ids))
    assert counts == {"node": len(ids), "node__to__node": edge_index.size(1)}
    numbers = torch.arange(len(ids), dtype=torch.float32)
    assert torch.equal(found.x, torch.stack([numbers, numbers / 2], 1))
    names = sorted({label for label in labels if label})
    assert found.y.tolist() == [names.index(label) if label else -1 for label in labels]
    for ours, theirs in (("train", "train"), ("val", "valid"), ("test", "test")):
        assert found[f"{ours}_mask"].tolist() == [split == theirs for split in splits]
    assert not (folder / "graph.partial").exists()


@pytest.mark.parametrize("memory", [0, 1000, 1 << 30])  # a scan per target, about seven, one
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float64])
def test_edges_are_sorted_in_as_many_scans_as_memory_requires(tmp_path, monkeypatch, memory, dtype):
    monkeypatch.setattr(edge_order, "_EDGES_PER_BLOCK", 300)
    random = np.random.default_rng(0)
    target, value = random.integers(20, size=1000) * random.integers(2, size=1000), random.integers(99, size=1000)
    database = table_files.TableFiles(tmp_path / "database", 100 << 20, 0, tmp_path, print)
    database.fill("edges", lambda: iter([{"source": value, "target": target}]))
    order = edge_order.EdgeOrder(database, "edges", "target", 21, memory)
    placed = [part.copy() for part in order.place("source", dtype)]
    database.close()
    assert memory or len(placed) == 21
    assert np.concatenate(placed).dtype == dtype
    assert np.array_equal(np.concatenate(placed), value[np.argsort(target, kind="stable")])
    assert np.array_equal(np.diff(order.indptr), np.bincount(target, minlength=21))


@settings(max_examples=8)
@given(graphs(), st.integers(1, 5), st.booleans(), st.data())
def test_a_graph_with_types_and_attributes(tmp_path_factory, drawn, num_papers, undirected, data):
    ids, pairs = drawn
    folder = tmp_path_factory.mktemp("tables")
    pairs = [(author, paper % num_papers) for author, paper in pairs]
    days = [data.draw(st.integers(1, 28)) for _ in pairs]
    written = [(ids[a], p, f"2024-01-{day:02}", 0.25 * day) for (a, p), day in zip(pairs, days, strict=True)]
    writes = write(folder / "writes.parquet", ["author", "paper", "time", "share"], written)
    papers = write(folder / "papers.csv", ["f", "time"], [(n, 100 * n) for n in range(num_papers)])
    convert_tables({"author__writes__paper": writes}, folder / "graph", {"paper": papers}, undirected=undirected)
    found = load_folder(folder / "graph")
    known = sorted({ids[a] for a, _ in pairs})
    expected = HeteroData()
    expected["author"].num_nodes, expected["paper"].num_nodes = len(known), num_papers
    kind = "author", "writes", "paper"
    expected[kind].edge_index = torch.tensor([(known.index(ids[a]), p) for a, p in pairs]).t()
    expected[kind].time = torch.tensor([1704067200 + 86400 * (day - 1) for day in days])
    expected[kind].share = torch.tensor([0.25 * day for day in days], dtype=torch.float64)
    if undirected:
        expected = ToUndirected()(expected)
    assert found.edge_types == expected.edge_types
    for kind in expected.edge_types:
        sizes = [expected[kind[end]].num_nodes for end in (2, 0)]
        order = assert_same_topology(found[kind].graph, expected[kind].edge_index, *sizes).edge_ids
        order = slice(None) if order is None else order.long()
        assert torch.equal(found[kind].time, expected[kind].time[order])
        assert torch.equal(found[kind].share, expected[kind].share[order])
    assert found["paper"].x.tolist() == [[n] for n in range(num_papers)]
    assert found["paper"].time.tolist() == [100 * n for n in range(num_papers)]
    assert found["author"].num_nodes == len(known)
    assert "x" not in found["author"]
    if isinstance(known[0], int):
        assert found["author"].id.tolist() == known
    else:
        rows = duckdb.sql(f"SELECT id FROM '{folder}/graph/nodes/author/id.parquet' ORDER BY number").fetchall()
        assert [row[0] for row in rows] == known


@pytest.mark.medium
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_published_edge_list_without_features(tmp_path, ending):
    edges = [(7, 900), (900, 7), (7, 7), (12, 900)]
    if ending == "npy":
        source = write(tmp_path / "edges.npy", None, edges)
    else:
        source = tmp_path / "edges.txt"
        source.write_text("# a web graph\n# FromNodeId\tToNodeId\n" + "".join(f"{s}\t{t}\n" for s, t in edges))
    with pytest.raises(ValueError, match=r"nodes have no features: give nodes=FILE .* or random_features=64"):
        convert_tables(source, tmp_path / "graph")
    convert_tables(source, tmp_path / "graph", random_features=5)
    found = load_folder(tmp_path / "graph")
    assert_same_topology(found.graph, torch.tensor([[0, 2, 0, 1], [2, 0, 0, 2]]), 3)
    assert np.load(tmp_path / "graph/id.npy").tolist() == [7, 12, 900]
    assert found.x.shape == (3, 5)
    assert float(found.x.std()) > 0.1


@pytest.fixture
def tables(tmp_path):
    edges = torch.randint(50, (300, 2), generator=torch.Generator().manual_seed(0)).tolist()
    source = write(tmp_path / "edges.csv", ["source", "target"], [(f"n{s}", f"n{t}") for s, t in edges])
    nodes = write(tmp_path / "nodes.csv", ["id", "label", "a"], [(f"n{n}", n % 3, n) for n in range(50)])
    return source, nodes


def read_files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_features_in_half_of_the_bytes(tmp_path, tables, dtype):
    source, nodes = tables
    convert_tables(source, tmp_path / "graph", nodes, feature_dtype=dtype)
    found = load_folder(tmp_path / "graph").x
    assert found.dtype == getattr(torch, dtype)
    assert torch.equal(found, torch.arange(50.0).view(-1, 1).to(found.dtype))
    assert (tmp_path / "graph" / "x.npy").stat().st_size == 128 + 100


def test_features_that_overflow_are_refused(tmp_path, tables):
    source, nodes = tables
    write(nodes, ["id", "label", "a"], [(f"n{n}", n % 3, 1e5 * n) for n in range(50)])
    refuses(ValueError, "ends at 65504; use feature_dtype=bfloat16", convert_tables, source, tmp_path / "graph", nodes,
            feature_dtype="float16")  # fmt: skip
    refuses(ValueError, "use float32, float16 or bfloat16", convert_tables, source, tmp_path / "graph", nodes,
            feature_dtype="int8")  # fmt: skip


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_the_cost_of_a_large_conversion_is_announced(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(convert, "_MIN_ANNOUNCED", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**15))
    edges = [(10 + n % 20, 10 + n % 7) for n in range(1000)]
    source = write(tmp_path / f"edges{ending}", ["source", "target"], edges)
    nodes = write(tmp_path / f"nodes{ending}", ["id", "a"], [(10 + n, 10 + n) for n in range(20)])
    said = []
    convert_tables(source, tmp_path / "graph", nodes, say=said.append)
    assert said[0].startswith("about 1,00")  # 1,000 edges, or one more of a text file
    assert re.search(r"need 20\.\d kB of disk \(32\.\d kB if nodes have ids\) meanwhile", said[0])
    assert said[0].endswith("meanwhile, and 1e+03 TB are free")
    said.clear()
    convert_tables(source, tmp_path / "no table", random_features=2, say=said.append)
    assert re.search(r"need 32(\.\d)? kB of disk meanwhile", said[0])


def test_attributes_may_have_any_name(tmp_path):
    """Also those of columns in the database."""
    names, edges = ["s", "t", "number", "edge", "value", "target_"], [(f"n{n % 7}", f"n{3 * n % 7}") for n in range(20)]
    rows = [[*ends, *(100 * place + n for place in range(len(names)))] for n, ends in enumerate(edges)]
    source = write(tmp_path / "edges.parquet", ["source", "target", *names], rows)
    convert_tables({"a__to__a": source}, tmp_path / "graph")
    found = load_folder(tmp_path / "graph")["a", "to", "a"]
    order = sorted(range(20), key=lambda n: (3 * n % 7, n))
    assert found.graph.indices.tolist() == [n % 7 for n in order]
    for place, name in enumerate(names):
        assert found[name].tolist() == [100 * place + n for n in order]


def test_the_progress_of_a_scan_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "_SECONDS_PER_REPORT", 0.001)
    said = queue.Queue()
    database = table_files.TableFiles(tmp_path / "database", 100 << 20, 0, tmp_path, said.put)
    database.make("numbers", "SELECT range AS number FROM range(100)")
    # Queries report nothing from here on, and what they have reported is complete at the next look.
    connection, looked = database.connection, threading.Event()
    database.connection = SimpleNamespace(
        execute=connection.execute, close=connection.close, query_progress=lambda: looked.set() or 0
    )
    assert looked.wait(600)
    said.queue.clear()
    for tenths, block in enumerate(database.blocks("numbers", {"number": "number"}, 10)):
        assert block["number"].tolist() == list(range(10 * tenths, 10 * tenths + 10))
        assert not tenths or said.get(timeout=600).startswith(f"  {tenths}0 %, about ")
    database.close()
    assert said.empty()


def test_files_that_changed_are_read_anew(tmp_path, tables):
    source, nodes = tables

    def interrupted(message):
        if message.startswith("sorting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_tables(source, tmp_path / "graph", nodes, say=interrupted)
    write(source, ["source", "target"], [("n1", "n2")])
    write(nodes, ["id", "label", "a"], [("n1", 0, 8), ("n2", 1, 9)])
    convert_tables(source, tmp_path / "graph", nodes)
    found = load_folder(tmp_path / "graph")
    assert found.x.tolist() == [[8], [9]]
    assert found.graph.num_edges == 1


def test_columns_are_known_in_whatever_case_and_masks_are_splits(tmp_path):
    source = write(tmp_path / "edges.csv", ["Weight", "Source", "Target"], [(0.5, 7, 8), (0.25, 8, 9)])
    header = ["ID", "Label", "Age", "train_mask", "Val_Mask"]
    nodes = write(tmp_path / "nodes.csv", header, [(8, 1, 3, True, False), (7, 0, 4, "", True), (9, 1, 5, False, "")])
    messages = []
    convert_tables(source, tmp_path / "graph", nodes, say=messages.append)
    found = load_folder(tmp_path / "graph")
    assert "features are Age: 1 in total" in messages
    assert found.x.tolist() == [[3], [4], [5]]
    assert found.y.tolist() == [1, 0, 1]
    assert found.train_mask.tolist() == [True, False, False]
    assert found.val_mask.tolist() == [False, True, False]
    assert_same_topology(found.graph, torch.tensor([[1, 0], [0, 2]]), 3)


def test_a_pattern_selects_several_arrow_files(tmp_path):
    feather, pa = pytest.importorskip("pyarrow.feather"), pytest.importorskip("pyarrow")
    for part in range(3):
        feather.write_feather(pa.table({"source": [part], "target": [0]}), tmp_path / f"edges{part}.arrow")
        feather.write_feather(pa.table({"size": [0.5 * part]}), tmp_path / f"nodes{part}.feather")
    convert_tables(tmp_path / "edges*.arrow", tmp_path / "graph", tmp_path / "nodes*.feather")
    assert np.load(tmp_path / "graph" / "x.npy").tolist() == [[0.0], [0.5], [1.0]]


def write_given(folder, name, text):
    """Write a table: values for Parquet, or space-separated lines of a CSV file."""
    if text is None:
        return None
    if text.startswith("("):
        duckdb.sql(f"COPY (SELECT * FROM (VALUES {text}) TO '{folder}/{name}.parquet'")
        return folder / f"{name}.parquet"
    (folder / f"{name}.csv").write_text(text.replace(" ", "\n") + "\n")
    return folder / f"{name}.csv"


ZEROS, ENDS, AB, TWO = "(0, 0)) t(source, target)", "source,target a,b", "id,a a,1 b,2", "a,split 1,train 2,test"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "edges", "nodes", "said"),
    [
        ("", "source,target a,z", AB, r"edges\.csv: the target of row 0, 'z', is not a node of .*nodes\.csv"),
        ("", "source,target a,b ,b", AB, "the source of row 1, None, is not a node"),
        ("", ENDS, "id,a a,1 b,2 a,3", r"nodes\.csv: id 'a' occurs twice"),
        ("", ENDS, "id,a a,1 ,2", "row 1 has no id"),
        ("", "source,target 0,2", TWO, "target of row 0, 2, is not a node"),
        ("", "source,target -1,1", TWO, "source of row 0, -1, is not a node"),
        ("", "source,target 0,1", TWO.replace("test", "hold"), r"split is 'hold' in .*nodes\.csv; use one of train"),
        ("", "source,target 1,1 1,2", "id,f 1,0 y,1", "the target of row 1, '2', is not a node of .*nodes"),
        ("", "(0.5, 1, 2)) t(w, source, dst)", None, "has the columns w, source, dst; edges need source and t"),
        ("", "('a', 1)) t(source, target)", "(1)) t(f)", "the source of row 0, 'a', is not a row number"),
        ("", "(0, 0.5)) t(source, target)", "(1)) t(f)", r"the target of row 0, .*0\.5.*, is not a row number"),
        ("", ZEROS, "(1, [0, 1])) t(f, label)", r"nodes\.parquet: label is INTEGER\[\]"),
        ("", ZEROS, "([1]), ([1, 2])) t(f)", r"nodes\.parquet: the lists of f are missing or differ in length"),
        ("a__to__a", "(0, 0, NULL), (0, 0, 1)) t(source, target, w)", None, "w is missing in some row"),
        ("a__to__a", "(0, 0, 1)) t(source, target, indptr)", None, "'indptr' is not a valid attr"),
        ("a__to__a", '(0, 0, 1)) t(source, target, "a/b")', None, "'a/b' is not a valid attribute name; rename"),
    ],
)
def test_tables_that_cannot_be(tmp_path, kind, edges, nodes, said):
    source = write_given(tmp_path, "edges", edges)
    source = {kind: source} if kind else source
    refuses(ValueError, said, convert_tables, source, tmp_path / "graph", write_given(tmp_path, "nodes", nodes))
    assert not (tmp_path / "graph").exists()


def test_mistakes_of_the_call(tmp_path, tables):
    source, nodes = tables
    with pytest.raises(FileNotFoundError, match=r"absent\.csv does not exist"):
        convert_tables(tmp_path / "absent.csv", tmp_path / "graph")
    with pytest.raises(ValueError, match="unknown file extension"):
        convert_tables(write(tmp_path / "edges.xlsx", ["a", "b"], []), tmp_path / "graph")
    refuses(FileExistsError, "exists already", convert_tables, source, tmp_path)
    refuses(ValueError, "give at least 100 MB", convert_tables, source, tmp_path / "graph", nodes, memory=1000)
    for edges, of, error in (
        ({"a__to": source}, None, "invalid edge type .*: write SOURCE__RELATION__TARGET"),
        ({"a__to__a": source}, {"b": nodes}, "nodes.b: no edge type has this endpoint, only a"),
        ({"a__to__a": source}, nodes, "nodes are not: give types"),
        (source, {"a": nodes}, "edges are not: give types"),
    ):
        refuses(ValueError, error, convert_tables, edges, tmp_path / "graph", of)


@pytest.mark.medium
def test_the_command(tmp_path, tables, capsys):
    source, nodes = tables
    out = tmp_path / "graph"
    assert convert_command.main([f"source={source}", f"nodes={nodes}", f"out={out}", "memory=1GB"]) == 0
    shown = capsys.readouterr()
    assert "50  node" in shown.out
    assert f"lgnn data=custom data.root={out}" in shown.out
    assert f"reading {source}" in shown.err
    typed = [f"source.a__to__b={source}", f"out={tmp_path / 'typed'}"]
    assert convert_command.main(typed) == 0
    assert load_folder(tmp_path / "typed").edge_types == [("a", "to", "b")]
    for given_, error in (
        ([f"source={source}"], "give out="),
        ([f"source={source}", f"out={out}"], "exists already"),
        ([f"source={source}", f"out={out}", "sauce=1"], "sauce"),
        ([f"source={source}", f"out={out}2", "memory=much"], "such as 4000000000, '4GB'"),
    ):
        assert convert_command.main(given_) == 2
        assert error in capsys.readouterr().err


def _convert_until_killed(rank, step, *arguments):
    """Convert, and end the process at the given step."""
    where, name, count, after = STEPS[step]
    real, left = getattr(where, name), iter(range(count))

    def vanishing(*args, **options):
        last = next(left, None) is None
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        made = real(*args, **options)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    setattr(where, name, vanishing)
    convert_tables(*arguments)


STEPS = {"indices": (convert, "index_dtype", 1, False), "checking": (convert, "load_folder", 0, True)}
"""Where the conversion of two node types is killed: before or after the n-th call of a function."""


@pytest.mark.medium
@pytest.mark.parametrize("step", STEPS)
def test_a_killed_conversion_goes_on(tmp_path, tables, step):
    source, nodes = tables
    source, nodes = {"a__to__a": source, "b__to__a": source}, {"a": nodes}
    (tmp_path / "b.csv").write_text("id,f,g\n" + "".join(f"n{n},{n / 7},1\n" for n in range(50)))
    nodes["b"] = str(tmp_path / "b.csv")
    convert_tables(source, tmp_path / "whole", nodes)
    ended = observe(_convert_until_killed, 1, step, source, tmp_path / "graph", nodes)
    assert ended.exit_codes == [-signal.SIGKILL], ended.errors
    assert not (tmp_path / "graph").exists()
    messages = []
    convert_tables(source, tmp_path / "graph", nodes, say=messages.append)
    assert messages[0] == "resuming an interrupted conversion"
    assert read_files(tmp_path / "graph") == read_files(tmp_path / "whole")
    assert not (tmp_path / "graph.partial").exists()


@pytest.mark.slow
def test_a_full_disk_of_the_database_says_so(tmp_path):
    """DuckDB may not spill to disk, as if the disk were full; once it may, the same call succeeds."""
    source = tmp_path / "edges.parquet"
    duckdb.sql(f"COPY (SELECT hash(range) AS source, hash(range + 1) AS target FROM range(1000000)) TO '{source}'")
    with pytest.MonkeyPatch.context() as patch:
        real = table_files.TableFiles.__init__

        def without_room(self, *args):
            real(self, *args)
            self.connection.execute("SET max_temp_directory_size = '1MB'")

        patch.setattr(table_files.TableFiles, "__init__", without_room)
        with pytest.raises(OSError, match="free disk space, or increase memory=, and repeat the call"):
            convert_tables(source, tmp_path / "graph", memory=170 << 20, random_features=1)
    counts = convert_tables(source, tmp_path / "graph", memory=1 << 30, random_features=1)
    assert counts["node__to__node"] == 1_000_000
    assert not (tmp_path / "graph/id.npy").exists()  # the ids do not fit into int64


def test_a_full_disk_names_the_folder_and_the_space_needed(tmp_path, tables, monkeypatch):
    """Writing fails once for want of space; the same call then goes on."""

    def without_room(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_blocks", without_room)
        refuses(OSError, r"no space left on device for .*graph\.partial: .* are free, and about .* are needed in all; "
                "free disk space and repeat", convert_tables, tables[0], tmp_path / "graph", tables[1])  # fmt: skip
    assert not (tmp_path / "graph").exists()
    assert convert_tables(tables[0], tmp_path / "graph", tables[1])["node"] == 50


@pytest.mark.parametrize("raised", [MemoryError(), RuntimeError("can't start new thread")])
def test_too_little_memory_names_the_option(tmp_path, tables, monkeypatch, raised):
    def without_memory(*arguments):
        raise raised

    monkeypatch.setattr(convert, "write_blocks", without_memory)
    refuses(MemoryError, "memory=2GB is more than the process gets: .* are .*; give a smaller memory=", convert_tables,
            tables[0], tmp_path / "graph", tables[1], memory=2 * 10**9)  # fmt: skip


def test_a_second_conversion_into_a_folder_is_refused_until_the_first_ends(tmp_path, tables):
    source, nodes = tables
    partial = tmp_path / "graph.partial"
    with convert._lock(partial):
        (partial / "database").mkdir()
        refuses(BlockingIOError, rf"graph\.partial is in use by process {os.getpid()} on ", convert_tables, source,
                tmp_path / "graph", nodes)  # fmt: skip
    assert (partial / ".running").exists()  # as a killed process leaves it
    assert convert_tables(source, tmp_path / "graph", nodes)["node"] == 50
    assert not partial.exists()


@pytest.mark.parametrize("during_query", [True, False])
def test_an_interrupted_command_names_the_one_that_goes_on(tmp_path, tables, capsys, monkeypatch, during_query):
    """Ctrl-C arrives within a query of the database, or between two."""
    arguments = [f"source={tables[0]}", f"nodes={tables[1]}", f"out={tmp_path}/graph"]
    error = RuntimeError("Query interrupted") if during_query else KeyboardInterrupt()

    def interrupted(database, *given):
        with database._translate_errors():
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(table_files.TableFiles, "make", interrupted)
        assert convert_command.main(arguments) == 130
    shown = capsys.readouterr().err
    assert f"{tmp_path}/graph.partial keeps the complete steps" in shown
    assert f"lgnn convert {' '.join(arguments)}" in shown
    assert not (tmp_path / "graph").exists()
    assert convert_command.main(arguments) == 0


def test_an_array_that_is_no_edge_list_is_described(tmp_path):
    np.save(tmp_path / "edges.npy", np.zeros(3, [("source", "i8"), ("target", "i8")]))
    said = (
        r"holds a structured array with the fields source \(int64\), target \(int64\), shape \[3\], instead of numbers"
    )
    refuses(ValueError, rf"{said}; expected are .*\[2, E\]", convert_tables, tmp_path / "edges.npy", tmp_path / "graph")
