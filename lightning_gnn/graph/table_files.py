"""Tables in files, CSV, Parquet, Arrow or ``.npy``, in a database on disk that keeps to a bound on memory: DuckDB."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy.typing as npt

from lightning_gnn.graph.arrays import load_array
from lightning_gnn.runtime.files import write_whole

Columns = dict[str, npt.NDArray[Any]]
_CSV, _PARQUET, _ARROW = (".csv", ".tsv", ".txt", ".edges"), (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
_PACKED = (".gz", ".zst")
_OTHERWISE = "CSV Error"
"""What the database says where a row of a CSV file does not look like the first ones."""
_MISSING = '{} needs {} ({}): pip install "lightning-gnn[convert]"'


class TableFiles:
    """A database of the tables of some files, in a folder, which an interrupted conversion finds again.

    Args:
        folder: Where it lies.
        memory: Bytes that it may hold; what is more lies on the disk.
        of: What identifies the conversion: if another one left its database here, it is removed.
        made: The folder of what is made of the tables, which goes with them.

    Raises:
        ModuleNotFoundError: DuckDB is missing.
        ValueError: The memory is too little.
    """

    def __init__(self, folder: Path, memory: int, of: Any, made: Path) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise ModuleNotFoundError(_MISSING.format("lgnn convert", "DuckDB", error)) from None
        if memory < 100 << 20:
            raise ValueError(f"memory is {memory} bytes; give at least 100 MB")
        folder.mkdir(parents=True, exist_ok=True)
        self.error: type[Exception] = duckdb.Error
        path, note = folder / "tables.duckdb", folder / "of.json"
        told = json.dumps(of, default=str)
        if not note.exists() or note.read_text() != told:
            note.unlink(missing_ok=True)  # first, so that what is left of a run that is killed here is not gone on with
            for old in (path, path.with_name(f"{path.name}.wal")):
                old.unlink(missing_ok=True)
            shutil.rmtree(made, ignore_errors=True)
            write_whole(note, told)
            self.resumed = False
        else:
            self.resumed = path.exists()
        self.connection = duckdb.connect(str(path))
        self.connection.execute(f"SET memory_limit = '{memory >> 20}MiB'")
        self.connection.execute(f"SET temp_directory = {text(folder / 'spill')}")
        self.connection.execute("SET enable_progress_bar = false")

    def close(self) -> None:
        """Close the database."""
        self.connection.close()

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a small result.

        Raises:
            OSError: The disk has no room for it.
            ValueError: The database says why.
        """
        with self._explained():
            return list(self.connection.execute(sql).fetchall())

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self.error as error:
            kind, said = type(error).__name__, "; ".join(str(error).partition("\n\n")[0].splitlines())
            if kind == "OutOfMemoryException" or (kind == "IOException" and "No space left" in said):
                raise OSError(f"{said}; make room on the disk, or give more memory=, and run the same again") from None
            raise ValueError(said) from None

    def make(self, name: str, sql: str) -> None:
        """Make a table, unless an earlier run has."""
        if not self.has(name):
            self.query(f"CREATE TABLE {quoted(name)} AS {sql}")

    def has(self, name: str) -> bool:
        """Say whether there is such a table."""
        return bool(self.query(f"SELECT 1 FROM duckdb_tables() WHERE table_name = {text(name)}"))

    def read(self, name: str, path: str | Path, header: bool | None = None) -> None:
        """Make a table of a file, or of all files of a pattern, whose rows keep their order.

        Args:
            name: The table.
            path: The file, or a pattern.
            header: Whether CSV has one; None: the database looks.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: Its ending is none that is known, or it cannot be read.
        """
        if self.has(name):
            return
        create = f"CREATE TABLE {quoted(name)} AS SELECT * FROM "
        try:
            try:
                with self._whole():
                    self.query(create + (scan := self._scan(path, header)))
                    if scan.startswith("read_csv") and self._has_quotes(name):
                        raise ValueError(_OTHERWISE)
            except ValueError as error:
                if _OTHERWISE not in str(error):
                    raise
                # What the first rows look like does not hold for all: now all are looked at, which takes longer.
                self.query(create + self._scan(path, header, ", sample_size = -1"))
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None

    def _has_quotes(self, name: str) -> bool:
        """Say whether a text begins with a quote, as where none is among the first rows of a CSV file."""
        texts = [column for column, kind in self.columns(name).items() if kind == "VARCHAR"]
        found = " OR ".join(f"starts_with({quoted(column)}, '\"')" for column in texts)
        return bool(texts) and bool(self.query(f"SELECT 1 FROM {quoted(name)} WHERE {found} LIMIT 1"))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Keep all that is done, or nothing."""
        self.query("BEGIN")
        try:
            yield
            self.query("COMMIT")
        except BaseException:
            with suppress(self.error):
                self.connection.rollback()
            raise

    def fill(self, name: str, blocks: Callable[[], Iterator[Columns]]) -> None:
        """Make a table of edges, ``source`` and ``target``, of blocks; all of it or nothing, unless an earlier run has.

        Raises:
            OSError: The disk has no room for it.
        """
        if self.has(name):
            return
        with self._whole():
            self.query(f"CREATE TABLE {quoted(name)} (source BIGINT, target BIGINT)")
            for block in blocks():
                self.connection.register("block", block)
                self.query(f"INSERT INTO {quoted(name)} SELECT source, target FROM block")

    def columns(self, name: str) -> dict[str, str]:
        """Return the columns of a table, and their types."""
        return {row[0]: row[1] for row in self.query(f"DESCRIBE {quoted(name)}")}

    def count(self, name: str) -> int:
        """Return the number of rows of a table."""
        return int(self.query(f"SELECT count(*) FROM {quoted(name)}")[0][0])

    def blocks(self, name: str, columns: Mapping[str, str], rows: int) -> Iterator[Columns]:
        """Yield a table's rows, in order.

        Args:
            name: The table.
            columns: What to select, by the name that it gets.
            rows: How many at a time.
        """
        chosen = ", ".join(f"{what} AS {quoted(column)}" for column, what in columns.items())
        for start in range(0, self.count(name), rows):
            within = f"rowid BETWEEN {start} AND {start + rows - 1}"
            # A scan of several threads keeps the order of rows.
            with self._explained():
                block = self.connection.execute(f"SELECT {chosen} FROM {quoted(name)} WHERE {within}").fetchnumpy()
            yield block

    def _scan(self, path: str | Path, header: bool | None, how: str = "") -> str:
        suffixes = [suffix.lower() for suffix in Path(path).suffixes]
        ending = suffixes[-2] if len(suffixes) > 1 and suffixes[-1] in _PACKED else "".join(suffixes[-1:])
        if not any(symbol in str(path) for symbol in "*?[") and not Path(path).exists():
            raise FileNotFoundError(f"{path} does not exist")
        if ending in _CSV:
            known = "" if header is None else f", header = {header}"
            return f"read_csv({text(path)}, comment = '#'{known}{how})"
        if ending in _PARQUET:
            return f"read_parquet({text(path)})"
        if ending in _ARROW:
            try:
                from pyarrow import dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
            except ImportError as error:
                raise ModuleNotFoundError(_MISSING.format(path, "pyarrow", error)) from None
            self.connection.register("scanned", dataset.dataset(str(path), format="ipc"))
            return "scanned"
        if ending == ".npy":
            array = load_array(Path(path)).numpy()
            if array.ndim != 2 or 2 not in array.shape:
                raise ValueError(f"{path} has the shape {list(array.shape)}; edges are [2, E] or [E, 2]")
            source, target = array if array.shape[0] == 2 else array.T
            self.connection.register("scanned", {"source": source, "target": target})
            return "scanned"
        known = ", ".join((*_CSV, *_PARQUET, *_ARROW, ".npy"))
        raise ValueError(f"{path}: what is in it? Endings that are known: {known}, and those of text with .gz or .zst")


def text(value: Any) -> str:
    """Return a text of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def quoted(name: str) -> str:
    """Return a name of SQL."""
    return '"' + name.replace('"', '""') + '"'


def listed(names: Sequence[str]) -> str:
    """Return names of columns, with commas between."""
    return ", ".join(map(quoted, names))
