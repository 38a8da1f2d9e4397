"""Reads CSV, Parquet, Arrow or ``.npy`` files into an on-disk DuckDB database with bounded memory."""

import errno
import glob
import gzip
import json
import shutil
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy.typing as npt

from lightning_gnn.datasets.text_files import Layout, detect_layout, is_gzip, rewrite, truncate
from lightning_gnn.features.arrays import load_array
from lightning_gnn.runtime.files import write_whole
from lightning_gnn.runtime.urls import local_path

Columns = dict[str, npt.NDArray[Any]]
TEXT = (".csv", ".tsv", ".txt", ".edges", ".edgelist", ".cites", ".content", ".dat", ".data")  # text files
_PARQUET, _ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
_COMPRESSED = (".gz", ".zst")
INTEGER_TYPES = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "HUGEINT")
_SAMPLE_BYTES = 1 << 20  # bytes of a text file from which its number of rows is estimated
_SECONDS_PER_REPORT = 5.0  # seconds between two looks at the progress of a query or scan
_MISSING_PACKAGE = '{} needs {} ({}): pip install "lightning-gnn[convert]"'


class TableFiles:
    """An on-disk database of tables; an interrupted conversion with the same inputs resumes from it."""

    def __init__(
        self, folder: Path, memory: int, fingerprint: object, output: Path, say: Callable[[str], None]
    ) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise ModuleNotFoundError(_MISSING_PACKAGE.format("lgnn convert", "DuckDB", error)) from None
        if memory < 100 << 20:
            raise ValueError(f"memory is {memory} bytes; give at least 100 MB")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.error: type[Exception] = duckdb.Error
        path, note = folder / "tables.duckdb", folder / "of.json"
        wanted = json.dumps(fingerprint, default=str)
        if not note.exists() or note.read_text() != wanted:
            note.unlink(missing_ok=True)  # first: if the process is killed here, the next run must not resume
            for old in (path, path.with_name(f"{path.name}.wal")):
                old.unlink(missing_ok=True)
            shutil.rmtree(output, ignore_errors=True)
            write_whole(note, wanted)
            self.resumed = False
        else:
            self.resumed = path.exists()
        self.connection = duckdb.connect(str(path))
        self.connection.execute(f"SET memory_limit = '{memory >> 20}MiB'")
        self.connection.execute(f"SET temp_directory = {as_text(folder / 'spill')}")
        # DuckDB measures its progress only with the progress bar, which is not printed.
        self.connection.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
        self._say, self._closed = say, threading.Event()
        # The scan of the text file that is being read, given the columns to read as texts.
        self._text_scan: Callable[[Sequence[str]], str] | None = None
        self._started = time.perf_counter()  # of the query or scan
        self._scanned: int | None = None  # percentage of a table that is read in blocks
        self._reporter = threading.Thread(target=self._report_progress, name="lightning-gnn-progress", daemon=True)
        self._reporter.start()

    def _report_progress(self) -> None:
        """Report the tenths of a query or scan that takes long, and the time that the rest takes at this rate."""
        reported = 0
        while not self._closed.wait(_SECONDS_PER_REPORT):
            scanned = self._scanned
            percent = self.connection.query_progress() if scanned is None else scanned
            tenths = int(percent) // 10
            if 0 < tenths < 10 and tenths != reported:
                left = (time.perf_counter() - self._started) * (100 - percent) / percent
                shown = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
                self._say(f"  {10 * tenths} %, about {shown} left for this step")
            reported = tenths

    def close(self) -> None:
        """Close the database."""
        self._closed.set()
        self._reporter.join()
        self.connection.close()

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a small result."""
        self._started = time.perf_counter()
        with self._translate_errors():
            return list(self.connection.execute(sql).fetchall())

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (self.error, RuntimeError) as error:
            name, message = type(error).__name__, "; ".join(str(error).partition("\n\n")[0].splitlines())
            if name == "InterruptException" or message == "Query interrupted":
                raise KeyboardInterrupt from None  # DuckDB handles Ctrl-C itself during a query
            if name == "IOException" and "No space left" in message:
                raise OSError(errno.ENOSPC, message) from None
            if name == "OutOfMemoryException" and "failed to allocate" in message:
                raise MemoryError(message) from None
            if name == "OutOfMemoryException":
                raise OSError(f"{message}; free disk space, or increase memory=, and repeat the call") from None
            if not isinstance(error, self.error):
                raise
            raise ValueError(message) from None

    def estimate(self, path: str | Path) -> tuple[int, int]:
        """Estimate the numbers of rows and columns of a table before it is read; 0 if the format does not allow it."""
        files = find_files(path)
        ending = _get_extension(files[0])
        if ending in _PARQUET:
            scan = f"parquet_file_metadata([{', '.join(map(as_text, files))}])"
            ((rows,),) = self.query(f"SELECT sum(num_rows) FROM {scan}")
            return int(rows), len(self.query(f"DESCRIBE SELECT * FROM read_parquet({as_text(files[0])})"))
        if ending == ".npy":
            return max(_load_edges(files[0]).shape, default=0), 2
        if ending not in TEXT or files[0].suffix.lower() in _COMPRESSED:
            return 0, 0
        with files[0].open("rb") as file:
            sample = file.read(_SAMPLE_BYTES)
        lines = max(sample.count(b"\n"), 1)
        columns = max(sample.count(separator) for separator in (b",", b";", b"\t", b" ")) // lines + 1
        return sum(file.stat().st_size for file in files) * lines // max(len(sample), 1), columns

    def make(self, name: str, sql: str) -> None:
        """Create a table unless it exists."""
        if not self.has(name):
            self.query(f"CREATE TABLE {as_name(name)} AS {sql}")

    def has(self, name: str) -> bool:
        """Return whether a table exists."""
        return bool(self.query(f"SELECT 1 FROM duckdb_tables() WHERE table_name = {as_text(name)}"))

    def read(
        self,
        name: str,
        path: str | Path,
        edges: bool = False,  # whether the file holds edges; edge lists without a header may have comments anywhere
        header: bool | None = None,  # whether a text file has a header; None: detect it
        check: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Create a table from the files of a pattern, in order; describe the layout of text files that were read."""
        if self.has(name):
            return None
        files = find_files(path)
        ending, line = _get_extension(files[0]), ""

        def check_rows() -> None:
            if not self.count(name):
                raise ValueError(f"{path} holds no {'edges' if edges else 'nodes'}{line}")
            if header:
                self._check_repeated_header(name, path, first.first)
            try:
                check()
            except ValueError as error:
                raise ValueError(f"{error}{line}") from None

        if ending not in TEXT:
            try:
                self._create(name, self._scan(path, ending), check_rows)
            except _LayoutError as error:
                raise ValueError(f"{path} cannot be read: {error}") from None
            return None
        with report_damage(path):
            layouts = [detect_layout(file, self._decompress(file), edges, header) for file in files]
        first = layouts[0]
        line = f"; its first line is {truncate(first.line)!r}"
        if header is None:
            header = first.header
            if header is None and len(files) > 1:
                header = all(layout.first == first.first for layout in layouts)
        if header is None:

            def check_no_header() -> None:
                if not self._occurs_below(name, first.first):
                    raise _HeaderError
                check_rows()

            try:
                return first.describe(False) + self._create_from_text(name, layouts, False, edges, check_no_header)
            except _HeaderError:
                header = True
        return first.describe(header) + self._create_from_text(name, layouts, header, edges, check_rows)

    def _create_from_text(
        self, name: str, layouts: Sequence[Layout], header: bool, edges: bool, check: Callable[[], None]
    ) -> str:
        """Create a table with types guessed from the first rows, else from all rows, else from a rewritten copy."""
        # One scan can read all files only if they share one layout and need no rewriting.
        first, error = layouts[0], ""
        is_uniform = all(
            layout.plain
            and (layout.separator, layout.width, layout.quotes, layout.skip)
            == (first.separator, first.width, first.quotes, first.skip)
            and (layout.first == first.first or not header)
            for layout in layouts
        )
        files = [layout.file for layout in layouts]
        is_list = edges and not header
        named = f"names = [{', '.join(map(as_text, first.names))}], " if first.names and not header else ""
        # Guess column types from the first rows, or from all rows if later ones differ.
        for sample in ("", ", sample_size = -1") if is_uniform else ():
            quote, escape = map(as_text, first.quotes)
            scan = (
                f"read_csv([{', '.join(map(as_text, files))}], delim = {as_text(first.separator)}, quote = {quote}, "
                f"escape = {escape}, header = {header}, skip = {first.skip}, comment = '', {named}"
                f"compression = {as_text('gzip' if is_gzip(first.file) else 'none')}{sample}"
            )
            try:
                self._create_text(name, scan, check, exact_types=bool(sample), reject_comments=is_list)
                return ""
            except _LayoutError as unlike:
                error = str(unlike)
        # As a last resort, rewrite the files as one plain CSV file.
        copy = self.folder / "rows.csv"
        with report_damage(first.path):
            note = rewrite(layouts, header, edges, copy)
        scan = f"read_csv({as_text(copy)}, delim = ',', quote = '\"', escape = '\"', header = {header}, comment = '', "
        try:
            self._create_text(name, f"{scan}{named}sample_size = -1", check, exact_types=True)
        except _LayoutError as unlike:
            raise ValueError(f"{first.path} cannot be read: {truncate(error or str(unlike))}") from None
        # The rows are in the database now.
        copy.unlink()
        return note

    def _create_text(
        self, name: str, scan: str, check: Callable[[], None], exact_types: bool, reject_comments: bool = False
    ) -> None:
        """Create a table from an unfinished call of ``read_csv``; ``exact_types``: types are guessed from all rows."""
        try:
            types = {row[0]: row[1] for row in self.query(f"DESCRIBE SELECT * FROM {scan})")}
        except ValueError as error:
            raise _LayoutError(str(error)) from None
        # A cast to integers accepts and rounds other numbers below the rows from which the type was guessed.
        integers = {} if exact_types else {name: t for name, t in types.items() if t in INTEGER_TYPES}

        def scan_with(texts: Sequence[str]) -> str:
            checked = {column: sql_type for column, sql_type in integers.items() if column not in texts}
            given = ", ".join(f"{as_text(column)}: 'VARCHAR'" for column in (*texts, *checked))
            values = ", ".join(
                f"CASE WHEN {_is_plain(column, sql_type)} THEN {as_name(column)}::{sql_type} "
                f"ELSE error({as_name(column)} || ' is not an integer') END AS {as_name(column)}"
                for column, sql_type in checked.items()
            )
            replaced = f"REPLACE ({values}) " if values else ""
            return f"(SELECT * {replaced}FROM {scan}{f', types = {{{given}}}' if given else ''}))"

        self._text_scan = scan_with
        try:
            self._create(name, scan_with(()), check, reject_comments)
        finally:
            self._text_scan = None

    def read_as_text(self, name: str, columns: Sequence[str]) -> None:
        """Read columns of the text file that is being read again as they are written, unless they are plain integers.

        Numbers of other types lose the text (``7.0``, ``1e3``, ``0x7``), and digits beyond 2^53.
        """
        if self._text_scan is None:
            return
        types = self.columns(name)
        columns = [column for column in columns if types[column] != "VARCHAR"]
        if integers := [column for column in columns if types[column] in INTEGER_TYPES]:
            plain = ", ".join(f"bool_and({_is_plain(column, types[column])})" for column in integers)
            are_plain = self.query(f"SELECT {plain} FROM {self._text_scan(integers)}")[0]
            exact = {column for column, is_plain in zip(integers, are_plain, strict=True) if is_plain}
            columns = [column for column in columns if column not in exact]
        if columns:
            self.query(f"CREATE OR REPLACE TABLE {as_name(name)} AS SELECT * FROM {self._text_scan(columns)}")

    def _check_repeated_header(self, name: str, path: str | Path, header: Sequence[str]) -> None:
        """Raise a ValueError if a row repeats the header, as in files that were joined."""
        columns = self.columns(name)
        if {*columns.values()} != {"VARCHAR"} or len(columns) != len(header):
            return
        repeated = " AND ".join(f"{as_name(c)} = {as_text(cell)}" for c, cell in zip(columns, header, strict=True))
        first = self.query(f"SELECT min(rowid) FROM {as_name(name)}")[0][0]  # not 0 before the table is committed
        for (row,) in self.query(f"SELECT min(rowid) FROM {as_name(name)} WHERE {repeated} HAVING count(*) > 0"):
            again = f"{describe_row(path, row - first)} repeats the header, {truncate(','.join(header))!r}"
            raise ValueError(f"{path}: {again}; remove it, or name the columns differently if it is an edge or node")

    def _create(self, name: str, scan: str, check: Callable[[], None], reject_comments: bool = False) -> None:
        """Create a table in one transaction; ``reject_comments`` rejects rows that look like comments."""
        with self.transaction():
            try:
                self.query(f"CREATE TABLE {as_name(name)} AS SELECT * FROM {scan}")
            except ValueError as error:
                raise _LayoutError(str(error)) from None
            if reject_comments:
                column, sql_type = next(iter(self.columns(name).items()))
                comments = f"SELECT 1 FROM {as_name(name)} WHERE ltrim({as_name(column)})[1] IN ('#', '%') LIMIT 1"
                if sql_type == "VARCHAR" and self.query(comments):
                    raise _LayoutError("comments")
            check()

    def _occurs_below(self, name: str, cells: Sequence[str]) -> bool:
        """Return whether a value of the first row of a table occurs in another row."""
        values = ", ".join(map(as_text, cells))
        condition = " OR ".join(f"{as_name(column)}::VARCHAR IN ({values})" for column in self.columns(name))
        first = self.query(f"SELECT min(rowid) FROM {as_name(name)}")[0][0]  # not 0 before the table is committed
        return bool(self.query(f"SELECT 1 FROM {as_name(name)} WHERE ({condition}) AND rowid > {first} LIMIT 1"))

    def _decompress(self, path: Path) -> Path:
        """Return the path of the text; a zstd file is decompressed to a copy."""
        if path.suffix.lower() != ".zst":
            return path
        copy = self.folder / f"{path.name}.unpacked"
        lines = f"read_csv({as_text(path)}, columns = {{'line': 'VARCHAR'}}, auto_detect = false, header = false, "
        none = "delim = '\x01', quote = '', escape = ''"
        options = "(FORMAT csv, HEADER false, DELIMITER '\x01', QUOTE '', ESCAPE '')"
        self.query(f"COPY (SELECT * FROM {lines}{none}, comment = '')) TO {as_text(copy)} {options}")
        return copy

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all changes, or none on an error."""
        self.query("BEGIN")
        try:
            yield
            self.query("COMMIT")
        except BaseException:
            with suppress(self.error):
                self.connection.rollback()
            raise

    def fill(self, name: str, blocks: Callable[[], Iterator[Columns]]) -> None:
        """Create an edge table, ``source`` and ``target``, from blocks in one transaction, unless it exists."""
        if self.has(name):
            return
        with self.transaction():
            self.query(f"CREATE TABLE {as_name(name)} (source BIGINT, target BIGINT)")
            for block in blocks():
                self.connection.register("block", block)
                self.query(f"INSERT INTO {as_name(name)} SELECT source, target FROM block")

    def rename(self, name: str, columns: Mapping[str, str]) -> None:
        """Rename columns of a table; a different column that has a new name gets the suffix ``_``."""
        for old, new in columns.items():
            others = {column.lower() for column in self.columns(name) if column != old}
            if new in others:
                self.query(f"ALTER TABLE {as_name(name)} RENAME COLUMN {as_name(new)} TO {as_name(new + '_')}")
            if new != old:
                self.query(f"ALTER TABLE {as_name(name)} RENAME COLUMN {as_name(old)} TO {as_name(new)}")

    def columns(self, name: str) -> dict[str, str]:
        """Return the column names of a table with their SQL types."""
        return {row[0]: row[1] for row in self.query(f"DESCRIBE {as_name(name)}")}

    def count(self, name: str) -> int:
        """Return the number of rows of a table."""
        return int(self.query(f"SELECT count(*) FROM {as_name(name)}")[0][0])

    def blocks(self, name: str, columns: Mapping[str, str], rows: int) -> Iterator[Columns]:
        """Yield the rows of a table in blocks, in order."""
        chosen = ", ".join(f"{expression} AS {as_name(column)}" for column, expression in columns.items())
        count = self.count(name)
        self._started = time.perf_counter()
        try:
            for start in range(0, count, rows):
                self._scanned = 100 * start // count
                within = f"rowid BETWEEN {start} AND {start + rows - 1}"
                # A multithreaded scan preserves the order of rows.
                with self._translate_errors():
                    block = self.connection.execute(f"SELECT {chosen} FROM {as_name(name)} WHERE {within}").fetchnumpy()
                yield block
        finally:
            self._scanned = None

    def _scan(self, path: str | Path, ending: str) -> str:
        if ending in _PARQUET:
            return f"read_parquet({as_text(path)})"
        if ending in _ARROW:
            try:
                from pyarrow import dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
            except ImportError as error:
                raise ModuleNotFoundError(_MISSING_PACKAGE.format(path, "pyarrow", error)) from None
            self.connection.register("scanned", dataset.dataset([*map(str, find_files(path))], format="ipc"))
            return "scanned"
        if ending == ".npy":
            array = _load_edges(Path(path))
            if array.ndim != 2 or 2 not in array.shape:
                raise ValueError(f"{path} has the shape {list(array.shape)}; edges are [2, E] or [E, 2]")
            source, target = array if array.shape[0] == 2 else array.T
            self.connection.register("scanned", {"source": source, "target": target})
            return "scanned"
        known = ", ".join((*TEXT, *_PARQUET, *_ARROW, ".npy"))
        raise ValueError(f"{path} has an unknown file extension; known: {known}, and those of text with .gz or .zst")


def _load_edges(path: Path) -> npt.NDArray[Any]:
    try:
        return load_array(path).numpy()
    except ValueError as error:
        raise ValueError(f"{error}; expected are edges, numbers of the shape [2, E] or [E, 2]") from None


def _is_plain(column: str, sql_type: str) -> str:
    """Return the SQL condition that a text is missing or is an integer as the database writes it."""
    name = as_name(column)
    return f"({name} IS NULL OR coalesce(TRY_CAST({name} AS {sql_type})::VARCHAR = {name}, false))"


class _LayoutError(ValueError):
    """Later rows of a file do not match the layout of the first ones."""


class _HeaderError(Exception):
    """The first row of a table turned out to be its header."""


def find_files(path: str | Path) -> list[Path]:
    """Return the files that match a path or glob pattern, sorted."""
    path = local_path(path)
    if path.exists():
        return [path]
    if not (files := sorted(map(Path, glob.glob(str(path), recursive=True)))):
        raise FileNotFoundError(f"{path} does not exist")
    return files


def describe_row(path: str | Path, row: int) -> str:
    """Return a text for the position of a row, from 0 on, in one or several files."""
    count = len(find_files(path))
    return f"row {row}" if count == 1 else f"row {row} (counted over {count} files)"


@contextmanager
def report_damage(path: str | Path) -> Iterator[None]:
    """Raise a ValueError that names the file if decompression fails."""
    try:
        yield
    except (EOFError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from None


def _get_extension(path: Path) -> str:
    """Return the file extension without the one of compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] in _COMPRESSED else "".join(suffixes[-1:])


def as_text(value: object) -> str:
    """Return an SQL string literal."""
    return "'" + str(value).replace("'", "''") + "'"


def as_name(name: str) -> str:
    """Return a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
