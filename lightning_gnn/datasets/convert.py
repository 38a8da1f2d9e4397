"""Out-of-core conversion of table files to a folder of ``.npy`` files for :func:`load_folder`."""

import errno
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock, Timeout
from torch_geometric.typing import EdgeType

from lightning_gnn.datasets.column_names import MASKS, SPLITS
from lightning_gnn.datasets.edge_order import EdgeOrder
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.datasets.hetero_folder import BETWEEN, TYPES, type_folders
from lightning_gnn.datasets.id_types import ID_RULES, IdRule
from lightning_gnn.datasets.named_tables import EDGE_TYPE, ENDPOINTS, NODE_TYPE, MessageSink, NamedTables, table_name
from lightning_gnn.datasets.published_files import detect_published
from lightning_gnn.datasets.synthetic import Labels
from lightning_gnn.datasets.table_files import INTEGER_TYPES, TableFiles, as_name, as_text, describe_row, find_files
from lightning_gnn.datasets.text_files import check_content
from lightning_gnn.datasets.topology_files import TOPOLOGY
from lightning_gnn.features.arrays import as_numpy, save_arrays, write_blocks
from lightning_gnn.features.table import FEATURE_DTYPES, check_finite_rows
from lightning_gnn.graph.csc import index_dtype
from lightning_gnn.runtime.files import write_whole
from lightning_gnn.runtime.memory_info import free_memory
from lightning_gnn.runtime.messages import shown
from lightning_gnn.runtime.urls import local_path

_NUMERIC = (*INTEGER_TYPES, "FLOAT", "DOUBLE", "BOOLEAN", "DECIMAL")
_MAX_SHOWN = 12  # maximum number of feature names in a message
_NUMBERS_PER_BLOCK = 1 << 22  # numbers written at a time, at least one row
_MIN_CODE, _MAX_CODES, _MAX_CLASS_NUMBER = 1 << 16, 1000, 1 << 24
"""Smallest value of a label that may be a code, maximum number of codes, and limit of labels that are class numbers."""
Tables: TypeAlias = str | Path | Mapping[str, str | Path]
_MIN_ANNOUNCED = 20_000_000  # minimum number of edges and node attributes for an estimate of the cost
_BYTES_PER_EDGE, _BYTES_PER_VALUE = 20, 6  # in the database and the folder
_NUMBERED_BYTES = 12  # per edge between nodes with ids, also while sorted out of core
_DATABASE_MEMORY_FRACTION = 0.6  # the rest of `memory` buffers rows between the database and the files


