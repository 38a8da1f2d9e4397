"""Published datasets, each as one homogeneous ``Data`` with features, labels and the three masks."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.datasets import Flickr, Planetoid, Reddit
from torch_geometric.io.planetoid import read_file
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import index_to_mask, to_undirected

from lightning_gnn.graph.csc import load_array
from lightning_gnn.graph.folder import _class_numbers, is_writable, load_folder, write_csc
from lightning_gnn.graph.processed import processed_elsewhere
from lightning_gnn.runtime.place import cache_root
from lightning_gnn.runtime.store import checksum, locked

__all__ = ["convert_papers100m", "flickr", "ogbn", "planetoid", "reddit"]

_PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
_OGBN = ("ogbn-arxiv", "ogbn-products", "ogbn-papers100M")
_PROMPT = "ogb asks a question on the terminal, and there is none; load it once in a terminal"
_PAPERS_URL = "http://snap.stanford.edu/ogb/data/nodeproppred/papers100M-bin.zip"
_PAPERS_FILES = (
    "raw/data.npz",
    "raw/node-label.npz",
    "split/time/train.csv.gz",
    "split/time/valid.csv.gz",
    "split/time/test.csv.gz",
)


def planetoid(
    root: str | Path = "data/planetoid", name: str = "Cora", normalize_features: bool = True, split: str = "public"
) -> Data:
    """Load a citation graph through PyG's ``Planetoid``.

    Args:
        root: Folder with ``<Name>/raw/ind.*``; what is missing is downloaded. It may be read-only.
        name: ``"Cora"``, ``"CiteSeer"`` or ``"PubMed"``.
        normalize_features: Scale each row of ``x`` to the sum 1.
        split: ``"public"``, ``"full"`` or ``"random"`` (drawn from torch's global random stream).

    Returns:
        ``Data`` with ``x`` float32 ``[N, F]``, ``y`` int64 ``[N]``, ``edge_index`` int64 ``[2, E]`` and ``train_mask``,
        ``val_mask``, ``test_mask`` bool ``[N]``.

    Raises:
        FileNotFoundError: Files are missing, and the folder is read-only.
        RuntimeError: Files are missing, and the download failed.
        ValueError: Another name or split, or a file that is damaged.
    """
    if name.lower() not in _PLANETOID:
        raise ValueError(f"name={name!r} is no Planetoid dataset; use one of {', '.join(_PLANETOID.values())}")
    if split not in ("public", "full", "random"):
        raise ValueError(f"split={split!r}; use 'public', 'full' or 'random'")
    name = _PLANETOID[name.lower()]
    suffixes = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    files = [f"ind.{name.lower()}.{suffix}" for suffix in suffixes]
    transform = NormalizeFeatures() if normalize_features else None
    return _from_pyg(
        lambda folder: Planetoid(folder, name, split=split, transform=transform),
        Path(root),
        name,
        files,
        _check_planetoid,
    )


def reddit(root: str | Path = "data/reddit") -> Data:
    """Load the Reddit posts of GraphSAGE (232,965 nodes, 114,615,892 edges) through PyG.

    Args:
        root: Folder with ``raw/reddit_data.npz`` and ``raw/reddit_graph.npz``; what is missing is downloaded.

    Returns:
        As :func:`planetoid`.

    Raises:
        FileNotFoundError: Files are missing, and the folder is read-only.
        RuntimeError: Files are missing, and the download failed.
        ValueError: A file is damaged.
    """
    return _from_pyg(lambda folder: Reddit(folder), Path(root), ".", ["reddit_data.npz", "reddit_graph.npz"])


def flickr(root: str | Path = "data/flickr") -> Data:
    """Load the Flickr images of GraphSAINT (89,250 nodes, 899,756 edges) through PyG.

    Args:
        root: Folder with ``raw/adj_full.npz``, ``raw/feats.npy``, ``raw/class_map.json`` and ``raw/role.json``; what is
            missing is downloaded.

    Returns:
        As :func:`planetoid`.

    Raises:
        FileNotFoundError: Files are missing, and the folder is read-only.
        RuntimeError: Files are missing, and the download failed.
        ValueError: A file is damaged.
    """
    files = ["adj_full.npz", "feats.npy", "class_map.json", "role.json"]
    return _from_pyg(lambda folder: Flickr(folder), Path(root), ".", files)


def ogbn(root: str | Path = "data/ogb", name: str = "ogbn-arxiv", undirected: bool | None = None) -> Data:
    """Load a node dataset of the Open Graph Benchmark.

    ``ogbn-papers100M`` is not downloaded (56 GB), needs no ``ogb`` package and is converted once, see
    :func:`convert_papers100m`; the result is memory-mapped.

    Args:
        root: Folder in which ``ogb`` keeps its datasets; what is missing is downloaded.
        name: ``"ogbn-arxiv"``, ``"ogbn-products"`` or ``"ogbn-papers100M"``.
        undirected: Add the reverse of each edge; by default for ogbn-arxiv only (ogbn-products has them already).

    Returns:
        As :func:`planetoid`; for ``ogbn-papers100M`` as :func:`~lightning_gnn.graph.folder.load_folder`.

    Raises:
        FileNotFoundError: The files of ogbn-papers100M are missing, or the folder is read-only.
        ImportError: The ``ogb`` package is missing.
        RuntimeError: Files are missing, and the download failed.
        ValueError: Another name, a damaged file, or ``undirected`` for ogbn-papers100M.
    """
    if name not in _OGBN:
        raise ValueError(f"name={name!r} is not supported; use one of {', '.join(_OGBN)}")
    root = Path(root)
    if name == "ogbn-papers100M":
        if undirected:
            raise ValueError("undirected=True is not supported for ogbn-papers100M, which stays directed; leave it out")
        folder = root / "ogbn_papers100M"
        with _one_process(folder):
            if not (folder / "npy").exists():
                convert_papers100m(folder, folder / "npy")
        return load_folder(folder / "npy")
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        raise ImportError(f'{name} is read with the ogb package ({error}): pip install "lightning-gnn[ogb]"') from None
    # ogb also looks for the name that older versions of it gave the folder.
    old, new = root / (name.replace("-", "_") + "_pyg"), root / name.replace("-", "_")
    base = old if old.exists() else new
    raw = [base / "raw" / file for file in ("edge.csv.gz", "node-feat.csv.gz")]
    if not is_writable(base) and not (base / "processed").exists():
        raise FileNotFoundError(f"{base} is read-only and holds no processed data; give a root that can be written to")
    # ogb calls torch.load without saying that its file holds a PyG object.
    safe = torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage])
    with _one_process(base), _explain(name, base, raw), safe:
        dataset = PygNodePropPredDataset(name, root=str(root))
        split = dataset.get_idx_split()
    stored = dataset[0]
    undirected = name == "ogbn-arxiv" if undirected is None else undirected
    edge_index = to_undirected(stored.edge_index, num_nodes=stored.num_nodes) if undirected else stored.edge_index
    data = Data(x=stored.x, edge_index=edge_index, y=stored.y.reshape(-1).to(torch.int64))
    for ours, theirs in (("train", "train"), ("val", "valid"), ("test", "test")):
        data[f"{ours}_mask"] = index_to_mask(torch.as_tensor(split[theirs]), stored.num_nodes)
    return data


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
        np.save(partial / "y.npy", y.numpy(), allow_pickle=False)
        for split, path in zip(("train", "val", "test"), splits, strict=True):
            np.save(partial / f"{split}_idx.npy", _read_ids(path), allow_pickle=False)
        write_csc(load_array(partial / "edge_index.npy"), num_nodes, partial / "csc", edge_ids=False)
        (partial / "edge_index.npy").unlink()
        for path in (partial / "csc").iterdir():
            path.rename(partial / path.name)
        (partial / "csc").rmdir()
        load_folder(partial)  # its checks run once, here
        partial.rename(folder)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} cannot be converted: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _from_pyg(
    make: Callable[[str], InMemoryDataset],
    root: Path,
    folder: str,
    files: Sequence[str],
    check: Callable[[Sequence[Path]], None] | None = None,
) -> Data:
    """Make a PyG dataset from the raw files in ``root / folder / "raw"``; process elsewhere if that is read-only."""
    base = root / folder
    raw = [base / "raw" / file for file in files]
    with ExitStack() as stack:
        stack.enter_context(_one_process(base))
        processed = base / "processed" / "data.pt"
        if not processed.exists() and not is_writable(base):
            if missing := _missing(raw):
                raise FileNotFoundError(
                    f"{base / 'raw'} lacks {missing} and is read-only; put the files there, or give a root that can be "
                    "written to"
                )
            stack.enter_context(_explain(f"the dataset in {base}", base, raw))
            return processed_elsewhere(make, base, folder, raw, check)
        if check is not None and not processed.exists() and not _missing(raw):
            check(raw)
        stack.enter_context(_explain(f"the dataset in {base}", base, raw, processed))
        return make(str(root))[0]


def _missing(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths if not path.exists())


@contextmanager
def _explain(name: str, base: Path, raw: Sequence[Path], processed: Path | None = None) -> Iterator[None]:
    """Turn what goes wrong while a dataset is downloaded and processed into one message that says what to do."""
    had_processed = processed is not None and processed.exists()
    try:
        yield
    except Exception as error:
        missing = _missing(raw)
        if missing and isinstance(error, zipfile.BadZipFile):
            raise RuntimeError(
                f"the archive from which {name} was to be unpacked is damaged ({error}); delete the .zip file in "
                f"{base.parent} or below it, and download it again"
            ) from None
        # OSError covers urllib, sockets and most of aiohttp; ogb asks on stdin before a large download.
        if missing and isinstance(error, (OSError, EOFError, asyncio.TimeoutError, RuntimeError)):
            reason = _PROMPT if isinstance(error, EOFError) else str(error)
            raise RuntimeError(
                f"{name} is not complete and could not be downloaded ({reason}). {base / 'raw'} lacks {missing}: "
                "connect to the network, copy the files there, or set root to a folder that has them"
            ) from None
        for path in raw:
            if path.exists() and (damage := _damage(path)):
                raise ValueError(f"{path} is damaged ({damage}); delete it, then download or copy it again") from None
        if isinstance(error, EOFError):
            raise RuntimeError(f"{name}: {_PROMPT}") from None
        if had_processed:
            raise RuntimeError(f"{processed} cannot be read ({error}); delete it, and it is made again") from error
        raise


def _damage(path: Path) -> str | None:
    """Read a file through; return what is wrong with it."""
    try:
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                return None if (member := archive.testzip()) is None else f"bad checksum of {member}"
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                while file.read(1 << 24):
                    pass
        elif path.suffix == ".npy":
            load_array(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        return str(error)
    return None


def _check_planetoid(raw: Sequence[Path]) -> None:
    """Name the damaged file: PyG unpickles all of them in one go, and takes a list of test nodes that was cut off."""
    rows = {}
    for path in raw:
        _, prefix, suffix = path.name.split(".", 2)
        try:
            rows[suffix] = len(read_file(str(path.parent), prefix, suffix))
        except Exception as error:  # a damaged pickle can raise anything
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}); delete it, then download or copy it again"
            ) from None
    for suffix, other in (("y", "x"), ("ally", "allx"), ("ty", "tx"), ("test.index", "tx")):
        if rows[suffix] != rows[other]:
            path = next(path for path in raw if path.name.endswith(f".{suffix}"))
            raise ValueError(
                f"{path} is damaged: it has {rows[suffix]} rows, but {other} has {rows[other]}; delete it, then "
                "download or copy it again"
            )


@contextmanager
def _one_process(base: Path) -> Iterator[None]:
    """Keep the other processes of a distributed run out while one downloads and processes."""
    root = cache_root()
    with nullcontext() if root is None else locked(root, "data", checksum(str(base.resolve()))):
        yield


def _unpack(archive: Path, name: str, path: Path) -> None:
    """Write one array of an ``.npz`` file as an ``.npy`` file, which is what lies in it."""
    try:
        with zipfile.ZipFile(archive) as members:
            if f"{name}.npy" not in members.namelist():
                raise ValueError(f"{archive} holds no {name}, but {', '.join(members.namelist())}")
            with members.open(f"{name}.npy") as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 24)
    except (EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{archive} is damaged ({error}); download it again") from None


def _read_ids(path: Path) -> np.ndarray:
    try:
        return np.loadtxt(path, dtype=np.int64, ndmin=1)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from None
