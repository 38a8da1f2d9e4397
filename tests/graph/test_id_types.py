"""Equal ids become one node, and different ids several, however both ends of the edges are written and stored."""

from itertools import combinations_with_replacement

import numpy as np
import pytest

from lightning_gnn.datasets import convert_tables
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.datasets.hetero_folder import node_folder
from tests.graph.test_text_files import LONG, list_pairs, read_ids

duckdb = pytest.importorskip("duckdb", reason="lgnn convert needs it")

COUNT = 50
KINDS = {
    "integers": str,
    "floats": "{}.0".format,
    "exponents": "{}e0".format,
    "signed": "+{}".format,
    "padded": "{:03}".format,
    "texts": "n{}".format,
}
"""How ids from 1 on are written."""
TYPES = ("BIGINT", "INTEGER", "UBIGINT", "HUGEINT", "DOUBLE", "FLOAT", "DECIMAL(9, 2)", "VARCHAR")


def ring(source, target):
    """Return the edges n -> n + 1 of 1 to ``COUNT``, each end written by a function."""
    return [(source(n), target(n % COUNT + 1)) for n in range(1, COUNT + 1)]


def write(path, rows, header="source,target"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def convert(tmp_path, source, nodes=None, **options):
    """Convert homogeneous tables; return the counts, the pairs of ids and the messages."""
    said = []
    drawn = {} if nodes else {"random_features": 1}
    counts = convert_tables(source, tmp_path / "out", nodes, say=said.append, **drawn, **options)
    names = [str(n) for n in range(counts["node"])] if nodes else read_ids(tmp_path / "out")
    return counts, list_pairs(load_folder(tmp_path / "out").graph, names), said


@pytest.mark.medium
@pytest.mark.parametrize(
    ("source", "target", "late"),
    [
        *((source, target, 0) for source in KINDS for target in KINDS),
        *(("integers", target, LONG) for target in KINDS),  # below integers, from which the type is guessed
    ],
)
def test_both_ends_are_compared_as_one_kind(tmp_path, source, target, late):
    rows = [("1", "2")] * late + ring(KINDS[source], KINDS[target])
    edges = write(tmp_path / "edges.csv", rows)
    kinds = {source, target} | ({"integers"} if late else set())
    same = {"integers", "floats", "exponents", "signed"}
    if "padded" in kinds and kinds & same:
        with pytest.raises(ValueError, match=r"edges\.csv: the \w+ of row \d+, '[+\d]\d+', is the same number as '"):
            convert(tmp_path, edges)
        counts, pairs, _ = convert(tmp_path, edges, ids="number") if "texts" not in kinds else ({}, None, [])
        expected = [(str(n), str(n % COUNT + 1)) for n in range(1, COUNT + 1)]
    elif "texts" in kinds and len(kinds) > 1:
        # Half of the ids are texts, so none is a mistake.
        counts, pairs, said = convert(tmp_path, edges)
        expected = ring(KINDS[source], KINDS[target])
        assert any(" ids are texts and " in line for line in said)
        assert len({end for pair in pairs for end in pair}) == counts["node"]
    else:
        counts, pairs, _ = convert(tmp_path, edges)
        write_as = KINDS[source] if kinds <= {"padded", "texts"} else str
        expected = ring(write_as, write_as)
    if pairs is not None:
        assert pairs == sorted([*expected, *[("1", "2")] * late])
        assert counts == {"node": len({end for pair in pairs for end in pair}), "node__to__node": COUNT + late}


@pytest.mark.parametrize(
    ("source", "target", "nodes"),
    [
        *((source, target, None) for source, target in combinations_with_replacement(TYPES, 2)),
        *(("DOUBLE", "INTEGER", nodes) for nodes in TYPES),
        *(("UBIGINT", "VARCHAR", nodes) for nodes in TYPES),
    ],
)
def test_typed_columns_of_integers_are_compared_as_integers(tmp_path, source, target, nodes):
    chosen = f"(range + 1)::{source} AS source, (range % {COUNT} + 1)::{target} AS target"
    duckdb.sql(f"COPY (SELECT {chosen} FROM range({COUNT})) TO '{tmp_path}/edges.parquet'")
    if nodes is not None:
        chosen = f"(range + 1)::{nodes} AS id, range AS f"
        duckdb.sql(f"COPY (SELECT {chosen} FROM range({COUNT})) TO '{tmp_path}/nodes.parquet'")
    table = None if nodes is None else tmp_path / "nodes.parquet"
    counts, pairs, _ = convert(tmp_path, tmp_path / "edges.parquet", table)
    assert counts == {"node": COUNT, "node__to__node": COUNT}
    first = 1 if nodes is None else 0
    assert pairs == sorted((str(n + first), str(n + first)) for n in range(COUNT))


BIG = [(1 << 53) + n for n in range(4)]
HUGE = [(1 << 64) + n for n in range(4)]


@pytest.mark.parametrize("ids", [BIG, [f"{n}.0" for n in BIG], HUGE, ["9.007199254740993e15", "9007199254740993", 1]])
def test_large_integers_keep_all_digits(tmp_path, ids):
    counts, pairs, _ = convert(tmp_path, write(tmp_path / "edges.csv", list(zip(ids, [*ids[1:], ids[0]], strict=True))))
    values = sorted({int(float(i)) if str(i).count("e") else int(str(i).removesuffix(".0")) for i in ids})
    if "e" in str(ids[0]):
        values = [1, (1 << 53) + 1]
    assert counts["node"] == len(values)
    assert {end for pair in pairs for end in pair} == {*map(str, values)}


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([*ring(str, str), ("source", "target"), (1, 3)], "row 50 repeats the header, 'source,target'; remove it"),
        ([*ring("a{}".format, "a{}".format), ("source", "target")], "row 50 repeats the header"),
        ([*[(1, 2)] * LONG, ("source", "target"), (1, 2)], f"row {LONG} repeats the header"),
        (
            [*ring(str, str), (7, "abc")],
            "the target of row 50, 'abc', is not an integer, but 50 of 51 ids are int",
        ),
        ([*ring("{}.0".format, str), (7, "abc")], "the target of row 50, 'abc', is not an integer, but"),
        ([*ring(str, str), ("0.5", 7)], r"the source of row 50, '0\.5', is not an integer"),
        ([*[(1, 2)] * LONG, *ring(str, str), ("1.5", 7)], rf"the source of row {LONG + COUNT}, '1\.5', is not an int"),
        ([*ring(str, str), ("nan", 7)], "the source of row 50, 'nan', is not an integer"),
        (
            [("inf", 7), ("1e3", 8), *ring(str, str), (7, "NA")],
            "the source of row 0, 'inf', is not an integer, but 51",
        ),
        ([*ring(str, str), (7, "0x7")], "the target of row 50, '0x7', is not an integer"),
        ([*ring(str, str), (7, "1_0")], "the target of row 50, '1_0', is not an integer"),
        ([*ring(str, str), (7, "007")], "the target of row 50, '007', is the same number as '7', which occurs too"),
        ([*ring(str, str), ("", 7)], "the source of row 50, None, is not a node of the edges"),
        ([*ring("{}.0".format, str), ("", 7)], "the source of row 50, None, is not a node of the edges"),
        ([*ring("n{}".format, str), (7, "")], "the target of row 50, None, is not a node of the edges"),
        ([*ring("n{}".format, str), (7, '""')], "the target of row 50, '', is empty|the target of row 50, None"),
    ],
)
def test_mistakes_among_ids_are_refused_with_their_row(tmp_path, rows, error):
    with pytest.raises(ValueError, match=rf"edges\.csv: {error}"):
        convert(tmp_path, write(tmp_path / "edges.csv", rows))
    assert not (tmp_path / "out").exists()


