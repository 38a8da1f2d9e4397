"""From tables in files, of any size, to a folder of ``.npy`` files that :func:`load_folder` maps into memory."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch_geometric.typing import EdgeType

from lightning_gnn.datasets.column_names import MASKS, SPLITS
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.datasets.hetero_folder import BETWEEN, TYPES, type_folders
from lightning_gnn.datasets.named_tables import (
    ALONE,
    BETWEEN_ALONE,
    ENDS,
    INTEGERS,
    NamedTables,
    Say,
    table_of,
)
from lightning_gnn.datasets.published_files import published
from lightning_gnn.datasets.synthetic import Labels
from lightning_gnn.datasets.table_files import Columns, TableFiles, listed, matching, quoted, text
from lightning_gnn.datasets.text_files import check_content
from lightning_gnn.datasets.topology_files import TOPOLOGY
from lightning_gnn.features.arrays import save_arrays, write_blocks
from lightning_gnn.graph.csc import index_dtype
from lightning_gnn.runtime.files import write_whole

_NUMBERS = (*INTEGERS, "FLOAT", "DOUBLE", "BOOLEAN", "DECIMAL")
_SHOWN = 12  # names of features that a message shows
_BLOCK = 1 << 22  # numbers that are written at a time, at least a row of them
_CODES_FROM, _MOST_CODES, _NUMBERS_TO = 1 << 16, 1000, 1 << 24
"""From which number on labels may be codes, how many codes there may be, and up to which number labels may be else."""
Tables: TypeAlias = str | Path | Mapping[str, str | Path]
_OF_DATABASE = 0.6
"""Share of the memory that the database gets; the rest is for what is on its way from there to the files."""


def convert_tables(
    source: Tables,
    out: str | Path,
    nodes: Tables | None = None,
    memory: int = 4 << 30,
    undirected: bool = False,
    random_features: int = 0,
    random_labels: int = 0,
    say: Say = lambda message: None,
) -> dict[str, int]:
    """Convert tables of edges and of nodes to a folder for :func:`~lightning_gnn.datasets.folder.load_folder`.

    ``docs/how-to/own-data.md`` lists formats and columns. Tables are text, Parquet or Arrow files, or ``.npy`` of
    edges; a pattern stands for several files. Encoding, separator and header of text are found, and reported. The
    tables pass through DuckDB, which spills to disk; in addition, 8 bytes per node are held. An interrupted conversion
    goes on where it stopped. ``source`` may also be a sparse matrix (``.npz``, ``.mtx``, or a folder with
    ``indptr.npy`` and ``indices.npy``, rows being sources), WebGraph's ``.graph-txt``, a folder of OGB, or triples of
    head, relation and tail.

    Ends of edges are the columns ``source`` and ``target`` (or similar names, or the first two). Of nodes, ``id`` is
    what edges refer to, or the row number; ``label`` becomes ``y`` (NULL: -1 or NaN), ``split`` the masks, ``time`` an
    attribute, and other numbers become features (NULL: 0). Texts are left out.

    Args:
        source: Edges; for a graph with types, a file for each ``SOURCE__RELATION__TARGET``.
        out: The folder to make.
        nodes: Nodes; for a graph with types, a file for each type that has one.
        memory: Bytes that the process may use.
        undirected: Add the reverse of each edge, and keep each edge once; between two types, as a type ``rev_…``.
        random_features: Draw so many features, where there are none.
        random_labels: Draw one of so many classes for each node, and a tenth of the nodes for each split, where there
            are no labels.
        say: Called with what is done.

    Returns:
        The numbers of nodes by type, then of edges by type.

    Raises:
        FileExistsError, FileNotFoundError: There is such a folder already, or a file is missing.
        ModuleNotFoundError: DuckDB is missing, or for Arrow files pyarrow.
        OSError: The disk has no room for it.
        ValueError: A file cannot be read or holds no rows, as many classes as nodes, an id that is missing or twice
            there, an edge to no node, names of types that do not fit each other, or a name that no file can have.
    """
    out = Path(out)
    folder = out.with_name(f"{out.name}.partial")
    if os.path.lexists(out):
        left = f" ({folder}, which is left of its conversion, can go)" if folder.exists() else ""
        raise FileExistsError(f"{out} exists already{left}; remove it, or choose another folder")
    edges, tables, alone = _named(source, nodes)
    for path in (*edges.values(), *tables.values()):
        for file in matching(path):
            check_content(file)
    form = published(edges[BETWEEN_ALONE], folder / "unpacked") if alone else None
    of_edges = edges.values() if form is None else form.files
    files = {str(path): _state(path) for path in (*of_edges, *tables.values())}
    drawn = random_features, random_labels
    given = [sorted((str(kind), str(path)) for kind, path in names.items()) for names in (edges, tables)]
    of = [5, *given, undirected, *drawn, files]
    database = TableFiles(folder / "database", int(memory * _OF_DATABASE), of, folder / "graph")
    if database.resumed:
        say("going on with what an earlier run has left")
    try:
        work = _Conversion(database, folder / "graph", edges, tables, alone, form, say)
        counts = work.run(undirected, *drawn)
    finally:
        database.close()
    # Its checks run once, here.
    labels: Labels = "numbers" if work.alone and work.has_numbers else "classes"
    load_folder(folder / "graph", labels=labels)
    (folder / "graph").rename(out)
    shutil.rmtree(folder)
    return counts


def _named(source: Tables, nodes: Tables | None) -> tuple[dict[EdgeType, str | Path], dict[str, str | Path], bool]:
    """Return the files of edges and of nodes by type, and whether there are no types."""
    if not isinstance(source, Mapping):
        if isinstance(nodes, Mapping):
            raise ValueError("nodes have types, but edges have none: name them, as source.paper__cites__paper=FILE")
        return {BETWEEN_ALONE: source}, {} if nodes is None else {ALONE: nodes}, True
    if nodes is not None and not isinstance(nodes, Mapping):
        raise ValueError("edges have types, but nodes have none: name them, as nodes.paper=FILE")
    edges = {}
    for name, path in source.items():
        kind = tuple(str(name).split(BETWEEN))
        if len(kind) != 3 or not all(kind):
            raise ValueError(f"{name!r} names no type of edges; write SOURCE{BETWEEN}RELATION{BETWEEN}TARGET")
        edges[kind] = path
    types = {end for kind in edges for end in (kind[0], kind[2])}
    if unknown := sorted(set(nodes or {}) - types):
        raise ValueError(f"nodes.{unknown[0]} is the end of no edges; their types are {', '.join(sorted(types))}")
    return edges, dict(nodes or {}), False


def _state(path: str | Path) -> list[Any]:
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in matching(path)]


class _Conversion(NamedTables):
    """One conversion, whose steps leave tables and files behind; what is there is not made again."""

    def run(self, undirected: bool, random_features: int, random_labels: int) -> dict[str, int]:
        """Do all steps."""
        self.read_all()
        if not self.alone:
            self._name_folders([made for kind in self.edges for made in self._directions(kind, undirected)])
        for name in self.types:
            self._number(name)
        counts = {name: self.database.count(table_of("ids", name)) for name in self.types}
        known = None if self.form is None else self.form.num_nodes
        if known is not None and counts[ALONE] != known:
            raise ValueError(f"{self.tables[ALONE]} has {counts[ALONE]} nodes, but {self.edges[BETWEEN_ALONE]} {known}")
        for name in self.types:
            self.say(f"writing {counts[name]} nodes{self.called(name)}")
            self._write_nodes(name, counts[name], random_features, random_labels)
        edges = {}
        for kind in self.edges:
            for made, parts in self._directions(kind, undirected).items():
                self.say(f"sorting edges{self.called(BETWEEN.join(made))}")
                edges[BETWEEN.join(made)] = self._write_edges(kind, made, parts, counts, undirected)
        return counts | edges

    def _name_folders(self, kinds: list[EdgeType]) -> None:
        folders, listed = type_folders(self.types, kinds)
        self.folders = {kind: self.folder / name for kind, name in folders.items()}
        if listed is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / TYPES, listed)

    def _number(self, name: str) -> None:
        """Make the table of ids of a type, whose rows have the numbers of its nodes."""
        # Nodes without a table but with a known number are numbered by row.
        table = table_of("ids", name)
        if name not in self.tables and self.rows is not None:
            self.database.make(table, f"SELECT range AS id, range AS number FROM range({self.rows})")
            return
        # Nodes that only edges name are numbered in the order of their ids.
        if name not in self.tables:
            ends = [
                f"SELECT {quoted(end)} AS id FROM {quoted(self.names[kind])}"
                for kind in self.edges
                for end, of in zip(ENDS, (kind[0], kind[2]), strict=True)
                if of == name
            ]
            some = f"SELECT DISTINCT id FROM ({' UNION ALL '.join(ends)}) WHERE id IS NOT NULL ORDER BY id"
            self.database.make(table, f"SELECT id, row_number() OVER () - 1 AS number FROM ({some})")
            return
        # Nodes with a table are numbered by row, with or without ids of their own.
        source = table_of("nodes", name)
        if self._by_row(name):
            self.database.make(table, f"SELECT rowid AS id, rowid AS number FROM {quoted(source)}")
            return
        self.database.make(table, f"SELECT id AS id, rowid AS number FROM {quoted(source)}")
        # Ids must be present and unique.
        for wrong, what in (("id IS NULL", "has no id"), (None, "is there twice")):
            found = (
                f"SELECT id, min(number) FROM {quoted(table)} GROUP BY id HAVING count(*) > 1 LIMIT 1"
                if wrong is None
                else f"SELECT id, number FROM {quoted(table)} WHERE {wrong} LIMIT 1"
            )
            for value, number in self.database.query(found):
                of = f"row {number}" if value is None else f"id {value!r}"
                raise ValueError(f"{self.tables[name]}: {of} {what}; each node has an id of its own")

    def _by_row(self, name: str) -> bool:
        """Say whether nodes are called by the number of their row."""
        if name not in self.tables:
            return self.rows is not None
        return "id" not in self.database.columns(table_of("nodes", name))

    def _write_nodes(self, name: str, count: int, random_features: int, random_labels: int) -> None:
        folder = self.folders[name]
        folder.mkdir(parents=True, exist_ok=True)
        table, columns = table_of("nodes", name), {}
        # Nodes that only edges name get a file with their ids, in the order of their numbers.
        if name in self.tables:
            columns = self.database.columns(table)
        elif self.rows is None:
            self._write_ids(name, folder, count)
        # Columns of numbers, or of lists of numbers, become features.
        features = [column for column in columns if column not in ("id", "label", "split", "time", *MASKS)]
        widths = {column: self._width(name, column, columns[column]) for column in features}
        if left_out := [column for column in features if not widths[column]]:
            self.say(f"left out{self.called(name)}, as they are no numbers: {', '.join(left_out)}")
        used = {column: width for column, width in widths.items() if width}
        if used:
            shown = [*used] if len(used) <= _SHOWN else [*list(used)[: _SHOWN - 1], "…", list(used)[-1]]
            self.say(f"features{self.called(name)} are {', '.join(shown)}: {sum(used.values())} in all")
        # Write labels, splits, masks and times as files of their own.
        if "label" in columns:
            self._write_labels(table, folder, count, columns["label"], name)
        elif random_labels and not (folder / "y.npy").exists():
            _draw_labels(folder, count, random_labels)
        if "split" in columns:
            self._write_splits(table, folder, count, name)
        for mask in MASKS:
            if mask in columns:
                self._write_mask(table, folder, count, mask, f"coalesce({mask}::BOOLEAN, false)")
        if "time" in columns and self.alone:
            self.say("left out: time, for which a folder without types has no place; name the types to keep it")
        elif "time" in columns:
            self._write_column(table, "time", columns["time"], folder / "time.npy", count, self.tables[name])
        # Write the features in blocks, so that they need not fit in memory.
        width = sum(used.values()) or random_features
        if (folder / "x.npy").exists():
            return
        # Without features a folder must at least say how many nodes there are.
        if not width and self.alone:
            raise ValueError("nodes have no features: give nodes=FILE with columns of numbers, or random_features=64")
        if not width:
            save_arrays(folder, {"num_nodes": np.array(count)})
        else:
            rows = max(1, _BLOCK // width)
            blocks = self._features(table, columns, used, rows) if used else _drawn(count, width, rows)
            write_blocks(folder / "x.npy", np.float32, (count, width), blocks)

    def _width(self, name: str, column: str, kind: str) -> int:
        """Return how many features a column is; none if it holds no numbers."""
        of, _, length = kind.partition("[")
        if of.partition("(")[0] not in _NUMBERS or "[" in length:
            return 0
        if not length:
            return 1
        if length != "]":
            return int(length[:-1])
        table = quoted(table_of("nodes", name))
        found = self.database.query(f"SELECT DISTINCT len({quoted(column)}) FROM {table} LIMIT 2")
        if len(found) != 1 or not found[0][0]:
            raise ValueError(
                f"{self.tables[name]}: the lists of {column} have different lengths, or are missing; features need one"
            )
        return int(found[0][0])

    def _features(
        self, table: str, columns: Mapping[str, str], widths: Mapping[str, int], rows: int
    ) -> Iterator[np.ndarray]:
        lists, chosen = {column for column in widths if columns[column].endswith("]")}, {}
        for column, width in widths.items():
            name = quoted(column)
            if column not in lists:
                chosen[column] = f"coalesce({name}, 0)::FLOAT"
                continue
            gap = f"SELECT 1 FROM {quoted(table)} WHERE list_count({name}) < len({name}) LIMIT 1"
            filled = f"[coalesce(value, 0) FOR value IN {name}]" if self.database.query(gap) else name
            chosen[column] = f"{filled}::FLOAT[{width}]"
        for block in self.database.blocks(table, chosen, rows):
            yield np.column_stack([np.stack(list(block[name])) if name in lists else block[name] for name in widths])

    def _write_column(self, table: str, column: str, kind: str, path: Path, count: int, where: object) -> None:
        """Write an attribute: times as seconds since 1970, numbers as they are; ``where`` says what it is read from."""
        if path.exists():
            return
        if not self._is_attribute(kind):
            raise ValueError(f"{where}: {column} is {kind}, but numbers and times have a place")
        is_time = kind.startswith("TIMESTAMP") or kind == "DATE"
        whole = is_time or kind in INTEGERS
        value = f"floor(epoch({quoted(column)}))" if is_time else quoted(column)
        if self.database.query(f"SELECT 1 FROM {quoted(table)} WHERE {quoted(column)} IS NULL LIMIT 1"):
            raise ValueError(f"{where}: {column} is missing in some row; fill it in")
        chosen = {column: f"{value}::{'BIGINT' if whole else 'DOUBLE'}"}
        blocks = (block[column] for block in self.database.blocks(table, chosen, _BLOCK))
        write_blocks(path, np.int64 if whole else np.float64, (count,), blocks)

    def _write_labels(self, table: str, folder: Path, count: int, kind: str, name: str) -> None:
        whole = kind in (*INTEGERS, "VARCHAR", "BOOLEAN")
        self.has_numbers |= not whole
        if (folder / "y.npy").exists():
            return
        value, names = "label", None
        if kind.partition("(")[0] not in (*_NUMBERS, "VARCHAR"):
            raise ValueError(f"{self.tables[name]}: label is {kind}; labels are numbers or texts")
        if kind == "VARCHAR" or (kind in INTEGERS and self._are_codes(table, name)):
            rows = self.database.query(
                f"SELECT DISTINCT label FROM {quoted(table)} WHERE label IS NOT NULL ORDER BY label"
            )
            names = [str(row[0]) for row in rows]
            (folder / "classes.json").write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
            value = f"list_position([{', '.join(map(text, names))}], label::VARCHAR) - 1"
        if whole:
            distinct = self.database.query(f"SELECT count(DISTINCT label) FROM {quoted(table)}")[0][0]
            listed_there = "" if names is None else ", listed in classes.json"
            self.say(f"labels{self.called(name)} are {distinct} classes{listed_there}")
        chosen = {"y": f"coalesce(({value})::{'BIGINT' if whole else 'FLOAT'}, {-1 if whole else text('NaN')})"}
        blocks = (block["y"] for block in self.database.blocks(table, chosen, _BLOCK))
        write_blocks(folder / "y.npy", np.int64 if whole else np.float32, (count,), blocks)

    def _are_codes(self, table: str, name: str) -> bool:
        """Say whether whole numbers as labels are codes, of which few values are large and stand there repeatedly."""
        facts = "coalesce(max(label), 0), count(label), count(DISTINCT label)"
        largest, count, distinct = self.database.query(f"SELECT {facts} FROM {quoted(table)}")[0]
        if largest >= _CODES_FROM and distinct <= _MOST_CODES and 2 * distinct <= count:
            return True
        if largest >= _NUMBERS_TO:
            raise ValueError(
                f"{self.tables[name]}: label goes up to {largest:,} and has {distinct:,} values for {count:,} nodes, "
                "so it is not a class; write classes as texts, and numbers to be predicted with decimals, as 1.0"
            )
        return False

    def _write_splits(self, table: str, folder: Path, count: int, name: str) -> None:
        known = [word for words in SPLITS.values() for word in words]
        words = ", ".join(map(text, known))
        strange = f"SELECT split FROM {quoted(table)} WHERE split IS NOT NULL AND lower(split) NOT IN ({words}) LIMIT 1"
        for (word,) in self.database.query(strange):
            raise ValueError(f"split is {word!r} in {self.tables[name]}; it may be {', '.join(known)}, or missing")
        for split, names in SPLITS.items():
            among = f"coalesce(lower(split) IN ({', '.join(map(text, names))}), false)"
            self._write_mask(table, folder, count, f"{split}_mask", among)

    def _write_mask(self, table: str, folder: Path, count: int, mask: str, value: str) -> None:
        if not (path := folder / f"{mask}.npy").exists():
            blocks = (block[mask] for block in self.database.blocks(table, {mask: value}, _BLOCK))
            write_blocks(path, np.bool_, (count,), blocks)

    def _write_ids(self, name: str, folder: Path, count: int) -> None:
        table = table_of("ids", name)
        if self.database.columns(table)["id"] not in INTEGERS[:-2]:  # int64 has no room for the last two
            ids = quoted(table)
            self.database.query(f"COPY (SELECT * FROM {ids} ORDER BY number) TO {text(folder / 'id.parquet')}")
        elif not (folder / "id.npy").exists():
            blocks = (block["id"] for block in self.database.blocks(table, {"id": "id::BIGINT"}, _BLOCK))
            write_blocks(folder / "id.npy", np.int64, (count,), blocks)

    def _directions(self, kind: EdgeType, undirected: bool) -> dict[EdgeType, list[bool]]:
        """Return the types of edges that become of one, each with whether its edges are reversed."""
        if not undirected:
            return {kind: [False]}
        if kind[0] == kind[2]:
            return {kind: [False, True]}
        return {kind: [False], (kind[2], f"rev_{kind[1]}", kind[0]): [True]}

    def _write_edges(
        self, kind: EdgeType, made: EdgeType, parts: list[bool], counts: Mapping[str, int], undirected: bool
    ) -> int:
        """Write a type of edges in CSC order: sorted by target, those of one target as they stand in the file."""
        # Choose the columns that become attributes of edges, and report the others.
        folder = self.folders[made]
        folder.mkdir(parents=True, exist_ok=True)
        columns = self.database.columns(self.names[kind])
        extras = [column for column in columns if column not in ENDS]
        kept = {} if self.alone else {name: columns[name] for name in extras if self._is_attribute(columns[name])}
        if left_out := [name for name in extras if name not in kept]:
            why = "for which a folder without types has no place; name the types" if self.alone else "no numbers"
            self.say(f"left out of the edges, {why}: {', '.join(left_out)}")
        # Reject names that a file cannot have; edges with attributes cannot be merged with their opposites.
        if bad := [column for column in kept if column in (*TOPOLOGY, "edge_index", "graph") or "/" in column]:
            raise ValueError(f"{self.edges[kind]}: {bad[0]!r} cannot be the name of an attribute; rename the column")
        if kept and undirected and kind[0] == kind[2]:
            raise ValueError(f"undirected keeps each edge once, but {BETWEEN.join(kind)} has {', '.join(kept)} by edge")
        # Number the ends, and add the opposite direction where it is wanted.
        numbered = self._numbered(kind, kept)
        table = table_of("sorted", BETWEEN.join(made))
        with_extras = f", {listed(list(kept))}" if kept else ""
        ways = [
            f"SELECT {'t' if turned else 's'} AS s, {'s' if turned else 't'} AS t, edge{with_extras} "
            f"FROM {quoted(numbered)}"
            for turned in parts
        ]
        chosen, order = " UNION ALL ".join(ways), "t, edge"
        # Both directions together may contain an edge twice, which is then kept once.
        if len(parts) > 1:
            chosen, order = f"SELECT DISTINCT s, t FROM ({chosen})", "t, s"
        # Sort by target, so that the rows are in CSC order.
        self.database.make(table, f"SELECT s, t{with_extras} FROM ({chosen}) ORDER BY {order}")
        num_edges = self.database.count(table)
        for name, of in kept.items():
            self._write_column(table, name, of, folder / f"{name}.npy", num_edges, self.edges[kind])
        # Stream the sources to the file while the in-degrees are counted.
        if not (folder / "indptr.npy").exists():
            indptr = np.zeros(counts[made[2]] + 1, np.int64)

            def indices() -> Iterator[np.ndarray]:
                for block in self.database.blocks(table, {"s": "s", "t": "t"}, _BLOCK):
                    _count(indptr, block)
                    yield block["s"]

            write_blocks(folder / "indices.npy", index_dtype(counts[made[0]]), (num_edges,), indices())
            save_arrays(folder, {"indptr": np.cumsum(indptr, out=indptr)})
        return num_edges

    def _is_attribute(self, kind: str) -> bool:
        return kind.partition("(")[0] in _NUMBERS or kind.startswith("TIMESTAMP") or kind == "DATE"

    def _numbered(self, kind: EdgeType, kept: Mapping[str, str]) -> str:
        """Make the table of edges between numbers of nodes; return its name."""
        # Select both ends as numbers: a row is its own number, an id is looked up by a join.
        name, (source, target) = table_of("numbered", BETWEEN.join(kind)), ENDS
        numbers, joined, within = [], "", ["true"]
        ends = (("a", source, kind[0]), ("b", target, kind[2]))
        for alias, end, of in ends:
            cast = self._compared(kind, end, of)
            if self._by_row(of):
                # Row numbers outside the table are dropped here, and reported below.
                numbers.append(f"e.{quoted(end)}::BIGINT")
                within.append(f"e.{quoted(end)}{cast} BETWEEN 0 AND {self.database.count(table_of('ids', of)) - 1}")
            else:
                numbers.append(f"{alias}.number")
                joined += f" JOIN {quoted(table_of('ids', of))} {alias} ON {alias}.id{cast} = e.{quoted(end)}{cast}"
        # The order of the file is kept as `edge`, so that sorting is reproducible.
        with_extras = "".join(f", e.{quoted(column)}" for column in kept)
        edges = quoted(self.names[kind])
        self.database.make(
            name,
            f"SELECT {numbers[0]} AS s, {numbers[1]} AS t, e.rowid AS edge{with_extras} FROM {edges} e {joined} "
            f"WHERE {' AND '.join(within)}",
        )
        # If edges were lost, find the first one that refers to no node, and name it.
        if self.database.count(name) < self.database.count(self.names[kind]):
            for _, end, of in ends:
                cast = self._compared(kind, end, of)
                among = f"SELECT id{cast} FROM {quoted(table_of('ids', of))}"
                lost = (
                    f"SELECT {quoted(end)}, rowid FROM {edges} WHERE {quoted(end)} IS NULL OR "
                    f"{quoted(end)}{cast} NOT IN ({among}) LIMIT 1"
                )
                for value, row in self.database.query(lost):
                    nodes = self.tables.get(of, "the edges")
                    raise ValueError(f"{self.edges[kind]}: the {end} of row {row}, {value!r}, is no node of {nodes}")
        return name

    def _compared(self, kind: EdgeType, end: str, of: str) -> str:
        """Return as what an end of edges is compared with the ids of nodes: as it is, a number of a row, or a text."""
        table = self.names[kind]
        found = self.database.columns(table)[end], self.database.columns(table_of("ids", of))["id"]
        if found[0] == found[1] or (all(name.partition("(")[0] in _NUMBERS for name in found) and not self._by_row(of)):
            return ""
        if not self._by_row(of):
            return "::VARCHAR"
        if found[0] in INTEGERS:
            return ""
        whole = f"TRY_CAST({quoted(end)} AS DOUBLE) = TRY_CAST({quoted(end)} AS BIGINT)"
        broken = f"{quoted(end)} IS NOT NULL AND NOT coalesce({whole}, false)"
        for value, row in self.database.query(
            f"SELECT {quoted(end)}, rowid FROM {quoted(table)} WHERE {broken} LIMIT 1"
        ):
            nodes = self.tables.get(of, "the graph")
            wrong = f"the {end} of row {row}, {value!r}, is no number of a row"
            raise ValueError(f"{self.edges[kind]}: {wrong}, as which it is read: {nodes} has no column id")
        return "::BIGINT"


def _count(indptr: np.ndarray, block: Columns) -> None:
    """Count a block's edges by target, which ascend, one place behind it."""
    first, last = int(block["t"][0]), int(block["t"][-1])
    indptr[first + 1 : last + 2] += np.bincount(block["t"] - first, minlength=last - first + 1)


def _drawn(count: int, width: int, rows: int) -> Iterator[np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    for start in range(0, count, rows):
        yield torch.randn(min(rows, count - start), width, generator=generator).numpy()


def _draw_labels(folder: Path, count: int, num_classes: int) -> None:
    generator = np.random.default_rng(0)
    part = generator.integers(10, size=count, dtype=np.int8)
    save_arrays(folder, {f"{split}_mask": part == number for number, split in enumerate(SPLITS)})
    save_arrays(folder, {"y": generator.integers(num_classes, size=count)})
