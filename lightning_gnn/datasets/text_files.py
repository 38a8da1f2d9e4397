"""Detects the layout of text tables, and rewrites files that the database cannot read directly."""

import codecs
import csv
import gzip
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from lightning_gnn.datasets.column_names import names_columns

_SAMPLE_BYTES = 1 << 20  # bytes of a file used to detect its layout, extended to at least three lines
_MAX_SAMPLE_ROWS = 2000  # maximum number of rows of the sample
_MAX_SHOWN_CHARS = 100  # maximum number of characters of a line in a message
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "::": "double colons", "|": "bars", " ": "blanks"}
"""Field separators in order of preference; a blank stands for any run of blanks and tabs."""
_QUOTE_STYLES = (('"', '"'), ('"', "\\"), ("", ""))  # quote character and escape character
_BROKEN_QUOTES = 0.99  # score factor of quotes that some row violates; wins unless rows are equally wide without quotes
_COMMENT_MARKS = ("#", "%")
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-"}
_NAME = re.compile(r"[^\W\d][\w .:()\-]*")
_REJECTED_STARTS = {
    "version https://git-lfs": "is a Git LFS pointer, not the file itself: run git lfs pull",
    "<!doctype html": "is a web page, not a table: download the file itself",
    "<html": "is a web page, not a table: download the file itself",
    "<head": "is a web page, not a table: download the file itself",
    "<?xml": "is XML, not a table: read GraphML or GEXF with networkx",
    "graph [": "is GML, not a table: read it with networkx",
    "{": "is JSON, not a table: write it as CSV or Parquet",
    "%%matrixmarket": "is a Matrix Market file: rename it to .mtx",
}


@dataclass(frozen=True)
class Layout:
    """Layout of a text file, detected from its first lines."""

    path: Path  # the file named in messages
    file: Path  # the file with the text; differs from `path` if it was decompressed
    encoding: str  # name of the codec
    separator: str  # between two fields
    quotes: tuple[str, str]  # quote character and escape character
    skip: int  # number of comments and empty lines before the first row
    header: bool | None  # whether the first row is a header; None: only if its values occur in no later row
    first: list[str]  # the first row
    width: int  # number of fields per row
    names: list[str]  # column names from the last comment, if the first row is not a header
    plain: bool  # whether the database can read the file directly
    line: str  # the first line that is not empty

    def describe(self, header: bool) -> str:
        """Return a message that describes the layout."""
        columns = f"{self.width} columns separated by {_SEPARATORS[self.separator]}" if self.width > 1 else "one column"
        first = "the first row is the header" if header else "named by a comment" if self.names else "no header"
        first += f", {truncate(self.separator.join(self.first))!r}" if header else ""
        skipped = f", {self.skip} lines of comments before it" if self.skip else ""
        encoding = "" if self.encoding.startswith("utf-8") else f", read as {self.encoding}"
        return f"{self.path.name}: {columns}, {first}{skipped}{encoding}"


