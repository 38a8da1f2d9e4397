"""Tables in files, CSV, Parquet, Arrow or ``.npy``, in a database on disk that keeps to a bound on memory: DuckDB."""

import glob
import gzip
import json
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy.typing as npt

from lightning_gnn.datasets.text_files import Layout, is_gzip, look, rewrite, shortened
from lightning_gnn.features.arrays import load_array
from lightning_gnn.runtime.files import write_whole

Columns = dict[str, npt.NDArray[Any]]
TEXT = (".csv", ".tsv", ".txt", ".edges", ".edgelist", ".cites", ".content", ".dat", ".data")  # endings of text files
_PARQUET, _ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
_PACKED = (".gz", ".zst")
_MISSING = '{} needs {} ({}): pip install "lightning-gnn[convert]"'


class TableFiles:
    """A database of the tables of some files, in a folder, which an interrupted conversion finds again."""

    def __init__(self, folder: Path, memory: int, of: object, made: Path) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise ModuleNotFoundError(_MISSING.format("lgnn convert", "DuckDB", error)) from None
        if memory < 100 << 20:
            raise ValueError(f"memory is {memory} bytes; give at least 100 MB")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.error: type[Exception] = duckdb.Error
        path, note = folder / "tables.duckdb", folder / "of.json"
        about = json.dumps(of, default=str)
        if not note.exists() or note.read_text() != about:
            note.unlink(missing_ok=True)  # first, so that what is left of a run that is killed here is not gone on with
            for old in (path, path.with_name(f"{path.name}.wal")):
                old.unlink(missing_ok=True)
            shutil.rmtree(made, ignore_errors=True)
            write_whole(note, about)
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
        """Return the rows of a small result."""
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

    def read(
        self,
        name: str,
        path: str | Path,
        edges: bool = False,  # whether it holds edges; then a list without a header may have comments anywhere
        header: bool | None = None,  # whether text has one; None: its rows show it
        then: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Make a table of a file or of all files of a pattern, in order; return how new text is laid out, else None."""
        if self.has(name):
            return None
        files = matching(path)
        ending, line = _ending(files[0]), ""

        def checked() -> None:
            if not self.count(name):
                raise ValueError(f"{path} holds no {'edges' if edges else 'nodes'}{line}")
            try:
                then()
            except ValueError as error:
                raise ValueError(f"{error}{line}") from None

        if ending not in TEXT:
            try:
                self._create(name, self._scan(path, ending), checked)
            except _UnlikeError as error:
                raise ValueError(f"{path} cannot be read: {error}") from None
            return None
        with undamaged(path):
            layouts = [look(file, self._unpacked(file), edges, header) for file in files]
        first = layouts[0]
        line = f"; its first line is {shortened(first.line)!r}"
        if header is None:
            header = first.header
            if header is None and len(files) > 1:
                header = all(layout.first == first.first for layout in layouts)
        if header is None:

            def unless_header() -> None:
                if not self._is_below(name, first.first):
                    raise _HeaderError
                checked()

            try:
                return first.describe(False) + self._create_of_text(name, layouts, False, edges, unless_header)
            except _HeaderError:
                header = True
        return first.describe(header) + self._create_of_text(name, layouts, header, edges, checked)

    def _create_of_text(
        self, name: str, layouts: Sequence[Layout], header: bool, edges: bool, then: Callable[[], None]
    ) -> str:
        """Make a table as the first rows look, else as all look, else of a copy; return how, where not as described."""
        # One scan can read all files only if they have one layout and need no rewriting.
        first, error = layouts[0], ""
        same = all(
            layout.plain
            and (layout.separator, layout.width, layout.quotes, layout.skip)
            == (first.separator, first.width, first.quotes, first.skip)
            and (layout.first == first.first or not header)
            for layout in layouts
        )
        files = [layout.file for layout in layouts]
        named = f"names = [{', '.join(map(text, first.names))}], " if first.names and not header else ""
        # Column types are guessed from the first rows, and if later rows differ, from all of them.
        for sample in ("", ", sample_size = -1") if same else ():
            quote, escape = map(text, first.quotes)
            scan = (
                f"read_csv([{', '.join(map(text, files))}], delim = {text(first.separator)}, quote = {quote}, "
                f"escape = {escape}, header = {header}, skip = {first.skip}, comment = '', {named}"
                f"compression = {text('gzip' if is_gzip(first.file) else 'none')}{sample})"
            )
            try:
                self._create(name, scan, then, within=edges and not header)
                return ""
            except _UnlikeError as unlike:
                error = str(unlike)
        # As a last resort the files are rewritten as one plain CSV file.
        copy = self.folder / "rows.csv"
        with undamaged(first.path):
            how = rewrite(layouts, header, edges, copy)
        scan = f"read_csv({text(copy)}, delim = ',', quote = '\"', escape = '\"', header = {header}, comment = '', "
        try:
            self._create(name, f"{scan}{named}sample_size = -1)", then)
        except _UnlikeError as unlike:
            raise ValueError(f"{first.path} cannot be read: {shortened(error or str(unlike))}") from None
        # The database holds the rows by now.
        copy.unlink()
        return how

    def _create(self, name: str, scan: str, then: Callable[[], None], within: bool = False) -> None:
        """Make a table; if comments may stand within, texts that look like them are not what was expected."""
        with self._whole():
            try:
                self.query(f"CREATE TABLE {quoted(name)} AS SELECT * FROM {scan}")
            except ValueError as error:
                raise _UnlikeError(str(error)) from None
            if within:
                column, kind = next(iter(self.columns(name).items()))
                found = f"SELECT 1 FROM {quoted(name)} WHERE ltrim({quoted(column)})[1] IN ('#', '%') LIMIT 1"
                if kind == "VARCHAR" and self.query(found):
                    raise _UnlikeError("comments")
            then()

    def _is_below(self, name: str, cells: Sequence[str]) -> bool:
        """Say whether some text of the first row of a table stands in another row."""
        among = ", ".join(map(text, cells))
        found = " OR ".join(f"{quoted(column)}::VARCHAR IN ({among})" for column in self.columns(name))
        first = self.query(f"SELECT min(rowid) FROM {quoted(name)}")[0][0]  # not 0 before the table is kept
        return bool(self.query(f"SELECT 1 FROM {quoted(name)} WHERE ({found}) AND rowid > {first} LIMIT 1"))

    def _unpacked(self, path: Path) -> Path:
        """Return where the text of a file is; of one that is packed with zstd, in a copy."""
        if path.suffix.lower() != ".zst":
            return path
        copy = self.folder / f"{path.name}.unpacked"
        lines = f"read_csv({text(path)}, columns = {{'line': 'VARCHAR'}}, auto_detect = false, header = false, "
        none = "delim = '\x01', quote = '', escape = ''"
        options = "(FORMAT csv, HEADER false, DELIMITER '\x01', QUOTE '', ESCAPE '')"
        self.query(f"COPY (SELECT * FROM {lines}{none}, comment = '')) TO {text(copy)} {options}")
        return copy

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
        """Make a table of edges, ``source`` and ``target``, of blocks: all or nothing, unless it is there."""
        if self.has(name):
            return
        with self._whole():
            self.query(f"CREATE TABLE {quoted(name)} (source BIGINT, target BIGINT)")
            for block in blocks():
                self.connection.register("block", block)
                self.query(f"INSERT INTO {quoted(name)} SELECT source, target FROM block")

    def rename(self, name: str, columns: Mapping[str, str]) -> None:
        """Give columns of a table other names; another column of such a name makes way."""
        for old, new in columns.items():
            others = {column.lower() for column in self.columns(name) if column != old}
            if new in others:
                self.query(f"ALTER TABLE {quoted(name)} RENAME COLUMN {quoted(new)} TO {quoted(new + '_')}")
            if new != old:
                self.query(f"ALTER TABLE {quoted(name)} RENAME COLUMN {quoted(old)} TO {quoted(new)}")

    def columns(self, name: str) -> dict[str, str]:
        """Return the columns of a table, and their types."""
        return {row[0]: row[1] for row in self.query(f"DESCRIBE {quoted(name)}")}

    def count(self, name: str) -> int:
        """Return the number of rows of a table."""
        return int(self.query(f"SELECT count(*) FROM {quoted(name)}")[0][0])

    def blocks(self, name: str, columns: Mapping[str, str], rows: int) -> Iterator[Columns]:
        """Yield a table's rows, in order."""
        chosen = ", ".join(f"{what} AS {quoted(column)}" for column, what in columns.items())
        for start in range(0, self.count(name), rows):
            within = f"rowid BETWEEN {start} AND {start + rows - 1}"
            # A scan of several threads keeps the order of rows.
            with self._explained():
                block = self.connection.execute(f"SELECT {chosen} FROM {quoted(name)} WHERE {within}").fetchnumpy()
            yield block

    def _scan(self, path: str | Path, ending: str) -> str:
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
        known = ", ".join((*TEXT, *_PARQUET, *_ARROW, ".npy"))
        raise ValueError(f"{path}: what is in it? Endings that are known: {known}, and those of text with .gz or .zst")


class _UnlikeError(ValueError):
    """The rows of a file are not what its first ones look like."""


class _HeaderError(Exception):
    """The first row of a table is its header."""


def matching(path: str | Path) -> list[Path]:
    """Return a file, or those of a pattern, in order."""
    if Path(path).exists():
        return [Path(path)]
    if not (files := sorted(map(Path, glob.glob(str(path), recursive=True)))):
        raise FileNotFoundError(f"{path} does not exist")
    return files


@contextmanager
def undamaged(path: str | Path) -> Iterator[None]:
    """Say which packed file is damaged."""
    try:
        yield
    except (EOFError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from None


def _ending(path: Path) -> str:
    """Return what a file's name says of what is in it, without how it is packed."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] in _PACKED else "".join(suffixes[-1:])


def text(value: object) -> str:
    """Return a text of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def quoted(name: str) -> str:
    """Return a name of SQL."""
    return '"' + name.replace('"', '""') + '"'


def listed(names: Sequence[str]) -> str:
    """Return names of columns, with commas between."""
    return ", ".join(map(quoted, names))