def convert_tables(
    source: Tables,
    out: str | Path,
    nodes: Tables | None = None,
    memory: int = 4 << 30,
    undirected: bool = False,
    random_features: int = 0,
    random_labels: int = 0,
    say: MessageSink = lambda message: None,
    feature_dtype: str = "float32",
    ids: IdRule = "auto",
) -> dict[str, int]:
    """Convert edge and node tables to a folder for :func:`~lightning_gnn.datasets.folder.load_folder`.

    ``docs/how-to/own-data.md`` lists formats and columns. Tables are text, Parquet or Arrow files, or ``.npy`` files of
    edges; a glob pattern selects several files. Encoding, separator and header of text files are detected and reported.
    DuckDB processes the tables out of core; the conversion also holds 8 bytes per node in memory. A repeated call
    resumes an interrupted conversion. ``source`` may also be a sparse matrix (``.npz``, ``.mtx``, or a folder with
    ``indptr.npy`` and ``indices.npy``, whose rows are sources), a WebGraph ``.graph-txt`` file, an OGB folder, or
    triples of head, relation and tail.

    The edge columns are ``source`` and ``target`` (or similar names, or the first two). Edges refer to the node column
    ``id``, or to the row number without one; ``label`` becomes ``y`` (NULL: -1 or NaN), ``split`` the masks, ``time``
    an attribute, and other numeric columns become features (NULL: 0). Text columns are left out.

    Args:
        source: Edge table; for a heterogeneous graph, one file per ``SOURCE__RELATION__TARGET``.
        out: The folder to create.
        nodes: Node table; for a heterogeneous graph, one file per node type that has a table.
        memory: Memory limit of the process, in bytes.
        undirected: Add the reverse of each edge and remove duplicates; between two node types, as edge type ``rev_…``.
        random_features: Number of random features per node if the tables have no features.
        random_labels: Number of classes for random labels if the tables have no labels; each split then gets a tenth
            of the nodes.
        say: Called with a message for each step.
        feature_dtype: ``"float32"``, or ``"float16"`` or ``"bfloat16"``, which store features in half of the bytes.
        ids: How to compare ids, in both ends of the edges and in the node table: ``"number"`` as integers (``007`` and
            ``7.0`` are 7), ``"text"`` as they are written, ``"auto"`` as integers if all are, else as texts. It raises
            an error if a few texts are among integers or if two texts are the same number.

    Returns:
        The number of nodes of each node type, then the number of edges of each edge type.

    Raises:
        FileExistsError, FileNotFoundError: ``out`` exists already, or a file is missing.
        ModuleNotFoundError: DuckDB is missing, or pyarrow for Arrow files.
        BlockingIOError: Another process converts to ``out``.
        MemoryError: The process gets less memory than ``memory``.
        OSError: The disk is full.
        ValueError: A file cannot be read or holds no rows, there are as many classes as nodes, an id is missing or
            occurs twice, an edge refers to an unknown node, type names mismatch, or a name is not a valid file name.
    """
    if getattr(torch, feature_dtype, None) not in FEATURE_DTYPES:
        raise ValueError(f"feature_dtype={feature_dtype!r} is unknown; use float32, float16 or bfloat16")
    if ids not in ID_RULES:
        raise ValueError(f"ids={ids!r} is unknown; use {', '.join(ID_RULES)}")
    out = local_path(out)
    folder = out.with_name(f"{out.name}.partial")
    if os.path.lexists(out):
        leftover = f" ({folder}, left over from its conversion, can be removed)" if folder.exists() else ""
        raise FileExistsError(f"{out} exists already{leftover}; remove it, or choose another folder")
    edges, tables, is_homogeneous = _by_type(source, nodes)
    for path in (*edges.values(), *tables.values()):
        for file in find_files(path):
            check_content(file)
    drawn, budget = (undirected, random_features, random_labels), int(memory * _DATABASE_MEMORY_FRACTION)
    with _lock(folder), _name_what_lacks(folder, memory) as needed:
        published = detect_published(edges[EDGE_TYPE], folder / "unpacked") if is_homogeneous else None
        of_edges = edges.values() if published is None else published.files
        files = {str(path): _fingerprint_files(path) for path in (*of_edges, *tables.values())}
        inputs = [sorted((str(edge_type), str(path)) for edge_type, path in names.items()) for names in (edges, tables)]
        fingerprint = [8, *inputs, drawn, feature_dtype, ids, files]
        database = TableFiles(folder / "database", budget, fingerprint, folder / "graph", say)
        try:
            if database.resumed:
                say("resuming an interrupted conversion")
            elif published is None:
                size, announced = _estimate_disk(database, edges.values(), tables.values())
                needed.append(size)
                if announced:
                    say(announced)
            conversion = _Conversion(database, folder / "graph", edges, tables, is_homogeneous, published, say)
            conversion.id_rule = ids
            conversion.feature_dtype, conversion.memory = getattr(torch, feature_dtype), memory - budget
            counts = conversion.run(*drawn)
        finally:
            database.close()
        # Run the checks of load_folder once, before the folder gets its name.
        labels: Labels = "numbers" if conversion.is_homogeneous and conversion.has_numbers else "classes"
        load_folder(folder / "graph", labels=labels)
        (folder / "graph").rename(out)
        shutil.rmtree(folder)
    return counts


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock the folder of a conversion against other processes; a killed process leaves no lock."""
    is_new, owner = not folder.exists(), folder / "owner"
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if is_new:
            stack.callback(_remove_if_unused, folder)
        try:
            stack.enter_context(FileLock(folder / ".running", timeout=0, thread_local=False))
        except Timeout:
            by = owner.read_text() if owner.exists() else "another process"
            raise BlockingIOError(f"{folder} is in use by {by}: wait until it ends, or choose another out=") from None
        except (NotImplementedError, OSError):
            pass  # a file system without locks
        write_whole(owner, f"process {os.getpid()} on {platform.node()}")
        yield


def _remove_if_unused(folder: Path) -> None:
    """Remove a folder in which a conversion has not begun."""
    if folder.exists() and {path.name for path in folder.iterdir()} <= {".running", "owner"}:
        shutil.rmtree(folder)


@contextmanager
def _name_what_lacks(folder: Path, memory: int) -> Iterator[list[int]]:
    """Complete the errors of a full disk and of too little memory; yield a list for the disk space needed."""
    needed: list[int] = []
    try:
        yield needed
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(folder).free
        total = f", and about {shown(sum(needed))} are needed in all" if sum(needed) else ""
        where = f"no space left on device for {folder}: {shown(free)} are free{total}"
        fix = "free disk space and repeat the call, which goes on; or remove the folder, and choose another out="
        raise OSError(errno.ENOSPC, f"{where}; {fix}") from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't start new thread" not in str(error):
            raise
        reason = f" ({error})" if str(error) else ""
        asked = f"memory={shown(memory).replace(' ', '')} is more than the process gets: {free_memory()}{reason}"
        fix = "give a smaller memory=, or raise the limit, and repeat the call, which goes on"
        raise MemoryError(f"{asked}; {fix}") from None


def _estimate_disk(database: TableFiles, edges: Iterable[str | Path], tables: Iterable[str | Path]) -> tuple[int, str]:
    """Estimate the disk space that a conversion needs, at least; return it and a message."""
    num_edges = sum(database.estimate(path)[0] for path in edges)
    shapes = [database.estimate(path) for path in tables]
    num_values = sum(rows * columns for rows, columns in shapes)
    size = num_edges * _BYTES_PER_EDGE + num_values * _BYTES_PER_VALUE
    with_ids = size + num_edges * _NUMBERED_BYTES
    if not shapes:  # nodes without a table always have ids
        size = with_ids
    if num_edges + num_values < _MIN_ANNOUNCED:
        return size, ""
    needed = f"{shown(size)} of disk" + (f" ({shown(with_ids)} if nodes have ids)" if shapes else "")
    free = shutil.disk_usage(database.folder).free
    warning = ": probably too little" if free < size else ""
    rows = f"{num_edges:,} edges and {sum(rows for rows, _ in shapes):,} rows of nodes"
    return size, f"about {rows} need {needed} meanwhile, and {shown(free)} are free{warning}"


def _by_type(source: Tables, nodes: Tables | None) -> tuple[dict[EdgeType, str | Path], dict[str, str | Path], bool]:
    """Return the edge files and node files by type, and whether the graph is homogeneous."""
    if not isinstance(source, Mapping):
        if isinstance(nodes, Mapping):
            raise ValueError("nodes are by type, but edges are not: give types, as source.paper__cites__paper=FILE")
        return {EDGE_TYPE: source}, {} if nodes is None else {NODE_TYPE: nodes}, True
    if nodes is not None and not isinstance(nodes, Mapping):
        raise ValueError("edges are by type, but nodes are not: give types, as nodes.paper=FILE")
    edges = {}
    for name, path in source.items():
        edge_type = tuple(str(name).split(BETWEEN))
        if len(edge_type) != 3 or not all(edge_type):
            raise ValueError(f"invalid edge type {name!r}: write SOURCE{BETWEEN}RELATION{BETWEEN}TARGET")
        edges[edge_type] = path
    types = {end for edge_type in edges for end in (edge_type[0], edge_type[2])}
    if unknown := sorted(set(nodes or {}) - types):
        raise ValueError(f"nodes.{unknown[0]}: no edge type has this endpoint, only {', '.join(sorted(types))}")
    return edges, dict(nodes or {}), False


def _fingerprint_files(path: str | Path) -> list[Any]:
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in find_files(path)]


class _Conversion(NamedTables):
    """One resumable conversion; each step skips the tables and files that exist already."""

    feature_dtype = torch.float32
    memory = 1 << 30  # bytes for edges outside the database

    def run(self, undirected: bool, random_features: int, random_labels: int) -> dict[str, int]:
        """Run all steps."""
        self.read_all()
        if not self.is_homogeneous:
            self._name_folders([name for kind in self.edges for name in self._list_directions(kind, undirected)])
        for name in self.types:
            self._number_nodes(name)
        counts = {name: self.database.count(table_name("ids", name)) for name in self.types}
        expected = None if self.published is None else self.published.num_nodes
        if expected is not None and counts[NODE_TYPE] != expected:
            path = self.edges[EDGE_TYPE]
            raise ValueError(f"{self.tables[NODE_TYPE]} has {counts[NODE_TYPE]} nodes, but {path} has {expected}")
        for name in self.types:
            self.say(f"writing {counts[name]} nodes{self.type_suffix(name)}")
            self._write_nodes(name, counts[name], random_features, random_labels)
        edges = {}
        for edge_type in self.edges:
            for out_type, directions in self._list_directions(edge_type, undirected).items():
                self.say(f"sorting edges{self.type_suffix(BETWEEN.join(out_type))}")
                edges[BETWEEN.join(out_type)] = self._write_edges(edge_type, out_type, directions, counts, undirected)
        return counts | edges

    def _name_folders(self, kinds: list[EdgeType]) -> None:
        folders, listed = type_folders(self.types, kinds)
        self.folders = {edge_type: self.folder / name for edge_type, name in folders.items()}
        if listed is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / TYPES, listed)

    def _number_nodes(self, name: str) -> None:
        """Create the table that maps the ids of a node type to node numbers."""
        # Without a node table but with a known count, nodes are numbered by row.
        table = table_name("ids", name)
        if name not in self.tables and self.rows is not None:
            self.database.make(table, f"SELECT range AS id, range AS number FROM range({self.rows})")
            return
        # Nodes that occur only in edges are numbered in the order of their ids.
        if name not in self.tables:
            ends = [
                f"SELECT {as_name(end)} AS id FROM {as_name(self.names[edge_type])}"
                for edge_type in self.edges
                for end, node in zip(ENDPOINTS, (edge_type[0], edge_type[2]), strict=True)
                if node == name
            ]
            ids = f"SELECT DISTINCT id FROM ({' UNION ALL '.join(ends)}) WHERE id IS NOT NULL ORDER BY id"
            self.database.make(table, f"SELECT id, row_number() OVER () - 1 AS number FROM ({ids})")
            return
        # Nodes with a table are numbered by row, with or without an id column.
        source = table_name("nodes", name)
        if self._has_row_ids(name):
            self.database.make(table, f"SELECT rowid AS id, rowid AS number FROM {as_name(source)}")
            return
        self.database.make(table, f"SELECT id AS id, rowid AS number FROM {as_name(source)}")
        # Ids must be present and unique.
        for condition, problem in (("id IS NULL", "has no id"), (None, "occurs twice")):
            query = (
                f"SELECT id, min(number) FROM {as_name(table)} GROUP BY id HAVING count(*) > 1 LIMIT 1"
                if condition is None
                else f"SELECT id, number FROM {as_name(table)} WHERE {condition} LIMIT 1"
            )
            for value, number in self.database.query(query):
                node = f"row {number}" if value is None else f"id {value!r}"
                raise ValueError(f"{self.tables[name]}: {node} {problem}; node ids must be unique")

    def _has_row_ids(self, name: str) -> bool:
        """Return whether edges refer to nodes by row number."""
        if name not in self.tables:
            return self.rows is not None
        return "id" not in self.database.columns(table_name("nodes", name))

    def _write_nodes(self, name: str, count: int, random_features: int, random_labels: int) -> None:
        folder = self.folders[name]
        folder.mkdir(parents=True, exist_ok=True)
        table, columns = table_name("nodes", name), {}
        # Nodes that occur only in edges get a file with their ids, in the order of their numbers.
        if name in self.tables:
            columns = self.database.columns(table)
        elif self.rows is None:
            self._write_ids(name, folder, count)
        # Numeric columns, and columns with lists of numbers, become features.
        features = [column for column in columns if column not in ("id", "label", "split", "time", *MASKS)]
        widths = {column: self._count_features(name, column, columns[column]) for column in features}
        if left_out := [column for column in features if not widths[column]]:
            self.say(f"left out{self.type_suffix(name)}, not numeric: {', '.join(left_out)}")
        used = {column: width for column, width in widths.items() if width}
        if used:
            shown = [*used] if len(used) <= _MAX_SHOWN else [*list(used)[: _MAX_SHOWN - 1], "…", list(used)[-1]]
            self.say(f"features{self.type_suffix(name)} are {', '.join(shown)}: {sum(used.values())} in total")
        # Write labels, splits, masks and times to separate files.
        if "label" in columns:
            self._write_labels(table, folder, count, columns["label"], name)
        elif random_labels and not (folder / "y.npy").exists():
            _draw_labels(folder, count, random_labels)
        if "split" in columns:
            self._write_splits(table, folder, count, name)
        for mask in MASKS:
            if mask in columns:
                self._write(folder / f"{mask}.npy", table, f"coalesce({mask}::BOOLEAN, false)", np.bool_, count)
        if "time" in columns and self.is_homogeneous:
            self.say("left out: time, which a homogeneous folder cannot store; name the node types to keep it")
        elif "time" in columns:
            self._write_column(table, "time", columns["time"], folder / "time.npy", count, self.tables[name])
        # Write the features in blocks, since they may be larger than memory.
        width = sum(used.values()) or random_features
        if (folder / "x.npy").exists():
            return
        # Without features a folder must at least store the number of nodes.
        if not width and self.is_homogeneous:
            raise ValueError("nodes have no features: give nodes=FILE with columns of numbers, or random_features=64")
        if not width:
            save_arrays(folder, {"num_nodes": np.array(count)})
        else:
            rows = max(1, _NUMBERS_PER_BLOCK // width)
            blocks = self._iter_features(table, columns, used, rows) if used else _draw_features(count, width, rows)
            empty = as_numpy(torch.empty(0, dtype=self.feature_dtype))
            write_blocks(folder / "x.npy", empty.dtype, (count, width), map(self._as_feature_dtype, blocks))

    def _as_feature_dtype(self, block: np.ndarray) -> np.ndarray:
        values = torch.from_numpy(block).to(self.feature_dtype)
        if self.feature_dtype == torch.float16:
            check_finite_rows(values, "a block of features", fix="float16 ends at 65504; use feature_dtype=bfloat16")
        return as_numpy(values)

    def _count_features(self, name: str, column: str, sql_type: str) -> int:
        """Return the number of features in a column, 0 if it is not numeric."""
        element, _, length = sql_type.partition("[")
        if element.partition("(")[0] not in _NUMERIC or "[" in length:
            return 0
        if not length:
            return 1
        if length != "]":
            return int(length[:-1])
        table = as_name(table_name("nodes", name))
        lengths = self.database.query(f"SELECT DISTINCT len({as_name(column)}) FROM {table} LIMIT 2")
        if len(lengths) != 1 or not lengths[0][0]:
            raise ValueError(
                f"{self.tables[name]}: the lists of {column} are missing or differ in length; features need one length"
            )
        return int(lengths[0][0])

    def _iter_features(
        self, table: str, columns: Mapping[str, str], widths: Mapping[str, int], rows: int
    ) -> Iterator[np.ndarray]:
        lists, chosen = {column for column in widths if columns[column].endswith("]")}, {}
        for column, width in widths.items():
            name = as_name(column)
            if column not in lists:
                chosen[column] = f"coalesce({name}, 0)::FLOAT"
                continue
            gap = f"SELECT 1 FROM {as_name(table)} WHERE list_count({name}) < len({name}) LIMIT 1"
            filled = f"[coalesce(value, 0) FOR value IN {name}]" if self.database.query(gap) else name
            chosen[column] = f"{filled}::FLOAT[{width}]"
        for block in self.database.blocks(table, chosen, rows):
            yield np.column_stack([np.stack(list(block[name])) if name in lists else block[name] for name in widths])

    def _write_column(
        self,
        table: str,
        column: str,
        sql_type: str,
        path: Path,
        count: int,
        where: object,  # the source in errors
        order: EdgeOrder | None = None,  # if the rows are edges
    ) -> None:
        """Write an attribute; times become seconds since 1970."""
        if path.exists():
            return
        if not self._is_attribute(sql_type):
            raise ValueError(f"{where}: {column} is {sql_type}, but attributes must be numbers or times")
        is_time = sql_type.startswith("TIMESTAMP") or sql_type == "DATE"
        is_integer = is_time or sql_type in INTEGER_TYPES
        value = f"floor(epoch({as_name(column)}))" if is_time else as_name(column)
        if self.database.query(f"SELECT 1 FROM {as_name(table)} WHERE {as_name(column)} IS NULL LIMIT 1"):
            raise ValueError(f"{where}: {column} is missing in some row; fill it in")
        dtype = np.int64 if is_integer else np.float64
        if order is None:
            self._write(path, table, f"{value}::{'BIGINT' if is_integer else 'DOUBLE'}", dtype, count)
        else:
            write_blocks(path, dtype, (count,), order.place(value, dtype))

    def _write_labels(self, table: str, folder: Path, count: int, sql_type: str, name: str) -> None:
        is_integer = sql_type in (*INTEGER_TYPES, "VARCHAR", "BOOLEAN")
        self.has_numbers |= not is_integer
        if (folder / "y.npy").exists():
            return
        value, names = "label", None
        if sql_type.partition("(")[0] not in (*_NUMERIC, "VARCHAR"):
            raise ValueError(f"{self.tables[name]}: label is {sql_type}; labels must be numbers or texts")
        if sql_type == "VARCHAR" or (sql_type in INTEGER_TYPES and self._are_codes(table, name)):
            rows = self.database.query(
                f"SELECT DISTINCT label FROM {as_name(table)} WHERE label IS NOT NULL ORDER BY label"
            )
            names = [str(row[0]) for row in rows]
            (folder / "classes.json").write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
            value = f"list_position([{', '.join(map(as_text, names))}], label::VARCHAR) - 1"
        if is_integer:
            distinct = self.database.query(f"SELECT count(DISTINCT label) FROM {as_name(table)}")[0][0]
            listed_there = "" if names is None else ", listed in classes.json"
            self.say(f"labels{self.type_suffix(name)} are {distinct} classes{listed_there}")
        chosen = f"coalesce(({value})::BIGINT, -1)" if is_integer else f"coalesce(({value})::FLOAT, 'NaN')"
        self._write(folder / "y.npy", table, chosen, np.int64 if is_integer else np.float32, count)

    def _are_codes(self, table: str, name: str) -> bool:
        """Return whether integer labels are codes: large values, few of them distinct, that repeat."""
        facts = "coalesce(max(label), 0), count(label), count(DISTINCT label)"
        largest, count, distinct = self.database.query(f"SELECT {facts} FROM {as_name(table)}")[0]
        if largest >= _MIN_CODE and distinct <= _MAX_CODES and 2 * distinct <= count:
            return True
        if largest >= _MAX_CLASS_NUMBER:
            raise ValueError(
                f"{self.tables[name]}: label goes up to {largest:,} and has {distinct:,} values for {count:,} nodes, "
                "so it is not a class; write classes as texts, and numbers to be predicted with decimals, as 1.0"
            )
        return False

    def _write_splits(self, table: str, folder: Path, count: int, name: str) -> None:
        valid = [word for words in SPLITS.values() for word in words]
        words = ", ".join(map(as_text, valid))
        other = f"SELECT split FROM {as_name(table)} WHERE split IS NOT NULL AND lower(split) NOT IN ({words}) LIMIT 1"
        for (word,) in self.database.query(other):
            raise ValueError(f"split is {word!r} in {self.tables[name]}; use one of {', '.join(valid)}, or NULL")
        for split, names in SPLITS.items():
            condition = f"coalesce(lower(split) IN ({', '.join(map(as_text, names))}), false)"
            self._write(folder / f"{split}_mask.npy", table, condition, np.bool_, count)

    def _write(self, path: Path, table: str, value: str, dtype: npt.DTypeLike, count: int) -> None:
        """Write the value of an SQL expression for each row of a table, unless the file exists."""
        if not path.exists():
            blocks = self.database.blocks(table, {"value": value}, _NUMBERS_PER_BLOCK)
            write_blocks(path, dtype, (count,), (block["value"] for block in blocks))

    def _write_ids(self, name: str, folder: Path, count: int) -> None:
        table = table_name("ids", name)
        ids, sql_type = as_name(table), self.database.columns(table)["id"]
        # Unsigned and 128-bit integers may exceed int64; Parquet would store the latter as floats.
        fits = f"SELECT max(id) < {1 << 63} AND min(id) >= {-1 << 63} FROM {ids}"
        if sql_type not in INTEGER_TYPES or not self.database.query(fits)[0][0]:
            chosen = "id::VARCHAR AS id" if sql_type == "HUGEINT" else "id"
            ordered = f"SELECT {chosen}, number FROM {ids} ORDER BY number"
            self.database.query(f"COPY ({ordered}) TO {as_text(folder / 'id.parquet')}")
        else:
            self._write(folder / "id.npy", table, "id::BIGINT", np.int64, count)

    def _list_directions(self, edge_type: EdgeType, undirected: bool) -> dict[EdgeType, list[bool]]:
        """Return the edge types to write for one input edge type, each with its directions (True: reversed)."""
        if not undirected:
            return {edge_type: [False]}
        if edge_type[0] == edge_type[2]:
            return {edge_type: [False, True]}
        return {edge_type: [False], (edge_type[2], f"rev_{edge_type[1]}", edge_type[0]): [True]}

    def _write_edges(
        self, kind: EdgeType, out_type: EdgeType, directions: list[bool], counts: Mapping[str, int], undirected: bool
    ) -> int:
        """Write an edge type in CSC order: sorted by target, then by position in the file."""
        # Select the columns that become edge attributes, and report the others.
        folder = self.folders[out_type]
        folder.mkdir(parents=True, exist_ok=True)
        columns = self.database.columns(self.names[kind])
        others = [column for column in columns if column not in ENDPOINTS]
        attrs = {} if self.is_homogeneous else {c: columns[c] for c in others if self._is_attribute(columns[c])}
        if left_out := [name for name in others if name not in attrs]:
            why = "which a homogeneous folder cannot store; name the types" if self.is_homogeneous else "not numeric"
            self.say(f"left out of the edges, {why}: {', '.join(left_out)}")
        # Reject invalid file names; edges with attributes cannot be merged with their reverses.
        if invalid := [column for column in attrs if column in (*TOPOLOGY, "edge_index", "graph") or "/" in column]:
            raise ValueError(f"{self.edges[kind]}: {invalid[0]!r} is not a valid attribute name; rename the column")
        if attrs and undirected and kind[0] == kind[2]:
            raise ValueError(f"undirected merges edges, but {BETWEEN.join(kind)} has attributes {', '.join(attrs)}")
        # Replace ids by node numbers, and choose the direction.
        table, *ends = self._number_endpoints(kind, attrs)
        source, target = ends[::-1] if directions[0] else ends
        # Both directions together may contain an edge twice; remove the duplicates.
        if len(directions) > 1:
            both = f"WITH one AS (SELECT {source} AS s, {target} AS t FROM {as_name(table)}) SELECT s, t FROM one"
            table, source, target = table_name("distinct", BETWEEN.join(out_type)), "s", "t"
            self.database.make(table, f"SELECT s, t FROM ({both} UNION SELECT t, s FROM one) ORDER BY t, s")
        num_edges = self.database.count(table)
        order = EdgeOrder(self.database, table, target, counts[out_type[2]], self.memory)
        for name, sql_type in attrs.items():
            self._write_column(table, name, sql_type, folder / f"{name}.npy", num_edges, self.edges[kind], order)
        if not (folder / "indptr.npy").exists():
            dtype = index_dtype(counts[out_type[0]])
            write_blocks(folder / "indices.npy", dtype, (num_edges,), order.place(source, dtype))
            save_arrays(folder, {"indptr": order.indptr})
        return num_edges

    def _is_attribute(self, sql_type: str) -> bool:
        return sql_type.partition("(")[0] in _NUMERIC or sql_type.startswith("TIMESTAMP") or sql_type == "DATE"

    def _number_endpoints(self, edge_type: EdgeType, attrs: Iterable[str]) -> tuple[str, str, str]:
        """Return a table in the order of the file, and the SQL expressions of its sources and targets as numbers."""
        # Select both endpoints as numbers: a row number as it is, an id through a join.
        name, (source, target) = self.names[edge_type], ENDPOINTS
        numbers, joins, conditions = [], "", ["true"]
        ends = (("a", source, edge_type[0]), ("b", target, edge_type[2]))
        for alias, end, node_type in ends:
            cast, ids = self._choose_cast(edge_type, end, node_type), table_name("ids", node_type)
            if self._has_row_ids(node_type):
                # Row numbers outside the table are reported below.
                numbers.append(f"{as_name(end)}::BIGINT")
                conditions.append(f"{as_name(end)}{cast} BETWEEN 0 AND {self.database.count(ids) - 1}")
            else:
                numbers.append(f"{alias}.number")
                joins += f" JOIN {as_name(ids)} {alias} ON {alias}.id{cast} = e.{as_name(end)}{cast}"
        edges = as_name(name)
        rows = f"FROM {edges} e {joins} WHERE {' AND '.join(conditions)}"
        if joins:
            name = table_name("numbered", BETWEEN.join(edge_type))
            # Names that no attribute may have.
            numbered = [as_name(f"/{end}") for end in ENDPOINTS]
            ends_and_attrs = [*numbered, *map(as_name, attrs)]
            columns = [*numbers, *(f"e.{as_name(column)}" for column in attrs)]
            chosen = ", ".join(f"{value} AS {column}" for value, column in zip(columns, ends_and_attrs, strict=True))
            self.database.make(name, f"SELECT {chosen} {rows} ORDER BY e.rowid")
            numbers, count = numbered, self.database.count(name)
        else:
            count = self.database.query(f"SELECT count(*) {rows}")[0][0]
        # If edges are missing from the result, report the first one that refers to an unknown node.
        if count < self.database.count(self.names[edge_type]):
            for _, end, node_type in ends:
                cast = self._choose_cast(edge_type, end, node_type)
                among = f"SELECT id{cast} FROM {as_name(table_name('ids', node_type))}"
                missing = (
                    f"SELECT {as_name(end)}, rowid FROM {edges} WHERE {as_name(end)} IS NULL OR "
                    f"{as_name(end)}{cast} NOT IN ({among}) LIMIT 1"
                )
                for value, row in self.database.query(missing):
                    path, nodes = self.edges[edge_type], self.tables.get(node_type, "the edges")
                    where = f"the {end} of {describe_row(path, row)}, {value!r}"
                    raise ValueError(f"{path}: {where}, is not a node of {nodes}")
        return name, numbers[0], numbers[1]

    def _choose_cast(self, edge_type: EdgeType, end: str, node_type: str) -> str:
        """Return the SQL cast with which an edge endpoint is compared with node ids."""
        table = self.names[edge_type]
        sql_type = self.database.columns(table)[end]
        if not self._has_row_ids(node_type) or sql_type in INTEGER_TYPES:
            return ""
        is_integer = f"TRY_CAST({as_name(end)} AS DOUBLE) = TRY_CAST({as_name(end)} AS BIGINT)"
        invalid = f"{as_name(end)} IS NOT NULL AND NOT coalesce({is_integer}, false)"
        for value, row in self.database.query(
            f"SELECT {as_name(end)}, rowid FROM {as_name(table)} WHERE {invalid} LIMIT 1"
        ):
            nodes = self.tables.get(node_type, "the graph")
            path = self.edges[edge_type]
            where = f"the {end} of {describe_row(path, row)}, {value!r}"
            problem = "is not a row number, as which it is read because"
            raise ValueError(f"{path}: {where}, {problem} {nodes} has no column id")
        return "::BIGINT"


def _draw_features(count: int, width: int, rows: int) -> Iterator[np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    for start in range(0, count, rows):
        yield torch.randn(min(rows, count - start), width, generator=generator).numpy()


def _draw_labels(folder: Path, count: int, num_classes: int) -> None:
    generator = np.random.default_rng(0)
    split_of = generator.integers(10, size=count, dtype=np.int8)
    save_arrays(folder, {f"{split}_mask": split_of == number for number, split in enumerate(SPLITS)})
    save_arrays(folder, {"y": generator.integers(num_classes, size=count)})
