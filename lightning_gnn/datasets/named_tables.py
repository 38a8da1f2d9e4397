"""Tables of edges and nodes, read from files of any known form, whose known columns have one name each."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch_geometric.typing import EdgeType

from lightning_gnn.datasets.column_names import OF_NODES, edge_columns, is_end, is_id
from lightning_gnn.datasets.folder import class_numbers
from lightning_gnn.datasets.hetero_folder import BETWEEN
from lightning_gnn.datasets.published_files import Published, read_ids, unpack
from lightning_gnn.datasets.table_files import TableFiles, quoted, text
from lightning_gnn.features.arrays import load_array, save_arrays

ALONE, BETWEEN_ALONE = "node", ("node", "to", "node")
ENDS = "source", "target"
INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "HUGEINT")
_MOST_RELATIONS = 20_000  # relations of triples; more are likely another column
_TINY = 5  # nodes below which each may have a class of its own
Say = Callable[[str], None]


def table_of(what: str, name: str) -> str:
    """Return the name of a table for a type; the database does not tell upper from lower case, but types do."""
    return f"{what} {name.encode().hex()}"


class NamedTables:
    """The tables of one conversion; a step whose table is there is not taken again."""

    def __init__(
        self,
        database: TableFiles,
        folder: Path,
        edges: Mapping[EdgeType, str | Path],
        tables: Mapping[str, str | Path],
        alone: bool,
        form: Published | None,
        say: Say,
    ) -> None:
        self.database, self.folder, self.edges, self.tables = database, folder, dict(edges), dict(tables)
        self.alone, self.form, self.say = alone, form, say
        self.types = sorted({end for kind in edges for end in (kind[0], kind[2])})
        self.names = {kind: table_of("edges", BETWEEN.join(kind)) for kind in edges}  # of their tables
        self.folders: dict[Any, Path] = {ALONE: folder, BETWEEN_ALONE: folder}
        self.has_numbers = False  # as labels
        self.rows: int | None = None  # of the nodes, where they are known by their numbers alone

    def read_all(self) -> None:
        """Read all files, and find out what their columns are."""
        if self.form is not None and not self.tables:
            self._read_nodes(self.form)
        for name, path in self.tables.items():
            self.say(f"reading {path}")
            self._read(table_of("nodes", name), path, False, partial(self._name_nodes, name))
        for kind, path in self.edges.items():
            self.say(f"reading {path}")
            self._read_edges(kind, path)
        if self.alone and "relation" in self.database.columns(self.names[BETWEEN_ALONE]):
            self._split_relations()
        for name, path in self.tables.items():
            if self.form is None or path != self.form.features:
                self._choose_ids(name)

    def _read(
        self, table: str, path: str | Path, edges: bool, then: Callable[[], None], header: bool | None = None
    ) -> None:
        if (how := self.database.read(table, path, edges, header, then)) is not None:
            self.say(how)

    def _read_edges(self, kind: EdgeType, path: str | Path) -> None:
        table = self.names[kind]
        if self.form is None:
            self._read(table, path, True, partial(self._name_edges, kind))
        elif self.form.blocks is not None:
            self.database.fill(table, self.form.blocks)
            if not self.database.count(table):
                raise ValueError(f"{path} holds no edges")
        elif self.form.edges is not None:
            self._read(table, self.form.edges, True, partial(self._name_edges, kind), header=False)

    def _name_edges(self, kind: EdgeType) -> None:
        """Give known columns of edges their one name each; a relation has one only where it makes types."""
        table, path = self.names[kind], self.edges[kind]
        columns = self.database.columns(table)
        found = edge_columns([*columns])
        if found is None:
            if len(columns) < 2 or any(is_end(name) for name in [*columns][2:]):
                there = ", ".join(columns)
                raise ValueError(f"{path} has the columns {there}; edges need source and target, or src and dst")
            found = [*columns][:2]
            if next(iter(columns)).startswith("column0") and len(columns) == 3 and self._are_triples(kind, columns):
                found = [[*columns][n] for n in (0, 2, 1)]
        if len(found) > 2 and not self.alone:
            found = found[:2]
        self.database.rename(table, dict(zip(found, (*ENDS, "relation"), strict=False)))

    def _are_triples(self, kind: EdgeType, columns: Mapping[str, str]) -> bool:
        """Say whether three columns without names are head, relation and tail, by which of them share values."""
        (a, kind_a), (b, kind_b), (c, kind_c) = columns.items()
        if kind_b != "VARCHAR" or (kind_a == "VARCHAR") != (kind_c == "VARCHAR") or kind_c in ("DOUBLE", "BOOLEAN"):
            return False
        table = quoted(self.names[kind])

        def share(one: str, other: str) -> bool:
            among = f"SELECT {quoted(other)}::VARCHAR FROM {table}"
            return bool(self.database.query(f"SELECT 1 FROM {table} WHERE {quoted(one)}::VARCHAR IN ({among}) LIMIT 1"))

        counts = ", ".join(f"count(DISTINCT {quoted(column)})" for column in (b, c))
        middle, last = self.database.query(f"SELECT {counts} FROM {table}")[0]
        if kind_c != "VARCHAR":
            are = middle <= last and share(a, c)
        elif not last or (share(a, b) and not share(a, c)):
            are = False
        else:
            are = not share(a, b) and (share(a, c) or middle <= last)
            if not are or (not self.alone and share(a, c)):
                fix = "say which is which by a first line, head,relation,tail for triples, or source,target,kind"
                raise ValueError(f"{self.edges[kind]} has three columns of text without names: {fix}")
        return are and self.alone

    def _split_relations(self) -> None:
        """Make a type of edges of each relation of triples."""
        whole, path = self.names.pop(BETWEEN_ALONE), self.edges.pop(BETWEEN_ALONE)
        distinct = f"SELECT DISTINCT relation::VARCHAR FROM {quoted(whole)} ORDER BY 1"
        relations = [relation for (relation,) in self.database.query(distinct)]
        if None in relations or len(relations) > _MOST_RELATIONS:
            what = "is missing in some row" if None in relations else f"has {len(relations):,} values, too many types"
            raise ValueError(f"{path}: the relation {what}")
        self.alone = False
        self.say(f"triples of a head, a relation and a tail: {len(relations)} relations become types of edges")
        ordered = table_of("relations", "")
        replaced = "SELECT * REPLACE (relation::VARCHAR AS relation)"
        self.database.make(ordered, f"{replaced} FROM {quoted(whole)} ORDER BY relation, rowid")
        for number, relation in enumerate(relations):
            kind = ALONE, relation, ALONE
            self.edges[kind], self.names[kind] = path, table_of("relation", str(number))
            rows = f"FROM {quoted(ordered)} WHERE relation = {text(relation)} ORDER BY rowid"
            self.database.make(self.names[kind], f"SELECT * EXCLUDE relation {rows}")

    def _name_nodes(self, name: str) -> None:
        """Give known columns of nodes their one name each, and check that labels are classes."""
        table, path = table_of("nodes", name), self.tables[name]
        columns = self.database.columns(table)
        renamed = {column: column.lower() for column in columns if column.lower() in OF_NODES}
        texts = [column for column, kind in columns.items() if kind == "VARCHAR"]
        count = self.database.count(table)

        def classes(column: str) -> int:
            return int(self.database.query(f"SELECT count(DISTINCT {quoted(column)}) FROM {quoted(table)}")[0][0])

        first, last = next(iter(columns)), [*columns][-1]
        unnamed = first.startswith("column0") and len(columns) > 1
        if unnamed and last in texts and {*texts} <= {first, last} and classes(last) < count:
            self.say(f"the last column of {path}, of texts, is the label")
            renamed[last] = "label"
        label = next((column for column, known in renamed.items() if known == "label"), None)
        number = classes(label) if label in texts else None
        if number == 0:
            del renamed[str(label)]
        elif number == count >= (2 if label == "Label" else _TINY):  # Gephi writes names as Label
            names = f"has {count} classes for {count} nodes, so it holds names"
            raise ValueError(f"{path}: the column {label} {names}; rename it, and call what is to be predicted label")
        self.database.rename(table, renamed)

    def _choose_ids(self, name: str) -> None:
        """Find the column of nodes that edges refer to, where it is not called id or others may be it."""
        # Candidates are called like an id, or could be one while no column is called id.
        table, path = table_of("nodes", name), self.tables[name]
        columns = self.database.columns(table)
        first = next(iter(columns))
        others = [
            column
            for column, kind in columns.items()
            if column not in OF_NODES
            and kind in (*INTEGERS, "VARCHAR")
            and (
                is_id(column)
                or ("id" not in columns and (kind == "VARCHAR" or (column == first and first.startswith("column0"))))
            )
        ]
        # A column called id wins if edges refer to it, or if it is the only candidate.
        if "id" in columns and (not others or self._holds_ends(name, "id")):
            return
        # Otherwise exactly one candidate must hold every id that edges refer to.
        found = [column for column in others if self._holds_ends(name, column)]
        if len(found) == 1:
            if "id" in columns:
                self.database.query(f"ALTER TABLE {quoted(table)} DROP COLUMN id")
                self.say(f"left out{self.called(name)}: id, to which edges do not refer")
            self.say(f"the ids of nodes{self.called(name)} are in the column {found[0]} of {path}")
            self.database.rename(table, {found[0]: "id"})
        elif "id" not in columns:
            # Without ids, nodes are numbered by row, and a message says why.
            why = f"{', '.join(found)} hold the ids of all edges" if found else "none holds the ids of all edges"
            self.say(f"nodes{self.called(name)} are numbered by row, from 0 on; of the columns of {path}, {why}")

    def _holds_ends(self, name: str, column: str) -> bool:
        """Say whether a column of nodes holds each id once, and all that edges refer to."""
        table, value = quoted(table_of("nodes", name)), quoted(column)
        twice = f"GROUP BY {value} HAVING count(*) > 1 OR {value} IS NULL"
        if self.database.query(f"SELECT 1 FROM {table} {twice} LIMIT 1"):
            return False
        kind_of_ids = self.database.columns(table_of("nodes", name))[column]
        for kind in self.edges:
            for end, of in zip(ENDS, (kind[0], kind[2]), strict=True):
                same = self.database.columns(self.names[kind])[end] == kind_of_ids
                cast = "" if same else "::VARCHAR"
                lost = f"{end} IS NOT NULL AND {end}{cast} NOT IN (SELECT {value}{cast} FROM {table})"
                if of == name and self.database.query(f"SELECT 1 FROM {quoted(self.names[kind])} WHERE {lost} LIMIT 1"):
                    return False
        return True

    def _read_nodes(self, form: Published) -> None:
        """Make the table of nodes that a published form has, or write its arrays."""
        # Unpack arrays to a temporary name, so that an interrupted run leaves no incomplete file.
        for name, (archive, member) in form.arrays.items():
            if not (path := self.folder / f"{name}.npy").exists():
                self.say(f"unpacking {member} of {archive}")
                self.folder.mkdir(parents=True, exist_ok=True)
                unpack(archive, member, self.folder / "unpacked.npy")
                (self.folder / "unpacked.npy").rename(path)
        # Number the classes of published labels; features stay as they are.
        if form.arrays:
            count = load_array(self.folder / "x.npy").size(0)
            y = load_array(self.folder / "y.npy")
            save_arrays(self.folder, {"y": class_numbers(y, count, f"node_label of {form.arrays['y'][0]}")})
            self.rows = count
        # Features in a table define the nodes, by row.
        if form.features is not None:
            self.say(f"reading {form.features}")
            self.database.read("features", form.features, header=False)
            count = self.database.count("features")
            if form.num_nodes not in (None, count):
                raise ValueError(f"{form.features} has {count} rows, but there are {form.num_nodes} nodes")
            chosen, joined = ["f.*"], ""
            # Labels are joined by row.
            if form.labels is not None:
                self.database.read("labels", form.labels, header=False)
                if (labels := self.database.count("labels")) != count:
                    raise ValueError(f"{form.labels} has {labels} rows, but {form.features} has {count}")
                if len(columns := list(self.database.columns("labels"))) > 1:
                    raise ValueError(f"{form.labels} has {len(columns)} columns; give labels of one, with nodes=FILE")
                chosen.append(f"l.{quoted(columns[0])} AS label")
                joined = "JOIN labels l ON l.rowid = f.rowid"
            # Splits list ids of nodes; a node in no list has none.
            if form.splits:
                parts = [
                    f"SELECT column0 AS node, {text(name)} AS split FROM read_csv({text(path)}, header = false)"
                    for name, path in form.splits.items()
                ]
                chosen.append("s.split")
                joined += f" LEFT JOIN ({' UNION ALL '.join(parts)}) s ON s.node = f.rowid"
            nodes = f"SELECT {', '.join(chosen)} FROM features f {joined} ORDER BY f.rowid"
            self.database.make(table_of("nodes", ALONE), nodes)
            # A node in several lists of splits would be joined several times.
            if self.database.count(table_of("nodes", ALONE)) != count:
                raise ValueError(f"{next(iter(form.splits.values())).parent} names a node twice")
            self.tables = {ALONE: form.features}
        elif not form.arrays:
            # Without any features only the number of nodes is known.
            self.rows = form.num_nodes
        if form.features is None:
            save_arrays(self.folder, {f"{name}_idx": read_ids(path) for name, path in form.splits.items()})

    def called(self, name: str) -> str:
        """Return a type as messages name it, nothing in a homogeneous graph."""
        return "" if self.alone else f" of {name}"
