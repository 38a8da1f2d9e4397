"""Reads published graph formats block by block: sparse matrices, WebGraph text, raw OGB folders."""

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

from lightning_gnn.datasets.table_files import Columns, report_damage
from lightning_gnn.datasets.text_files import open_binary
from lightning_gnn.features.arrays import load_array, new_file

_EDGES_PER_BLOCK = 1 << 22  # edges read at a time, at least one row
_BYTES_PER_READ = 1 << 25  # bytes of text read at a time
_WEBGRAPH = (".graph-txt", ".graph-txt.gz")
_MATRIX_MARKET = (".mtx", ".mtx.gz")
_OGB_NODE_FILES = ("node-feat.csv.gz", "node-label.csv.gz")  # file names of OGB
_SPLITS = {"train": "train", "val": "valid", "test": "test"}


@dataclass(frozen=True)
class PublishedGraph:
    """A published homogeneous graph whose nodes are numbered from 0."""

    files: list[Path]  # all files of the graph
    num_nodes: int | None = None  # None: the number of feature rows
    edges: Path | None = None  # edge table, or None if `blocks` yields the edges
    blocks: Callable[[], Iterator[Columns]] | None = None  # yields edges as int64 source and target
    features: Path | None = None  # table without a header, one row per node
    labels: Path | None = None  # table without a header, one column
    splits: dict[str, Path] = field(default_factory=dict)  # one-column tables of node numbers, by split
    arrays: dict[str, tuple[Path, str]] = field(default_factory=dict)  # copied arrays: name -> (archive, member)


def detect_published(path: str | Path, scratch: Path) -> PublishedGraph | None:
    """Detect a published format that :func:`convert_tables` lists; return None for a table."""
    path = Path(path)
    if path.is_dir():
        if (path / "indptr.npy").exists() and (path / "indices.npy").exists():
            files = [path / "indptr.npy", path / "indices.npy"]
            return _from_csr(files, load_array(files[0]).numpy(), load_array(files[1]).numpy())
        return _read_ogb(path, scratch)
    if not path.is_file():
        return None
    if path.suffix == ".npz":
        return _read_scipy(path, scratch)
    if path.name.endswith(_WEBGRAPH):
        return _read_webgraph(path)
    if path.name.endswith(_MATRIX_MARKET):
        return _read_matrix_market(path)
    return None


def unpack(archive: Path, name: str, path: Path) -> None:
    """Extract one array of an ``.npz`` archive to an ``.npy`` file."""
    with report_damage(archive), zipfile.ZipFile(archive) as members:
        if f"{name}.npy" not in members.namelist():
            raise ValueError(f"{archive} holds no {name}, but {', '.join(members.namelist())}")
        size = members.getinfo(f"{name}.npy").file_size
        with members.open(f"{name}.npy") as source, new_file(path, size) as target:
            while block := source.read(1 << 24):
                target.write(block)


def read_ids(path: Path) -> npt.NDArray[np.int64]:
    """Return the numbers in a text file, compressed or not, one per line."""
    try:
        return np.loadtxt(path, dtype=np.int64, ndmin=1)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from None


def _from_csr(
    files: list[Path], indptr: npt.NDArray[Any], indices: npt.NDArray[Any], by_target: bool = False
) -> PublishedGraph:
    """Return the graph of a CSR matrix (rows are sources), or with ``by_target`` of a CSC matrix."""
    where = files[0]
    if indptr.ndim != 1 or indices.ndim != 1 or not len(indptr) or indptr[0] != 0 or indptr[-1] != len(indices):
        raise ValueError(f"{where}: indptr must go from 0 to the number of edges, {len(indices)}")
    if not np.issubdtype(indptr.dtype, np.integer) or not np.issubdtype(indices.dtype, np.integer):
        raise ValueError(f"{where}: indptr and indices must be integers, but are {indptr.dtype} and {indices.dtype}")

    def blocks() -> Iterator[Columns]:
        row, last = 0, len(indptr) - 1
        while row < last:
            begin = int(indptr[row])
            end = int(np.searchsorted(indptr, begin + _EDGES_PER_BLOCK, side="right")) - 1
            end = min(last, max(row + 1, end))
            offsets = indptr[row : end + 1].astype(np.int64)
            counts = offsets[1:] - offsets[:-1]
            if (counts < 0).any():
                raise ValueError(f"{where}: indptr decreases at row {row + int((counts < 0).argmax())}")
            rows = np.repeat(np.arange(row, end, dtype=np.int64), counts)
            neighbors = indices[begin : begin + len(rows)].astype(np.int64)
            yield {"source": neighbors, "target": rows} if by_target else {"source": rows, "target": neighbors}
            row = end

    return PublishedGraph(files, len(indptr) - 1, blocks=blocks)


def _read_scipy(path: Path, scratch: Path) -> PublishedGraph:
    with report_damage(path), np.load(path) as archive:
        if not {"format", "shape"} <= {*archive.files}:
            raise ValueError(f"{path} is not a SciPy sparse matrix: it holds {', '.join(archive.files)}")
        layout, shape = archive["format"].item(), archive["shape"].tolist()
    layout = layout.decode() if isinstance(layout, bytes) else str(layout)
    if layout not in ("csr", "csc", "coo"):
        raise ValueError(f"{path} is a matrix in {layout} format; save it as csr, csc or coo")
    names = ("row", "col") if layout == "coo" else ("indptr", "indices")
    scratch.mkdir(parents=True, exist_ok=True)
    for name in names:
        unpack(path, name, scratch / f"{name}.npy")
    first, second = (load_array(scratch / f"{name}.npy").numpy() for name in names)
    num_nodes = _check_square(path, shape)
    if layout == "coo":
        return _from_coo(path, num_nodes, first, second)
    return _from_csr([path], first, second, by_target=layout == "csc")


