"""Forms in which graphs are published, as edges by blocks: sparse matrices, WebGraph's text, OGB's raw folders."""

import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.io
import scipy.sparse

from lightning_gnn.datasets.table_files import Columns, undamaged
from lightning_gnn.datasets.text_files import opened
from lightning_gnn.features.arrays import load_array, new_file

_BLOCK = 1 << 22  # edges that are read at a time, or a row of them
_TEXT = 1 << 25  # characters of lines that are read at a time
_WEBGRAPH = (".graph-txt", ".graph-txt.gz")
_MATRIX_MARKET = (".mtx", ".mtx.gz")
_OF_NODES = ("node-feat.csv.gz", "node-label.csv.gz")  # of OGB
_SPLITS = {"train": "train", "val": "valid", "test": "test"}


@dataclass(frozen=True)
class Published:
    """A graph as it is published, without types, whose nodes are called by numbers from 0 on."""

    files: list[Path]  # all that it is read from
    num_nodes: int | None = None  # how many nodes there are; None: as many as there are rows of features
    edges: Path | None = None  # a table of edges, where they are one
    blocks: Callable[[], Iterator[Columns]] | None = None  # yields edges otherwise, as int64 source and target
    features: Path | None = None  # a table without a header, a row of features per node
    labels: Path | None = None  # likewise, of one column
    splits: dict[str, Path] = field(default_factory=dict)
    """Tables of one column, the numbers of nodes, by ``train``, ``val`` and ``test``."""
    arrays: dict[str, tuple[Path, str]] = field(default_factory=dict)
    """Arrays that become files as they are: by the file's name, the archive, and their name there."""


def published(path: str | Path, scratch: Path) -> Published | None:
    """Return what lies at a path if it is a published form, as :func:`convert_tables` lists them; None for a table."""
    path = Path(path)
    if path.is_dir():
        if (path / "indptr.npy").exists() and (path / "indices.npy").exists():
            files = [path / "indptr.npy", path / "indices.npy"]
            return _matrix(files, load_array(files[0]).numpy(), load_array(files[1]).numpy())
        return _ogb(path, scratch)
    if not path.is_file():
        return None
    if path.suffix == ".npz":
        return _scipy(path, scratch)
    if path.name.endswith(_WEBGRAPH):
        return _webgraph(path)
    if path.name.endswith(_MATRIX_MARKET):
        return _matrix_market(path)
    return None


def unpack(archive: Path, name: str, path: Path) -> None:
    """Write one array of an ``.npz`` file as an ``.npy`` file, which is what lies in it."""
    with undamaged(archive), zipfile.ZipFile(archive) as members:
        if f"{name}.npy" not in members.namelist():
            raise ValueError(f"{archive} holds no {name}, but {', '.join(members.namelist())}")
        size = members.getinfo(f"{name}.npy").file_size
        with members.open(f"{name}.npy") as source, new_file(path, size) as target:
            while block := source.read(1 << 24):
                target.write(block)


def read_ids(path: Path) -> npt.NDArray[np.int64]:
    """Return the numbers in a text file, packed or not, one a line."""
    try:
        return np.loadtxt(path, dtype=np.int64, ndmin=1)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from None


def _matrix(
    files: list[Path], indptr: npt.NDArray[Any], indices: npt.NDArray[Any], by_target: bool = False
) -> Published:
    """Edges of a sparse matrix, by its rows, or by its columns, which are the targets."""
    where = files[0]
    if indptr.ndim != 1 or indices.ndim != 1 or not len(indptr) or indptr[0] != 0 or indptr[-1] != len(indices):
        raise ValueError(f"{where}: indptr must go from 0 to the number of edges, {len(indices)}")
    if not np.issubdtype(indptr.dtype, np.integer) or not np.issubdtype(indices.dtype, np.integer):
        raise ValueError(f"{where}: indptr and indices must be integers, but are {indptr.dtype} and {indices.dtype}")

    def blocks() -> Iterator[Columns]:
        row, last = 0, len(indptr) - 1
        while row < last:
            begin = int(indptr[row])
            end = int(np.searchsorted(indptr, begin + _BLOCK, side="right")) - 1
            end = min(last, max(row + 1, end))
            offsets = indptr[row : end + 1].astype(np.int64)
            counts = offsets[1:] - offsets[:-1]
            if (counts < 0).any():
                raise ValueError(f"{where}: indptr falls at row {row + int((counts < 0).argmax())}")
            rows = np.repeat(np.arange(row, end, dtype=np.int64), counts)
            others = indices[begin : begin + len(rows)].astype(np.int64)
            yield {"source": others, "target": rows} if by_target else {"source": rows, "target": others}
            row = end

    return Published(files, len(indptr) - 1, blocks=blocks)


def _scipy(path: Path, scratch: Path) -> Published:
    with undamaged(path), np.load(path) as archive:
        if not {"format", "shape"} <= {*archive.files}:
            raise ValueError(f"{path} is no sparse matrix of SciPy: it holds {', '.join(archive.files)}")
        kind, shape = archive["format"].item(), archive["shape"].tolist()
    kind = kind.decode() if isinstance(kind, bytes) else str(kind)
    if kind not in ("csr", "csc", "coo"):
        raise ValueError(f"{path} is a matrix in {kind}; save it in csr, csc or coo")
    names = ("row", "col") if kind == "coo" else ("indptr", "indices")
    scratch.mkdir(parents=True, exist_ok=True)
    for name in names:
        unpack(path, name, scratch / f"{name}.npy")
    first, second = (load_array(scratch / f"{name}.npy").numpy() for name in names)
    num_nodes = _square(path, shape)
    if kind == "coo":
        return _entries(path, num_nodes, first, second)
    return _matrix([path], first, second, by_target=kind == "csc")