def test_ids_are_texts_or_numbers_on_request(tmp_path):
    edges = write(tmp_path / "edges.csv", [*ring(str, "{}.0".format), (7, "007"), (7, "0.5")])
    with pytest.raises(ValueError, match=r"the target of row 51, '0\.5', is not an integer, as which ids=number"):
        convert(tmp_path, edges, ids="number")
    counts, pairs, _ = convert(tmp_path, edges, ids="text")
    assert counts["node"] == 2 * COUNT + 2
    assert pairs == sorted([*ring(str, "{}.0".format), ("7", "007"), ("7", "0.5")])
    with pytest.raises(ValueError, match="ids='word' is unknown; use auto, number, text"):
        convert(tmp_path, edges, ids="word")


def test_a_float_that_is_not_exact_is_refused(tmp_path):
    chosen = f"(range * {1 << 52})::DOUBLE AS source, range AS target"
    duckdb.sql(f"COPY (SELECT {chosen} FROM range(3)) TO '{tmp_path}/edges.parquet'")
    with pytest.raises(ValueError, match=r"the source of row 2, '9.*', is a double above 2\^53"):
        convert(tmp_path, tmp_path / "edges.parquet")


@pytest.mark.parametrize("written", KINDS)
def test_several_files_of_edges_share_the_ids_of_a_node_type(tmp_path, written):
    """Users are floats in one file and integers in the other; items are written in several ways."""
    write(tmp_path / "a0.csv", ring("{}.0".format, KINDS[written])[:25])
    write(tmp_path / "a1.csv", ring("{}.0".format, KINDS[written])[25:])
    likes = write(tmp_path / "b.csv", ring(KINDS[written], str))
    source = {"user__buys__item": tmp_path / "a*.csv", "item__of__user": likes}
    counts = convert_tables(source, tmp_path / "out")
    assert counts["user"] == counts["item"] == COUNT
    for name in ("user", "item"):
        found = read_ids(node_folder(tmp_path / "out", name))
        write_as = KINDS[written] if name == "item" and written in ("padded", "texts") else str
        ids = [write_as(n) for n in range(1, COUNT + 1)]
        assert found == (ids if write_as is str else sorted(ids))
    graph = load_folder(tmp_path / "out")
    assert graph["user", "buys", "item"].graph.num_edges == COUNT
    write(tmp_path / "a1.csv", [*ring("{}.0".format, KINDS[written])[25:], ("x", KINDS[written](1))])
    with pytest.raises(ValueError, match=r"a\*\.csv: the source of row 50 \(counted over 2 files\), 'x', is not"):
        convert_tables(source, tmp_path / "again")


