"""Reads edge and node tables from files and renames recognized columns to standard names."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch_geometric.typing import EdgeType

from lightning_gnn.datasets.column_names import NODE_COLUMNS, find_columns, is_endpoint_name, is_id_name
from lightning_gnn.datasets.folder import class_numbers
from lightning_gnn.datasets.hetero_folder import BETWEEN
from lightning_gnn.datasets.id_types import IdColumn, IdRule, unify_ids
from lightning_gnn.datasets.published_files import PublishedGraph, read_ids, unpack
from lightning_gnn.datasets.table_files import INTEGER_TYPES, TableFiles, as_name, as_text
from lightning_gnn.features.arrays import load_array, save_arrays

NODE_TYPE, EDGE_TYPE = "node", ("node", "to", "node")
ENDPOINTS = "source", "target"
_MAX_RELATIONS = 20_000  # maximum for triples; a column with more values is likely not a relation
_MIN_NODES_FOR_NAMES = 5  # graphs with fewer nodes may have as many classes as nodes
MessageSink = Callable[[str], None]


def table_name(prefix: str, name: str) -> str:
    """Return the table name for a type, hex-encoded because table names are case-insensitive but types are not."""
    return f"{prefix} {name.encode().hex()}"


class NamedTables:
    """The tables of one conversion; steps whose table exists are skipped."""

    id_rule: IdRule = "auto"

    def __init__(
        self,
        database: TableFiles,
        folder: Path,
        edges: Mapping[EdgeType, str | Path],
        tables: Mapping[str, str | Path],
        is_homogeneous: bool,
        published: PublishedGraph | None,
        say: MessageSink,
    ) -> None:
        self.database, self.folder, self.edges, self.tables = database, folder, dict(edges), dict(tables)
        self.is_homogeneous, self.published, self.say = is_homogeneous, published, say
        self.types = sorted({end for edge_type in edges for end in (edge_type[0], edge_type[2])})
        self.names = {edge_type: table_name("edges", BETWEEN.join(edge_type)) for edge_type in edges}  # table names
        self.folders: dict[Any, Path] = {NODE_TYPE: folder, EDGE_TYPE: folder}
        self.has_numbers = False  # whether labels are floating
        self.rows: int | None = None  # number of nodes if nodes have neither a table nor ids

    def read_all(self) -> None:
        """Read all files and identify their columns."""
        if self.published is not None and not self.tables:
            self._read_nodes(self.published)
        for name, path in self.tables.items():
            self.say(f"reading {path}")
            self._read(table_name("nodes", name), path, False, partial(self._name_nodes, name))
        for edge_type, path in self.edges.items():
            self.say(f"reading {path}")
            self._read_edges(edge_type, path)
        # Both ends of an edge, and all files with ids of a node type, must agree in the type of ids.
        for name in self.types if self.rows is None else ():
            self._unify_ids(name, None if name in self.tables else False)
        for name, path in self.tables.items():
            if self.published is None or path != self.published.features:
                self._choose_ids(name)
                if "id" in self.database.columns(table_name("nodes", name)):
                    self._unify_ids(name, True)
        if self.is_homogeneous and "relation" in self.database.columns(self.names[EDGE_TYPE]):
            self._split_relations()

    def _unify_ids(self, name: str, known: bool | None) -> None:
        """Give all columns with ids of a node type one type; ``known``: include those of its table."""
        columns = [
            IdColumn(self.names[edge_type], end, self.edges[edge_type])
            for edge_type in self.edges
            for end, end_type in zip(ENDPOINTS, (edge_type[0], edge_type[2]), strict=True)
            if end_type == name
        ]
        if known:
            columns.append(IdColumn(table_name("nodes", name), "id", self.tables[name]))
        unify_ids(self.database, columns, self.id_rule, known, lambda line: self.say(f"{line}{self.type_suffix(name)}"))

    def _read(
        self, table: str, path: str | Path, edges: bool, check: Callable[[], None], header: bool | None = None
    ) -> None:
        if (layout := self.database.read(table, path, edges, header, check)) is not None:
            self.say(layout)

    def _read_edges(self, edge_type: EdgeType, path: str | Path) -> None:
        table = self.names[edge_type]
        if self.published is None:
            self._read(table, path, True, partial(self._name_edges, edge_type))
        elif self.published.blocks is not None:
            self.database.fill(table, self.published.blocks)
            if not self.database.count(table):
                raise ValueError(f"{path} holds no edges")
        elif self.published.edges is not None:
            self._read(table, self.published.edges, True, partial(self._name_edges, edge_type), header=False)

    def _name_edges(self, edge_type: EdgeType) -> None:
        """Rename recognized edge columns; a relation column is used only in homogeneous input."""
        table, path = self.names[edge_type], self.edges[edge_type]
        columns = self.database.columns(table)
        names = find_columns([*columns])
        if names is None:
            if len(columns) < 2 or any(is_endpoint_name(name) for name in [*columns][2:]):
                present = ", ".join(columns)
                raise ValueError(f"{path} has the columns {present}; edges need source and target, or src and dst")
            names = [*columns][:2]
            is_unnamed = next(iter(columns)).startswith("column0")
            if is_unnamed and len(columns) == 3 and self._are_triples(edge_type, columns):
                names = [[*columns][n] for n in (0, 2, 1)]
        if len(names) > 2 and not self.is_homogeneous:
            names = names[:2]
        self.database.read_as_text(table, names[:2])
        self.database.rename(table, dict(zip(names, (*ENDPOINTS, "relation"), strict=False)))

    def _are_triples(self, edge_type: EdgeType, columns: Mapping[str, str]) -> bool:
        """Return whether three unnamed columns are head, relation and tail, judged by which columns share values."""
        (a, kind_a), (b, kind_b), (c, kind_c) = columns.items()
        if kind_b != "VARCHAR" or (kind_a == "VARCHAR") != (kind_c == "VARCHAR") or kind_c in ("DOUBLE", "BOOLEAN"):
            return False
        table = as_name(self.names[edge_type])

        def have_common_values(one: str, other: str) -> bool:
            among = f"{as_name(one)}::VARCHAR IN (SELECT {as_name(other)}::VARCHAR FROM {table})"
            return bool(self.database.query(f"SELECT 1 FROM {table} WHERE {among} LIMIT 1"))

        counts = ", ".join(f"count(DISTINCT {as_name(column)})" for column in (b, c))
        num_middle, num_last = self.database.query(f"SELECT {counts} FROM {table}")[0]
        if kind_c != "VARCHAR":
            is_triples = num_middle <= num_last and have_common_values(a, c)
        elif not num_last or (have_common_values(a, b) and not have_common_values(a, c)):
            is_triples = False
        else:
            is_triples = not have_common_values(a, b) and (have_common_values(a, c) or num_middle <= num_last)
            if not is_triples or (not self.is_homogeneous and have_common_values(a, c)):
                fix = "name them in a first line, head,relation,tail for triples, or source,target,kind"
                raise ValueError(f"{self.edges[edge_type]} has three unnamed text columns: {fix}")
        return is_triples and self.is_homogeneous

    def _split_relations(self) -> None:
        """Create one edge type per relation of the triples."""
        triples, path = self.names.pop(EDGE_TYPE), self.edges.pop(EDGE_TYPE)
        distinct = f"SELECT DISTINCT relation::VARCHAR FROM {as_name(triples)} ORDER BY 1"
        relations = [relation for (relation,) in self.database.query(distinct)]
        if None in relations or len(relations) > _MAX_RELATIONS:
            problem = "is missing in some row" if None in relations else f"has {len(relations):,} values, too many"
            raise ValueError(f"{path}: the relation {problem}")
        self.is_homogeneous = False
        self.say(f"triples of head, relation and tail: {len(relations)} relations become edge types")
        ordered = table_name("relations", "")
        replaced = "SELECT * REPLACE (relation::VARCHAR AS relation)"
        self.database.make(ordered, f"{replaced} FROM {as_name(triples)} ORDER BY relation, rowid")
        for number, relation in enumerate(relations):
            edge_type = NODE_TYPE, relation, NODE_TYPE
            self.edges[edge_type], self.names[edge_type] = path, table_name("relation", str(number))
            rows = f"FROM {as_name(ordered)} WHERE relation = {as_text(relation)} ORDER BY rowid"
            self.database.make(self.names[edge_type], f"SELECT * EXCLUDE relation {rows}")

    def _name_nodes(self, name: str) -> None:
        """Rename recognized node columns, and check that text labels are classes."""
        table, path = table_name("nodes", name), self.tables[name]
        columns = self.database.columns(table)
        renamed = {column: column.lower() for column in columns if column.lower() in NODE_COLUMNS}
        texts = [column for column, sql_type in columns.items() if sql_type == "VARCHAR"]
        count = self.database.count(table)

        def classes(column: str) -> int:
            return int(self.database.query(f"SELECT count(DISTINCT {as_name(column)}) FROM {as_name(table)}")[0][0])

        first, last = next(iter(columns)), [*columns][-1]
        unnamed = first.startswith("column0") and len(columns) > 1
        if unnamed and last in texts and {*texts} <= {first, last} and classes(last) < count:
            self.say(f"the last column of {path}, a text column, is the label")
            renamed[last] = "label"
        label = next((column for column, known in renamed.items() if known == "label"), None)
        number = classes(label) if label in texts else None
        if number == 0:
            del renamed[str(label)]
        elif number == count >= (2 if label == "Label" else _MIN_NODES_FOR_NAMES):  # Gephi writes names as Label
            names = f"has {count} distinct values for {count} nodes, so it holds names"
            raise ValueError(f"{path}: the column {label} {names}; rename it, and name the column to predict label")
        self.database.read_as_text(table, [column for column, known in renamed.items() if known == "id"])
        self.database.rename(table, renamed)

    def _choose_ids(self, name: str) -> None:
        """Find the node column that edges refer to if it is not named id or if there are several candidates."""
        table, path = table_name("nodes", name), self.tables[name]
        if "id" in self.database.columns(table):
            unify_ids(self.database, [IdColumn(table, "id", path)], self.id_rule, None, self.say)
        # Candidates have a name like an id, or may hold ids if no column is named id.
        columns = self.database.columns(table)
        first = next(iter(columns))
        candidates = [
            column
            for column, kind in columns.items()
            if column not in NODE_COLUMNS
            and kind in (*INTEGER_TYPES, "VARCHAR")
            and (
                is_id_name(column)
                or ("id" not in columns and (kind == "VARCHAR" or (column == first and first.startswith("column0"))))
            )
        ]
        # A column named id wins if edges refer to it or if it is the only candidate.
        if "id" in columns and (not candidates or self._holds_ends(name, "id")):
            return
        # Otherwise exactly one candidate must hold every id that edges refer to.
        found = [column for column in candidates if self._holds_ends(name, column)]
        if len(found) == 1:
            if "id" in columns:
                self.database.query(f"ALTER TABLE {as_name(table)} DROP COLUMN id")
                self.say(f"left out{self.type_suffix(name)}: id, which edges do not refer to")
            self.say(f"the ids of nodes{self.type_suffix(name)} are in the column {found[0]} of {path}")
            self.database.rename(table, {found[0]: "id"})
        elif "id" not in columns:
            # Without ids, nodes are numbered by row; a message states the reason.
            why = f"{', '.join(found)} hold all ids of the edges" if found else "no column holds all ids of the edges"
            self.say(f"nodes{self.type_suffix(name)} are numbered by row, from 0 on; in {path}, {why}")

    def _holds_ends(self, name: str, column: str) -> bool:
        """Return whether a node column holds unique ids that include all ids of the edges."""
        table, value = as_name(table_name("nodes", name)), as_name(column)
        duplicates = f"GROUP BY {value} HAVING count(*) > 1 OR {value} IS NULL"
        if self.database.query(f"SELECT 1 FROM {table} {duplicates} LIMIT 1"):
            return False
        id_type = self.database.columns(table_name("nodes", name))[column]
        for edge_type in self.edges:
            edges = self.names[edge_type]
            for end, end_type in zip(ENDPOINTS, (edge_type[0], edge_type[2]), strict=True):
                cast = "" if self.database.columns(edges)[end] == id_type else "::VARCHAR"
                missing = f"{end} IS NOT NULL AND {end}{cast} NOT IN (SELECT {value}{cast} FROM {table})"
                if end_type == name and self.database.query(f"SELECT 1 FROM {as_name(edges)} WHERE {missing} LIMIT 1"):
                    return False
        return True

    def _read_nodes(self, graph: PublishedGraph) -> None:
        """Create the node table of a published graph, or write its arrays."""
        # Unpack to a temporary name, so that an interrupted run leaves no incomplete file.
        for name, (archive, member) in graph.arrays.items():
            if not (path := self.folder / f"{name}.npy").exists():
                self.say(f"unpacking {member} of {archive}")
                self.folder.mkdir(parents=True, exist_ok=True)
                unpack(archive, member, self.folder / "unpacked.npy")
                (self.folder / "unpacked.npy").rename(path)
        # Convert published labels to class numbers; features stay unchanged.
        if graph.arrays:
            count = load_array(self.folder / "x.npy").size(0)
            y = load_array(self.folder / "y.npy")
            save_arrays(self.folder, {"y": class_numbers(y, count, f"node_label of {graph.arrays['y'][0]}")})
            self.rows = count
        # Each row of a feature table is a node.
        if graph.features is not None:
            self.say(f"reading {graph.features}")
            self.database.read("features", graph.features, header=False)
            count = self.database.count("features")
            if graph.num_nodes not in (None, count):
                raise ValueError(f"{graph.features} has {count} rows, but the graph has {graph.num_nodes} nodes")
            select, joins = ["f.*"], ""
            # Labels are joined by row.
            if graph.labels is not None:
                self.database.read("labels", graph.labels, header=False)
                if (labels := self.database.count("labels")) != count:
                    raise ValueError(f"{graph.labels} has {labels} rows, but {graph.features} has {count}")
                if len(columns := list(self.database.columns("labels"))) > 1:
                    raise ValueError(f"{graph.labels} has {len(columns)} columns; give labels of one, with nodes=FILE")
                select.append(f"l.{as_name(columns[0])} AS label")
                joins = "JOIN labels l ON l.rowid = f.rowid"
            # Splits list node ids; a node in none of the lists has no split.
            if graph.splits:
                parts = [
                    f"SELECT column0 AS node, {as_text(name)} AS split FROM read_csv({as_text(path)}, header = false)"
                    for name, path in graph.splits.items()
                ]
                select.append("s.split")
                joins += f" LEFT JOIN ({' UNION ALL '.join(parts)}) s ON s.node = f.rowid"
            nodes = f"SELECT {', '.join(select)} FROM features f {joins} ORDER BY f.rowid"
            self.database.make(table_name("nodes", NODE_TYPE), nodes)
            # A node in several split lists would be joined several times.
            if self.database.count(table_name("nodes", NODE_TYPE)) != count:
                raise ValueError(f"{next(iter(graph.splits.values())).parent} lists a node twice")
            self.tables = {NODE_TYPE: graph.features}
        elif not graph.arrays:
            # Without features, only the number of nodes is known.
            self.rows = graph.num_nodes
        if graph.features is None:
            save_arrays(self.folder, {f"{name}_idx": read_ids(path) for name, path in graph.splits.items()})

    def type_suffix(self, name: str) -> str:
        """Return " of <type>" for messages, or "" for a homogeneous graph."""
        return "" if self.is_homogeneous else f" of {name}"