def detect_layout(path: Path, file: Path, edges: bool, header: bool | None = None) -> Layout:
    """Detect the layout of a text file."""
    # Read a sample with at least three lines, regardless of their length.
    with open_binary(file) as binary:
        sample = binary.read(_SAMPLE_BYTES)
        while sample.count(b"\n") < 3 and (more := binary.read(_SAMPLE_BYTES)):
            sample += more
        is_complete = not binary.read(1)
    # The incremental decoder tolerates a character that is split at the end of the sample.
    encoding = _detect_encoding(sample, path)
    try:
        decoded = codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file: it begins with {sample[:16]!r}") from None
    buffer = io.StringIO(decoded, newline=None)
    lines, newlines = list(buffer), buffer.newlines
    # The last line of the sample may be incomplete.
    if not is_complete and len(lines) > 1:
        lines.pop()
    line = next((line.strip() for line in lines if line.strip()), "")
    check_line(path, line)
    # Skip leading comments and empty lines; edge files may also have comments between rows.
    skip = next((n for n, line in enumerate(lines) if line.strip() and not is_comment(line)), len(lines))
    body = lines[skip:]
    if not body:
        raise ValueError(f"{path} holds no rows; its first line is {truncate(line)!r}")
    data = [line for line in body if not is_comment(line)] if edges else body
    # Score each separator and quoting style by the fraction of rows with the most frequent width.
    options = []
    for order, separator in enumerate(_SEPARATORS):
        for rank, quotes in enumerate(_QUOTE_STYLES if '"' in decoded else _QUOTE_STYLES[:1]):
            rows, is_whole = _parse_sample(data, separator, quotes, is_complete)
            if not rows:
                continue
            width, count = Counter(map(len, rows)).most_common(1)[0]
            score = count / len(rows) * (1 if is_whole else _BROKEN_QUOTES)
            # A separator must split most rows into the same number of columns, at least two.
            if width > 1 and score > 0.5:
                options.append((score, names_columns(rows[0], edges), -order, -rank, width, separator, quotes, rows))
    # Without such a separator the file has a single column.
    if not options:
        rows = _parse_sample(data, ",", _QUOTE_STYLES[0], is_complete)[0] or [[data[0].strip()]]
        options.append((1.0, names_columns(rows[0], edges), 0, 0, 1, ",", _QUOTE_STYLES[0], rows))
    _, known, _, _, width, separator, quotes, rows = max(options, key=lambda option: option[:4])
    # Take the names from a header, or from a comment directly before the first row.
    names: list[str] = []
    if header is None:
        header = True if known else _is_header(rows, edges)
        if not known and skip and is_comment(comment := lines[skip - 1]):
            found = _parse_sample([comment.lstrip("#% ")], separator, quotes, True)[0]
            if found and len(found[0]) == width and names_columns(found[0], edges):
                header, names = False, found[0]
    # DuckDB reads only plain files directly; other files are rewritten first.
    plain = (
        encoding.startswith("utf-8")
        and not isinstance(newlines, tuple)
        and all(len(row) == width for row in rows)
        and not (edges and header is not True and len(data) < len(body))
        and (not is_padded(rows) if separator != " " else all(" ".join(x.split()) == x.strip("\n") for x in data))
    )
    return Layout(path, file, encoding, separator, quotes, skip, header, rows[0], width, names, plain, line)


def check_content(path: Path) -> None:
    """Raise a ValueError if a file is a Git LFS pointer."""
    if path.is_dir():
        return
    with path.open("rb") as file:
        check_line(path, file.read(30).decode("latin-1"), 1)


def check_line(path: Path, line: str, kinds: int | None = None) -> None:
    """Raise a ValueError if the first line of a file shows that it is not a table."""
    for begin, why in islice(_REJECTED_STARTS.items(), kinds):
        if line.lower().startswith(begin):
            raise ValueError(f"{path} {why} (it begins with {truncate(line)!r})")


def is_gzip(path: Path) -> bool:
    """Return whether a file is gzip-compressed, regardless of its name."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def open_binary(path: Path) -> IO[bytes]:
    """Open a file in binary mode, decompressing gzip."""
    return gzip.open(path, "rb") if is_gzip(path) else path.open("rb")  # type: ignore[return-value]


def is_comment(line: str) -> bool:
    """Return whether a line is a comment."""
    return line.lstrip().startswith(_COMMENT_MARKS)


def truncate(line: str) -> str:
    """Truncate a line for a message."""
    return line if len(line) <= _MAX_SHOWN_CHARS else f"{line[:_MAX_SHOWN_CHARS]}…"


def is_padded(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether all fields of some column are padded with blanks."""
    columns = ([cell for cell in column if cell.strip()] for column in zip(*rows, strict=False))
    return any(column and all(cell != cell.strip() for cell in column) for column in columns)


def rewrite(layouts: Sequence[Layout], header: bool, edges: bool, out: Path) -> str:
    """Write files as one UTF-8 CSV file with one header; describe a fallback encoding in the result."""
    first = layouts[0]
    quotes = _QUOTE_STYLES[_QUOTE_STYLES.index(first.quotes) :]
    encodings = [first.encoding, "latin-1"][: 1 + first.encoding.startswith("utf-8")]
    failed: Exception | None = None
    for encoding in encodings:
        for quote in quotes:
            try:
                with out.open("w", newline="", encoding="utf-8") as file:
                    writer = csv.writer(file)
                    for number, layout in enumerate(layouts):
                        rows = _rows_of(layout, encoding, quote, header, edges)
                        if header and number and (row := next(rows, None)) and row != first.first:
                            writer.writerow(row)
                        writer.writerows(rows)
                return "" if encoding == first.encoding else f", read as {encoding}"
            except UnicodeDecodeError as error:
                failed = error
                break
            except csv.Error as error:
                failed = failed or error
            except ValueError as error:
                raise ValueError(f"{first.path}: {failed or error}") from None
    raise ValueError(f"{first.path}: {failed}")