@pytest.mark.parametrize("written", KINDS)
def test_edges_find_the_nodes_of_a_table_by_number_or_text(tmp_path, written):
    nodes = write(tmp_path / "nodes.csv", [(KINDS[written](n), n) for n in range(1, COUNT + 1)], "id,f")
    for kind, other in KINDS.items():
        edges = write(tmp_path / "edges.csv", ring(other, other))
        if kind == written or not {"padded", "texts"} & {kind, written}:
            counts, pairs, _ = convert(tmp_path, edges, nodes)
            assert counts == {"node": COUNT, "node__to__node": COUNT}
            assert pairs == sorted((str(n), str((n + 1) % COUNT)) for n in range(COUNT))
            (tmp_path / "out").rename(tmp_path / kind)
            continue
        with pytest.raises(ValueError, match=r"is not a node of|is the same number as"):
            convert(tmp_path, edges, nodes)


def test_late_decimals_of_features_are_not_rounded(tmp_path):
    edges = write(tmp_path / "edges.csv", [(0, 1)])
    nodes = write(tmp_path / "nodes.csv", [(n, 1) for n in range(LONG)] + [(LONG, 1.5)], "id,f")
    convert(tmp_path, edges, nodes)
    assert np.load(tmp_path / "out/x.npy")[-1] == 1.5
