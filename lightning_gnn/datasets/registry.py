"""Published datasets, each as one ``Data``, or ``HeteroData``, with features, labels and the three masks."""

import errno
import operator
import os
import pickle
import re
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
import torch_geometric.io.planetoid as planetoid_io
from scipy.sparse import csr_matrix
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.dataset import files_exist
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.datasets import OGB_MAG, Coauthor, Flickr, Planetoid, Reddit, Yelp
from torch_geometric.transforms import NormalizeFeatures, RandomNodeSplit, ToUndirected
from torch_geometric.utils import index_to_mask, to_undirected

from lightning_gnn.datasets.convert import convert_tables
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.runtime.moved_names import find_moved
from lightning_gnn.runtime.store import cache_root, checksum, is_writable, locked

T = TypeVar("T")
__all__ = ["coauthor", "flickr", "ogb_mag", "ogbn", "planetoid", "reddit", "yelp"]

_COAUTHOR = {"cs": "CS", "physics": "Physics"}
_PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
_OGBN = ("ogbn-arxiv", "ogbn-products", "ogbn-papers100M")
_DISTRUST, _TRUST = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_unpickling_lock = threading.Lock()
_PAPERS_URL = "http://snap.stanford.edu/ogb/data/nodeproppred/papers100M-bin.zip"
_PAPERS_FILES = ["raw/data.npz", "raw/node-label.npz"]
_PAPERS_FILES += [f"split/time/{split}.csv.gz" for split in ("train", "valid", "test")]
_PLAIN = re.compile(
    r"numpy\.(ndarray|dtype|_?core\.multiarray\._reconstruct)|scipy\.sparse\._?csr\.csr_matrix|_codecs\.encode|"
    r"(__builtin__|builtins)\.list|collections\.(defaultdict|OrderedDict)"
)  # what Planetoid's raw files are made of
_PROMPT = "ogb asks a question on the terminal, and there is none; load it once in a terminal"


class _PlainUnpickler(pickle.Unpickler):
    """Makes arrays and containers alone, and runs no code of a file."""

    def find_class(self, module: str, name: str) -> object:
        if not _PLAIN.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of numbers needs")
        return super().find_class(module, name)


def _load_plain(file: IO[bytes], encoding: str) -> Any:
    """Stand for ``pickle.load`` where PyG reads Planetoid's raw files."""
    try:
        found = _PlainUnpickler(file, encoding=encoding).load()
        if isinstance(found, csr_matrix):
            found.check_format(full_check=True)  # scipy writes out of bounds where an index is
        return found
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{file.name}: {type(error).__name__}: {error}") from None


class _Planetoid(Planetoid):  # type: ignore[misc]
    def process(self) -> None:
        with open(self.raw_paths[4], "rb") as labels, open(self.raw_paths[7]) as nodes:
            rows = _load_plain(labels, "latin1").shape[0]
            count = len(set(nodes.read().split("\n")[:-1]))
        if rows != count:  # PyG would take fewer test nodes
            raise ValueError(f"{self.raw_paths[7]} has {count} nodes, but ty {rows} rows")
        data = planetoid_io.read_planetoid_data(self.raw_dir, self.name)
        data.validate()  # edges to nodes that there are not would be kept
        self.save([data], self.processed_paths[0])


