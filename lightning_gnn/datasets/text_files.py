"""How a text file is laid out, and a plain copy of it where the database needs one."""

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

from lightning_gnn.datasets.column_names import are_known

_SAMPLE = 1 << 20  # bytes of a file that its layout is guessed from, at least a few lines of it
_ROWS = 2000  # rows of the sample that are looked at
_SHOWN = 100  # characters of a line in a message
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "::": "double colons", "|": "bars", " ": "blanks"}
"""What is between fields, by preference; a blank stands for any run of blanks and tabs."""
_QUOTES = (('"', '"'), ('"', "\\"), ("", ""))  # what encloses fields, and what stands before a quote in them
_BROKEN = 0.99  # what quotes count that some row breaks: more than none, unless all rows are equally long without
_COMMENTS = ("#", "%")
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-"}
_NAME = re.compile(r"[^\W\d][\w .:()\-]*")
_FOREIGN = {
    "version https://git-lfs": "is a Git LFS pointer, not the file that it stands for: run git lfs pull",
    "<!doctype html": "is a web page, not a table: download the file itself",
    "<html": "is a web page, not a table: download the file itself",
    "<head": "is a web page, not a table: download the file itself",
    "<?xml": "is XML, not a table: read GraphML or GEXF with networkx",
    "graph [": "is GML, not a table: read it with networkx",
    "{": "is JSON, not a table: write it as CSV or Parquet",
    "%%matrixmarket": "is a matrix of Matrix Market: rename it to .mtx",
}


@dataclass(frozen=True)
class Layout:
    """How a text file is laid out, by its first lines."""

    path: Path  # the file that messages name
    file: Path  # where its text is; another one if the database has unpacked it
    encoding: str  # how its bytes are read
    separator: str  # what is between two fields
    quotes: tuple[str, str]  # what encloses fields, and what stands before a quote in them
    skip: int  # how many lines, comments and empty ones, stand before the first row
    header: bool | None  # whether the first row is a header; None: only if its texts occur nowhere below
    first: list[str]  # the first row
    width: int  # how many fields a row has
    names: list[str]  # names of columns, from the last comment, where the first row holds none
    plain: bool  # whether the database reads the file as it is
    line: str  # the first line that is not empty

    def describe(self, header: bool) -> str:
        """Say how the file is read."""
        columns = f"{self.width} columns separated by {_SEPARATORS[self.separator]}" if self.width > 1 else "one column"
        first = "the first row is the header" if header else "named by a comment" if self.names else "no header"
        first += f", {shortened(self.separator.join(self.first))!r}" if header else ""
        skipped = f", {self.skip} lines of comments before it" if self.skip else ""
        encoding = "" if self.encoding.startswith("utf-8") else f", read as {self.encoding}"
        return f"{self.path.name}: {columns}, {first}{skipped}{encoding}"


def look(path: Path, file: Path, edges: bool, header: bool | None = None) -> Layout:
    """Return how a text file is laid out."""
    # Read a sample with at least three lines, however long these are.
    with opened(file) as binary:
        sample = binary.read(_SAMPLE)
        while sample.count(b"\n") < 3 and (more := binary.read(_SAMPLE)):
            sample += more
        whole = not binary.read(1)
    # The incremental decoder tolerates a character that the end of the sample cuts in two.
    encoding = _encoding(sample, path)
    try:
        decoded = codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        raise ValueError(f"{path} holds no text: it begins with {sample[:16]!r}") from None
    buffer = io.StringIO(decoded, newline=None)
    lines, newlines = list(buffer), buffer.newlines
    # The last line of a sample may be incomplete.
    if not whole and len(lines) > 1:
        lines.pop()
    line = next((line.strip() for line in lines if line.strip()), "")
    check_line(path, line)
    # Skip leading comments and empty lines; files of edges may have comments between rows as well.
    skip = next((n for n, line in enumerate(lines) if line.strip() and not is_comment(line)), len(lines))
    body = lines[skip:]
    if not body:
        raise ValueError(f"{path} holds no rows; its first line is {shortened(line)!r}")
    data = [line for line in body if not is_comment(line)] if edges else body
    # Rate every separator and kind of quotes by the share of rows that have the most frequent width.
    options = []
    for order, separator in enumerate(_SEPARATORS):
        for rank, quotes in enumerate(_QUOTES if '"' in decoded else _QUOTES[:1]):
            rows, is_whole = _sampled(data, separator, quotes, whole)
            if not rows:
                continue
            width, count = Counter(map(len, rows)).most_common(1)[0]
            share = count / len(rows) * (1 if is_whole else _BROKEN)
            # A separator must split rows into columns, and most of them into equally many.
            if width > 1 and share > 0.5:
                options.append((share, are_known(rows[0], edges), -order, -rank, width, separator, quotes, rows))
    # Without any such separator the file has a single column.
    if not options:
        rows = _sampled(data, ",", _QUOTES[0], whole)[0] or [[data[0].strip()]]
        options.append((1.0, are_known(rows[0], edges), 0, 0, 1, ",", _QUOTES[0], rows))
    _, known, _, _, width, separator, quotes, rows = max(options, key=lambda option: option[:4])
    # Names are taken from a header, or from a comment right before the first row.
    names: list[str] = []
    if header is None:
        header = True if known else _is_header(rows, edges)
        if not known and skip and is_comment(comment := lines[skip - 1]):
            found = _sampled([comment.lstrip("#% ")], separator, quotes, True)[0]
            if found and len(found[0]) == width and are_known(found[0], edges):
                header, names = False, found[0]
    # DuckDB reads only plain files directly; others are rewritten first.
    plain = (
        encoding.startswith("utf-8")
        and not isinstance(newlines, tuple)
        and all(len(row) == width for row in rows)
        and not (edges and header is not True and len(data) < len(body))
        and (all(" ".join(line.split()) == line.strip("\n") for line in data) if separator == " " else not padded(rows))
    )
    return Layout(path, file, encoding, separator, quotes, skip, header, rows[0], width, names, plain, line)