def _matrix_market(path: Path) -> Published:
    try:
        matrix = scipy.io.mmread(path)
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is not a Matrix Market file: {error}") from None
    matrix = scipy.sparse.coo_array(matrix)
    return _entries(path, _square(path, matrix.shape), matrix.row, matrix.col)


def _square(path: Path, shape: Sequence[int]) -> int:
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"{path} has the shape {list(shape)}; a graph without types is a square matrix")
    return int(shape[0])


def _entries(path: Path, num_nodes: int, rows: npt.NDArray[Any], columns: npt.NDArray[Any]) -> Published:
    def blocks() -> Iterator[Columns]:
        for start in range(0, len(rows), _BLOCK):
            block = slice(start, start + _BLOCK)
            yield {"source": rows[block].astype(np.int64), "target": columns[block].astype(np.int64)}

    return Published([path], num_nodes, blocks=blocks)


def _webgraph(path: Path) -> Published:
    # The first line holds the number of nodes.
    with undamaged(path), opened(path) as file:
        first = file.readline().strip()
    if not first.isdigit():
        raise ValueError(f"{path} begins with {first[:40]!r}, not with the number of nodes")
    num_nodes = int(first)

    # Each following line lists the successors of one node.
    def blocks() -> Iterator[Columns]:
        row = 0
        with undamaged(path), opened(path) as file:
            file.readline()
            while lines := file.readlines(_TEXT):
                words = [line.split() for line in lines]
                counts = np.fromiter(map(len, words), np.int64, len(lines))
                # Words are parsed all at once; only if this fails is the wrong line looked for.
                try:
                    targets = np.array(list(chain.from_iterable(words)), dtype=np.bytes_).astype(np.int64)
                except (ValueError, OverflowError):
                    is_number = re.compile(rb"\d{1,18}").fullmatch
                    wrong = next(n for n, line in enumerate(words) if not all(map(is_number, line)))
                    raise ValueError(f"{path}: line {row + wrong + 2} holds something else than numbers") from None
                yield {"source": np.repeat(np.arange(row, row + len(lines)), counts), "target": targets}
                row += len(lines)
        # A truncated file ends early without any other error.
        if row != num_nodes:
            raise ValueError(f"{path} has lines for {row} nodes, but begins with {num_nodes}; it is cut off or damaged")

    return Published([path], num_nodes, blocks=blocks)


def _ogb(path: Path, scratch: Path) -> Published:
    # OGB keeps tables in `raw`, and beside it the splits, which are used if there is only one kind of them.
    raw = path / "raw" if (path / "raw").is_dir() else path
    found = sorted((raw.parent / "split").glob("*/train.csv.gz"))
    splits = {}
    if len(found) == 1:
        splits = {ours: found[0].with_name(f"{theirs}.csv.gz") for ours, theirs in _SPLITS.items()}
    # The large datasets come as NumPy archives, which are unpacked and read in blocks.
    if (raw / "data.npz").exists():
        archive, labels = raw / "data.npz", raw / "node-label.npz"

        def blocks() -> Iterator[Columns]:
            scratch.mkdir(parents=True, exist_ok=True)
            unpack(archive, "edge_index", scratch / "edge_index.npy")
            edges = load_array(scratch / "edge_index.npy").numpy()
            if edges.ndim != 2 or edges.shape[0] != 2:
                raise ValueError(f"{archive}: edge_index has the shape {list(edges.shape)}; edges are [2, E]")
            for start in range(0, edges.shape[1], _BLOCK):
                source, target = edges[:, start : start + _BLOCK].astype(np.int64)
                yield {"source": source, "target": target}
            (scratch / "edge_index.npy").unlink()

        arrays = {"x": (archive, "node_feat"), "y": (labels, "node_label")}
        return Published([archive, labels, *splits.values()], blocks=blocks, splits=splits, arrays=arrays)
    # The others come as compressed tables, with the number of nodes in a file or by the rows of features.
    if not (raw / "edge.csv.gz").exists():
        none = "neither indptr.npy and indices.npy, nor OGB's raw/edge.csv.gz or raw/data.npz"
        raise FileNotFoundError(f"{path} holds {none}; for tables in it give a pattern, such as '{path}/*.parquet'")
    edges = raw / "edge.csv.gz"
    features, classes = (path if path.exists() else None for path in map(raw.joinpath, _OF_NODES))
    num_nodes = None
    if (raw / "num-node-list.csv.gz").exists():
        num_nodes = int(read_ids(raw / "num-node-list.csv.gz").sum())
    elif features is None:
        raise FileNotFoundError(f"{raw} lacks num-node-list.csv.gz and node-feat.csv.gz: how many nodes are there?")
    files = [path for path in (edges, features, classes, *splits.values()) if path is not None]
    return Published(files, num_nodes, edges=edges, features=features, labels=classes, splits=splits)