class _ReadOnlyError(FileNotFoundError):
    """A data set is not processed yet, and cannot be where it lies."""


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
        FileNotFoundError, RuntimeError: The folder is read-only and not processed, or the download failed.
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

    ``root`` has ``raw/reddit_data.npz`` and ``raw/reddit_graph.npz``, or they are downloaded. ``trust``, what is
    returned and what is raised are as for :func:`planetoid`.
    """
    return _load(Reddit, root, trust)


def flickr(root: str | Path = "data/flickr", trust: bool = False) -> Data:
    """Load the Flickr images of GraphSAINT (89,250 nodes, 899,756 edges) through PyG.

    ``root`` has ``raw/adj_full.npz``, ``raw/feats.npy``, ``raw/class_map.json`` and ``raw/role.json``, or they are
    downloaded. ``trust``, what is returned and what is raised are as for :func:`planetoid`.
    """
    return _load(Flickr, root, trust)


def yelp(root: str | Path = "data/yelp", trust: bool = False) -> Data:
    """Load the Yelp reviewers of GraphSAINT (716,847 nodes, 13,954,819 edges, 100 labels) through PyG's ``Yelp``.

    As :func:`flickr`, but ``y`` is float32 ``[N, 100]``: 0 or 1 for each label.
    """
    data: Data = _load(Yelp, root, trust)
    data.y = data.y.float()
    return data


def coauthor(root: str | Path = "data/coauthor", name: str = "CS", seed: int = 0, trust: bool = False) -> Data:
    """Load authors who wrote papers together (CS: 18,333 nodes; Physics: 34,493) through PyG's ``Coauthor``.

    It has no public split. As in "Pitfalls of Graph Neural Network Evaluation" (arXiv:1811.05868), ``seed`` draws 20
    nodes of each class for training and 30 for each class for validation; the rest are for testing.

    ``root`` has ``<name>/raw/ms_academic_*.npz``, or they are downloaded; ``name`` is ``"CS"`` or ``"Physics"``.
    ``trust``, what is returned and what is raised are as for :func:`planetoid`.
    """
    if name.lower() not in _COAUTHOR:
        raise ValueError(f"name={name!r} is no Coauthor dataset; use one of {', '.join(_COAUTHOR.values())}")
    name = _COAUTHOR[name.lower()]
    data: Data = _load(Coauthor, root, trust, name=name)
    num_val = 30 * (int(data.y.max()) + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RandomNodeSplit("test_rest", num_train_per_class=20, num_val=num_val)(data)


def ogbn(
    root: str | Path = "data/ogb", name: str = "ogbn-arxiv", undirected: bool | None = None, trust: bool = False
) -> Data:
    """Load a node dataset of the Open Graph Benchmark.

    ``ogbn-papers100M`` is not downloaded (56 GB), needs no ``ogb`` package and is converted once, by
    :func:`~lightning_gnn.datasets.convert_tables`; the result is memory-mapped, its edges are numbered in the order of
    their targets, and unlabeled nodes have the label -1.

    Args:
        root: Folder in which ``ogb`` keeps its datasets; what is missing is downloaded.
        name: ``"ogbn-arxiv"``, ``"ogbn-products"`` or ``"ogbn-papers100M"``.
        undirected: Add the reverse of each edge; by default for ogbn-arxiv only (ogbn-products has them already).
        trust: As for :func:`planetoid`, as what is returned and raised, also of ``split/*/*.pt``.

    Raises:
        FileNotFoundError, ImportError: Files of ogbn-papers100M, ``ogb``, or DuckDB for ogbn-papers100M are missing.
    """
    if name not in _OGBN:
        raise ValueError(f"name={name!r} is not supported; use one of {', '.join(_OGBN)}")
    root = Path(root)
    # ogbn-papers100M is converted from the downloaded files, by one process at a time.
    if name == "ogbn-papers100M":
        folder = root / "ogbn_papers100M"
        made = folder / ("npy_undirected" if undirected else "npy")
        with _one_process(folder):
            if not made.exists():
                _check_papers(folder, made)
                convert_tables(folder, made, undirected=bool(undirected))
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
        root: Folder with ``mag/raw``; what is missing is downloaded, and read by pandas.
        preprocess: Features of all types but papers: ``"metapath2vec"`` or ``"TransE"``; None leaves them without
            features, in whose place :class:`~lightning_gnn.nn.TypeEmbeddings` can be trained.
        undirected: Add the reverse of each edge type, ``rev_…``, and of each citation.
        trust: As for :func:`planetoid`, as what is raised.

    Returns:
        ``HeteroData``; of ``paper`` ``x`` float32 ``[N, 128]``, ``y`` int64 ``[N]`` in ``[0, 349)``, ``year`` int64
        ``[N]`` and ``train_mask``, ``val_mask``, ``test_mask`` bool ``[N]``.
    """
    if preprocess is not None and preprocess.lower() not in ("metapath2vec", "transe"):
        raise ValueError(f"preprocess={preprocess!r} is unknown; use 'metapath2vec', 'TransE' or None")
    data: HeteroData = _load(OGB_MAG, root, trust, preprocess=preprocess)
    return ToUndirected()(data) if undirected else data


def _check_papers(source: Path, folder: Path) -> None:
    """Check that the raw files of ogbn-papers100M are there and the folder can be made."""
    if missing := [file for file in _PAPERS_FILES if not (source / file).exists()]:
        lacks = f"{source} lacks {', '.join(missing)}"
        raise FileNotFoundError(
            f"{lacks}; download {_PAPERS_URL} (56 GB) and unpack it, so that its content lies there"
        )
    if not is_writable(folder):
        raise FileNotFoundError(f"{folder} cannot be made, its place is read-only; link the raw files elsewhere")


def _load(
    kind: type[InMemoryDataset],
    root: str | Path,
    trust: bool,
    read: Callable[[InMemoryDataset], T] = operator.itemgetter(0),
    **options: object,
) -> T:
    """Make a data set of PyG or ogb and read it, by one process at a time; say what to do where that fails."""

    class Checked(kind):  # type: ignore[misc]
        def _download(self) -> None:
            base = Path(self.processed_dir).parent
            if not files_exist(self.processed_paths) and not is_writable(base):
                fix = "copy it to a folder that can be written to, and give that as root (data.root)"
                raise _ReadOnlyError(f"{base} is read-only and lacks {self.processed_paths[0]}: {fix}")
            super()._download()

    dataset = Checked.__new__(Checked)  # an error finds its folders in it
    with _one_process(Path(root)), _unpickling(trust):
        try:
            dataset.__init__(root=str(root), **options)  # type: ignore[misc]
            return read(dataset)
        except ModuleNotFoundError as error:
            raise ImportError(f"{kind.__name__} needs another package ({error}): pip install {error.name}") from None
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or isinstance(error, MemoryError | _ReadOnlyError):
                raise
            raise _explained(dataset, error, trust) from None


def _explained(dataset: InMemoryDataset, error: Exception, trust: bool) -> Exception:
    """Return an error that says what to do where a data set cannot be downloaded or read."""
    raw, reason, advice = Path(dataset.raw_dir), str(error) or type(error).__name__, ""
    lacking = ", ".join(Path(path).name for path in dataset.raw_paths if not os.path.exists(path))
    if lacking and not isinstance(error, zipfile.BadZipFile):
        reason = _PROMPT if isinstance(error, EOFError) else reason
        return RuntimeError(
            f"{raw} lacks {lacking}, and the download failed ({reason}): connect to the network, copy the files there, "
            "or set root to a folder that has them"
        )
    if isinstance(error, pickle.UnpicklingError):
        cause = re.search(r"((?:Unsupported|Trying) .*?)\.(?:\s|$)", reason, re.MULTILINE)
        reason = cause[1] if cause else reason.splitlines()[0]
        reason = f"a file holds more than tensors and PyG's own data, or is damaged: {reason}"
        if not trust:  # some modules torch refuses even so
            advice = ". If you know who made it, trust=True (data.trust=true) opens it, and runs the code in it"
    return ValueError(f"delete and load again: {raw.parent} ({reason}){advice}")


@contextmanager
def _unpickling(trust: bool) -> Iterator[None]:
    """Let PyG and ogb unpickle tensors and PyG's own data alone, or anything; of Planetoid's raw files arrays alone."""
    # ogb's files hold these, without allowing torch to make them.
    safe = torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage])
    with _unpickling_lock, safe, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Weights only load failed|Environment variable TORCH_FORCE")
        before = {name: os.environ.pop(name, None) for name in (_DISTRUST, _TRUST)}
        chosen = _TRUST if trust else _DISTRUST
        os.environ[chosen] = "1"
        theirs, planetoid_io.pickle = planetoid_io.pickle, SimpleNamespace(load=_load_plain)
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


if not TYPE_CHECKING:  # with it, a type checker would take any name for one that is here
    __getattr__ = find_moved(__name__)