def _rows_of(layout: Layout, encoding: str, quotes: tuple[str, str], header: bool, edges: bool) -> Iterator[list[str]]:
    """Yield all rows of a file; each row must have ``layout.width`` fields."""
    number, line = 0, ""

    def lines() -> Iterator[str]:
        nonlocal number, line
        begun = False
        with open_binary(layout.file) as binary, io.TextIOWrapper(binary, encoding, newline=None) as file:
            for number, line in enumerate(file, 1):
                begun |= bool(line.strip()) and number > layout.skip
                if begun and not (edges and not header and is_comment(line)):
                    yield line

    strip = layout.separator != " "
    try:
        for row in _parse_rows(lines(), layout.separator, quotes):
            if len(row) != layout.width:
                most = f"but most lines have {layout.width}, separated by {_SEPARATORS[layout.separator]}"
                raise ValueError(f"line {number} has {len(row)} fields, {most}: {truncate(line.rstrip())!r}")
            yield [cell.strip() for cell in row] if strip else row
    except csv.Error as error:
        raise csv.Error(f"line {number}: {error}: {truncate(line.rstrip())!r}") from None


def _parse_sample(
    lines: Sequence[str], separator: str, quotes: tuple[str, str], is_complete: bool
) -> tuple[list[list[str]], bool]:
    """Return up to ``_MAX_SAMPLE_ROWS`` rows, and whether all of them fit the quoting style."""
    rows: list[list[str]] = []
    try:
        rows.extend(islice(_parse_rows(lines, separator, quotes), _MAX_SAMPLE_ROWS))
    except csv.Error as error:
        return rows, not is_complete and "unexpected end" in str(error)
    return rows, True


def _parse_rows(lines: Iterable[str], separator: str, quotes: tuple[str, str]) -> Iterator[list[str]]:
    """Yield the rows that are not empty."""
    if separator == "::":
        yield from (line.rstrip("\n").split(separator) for line in lines if line.strip())
        return
    if separator == " ":
        lines = (line.strip().replace("\t", " ") for line in lines)
    quote, escape = quotes
    csv.field_size_limit(1 << 30)
    options: dict[str, Any] = {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}
    options |= {"doublequote": False, "escapechar": escape} if escape == "\\" else {}
    yield from filter(
        None, csv.reader(lines, delimiter=separator, skipinitialspace=separator == " ", strict=True, **options)
    )


def _detect_encoding(sample: bytes, path: Path) -> str:
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
    ):  # fmt: skip
        if sample.startswith(mark):
            return encoding
    for encoding, zeros in (("utf-16-le", sample[1::2]), ("utf-16-be", sample[::2])):
        if 2 * zeros.count(0) > len(zeros):
            return encoding
    if b"\0" in sample:
        raise ValueError(f"{path} is not a text file: it begins with {sample[:16]!r}")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8"


def _is_header(rows: Sequence[Sequence[str]], edges: bool) -> bool | None:
    """Return whether the first row is a header; None: only if its values occur in no row after the sample."""
    first, body = rows[0], rows[1:]
    are_numbers = [_is_number(cell) for cell in first]
    for column, cell in enumerate(first):
        below = [row[column] for row in body if len(row) > column]
        filled = [other for other in below if other.strip().lower() not in _MISSING]
        if filled and (not edges or not any(are_numbers[:2])):
            is_text = cell.strip().lower() not in _MISSING and not are_numbers[column]
            if is_text and all(map(_is_number, filled)):
                return True  # a text above numbers is a column name
            if not cell.strip() and len(filled) == len(below):
                return True  # pandas leaves the name of an index column empty
    if any(are_numbers):
        return False
    seen = {cell for row in body for cell in row}
    shapes = {_abstract_pattern(cell) for cell in seen}
    for cell in first:
        if cell in seen or not _NAME.fullmatch(cell.strip()):
            return False
        if any(map(str.isdigit, cell)) and _abstract_pattern(cell) in shapes:
            return False
    return None if body else True


def _abstract_pattern(cell: str) -> str:
    """Return a string with each word replaced by one letter and each number by one digit."""
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", cell))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
