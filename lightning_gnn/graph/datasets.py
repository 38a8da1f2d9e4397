"""Published datasets, each as one ``Data``, or ``HeteroData``, with features, labels and the three masks."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pickle
import re
import shutil
import tempfile
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.datasets import OGB_MAG, Coauthor, Flickr, Planetoid, Reddit, Yelp
from torch_geometric.transforms import NormalizeFeatures, RandomNodeSplit, ToUndirected
from torch_geometric.utils import index_to_mask, to_undirected

from lightning_gnn.graph.arrays import check_file, load_array, save_arrays
from lightning_gnn.graph.convert import convert_tables
from lightning_gnn.graph.folder import class_numbers, load_folder
from lightning_gnn.graph.planetoid_files import SUFFIXES, read_planetoid
from lightning_gnn.graph.published_files import read_ids, unpack
from lightning_gnn.graph.topology_files import write_csc
from lightning_gnn.runtime.store import cache_root, checksum, is_writable, kept, locked

__all__ = ["coauthor", "convert_papers100m", "flickr", "ogb_mag", "ogbn", "planetoid", "reddit", "yelp"]

_GRAPHSAINT = ["adj_full.npz", "feats.npy", "class_map.json", "role.json"]
_COAUTHOR = {"cs": "CS", "physics": "Physics"}
_PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
_MAG_FILES = (
    "num-node-dict.csv.gz",
    "node-feat/paper/node-feat.csv.gz",
    "node-feat/paper/node_year.csv.gz",
    "node-label/paper/node-label.csv.gz",
    "relations/author___affiliated_with___institution/edge.csv.gz",
    "relations/author___writes___paper/edge.csv.gz",
    "relations/paper___cites___paper/edge.csv.gz",
    "relations/paper___has_topic___field_of_study/edge.csv.gz",
    "split/time/paper/train.csv.gz",
    "split/time/paper/valid.csv.gz",
    "split/time/paper/test.csv.gz",
)
_OGBN = ("ogbn-arxiv", "ogbn-products", "ogbn-papers100M")
_DISTRUST, _TRUST = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_unpickling_lock = threading.Lock()
_PAPERS_URL = "http://snap.stanford.edu/ogb/data/nodeproppred/papers100M-bin.zip"
_PAPERS_FILES = (
    "raw/data.npz",
    "raw/node-label.npz",
    "split/time/train.csv.gz",
    "split/time/valid.csv.gz",
    "split/time/test.csv.gz",
)
_PROCESSED = "data.pt"
_PROMPT = "ogb asks a question on the terminal, and there is none; load it once in a terminal"


class _Planetoid(Planetoid):  # type: ignore[misc]
    def process(self) -> None:
        self.save([read_planetoid(Path(self.raw_dir), self.name)], self.processed_paths[0])


def planetoid(
    root: str | Path = "data/planetoid",
    name: str = "Cora",
    normalize_features: bool = True,
    split: str = "public",
    trust: bool = False,
) -> Data:
    """Load a citation graph through PyG's ``Planetoid``.

    The raw files are pickles; whatever ``trust`` is, only arrays and containers are made of them, and no code is run.

    Args:
        root: Folder with ``<Name>/raw/ind.*``; what is missing is downloaded. It may be read-only.
        name: ``"Cora"``, ``"CiteSeer"`` or ``"PubMed"``.
        normalize_features: Scale each row of ``x`` to the sum 1.
        split: ``"public"``, ``"full"`` or ``"random"`` (drawn from torch's global random stream).
        trust: Open a file ``processed/*.pt`` even if it holds more than tensors and PyG's own data. That runs the code
            in it: say so only if you know who made it.

    Returns:
        ``Data`` with ``x`` float32 ``[N, F]``, ``y`` int64 ``[N]``, ``edge_index`` int64 ``[2, E]`` and ``train_mask``,
        ``val_mask``, ``test_mask`` bool ``[N]``.

    Raises:
        FileNotFoundError: Files are missing, and the folder is read-only.
        RuntimeError: Files are missing, and the download failed.
        ValueError: Another name or split, or a file that is damaged or asks for code to be run.
    """
    if name.lower() not in _PLANETOID:
        raise ValueError(f"name={name!r} is no Planetoid dataset; use one of {', '.join(_PLANETOID.values())}")
    if split not in ("public", "full", "random"):
        raise ValueError(f"split={split!r}; use 'public', 'full' or 'random'")
    name = _PLANETOID[name.lower()]
    files = [f"ind.{name.lower()}.{suffix}" for suffix in SUFFIXES]
    transform = NormalizeFeatures() if normalize_features else None
    make = partial(_Planetoid, name=name, split=split, transform=transform)
    return _from_pyg(make, Path(root), name, files, trust)


def reddit(root: str | Path = "data/reddit", trust: bool = False) -> Data:
    """Load the Reddit posts of GraphSAGE (232,965 nodes, 114,615,892 edges) through PyG.

    Args:
        root: Folder with ``raw/reddit_data.npz`` and ``raw/reddit_graph.npz``; what is missing is downloaded.
        trust: Open a file ``processed/*.pt`` even if it holds more than data, and run the code in it.

    Returns:
        ``Data`` like that of :func:`planetoid`.

    Raises:
        FileNotFoundError: Files are missing, and the folder is read-only.
        RuntimeError: Files are missing, and the download failed.
        ValueError: A file is damaged or asks for code to be run.
    """
    return _from_pyg(Reddit, Path(root), ".", ["reddit_data.npz", "reddit_graph.npz"], trust)


def flickr(root: str | Path = "data/flickr", trust: bool = False) -> Data:
    """Load the Flickr images of GraphSAINT (89,250 nodes, 899,756 edges) through PyG.

    Args:
        root: Folder with ``raw/adj_full.npz``, ``raw/feats.npy``, ``raw/class_map.json`` and ``raw/role.json``; what is
            missing is downloaded.
        trust: Open a file ``processed/*.pt`` even if it holds more than data, and run the code in it.

    Returns:
        ``Data`` like that of :func:`planetoid`.

    Raises:
        FileNotFoundError: Files are missing, and the folder is read-only.
        RuntimeError: Files are missing, and the download failed.
        ValueError: A file is damaged or asks for code to be run.
    """
    return _from_pyg(Flickr, Path(root), ".", _GRAPHSAINT, trust)


def yelp(root: str | Path = "data/yelp", trust: bool = False) -> Data:
    """Load the Yelp reviewers of GraphSAINT (716,847 nodes, 13,954,819 edges, 100 labels) through PyG's ``Yelp``.

    Args:
        root: Folder with ``raw/adj_full.npz``, ``raw/feats.npy``, ``raw/class_map.json`` and ``raw/role.json``; what is
            missing is downloaded.
        trust: Open a file ``processed/*.pt`` even if it holds more than data, and run the code in it.

    Returns:
        ``Data`` like that of :func:`planetoid`, but ``y`` float32 ``[N, 100]``: 0 or 1 for each label.

    Raises:
        FileNotFoundError: Files are missing, and the folder is read-only.
        RuntimeError: Files are missing, and the download failed.
        ValueError: A file is damaged or asks for code to be run.
    """
    data = _from_pyg(Yelp, Path(root), ".", _GRAPHSAINT, trust)
    data.y = data.y.float()
    return data


def coauthor(root: str | Path = "data/coauthor", name: str = "CS", seed: int = 0, trust: bool = False) -> Data:
    """Load authors who wrote papers together (CS: 18,333 nodes; Physics: 34,493) through PyG's ``Coauthor``.

    It has no public split. As in "Pitfalls of Graph Neural Network Evaluation" (arXiv:1811.05868), 20 nodes of each
    class are drawn for training and 30 for each class for validation; the rest are for testing.

    Args:
        root: Folder with ``<name>/raw/ms_academic_*.npz``; what is missing is downloaded.
        name: ``"CS"`` or ``"Physics"``.
        seed: Of the split.
        trust: Open a file ``processed/*.pt`` even if it holds more than data, and run the code in it.

    Returns:
        ``Data`` like that of :func:`planetoid`.

    Raises:
        FileNotFoundError: Files are missing, and the folder is read-only.
        RuntimeError: Files are missing, and the download failed.
        ValueError: Another name, or a file that is damaged or asks for code to be run.
    """
    if name.lower() not in _COAUTHOR:
        raise ValueError(f"name={name!r} is no Coauthor dataset; use one of {', '.join(_COAUTHOR.values())}")
    name = _COAUTHOR[name.lower()]
    files = [f"ms_academic_{name[:3].lower()}.npz"]
    data = _from_pyg(partial(Coauthor, name=name), Path(root), name, files, trust)
    num_val = 30 * (int(data.y.max()) + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RandomNodeSplit("test_rest", num_train_per_class=20, num_val=num_val)(data)


def ogbn(
    root: str | Path = "data/ogb", name: str = "ogbn-arxiv", undirected: bool | None = None, trust: bool = False
) -> Data:
    """Load a node dataset of the Open Graph Benchmark.

    ``ogbn-papers100M`` is not downloaded (56 GB), needs no ``ogb`` package and is converted once, see
    :func:`convert_papers100m`; the result is memory-mapped.

    Args:
        root: Folder in which ``ogb`` keeps its datasets; what is missing is downloaded.
        name: ``"ogbn-arxiv"``, ``"ogbn-products"`` or ``"ogbn-papers100M"``.
        undirected: Add the reverse of each edge; by default for ogbn-arxiv only (ogbn-products has them already). For
            ogbn-papers100M that is a folder of its own, made by :func:`~lightning_gnn.graph.convert_tables`.
        trust: Open a file ``processed/*.pt`` or ``split/*/*.pt`` even if it holds more than data, and run the code in
            it.

    Returns:
        ``Data`` like that of :func:`planetoid`; for ``ogbn-papers100M`` that of
        :func:`~lightning_gnn.graph.folder.load_folder`.

    Raises:
        FileNotFoundError: The files of ogbn-papers100M are missing, or the folder is read-only.
        ImportError: The ``ogb`` package is missing.
        RuntimeError: Files are missing, and the download failed.
        ValueError: Another name, a file that is damaged or asks for code to be run.
    """
    if name not in _OGBN:
        raise ValueError(f"name={name!r} is not supported; use one of {', '.join(_OGBN)}")
    root = Path(root)
    if name == "ogbn-papers100M":
        folder = root / "ogbn_papers100M"
        made = folder / ("npy_undirected" if undirected else "npy")
        with _one_process(folder):
            if not made.exists() and undirected:
                _check_papers(folder, made)
                convert_tables(folder, made, undirected=True)
            elif not made.exists():
                convert_papers100m(folder, made)
        return load_folder(made)
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
    with _one_process(base), _unpickling(trust), _explain(name, base, raw):
        dataset = PygNodePropPredDataset(name, root=str(root))
        split = dataset.get_idx_split()
    stored = dataset[0]
    undirected = name == "ogbn-arxiv" if undirected is None else undirected
    edge_index = to_undirected(stored.edge_index, num_nodes=stored.num_nodes) if undirected else stored.edge_index
    data = Data(x=stored.x, edge_index=edge_index, y=stored.y.reshape(-1).to(torch.int64))
    for ours, theirs in (("train", "train"), ("val", "valid"), ("test", "test")):
        data[f"{ours}_mask"] = index_to_mask(torch.as_tensor(split[theirs]), stored.num_nodes)
    return data


def ogb_mag(
    root: str | Path = "data/ogb", preprocess: str | None = None, undirected: bool = True, trust: bool = False
) -> HeteroData:
    """Load the papers, authors, institutions and fields of OGB's MAG (1.9M nodes, 21M edges) through PyG's ``OGB_MAG``.

    Args:
        root: Folder with ``mag/raw``; what is missing is downloaded.
        preprocess: Features of all types but papers: ``"metapath2vec"`` or ``"TransE"``; None leaves them without
            features, in whose place :class:`~lightning_gnn.nn.TypeEmbeddings` can be trained.
        undirected: Add the reverse of each edge type, ``rev_…``, and of each citation.
        trust: Open a file ``*.pt`` even if it holds more than data, and run the code in it.

    Returns:
        ``HeteroData``; of ``paper`` ``x`` float32 ``[N, 128]``, ``y`` int64 ``[N]`` in ``[0, 349)``, ``year`` int64
        ``[N]`` and ``train_mask``, ``val_mask``, ``test_mask`` bool ``[N]``.

    Raises:
        FileNotFoundError: Files are missing, and the folder is read-only.
        ImportError: pandas is missing, which reads the raw files.
        RuntimeError: Files are missing, and the download failed.
        ValueError: Another ``preprocess``, or a file is damaged or asks for code to be run.
    """
    kinds = {None: None, "metapath2vec": "metapath2vec", "transe": "transe"}
    if (kind := preprocess if preprocess is None else preprocess.lower()) not in kinds:
        raise ValueError(f"preprocess={preprocess!r} is unknown; use 'metapath2vec', 'TransE' or None")
    processed = "data.pt" if kind is None else f"data_{kind}.pt"
    if not (Path(root) / "mag" / "processed" / processed).exists():
        try:
            import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore] # noqa: F401
        except ImportError as error:
            raise ImportError(f"PyG reads the files of OGB's MAG with pandas ({error}): pip install pandas") from None
    files = [*_MAG_FILES, *([] if kind is None else [f"mag_{kind}_emb.pt"])]
    data = _from_pyg(partial(OGB_MAG, preprocess=kind), Path(root), "mag", files, trust, processed)
    return ToUndirected()(data) if undirected else data


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
    data, label, *splits = _check_papers(source, folder)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        unpack(data, "node_feat", partial / "x.npy")
        unpack(data, "edge_index", partial / "edge_index.npy")
        unpack(label, "node_label", partial / "y.npy")
        num_nodes = load_array(partial / "x.npy").size(0)
        y = class_numbers(load_array(partial / "y.npy", mmap=False), num_nodes, f"node_label of {label}")
        save_arrays(partial, {"y": y})
        for split, path in zip(("train", "val", "test"), splits, strict=True):
            save_arrays(partial, {f"{split}_idx": read_ids(path)})
        write_csc(load_array(partial / "edge_index.npy"), num_nodes, partial, edge_ids=False)
        (partial / "edge_index.npy").unlink()
        load_folder(partial)  # its checks run once, here
        partial.rename(folder)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} cannot be converted: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_papers(source: Path, folder: Path) -> list[Path]:
    """Return the raw files of ogbn-papers100M, if they are there and the folder can be made."""
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
    return paths


def _from_pyg(
    make: Callable[[str], InMemoryDataset],
    root: Path,
    folder: str,
    files: Sequence[str],
    trust: bool,
    processed: str = _PROCESSED,
) -> Any:
    """Make a PyG dataset from the raw files in ``root / folder / "raw"``; process elsewhere if that is read-only.

    Args:
        make: Makes the dataset in a root.
        root: The root.
        folder: What PyG calls the dataset's folder below it.
        files: The raw files, the first one directly in ``raw``.
        trust: Open files that hold more than data.
        processed: What PyG makes of them.
    """
    base = root / folder
    raw = [base / "raw" / file for file in files]
    with _one_process(base):
        elsewhere = not (base / "processed" / processed).exists() and not is_writable(base)
        if elsewhere and (missing := _missing(raw)):
            raise FileNotFoundError(
                f"{base / 'raw'} lacks {missing} and is read-only; put the files there, or give a root that can be "
                "written to"
            )
        with _unpickling(trust), _explain(f"the dataset in {base}", base, raw, processed):
            return _processed_elsewhere(make, base, folder, raw, processed) if elsewhere else make(str(root))[0]


def _processed_elsewhere(
    make: Callable[[str], InMemoryDataset], base: Path, folder: str, raw: Sequence[Path], processed: str
) -> Any:
    """Make a PyG dataset from raw files in a read-only folder.

    Args:
        make: Makes the dataset in a root.
        base: The folder, with ``raw``.
        folder: What PyG calls it below the root.
        raw: The raw files.
        processed: What PyG makes of them.
    """

    def process(target: Path) -> None:
        with _mirror(folder, raw, target) as root:
            make(root)

    def read(source: Path, fresh: bool) -> Any:
        with _mirror(folder, raw, source) as root:
            return make(root)[0]

    found = kept(
        "datasets",
        checksum(
            "processed 1",
            str(base.resolve()),
            folder,
            torch_geometric.__version__,
            *(() if processed == _PROCESSED else (processed,)),
        ),
        process,
        read,
        title=str(base),
        sources=[path.resolve() for path in raw],
    )
    if found is None:
        with tempfile.TemporaryDirectory(prefix="lightning_gnn-") as target:
            process(Path(target))
            found = read(Path(target), True)
    return found


@contextmanager
def _mirror(folder: str, raw: Sequence[Path], processed: Path) -> Iterator[str]:
    """Yield a root in which PyG finds raw files, and a folder for what it makes of them, that lie elsewhere."""
    with tempfile.TemporaryDirectory(prefix="lightning_gnn-") as root:
        base = Path(root) / folder
        base.mkdir(exist_ok=True)
        try:
            (base / "raw").symlink_to(raw[0].parent.resolve(), target_is_directory=True)
            (base / "processed").symlink_to(processed, target_is_directory=True)
            yield root
            return
        except OSError:
            if (base / "processed").exists():  # then it is the caller's
                raise
        # Windows lets not every user make links.
        (base / "raw").mkdir(exist_ok=True)
        for path in raw:
            copy = base / "raw" / path.relative_to(raw[0].parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        shutil.copytree(processed, base / "processed")
        yield root
        if not any(processed.iterdir()):
            shutil.copytree(base / "processed", processed, dirs_exist_ok=True)


def _missing(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths if not path.exists())


@contextmanager
def _explain(name: str, base: Path, raw: Sequence[Path], made: str = _PROCESSED) -> Iterator[None]:
    """Turn what goes wrong while a dataset is downloaded and processed into one message that says what to do."""
    processed = base / "processed" / made
    had_processed = processed.exists()
    stored = sorted([*base.glob("processed/*.pt"), *base.glob("split/*/*.pt"), *base.glob("raw/*.pt")])
    for path in (*raw, *stored):
        if os.path.lexists(path):  # a FIFO would be waited for
            check_file(path)
    try:
        yield
    except pickle.UnpicklingError as error:
        raise _refused(name, stored, error) from None
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


@contextmanager
def _unpickling(trust: bool) -> Iterator[None]:
    """Let the libraries that read a dataset unpickle tensors and PyG's own data alone, or anything.

    PyG asks torch for anything where that does not suffice. Torch's own switch overrules it, for all threads.
    """
    # ogb's files hold these, and it does not tell torch so.
    safe = torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage])
    with _unpickling_lock, safe, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Weights only load failed|Environment variable TORCH_FORCE")
        before = {name: os.environ.pop(name, None) for name in (_DISTRUST, _TRUST)}
        chosen = _TRUST if trust else _DISTRUST
        os.environ[chosen] = "1"
        try:
            yield
        finally:
            del os.environ[chosen]
            os.environ.update({name: value for name, value in before.items() if value is not None})


def _refused(name: str, stored: Sequence[Path], error: pickle.UnpicklingError) -> ValueError:
    """Return an error that names the file which torch does not unpickle."""
    trusted = os.environ.get(_TRUST) == "1"  # some modules PyG refuses even so
    advice = ". If you know who made it, trust=True (data.trust=true) opens it, and runs the code in it"
    for path in stored:
        try:
            torch.load(path, weights_only=True)
        except pickle.UnpicklingError as found:
            known = re.search(r"((?:Unsupported|Trying) .*?)\.(?:\s|$)", str(found), re.MULTILINE)
            reason = known[1] if known else str(found).splitlines()[0]
            return ValueError(
                f"{path} holds more than tensors and PyG's own data, or is damaged ({reason}); delete it, and it is "
                f"made again{'' if trusted else advice}"
            )
        except Exception as found:
            return ValueError(f"{path} cannot be read ({found}); delete it, and it is made again")
    return ValueError(f"{name} cannot be read: {error}")


@contextmanager
def _one_process(base: Path) -> Iterator[None]:
    """Keep the other processes of a distributed run out while one downloads and processes."""
    root = cache_root()
    with nullcontext() if root is None else locked(root, "data", checksum(str(base.resolve()))):
        yield
