"""Published datasets, each as one ``Data``, or ``HeteroData``, with features, labels and the three masks."""

import errno
import os
import pickle
import re
import shutil
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch_geometric.io.planetoid as planetoid_io
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.dataset import files_exist
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.datasets import OGB_MAG, Coauthor, Flickr, Planetoid, Reddit, Yelp
from torch_geometric.transforms import NormalizeFeatures, RandomNodeSplit, ToUndirected
from torch_geometric.utils import index_to_mask, to_undirected

from lightning_gnn.datasets import planetoid_files
from lightning_gnn.datasets.convert import convert_tables
from lightning_gnn.datasets.folder import class_numbers, load_folder
from lightning_gnn.datasets.published_files import read_ids, unpack
from lightning_gnn.datasets.topology_files import write_csc
from lightning_gnn.features.arrays import check_file, load_array, save_arrays
from lightning_gnn.runtime.store import cache_root, checksum, is_writable, locked

__all__ = ["coauthor", "convert_papers100m", "flickr", "ogb_mag", "ogbn", "planetoid", "reddit", "yelp"]

_COAUTHOR = {"cs": "CS", "physics": "Physics"}
_PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
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
_PROMPT = "ogb asks a question on the terminal, and there is none; load it once in a terminal"


class _Planetoid(Planetoid):  # type: ignore[misc]
    def process(self) -> None:
        with open(self.raw_paths[4], "rb") as labels, open(self.raw_paths[7]) as nodes:
            rows = planetoid_files.load(labels, "latin1").shape[0]
            count = len(set(nodes.read().split("\n")[:-1]))
        if rows != count:  # PyG would take fewer test nodes
            raise planetoid_files.DamagedFile(f"it has {count} nodes, but ty {rows} rows", self.raw_paths[7])
        data = planetoid_io.read_planetoid_data(self.raw_dir, self.name)
        data.validate()  # edges to nodes that there are not would be kept
        self.save([data], self.processed_paths[0])


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
        root: Folder with ``<Name>/raw/ind.*``; what is missing is downloaded.
        name: ``"Cora"``, ``"CiteSeer"`` or ``"PubMed"``.
        normalize_features: Scale each row of ``x`` to the sum 1.
        split: ``"public"``, ``"full"`` or ``"random"`` (drawn from torch's global random stream).
        trust: Open a file ``processed/*.pt`` even if it holds more than tensors and PyG's own data. That runs the code
            in it: say so only if you know who made it.

    Returns:
        ``Data`` with ``x`` float32 ``[N, F]``, ``y`` int64 ``[N]``, ``edge_index`` int64 ``[2, E]`` and ``train_mask``,
        ``val_mask``, ``test_mask`` bool ``[N]``.

    Raises:
        FileNotFoundError: It is not processed yet, and the folder is read-only.
        RuntimeError: Files are missing, and the download failed.
        ValueError: Another name or split, or a file that is damaged or asks for code to be run.
    """
    if name.lower() not in _PLANETOID:
        raise ValueError(f"name={name!r} is no Planetoid dataset; use one of {', '.join(_PLANETOID.values())}")
    if split not in ("public", "full", "random"):
        raise ValueError(f"split={split!r}; use 'public', 'full' or 'random'")
    name = _PLANETOID[name.lower()]
    transform = NormalizeFeatures() if normalize_features else None
    return _load(_Planetoid, root, trust, name=name, split=split, transform=transform)


def reddit(root: str | Path = "data/reddit", trust: bool = False) -> Data:
    """Load the Reddit posts of GraphSAGE (232,965 nodes, 114,615,892 edges) through PyG.

    Args:
        root: Folder with ``raw/reddit_data.npz`` and ``raw/reddit_graph.npz``; what is missing is downloaded.
        trust: As for :func:`planetoid`, as what is raised.

    Returns:
        ``Data`` like that of :func:`planetoid`.
    """
    return _load(Reddit, root, trust)


def flickr(root: str | Path = "data/flickr", trust: bool = False) -> Data:
    """Load the Flickr images of GraphSAINT (89,250 nodes, 899,756 edges) through PyG.

    Args:
        root: Folder with ``raw/adj_full.npz``, ``raw/feats.npy``, ``raw/class_map.json`` and ``raw/role.json``; what is
            missing is downloaded.
        trust: As for :func:`planetoid`, as what is raised.

    Returns:
        ``Data`` like that of :func:`planetoid`.
    """
    return _load(Flickr, root, trust)


def yelp(root: str | Path = "data/yelp", trust: bool = False) -> Data:
    """Load the Yelp reviewers of GraphSAINT (716,847 nodes, 13,954,819 edges, 100 labels) through PyG's ``Yelp``.

    Args:
        root: Folder with ``raw/adj_full.npz``, ``raw/feats.npy``, ``raw/class_map.json`` and ``raw/role.json``; what is
            missing is downloaded.
        trust: As for :func:`planetoid`, as what is raised.

    Returns:
        ``Data`` like that of :func:`planetoid`, but ``y`` float32 ``[N, 100]``: 0 or 1 for each label.
    """
    data = _load(Yelp, root, trust)
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
        trust: As for :func:`planetoid`, as what is raised.

    Returns:
        ``Data`` like that of :func:`planetoid`.
    """
    if name.lower() not in _COAUTHOR:
        raise ValueError(f"name={name!r} is no Coauthor dataset; use one of {', '.join(_COAUTHOR.values())}")
    name = _COAUTHOR[name.lower()]
    data = _load(Coauthor, root, trust, name=name)
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
        trust: As for :func:`planetoid`, as what is raised, also of ``split/*/*.pt``.

    Returns:
        ``Data`` like that of :func:`planetoid`; for ``ogbn-papers100M`` that of
        :func:`~lightning_gnn.datasets.folder.load_folder`.

    Raises:
        FileNotFoundError: The files of ogbn-papers100M are missing, or the folder is read-only.
        ImportError: The ``ogb`` package is missing.
    """
    if name not in _OGBN:
        raise ValueError(f"name={name!r} is not supported; use one of {', '.join(_OGBN)}")
    root = Path(root)
    # ogbn-papers100M is converted from the downloaded files, by one process at a time.
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
    # The other datasets are read by OGB's own package, which downloads them.
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        raise ImportError(f'{name} is read with the ogb package ({error}): pip install "lightning-gnn[ogb]"') from None
    stored, split = _load(
        PygNodePropPredDataset, root, trust, lambda dataset: (dataset[0], dataset.get_idx_split()), name=name
    )
    # Of these, only ogbn-arxiv is published with directed edges.
    undirected = name == "ogbn-arxiv" if undirected is None else undirected
    edge_index = to_undirected(stored.edge_index, num_nodes=stored.num_nodes) if undirected else stored.edge_index
    data = Data(x=stored.x, edge_index=edge_index, y=stored.y.reshape(-1).to(torch.int64))
    # OGB lists the ids of each split, whereas PyG expects masks.
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
        trust: As for :func:`planetoid`, as what is raised.

    Returns:
        ``HeteroData``; of ``paper`` ``x`` float32 ``[N, 128]``, ``y`` int64 ``[N]`` in ``[0, 349)``, ``year`` int64
        ``[N]`` and ``train_mask``, ``val_mask``, ``test_mask`` bool ``[N]``.

    Raises:
        ImportError: pandas is missing, which reads the raw files.
    """
    if preprocess is not None and preprocess.lower() not in ("metapath2vec", "transe"):
        raise ValueError(f"preprocess={preprocess!r} is unknown; use 'metapath2vec', 'TransE' or None")
    data = _load(OGB_MAG, root, trust, preprocess=preprocess)
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


def _load(
    kind: type[InMemoryDataset],
    root: str | Path,
    trust: bool,
    read: Callable[[Any], Any] = lambda dataset: dataset[0],
    **options: Any,
) -> Any:
    """Make a data set of PyG or ogb and read it, by one process at a time; say what to do where that fails."""
    checked = False

    class Checked(kind):  # type: ignore[misc]
        def _download(self) -> None:
            nonlocal checked
            base = Path(self.processed_dir).parent
            for path in map(Path, (*self.raw_paths, *self.processed_paths)):
                if os.path.lexists(path) and not path.is_dir():
                    check_file(path)  # a FIFO would be waited for
            if not files_exist(self.processed_paths) and not is_writable(base):
                raise FileNotFoundError(
                    f"{base} is read-only and lacks {self.processed_paths[0]}: copy it to a folder that can be written "
                    "to, and give that as root (data.root)"
                )
            checked = True
            super()._download()

    dataset: Any = Checked.__new__(Checked)  # an error finds its folders in it
    with _one_process(Path(root)), _unpickling(trust):
        try:
            dataset.__init__(root=str(root), **options)
            return read(dataset)
        except ModuleNotFoundError as error:
            raise ImportError(f"{kind.__name__} needs another package ({error}): pip install {error.name}") from None
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not checked or full or isinstance(error, MemoryError):
                raise
            raise _explained(dataset, Path(root), error) from None


def _explained(dataset: InMemoryDataset, root: Path, error: Exception) -> Exception:
    """Return an error that says what to do where a data set cannot be downloaded or read."""
    raw, reason = Path(dataset.raw_dir), str(error) or type(error).__name__
    lacking = ", ".join(Path(path).name for path in dataset.raw_paths if not os.path.exists(path))
    if lacking and not isinstance(error, zipfile.BadZipFile):
        reason = _PROMPT if isinstance(error, EOFError) else reason
        return RuntimeError(
            f"{raw} lacks {lacking}, and the download failed ({reason}): connect to the network, copy the files there, "
            "or set root to a folder that has them"
        )
    advice = ""
    if isinstance(error, pickle.UnpicklingError):
        cause = re.search(r"((?:Unsupported|Trying) .*?)\.(?:\s|$)", reason, re.MULTILINE)
        cause_line = cause[1] if cause else reason.splitlines()[0]
        reason = f"it holds more than tensors and PyG's own data, or is damaged: {cause_line}"
        if os.environ.get(_TRUST) != "1":  # some modules torch refuses even so
            advice = ". If you know who made it, trust=True (data.trust=true) opens it, and runs the code in it"
    named = error.path if isinstance(error, planetoid_files.DamagedFile) else None
    file = next(root.rglob("*.zip"), raw) if lacking else named or _unreadable(raw)
    return ValueError(f"delete and load again: {file} ({reason}){advice}")


def _unreadable(raw: Path) -> Path:
    """Return the first file of tensors of a data set that torch does not read, or else the folder of its raw files."""
    for path in sorted(raw.parent.rglob("*.pt")):
        try:
            torch.load(path, weights_only=True)
        except Exception:
            return path
    return raw


@contextmanager
def _unpickling(trust: bool) -> Iterator[None]:
    """Let PyG and ogb unpickle tensors and PyG's own data alone, or anything; of Planetoid's raw files arrays alone.

    PyG asks torch for anything where that does not suffice. Torch's own switch overrules it, for all threads.
    """
    # ogb's files hold these, and it does not tell torch so.
    safe = torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage])
    with _unpickling_lock, safe, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Weights only load failed|Environment variable TORCH_FORCE")
        before = {name: os.environ.pop(name, None) for name in (_DISTRUST, _TRUST)}
        chosen = _TRUST if trust else _DISTRUST
        os.environ[chosen] = "1"
        theirs, planetoid_io.pickle = planetoid_io.pickle, planetoid_files
        try:
            yield
        finally:
            planetoid_io.pickle = theirs
            del os.environ[chosen]
            os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def _one_process(base: Path) -> Iterator[None]:
    """Keep the other processes of a distributed run out while one downloads and processes."""
    root = cache_root()
    with nullcontext() if root is None else locked(root, "data", checksum(str(base.resolve()))):
        yield