def check_content(path: Path) -> None:
    """Check that a file is not a pointer to itself."""
    if path.is_dir():
        return
    with path.open("rb") as file:
        check_line(path, file.read(30).decode("latin-1"), 1)


def check_line(path: Path, line: str, kinds: int | None = None) -> None:
    """Check by the first line of a file that it may be a table."""
    for begin, why in islice(_FOREIGN.items(), kinds):
        if line.lower().startswith(begin):
            raise ValueError(f"{path} {why} (it begins with {shortened(line)!r})")


def is_gzip(path: Path) -> bool:
    """Say whether a file is packed with gzip, whatever its name."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def opened(path: Path) -> IO[bytes]:
    """Open a file, packed with gzip or not."""
    return gzip.open(path, "rb") if is_gzip(path) else path.open("rb")  # type: ignore[return-value]


def is_comment(line: str) -> bool:
    """Say whether a line is a comment."""
    return line.lstrip().startswith(_COMMENTS)


def shortened(line: str) -> str:
    """Return what a message shows of a line."""
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def padded(rows: Sequence[Sequence[str]]) -> bool:
    """Say whether blanks stand around all fields of some column."""
    columns = ([cell for cell in column if cell.strip()] for column in zip(*rows, strict=False))
    return any(column and all(cell != cell.strip() for cell in column) for column in columns)


def rewrite(layouts: Sequence[Layout], header: bool, edges: bool, out: Path) -> str:
    """Write rows of files as one CSV file in UTF-8, the header once; return how, if not as their first lines say."""
    first = layouts[0]
    quotes = _QUOTES[_QUOTES.index(first.quotes) :]
    encodings = [first.encoding, "latin-1"][: 1 + first.encoding.startswith("utf-8")]
    failed: Exception | None = None
    for encoding in encodings:
        for quote in quotes:
            try:
                with out.open("w", newline="", encoding="utf-8") as file:
                    writer = csv.writer(file)
                    for number, layout in enumerate(layouts):
                        rows = _whole(layout, encoding, quote, header, edges)
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


def _whole(layout: Layout, encoding: str, quotes: tuple[str, str], header: bool, edges: bool) -> Iterator[list[str]]:
    """Yield all rows of a file; each must have as many fields as most."""
    number, line = 0, ""

    def lines() -> Iterator[str]:
        nonlocal number, line
        begun = False
        with opened(layout.file) as binary, io.TextIOWrapper(binary, encoding, newline=None) as file:
            for number, line in enumerate(file, 1):
                begun |= bool(line.strip()) and number > layout.skip
                if begun and not (edges and not header and is_comment(line)):
                    yield line

    strip = layout.separator != " "
    try:
        for row in _parsed(lines(), layout.separator, quotes):
            if len(row) != layout.width:
                most = f"but most have {layout.width}, separated by {_SEPARATORS[layout.separator]}"
                raise ValueError(f"line {number} has {len(row)} fields, {most}: {shortened(line.rstrip())!r}")
            yield [cell.strip() for cell in row] if strip else row
    except csv.Error as error:
        raise csv.Error(f"line {number}: {error}: {shortened(line.rstrip())!r}") from None


def _sampled(
    lines: Sequence[str], separator: str, quotes: tuple[str, str], whole: bool
) -> tuple[list[list[str]], bool]:
    """Return some rows, and whether all are quoted like that."""
    rows: list[list[str]] = []
    try:
        rows.extend(islice(_parsed(lines, separator, quotes), _ROWS))
    except csv.Error as error:
        return rows, not whole and "unexpected end" in str(error)
    return rows, True


def _parsed(lines: Iterable[str], separator: str, quotes: tuple[str, str]) -> Iterator[list[str]]:
    """Yield rows, without empty ones."""
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


def _encoding(sample: bytes, path: Path) -> str:
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
        raise ValueError(f"{path} holds no text: it begins with {sample[:16]!r}")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8"


def _is_header(rows: Sequence[Sequence[str]], edges: bool) -> bool | None:
    """Say whether a first row is a header; None: if none of its texts occurs below what was sampled, either."""
    first, body = rows[0], rows[1:]
    are_numbers = [_is_number(cell) for cell in first]
    for column, cell in enumerate(first):
        below = [row[column] for row in body if len(row) > column]
        filled = [other for other in below if other.strip().lower() not in _MISSING]
        if filled and (not edges or not any(are_numbers[:2])):
            is_text = cell.strip().lower() not in _MISSING and not are_numbers[column]
            if is_text and all(map(_is_number, filled)):
                return True  # a name over numbers
            if not cell.strip() and len(filled) == len(below):
                return True  # the name that pandas gives to an index
    if any(are_numbers):
        return False
    seen = {cell for row in body for cell in row}
    shapes = {_shape(cell) for cell in seen}
    for cell in first:
        if cell in seen or not _NAME.fullmatch(cell.strip()):
            return False
        if any(map(str.isdigit, cell)) and _shape(cell) in shapes:
            return False
    return None if body else True


def _shape(cell: str) -> str:
    """Return a text with one letter for each word in it and one digit for each number."""
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", cell))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
