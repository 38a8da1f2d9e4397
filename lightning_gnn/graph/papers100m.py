"""The files of ogbn-papers100M, converted without the graph ever in memory."""

from __future__ import annotations

import shutil
import zipfile
import zlib
from pathlib import Path

import numpy as np

from lightning_gnn.graph.arrays import load_array, new_file, save_arrays
from lightning_gnn.graph.folder import _class_numbers, load_folder, write_csc
from lightning_gnn.runtime.place import is_writable

_PAPERS_URL = "http://snap.stanford.edu/ogb/data/nodeproppred/papers100M-bin.zip"
_PAPERS_FILES = (
    "raw/data.npz",
    "raw/node-label.npz",
    "split/time/train.csv.gz",
    "split/time/valid.csv.gz",
    "split/time/test.csv.gz",
)


def convert_papers100m(source: str | Path, folder: str | Path) -> None:
    """Convert the raw files of ogbn-papers100M to a folder for ``load_folder``, without the graph ever in memory.

    The arrays are unpacked block by block to disk, and the edges sorted there. The result takes 65 GB,
    another 32 GB are needed meanwhile, and 2 GB of memory. Edges are then numbered in the order of their targets.

    Args:
        source: The unpacked archive of ogb: ``raw/data.npz`` with ``edge_index`` int64 ``[2, E]`` and ``node_feat``
            float32 ``[N, F]``, ``raw/node-label.npz`` with ``node_label`` float32 ``[N, 1]`` (NaN: unlabelled), and
            ``split/time/{train,valid,test}.csv.gz``.
        folder: The folder to make. Unlabelled nodes get the label -1.

    Raises:
        FileExistsError: There is such a folder already.
        FileNotFoundError: A raw file is missing, or the folder cannot be written to.
        OSError: The disk has no room for it.
        ValueError: A raw file is damaged.
    """
    source, folder = Path(source), Path(folder)
    paths = [source / file for file in _PAPERS_FILES]
    if missing := [str(path.relative_to(source)) for path in paths if not path.exists()]:
        raise FileNotFoundError(
            f"{source} lacks {', '.join(missing)}; download {_PAPERS_URL} (56 GB) and unpack it, so that "
            f"its content lies in {source}"
        )
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; remove it first")
    if not is_writable(folder):
        raise FileNotFoundError(f"{folder} cannot be made, its place is read-only; link the raw files elsewhere")
    data, label, *splits = paths
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _unpack(data, "node_feat", partial / "x.npy")
        _unpack(data, "edge_index", partial / "edge_index.npy")
        _unpack(label, "node_label", partial / "y.npy")
        num_nodes = load_array(partial / "x.npy").size(0)
        y = _class_numbers(load_array(partial / "y.npy", mmap=False), num_nodes, f"node_label of {label}")
        save_arrays(partial, {"y": y})
        for split, path in zip(("train", "val", "test"), splits, strict=True):
            save_arrays(partial, {f"{split}_idx": _read_ids(path)})
        write_csc(load_array(partial / "edge_index.npy"), num_nodes, partial, edge_ids=False)
        (partial / "edge_index.npy").unlink()
        load_folder(partial)  # its checks run once, here
        partial.rename(folder)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} cannot be converted: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unpack(archive: Path, name: str, path: Path) -> None:
    """Write one array of an ``.npz`` file as an ``.npy`` file, which is what lies in it."""
    try:
        with zipfile.ZipFile(archive) as members:
            if f"{name}.npy" not in members.namelist():
                raise ValueError(f"{archive} holds no {name}, but {', '.join(members.namelist())}")
            size = members.getinfo(f"{name}.npy").file_size
            with members.open(f"{name}.npy") as source, new_file(path, size) as target:
                shutil.copyfileobj(source, target, 1 << 24)
    except (EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{archive} is damaged ({error}); download it again") from None


def _read_ids(path: Path) -> np.ndarray:
    try:
        return np.loadtxt(path, dtype=np.int64, ndmin=1)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from None