def _read_matrix_market(path: Path) -> PublishedGraph:
    try:
        matrix = scipy.io.mmread(path)
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is not a Matrix Market file: {error}") from None
    matrix = scipy.sparse.coo_array(matrix)
    return _from_coo(path, _check_square(path, matrix.shape), matrix.row, matrix.col)


def _check_square(path: Path, shape: Sequence[int]) -> int:
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"{path} has the shape {list(shape)}; a homogeneous graph is a square matrix")
    return int(shape[0])


def _from_coo(path: Path, num_nodes: int, rows: npt.NDArray[Any], columns: npt.NDArray[Any]) -> PublishedGraph:
    def blocks() -> Iterator[Columns]:
        for start in range(0, len(rows), _EDGES_PER_BLOCK):
            block = slice(start, start + _EDGES_PER_BLOCK)
            yield {"source": rows[block].astype(np.int64), "target": columns[block].astype(np.int64)}

    return PublishedGraph([path], num_nodes, blocks=blocks)


def _read_webgraph(path: Path) -> PublishedGraph:
    # The first line holds the number of nodes.
    with report_damage(path), open_binary(path) as file:
        first = file.readline().strip()
    if not first.isdigit():
        raise ValueError(f"{path} begins with {first[:40]!r}, not with the number of nodes")
    num_nodes = int(first)

    # Each following line lists the successors of one node.
    def blocks() -> Iterator[Columns]:
        row = 0
        with report_damage(path), open_binary(path) as file:
            file.readline()
            while lines := file.readlines(_BYTES_PER_READ):
                words = [line.split() for line in lines]
                counts = np.fromiter(map(len, words), np.int64, len(lines))
                # Parse all words at once; search for the wrong line only if this fails.
                try:
                    targets = np.array(list(chain.from_iterable(words)), dtype=np.bytes_).astype(np.int64)
                except (ValueError, OverflowError):
                    is_number = re.compile(rb"\d{1,18}").fullmatch
                    wrong = next(n for n, line in enumerate(words) if not all(map(is_number, line)))
                    raise ValueError(f"{path}: line {row + wrong + 2} holds words that are not numbers") from None
                yield {"source": np.repeat(np.arange(row, row + len(lines)), counts), "target": targets}
                row += len(lines)
        # A truncated file ends early without any other error.
        if row != num_nodes:
            raise ValueError(f"{path} has lines for {row} nodes, but declares {num_nodes}; it is truncated or damaged")

    return PublishedGraph([path], num_nodes, blocks=blocks)


def _read_ogb(path: Path, scratch: Path) -> PublishedGraph:
    # OGB stores tables in `raw` and splits in `split`; the splits are used if only one kind exists.
    raw = path / "raw" if (path / "raw").is_dir() else path
    train_splits = sorted((raw.parent / "split").glob("*/train.csv.gz"))
    splits = {}
    if len(train_splits) == 1:
        splits = {ours: train_splits[0].with_name(f"{theirs}.csv.gz") for ours, theirs in _SPLITS.items()}
    # Large datasets come as NumPy archives, which are unpacked and read in blocks.
    if (raw / "data.npz").exists():
        archive, labels = raw / "data.npz", raw / "node-label.npz"

        def blocks() -> Iterator[Columns]:
            scratch.mkdir(parents=True, exist_ok=True)
            unpack(archive, "edge_index", scratch / "edge_index.npy")
            edges = load_array(scratch / "edge_index.npy").numpy()
            if edges.ndim != 2 or edges.shape[0] != 2:
                raise ValueError(f"{archive}: edge_index has the shape {list(edges.shape)}; edges are [2, E]")
            for start in range(0, edges.shape[1], _EDGES_PER_BLOCK):
                source, target = edges[:, start : start + _EDGES_PER_BLOCK].astype(np.int64)
                yield {"source": source, "target": target}
            (scratch / "edge_index.npy").unlink()

        arrays = {"x": (archive, "node_feat"), "y": (labels, "node_label")}
        return PublishedGraph([archive, labels, *splits.values()], blocks=blocks, splits=splits, arrays=arrays)
    # Other datasets are compressed tables; the node count is in a file, or equals the number of feature rows.
    if not (raw / "edge.csv.gz").exists():
        none = "neither indptr.npy and indices.npy, nor OGB's raw/edge.csv.gz or raw/data.npz"
        raise FileNotFoundError(f"{path} holds {none}; for tables in it give a pattern, such as '{path}/*.parquet'")
    edges = raw / "edge.csv.gz"
    features, classes = (path if path.exists() else None for path in map(raw.joinpath, _OGB_NODE_FILES))
    num_nodes = None
    if (raw / "num-node-list.csv.gz").exists():
        num_nodes = int(read_ids(raw / "num-node-list.csv.gz").sum())
    elif features is None:
        raise FileNotFoundError(f"{raw} lacks num-node-list.csv.gz and node-feat.csv.gz: cannot count the nodes")
    files = [path for path in (edges, features, classes, *splits.values()) if path is not None]
    return PublishedGraph(files, num_nodes, edges=edges, features=features, labels=classes, splits=splits)
