"""Loads published datasets as ``Data`` or ``HeteroData`` with features, labels and three split masks."""

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
from typing import IO, Any, TypeVar

import numpy as np
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
from lightning_gnn.datasets.folder import class_numbers, load_features, load_folder
from lightning_gnn.datasets.topology_files import load_topology
from lightning_gnn.features.arrays import load_array
from lightning_gnn.graph.checks import check_nodes
from lightning_gnn.runtime.store import cache_root, checksum, is_writable, locked
from lightning_gnn.runtime.urls import local_path

T = TypeVar("T")
__all__ = ["coauthor", "flickr", "mag240m", "ogb_mag", "ogbn", "planetoid", "reddit", "yelp"]

_COAUTHOR = {"cs": "CS", "physics": "Physics"}
_PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
_OGBN = ("ogbn-arxiv", "ogbn-products", "ogbn-papers100M")
_FORCE_SAFE_VAR, _FORCE_UNSAFE_VAR = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_unpickling_lock = threading.Lock()
_PAPERS_URL = "http://snap.stanford.edu/ogb/data/nodeproppred/papers100M-bin.zip"
_PAPERS_FILES = ["raw/data.npz", "raw/node-label.npz"]
_PAPERS_FILES += [f"split/time/{split}.csv.gz" for split in ("train", "valid", "test")]
_MAG240M_URL = "https://ogb.stanford.edu/docs/lsc/mag240m"
_MAG240M_FILES = ["processed/paper/node_feat.npy", "processed/paper/node_label.npy", "split_dict.pt"]
_MAG240M_FILES += ["processed/paper___cites___paper/edge_index.npy"]
_SAFE_CLASSES = re.compile(
    r"numpy\.(ndarray|dtype|_?core\.multiarray\._reconstruct)|scipy\.sparse\._?csr\.csr_matrix|_codecs\.encode|"
    r"(__builtin__|builtins)\.list|collections\.(defaultdict|OrderedDict)"
)  # classes in Planetoid's raw files
_rebuild_array = np.zeros(0).__reduce__()[0]
_NUMPY_CLASSES: list[Any] = [np.ndarray, np.dtype, np.dtypes.Int64DType]
_NUMPY_CLASSES += [(_rebuild_array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
_PROMPT_ERROR = "ogb asks a question, but stdin is not a terminal; load the dataset once in a terminal"


class _SafeUnpickler(pickle.Unpickler):
    """Unpickles only arrays and containers, so that a file cannot run code."""

    def find_class(self, module: str, name: str) -> object:
        if not _SAFE_CLASSES.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a file of numbers does not need")
        return super().find_class(module, name)


def _load_safely(file: IO[bytes], encoding: str) -> Any:
    """Replace ``pickle.load`` while PyG reads Planetoid's raw files."""
    try:
        content = _SafeUnpickler(file, encoding=encoding).load()
        if isinstance(content, csr_matrix):
            content.check_format(full_check=True)  # scipy writes out of bounds for an invalid index
        return content
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{file.name}: {type(error).__name__}: {error}") from None


class _Planetoid(Planetoid):  # type: ignore[misc]
    def process(self) -> None:
        with open(self.raw_paths[4], "rb") as labels, open(self.raw_paths[7]) as nodes:
            rows = _load_safely(labels, "latin1").shape[0]
            count = len(set(nodes.read().split("\n")[:-1]))
        if rows != count:  # PyG would silently use fewer test nodes
            raise ValueError(f"{self.raw_paths[7]} has {count} nodes, but ty {rows} rows")
        data = planetoid_io.read_planetoid_data(self.raw_dir, self.name)
        data.validate()  # PyG does not reject edges to missing nodes
        self.save([data], self.processed_paths[0])


class _ReadOnlyError(FileNotFoundError):
    """A dataset in a read-only folder is not processed yet."""


def planetoid(
    root: str | Path = "data/planetoid",
    name: str = "Cora",
    normalize_features: bool = True,
    split: str = "public",
    trust: bool = False,
) -> Data:
    """Load a citation graph through PyG's ``Planetoid``.

    The raw files are pickles. Regardless of ``trust``, only arrays and containers are unpickled, and no code runs.

    Args:
        root: Folder with ``<Name>/raw/ind.*``; missing files are downloaded.
        name: ``"Cora"``, ``"CiteSeer"`` or ``"PubMed"``.
        normalize_features: Scale each row of ``x`` to the sum 1.
        split: ``"public"``, ``"full"`` or ``"random"`` (uses torch's global random generator).
        trust: Open a file ``processed/*.pt`` even if it holds more than tensors and PyG's own data. That runs the code
            in the file: use it only for files from a trusted source.

    Returns:
        ``Data`` with ``x`` float32 ``[N, F]``, ``y`` int64 ``[N]``, ``edge_index`` int64 ``[2, E]`` and ``train_mask``,
        ``val_mask``, ``test_mask`` bool ``[N]``.

    Raises:
        FileNotFoundError, RuntimeError: The folder is read-only and not processed, or the download failed.
        ValueError: The name or split is unknown, or a file is damaged or contains code.
    """
    if name.lower() not in _PLANETOID:
        raise ValueError(f"name={name!r} is not a Planetoid dataset; use one of {', '.join(_PLANETOID.values())}")
    if split not in ("public", "full", "random"):
        raise ValueError(f"split={split!r} is unknown; use 'public', 'full' or 'random'")
    name = _PLANETOID[name.lower()]
    transform = NormalizeFeatures() if normalize_features else None
    return _load(_Planetoid, root, trust, name=name, split=split, transform=transform)


def reddit(root: str | Path = "data/reddit", trust: bool = False) -> Data:
    """Load the Reddit posts of GraphSAGE (232,965 nodes, 114,615,892 edges) through PyG.

    ``root`` has ``raw/reddit_data.npz`` and ``raw/reddit_graph.npz``, or they are downloaded. ``trust``, the return
    value and the errors are the same as for :func:`planetoid`.
    """
    return _load(Reddit, root, trust)


def flickr(root: str | Path = "data/flickr", trust: bool = False) -> Data:
    """Load the Flickr images of GraphSAINT (89,250 nodes, 899,756 edges) through PyG.

    ``root`` has ``raw/adj_full.npz``, ``raw/feats.npy``, ``raw/class_map.json`` and ``raw/role.json``, or they are
    downloaded. ``trust``, the return value and the errors are the same as for :func:`planetoid`.
    """
    return _load(Flickr, root, trust)


def yelp(root: str | Path = "data/yelp", trust: bool = False) -> Data:
    """Load the Yelp reviewers of GraphSAINT (716,847 nodes, 13,954,819 edges, 100 labels) through PyG's ``Yelp``.

    Like :func:`flickr`, but ``y`` is float32 ``[N, 100]``: 0 or 1 for each label.
    """
    data: Data = _load(Yelp, root, trust)
    data.y = data.y.float()
    return data


def coauthor(root: str | Path = "data/coauthor", name: str = "CS", seed: int = 0, trust: bool = False) -> Data:
    """Load a co-authorship graph (CS: 18,333 nodes; Physics: 34,493) through PyG's ``Coauthor``.

    The dataset has no public split. As in "Pitfalls of Graph Neural Network Evaluation" (arXiv:1811.05868), ``seed``
    draws 20 training nodes and 30 validation nodes per class; the others are test nodes.

    ``root`` has ``<name>/raw/ms_academic_*.npz``, or they are downloaded; ``name`` is ``"CS"`` or ``"Physics"``.
    ``trust``, the return value and the errors are the same as for :func:`planetoid`.
    """
    if name.lower() not in _COAUTHOR:
        raise ValueError(f"name={name!r} is not a Coauthor dataset; use one of {', '.join(_COAUTHOR.values())}")
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

    ``ogbn-papers100M`` is not downloaded (56 GB), does not need the ``ogb`` package and is converted once, by
    :func:`~lightning_gnn.datasets.convert_tables`; the result is memory-mapped, its edges are numbered in the order of
    their targets, and unlabeled nodes have the label -1.

    Args:
        root: Folder in which ``ogb`` stores its datasets; missing files are downloaded.
        name: ``"ogbn-arxiv"``, ``"ogbn-products"`` or ``"ogbn-papers100M"``.
        undirected: Add the reverse of each edge; by default for ogbn-arxiv only (ogbn-products has them already).
        trust: Same as for :func:`planetoid`, also for ``split/*/*.pt``; so are the return value and the other errors.

    Raises:
        FileNotFoundError, ImportError: Files of ogbn-papers100M, ``ogb``, or DuckDB for ogbn-papers100M are missing.
    """
    if name not in _OGBN:
        raise ValueError(f"name={name!r} is not supported; use one of {', '.join(_OGBN)}")
    root = local_path(root)
    # ogbn-papers100M is converted from the downloaded files, by one process at a time.
    if name == "ogbn-papers100M":
        folder = root / "ogbn_papers100M"
        converted = folder / ("npy_undirected" if undirected else "npy")
        with _lock_dataset(folder):
            if not converted.exists():
                _check_files(folder, _PAPERS_FILES, f"{_PAPERS_URL} (56 GB)")
                if not is_writable(converted):
                    fix = "link the raw files elsewhere"
                    raise FileNotFoundError(f"{converted} cannot be created in a read-only folder; {fix}")
                convert_tables(folder, converted, undirected=bool(undirected))
        return load_folder(converted)
    # OGB's own package downloads and reads the other datasets.
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        raise ImportError(f'{name} is read with the ogb package ({error}): pip install "lightning-gnn[ogb]"') from None
    stored, split = _load(
        PygNodePropPredDataset, root, trust, lambda dataset: (dataset[0], dataset.get_idx_split()), name=name
    )
    # Only ogbn-arxiv is published with directed edges.
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
        root: Folder with ``mag/raw``; missing files are downloaded. Requires pandas.
        preprocess: Features of all node types except papers: ``"metapath2vec"`` or ``"TransE"``; None leaves them
            without features, and :class:`~lightning_gnn.nn.TypeEmbeddings` can be trained instead.
        undirected: Add the reverse of each edge type, ``rev_…``, and of each citation.
        trust: Same as for :func:`planetoid`; so are the errors.

    Returns:
        ``HeteroData``; ``paper`` has ``x`` float32 ``[N, 128]``, ``y`` int64 ``[N]`` in ``[0, 349)``, ``year`` int64
        ``[N]`` and ``train_mask``, ``val_mask``, ``test_mask`` bool ``[N]``.
    """
    if preprocess is not None and preprocess.lower() not in ("metapath2vec", "transe"):
        raise ValueError(f"preprocess={preprocess!r} is unknown; use 'metapath2vec', 'TransE' or None")
    data: HeteroData = _load(OGB_MAG, root, trust, preprocess=preprocess)
    return ToUndirected()(data) if undirected else data


def mag240m(root: str | Path = "data/ogb") -> Data:
    """Load the papers of OGB's MAG240M and their citations: the homogeneous version of HyScale-GNN's table III.

    121,751,666 nodes, 1,297,748,926 edges, 768 features, 153 classes. Nothing is downloaded (200 GB) or copied: the
    features stay in OGB's file, which is memory-mapped. The first load sorts the edges by target into the user's cache
    (12 GB, see ``lgnn cache``). OGB publishes no labels of its test papers, so the test split is missing.

    Args:
        root: Folder in which ``ogb`` stores its datasets, with ``mag240m_kddcup2021``.

    Returns:
        ``Data`` with ``x`` float16 ``[N, 768]``, ``y`` int64 ``[N]`` (-1: unlabeled), ``graph``, a :class:`CSCGraph`,
        ``train_idx`` and ``val_idx`` int64.

    Raises:
        FileNotFoundError: A file is missing.
        TypeError, ValueError: A file is damaged, or holds other arrays.
    """
    source = local_path(root) / "mag240m_kddcup2021"
    _check_files(source, _MAG240M_FILES, f"{_MAG240M_URL} (200 GB)")
    features, labels, split, edges = (source / file for file in _MAG240M_FILES)
    x = load_features(features)
    graph = load_topology(edges.parent, len(x), True, True, f"{features} has {len(x)} rows, one per node")
    data = Data(x=x, graph=graph, y=class_numbers(load_array(labels), len(x), str(labels)))
    try:
        with torch.serialization.safe_globals(_NUMPY_CLASSES):
            nodes_of = torch.load(split, weights_only=True)
        data.train_idx, data.val_idx = (check_nodes(nodes_of[name], len(x), name) for name in ("train", "valid"))
    except (EOFError, KeyError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"{split} is damaged ({type(error).__name__}: {error}); download it again") from None
    return data


def _check_files(source: Path, files: list[str], url: str) -> None:
    if missing := [file for file in files if not (source / file).exists()]:
        lacks = f"{source} lacks {', '.join(missing)}"
        raise FileNotFoundError(f"{lacks}; download {url} and unpack its content into that folder")


def _load(
    base: type[InMemoryDataset],
    root: str | Path,
    trust: bool,
    extract: Callable[[InMemoryDataset], T] = operator.itemgetter(0),
    **options: object,
) -> T:
    """Create and read a dataset of PyG or ogb under a process lock; errors name the remedy."""

    class Checked(base):  # type: ignore[misc]
        def _download(self) -> None:
            base = Path(self.processed_dir).parent
            if not files_exist(self.processed_paths) and not is_writable(base):
                fix = "copy it to a folder that can be written to, and give that as root (data.root)"
                raise _ReadOnlyError(f"{base} is read-only and lacks {self.processed_paths[0]}: {fix}")
            super()._download()

    root = local_path(root)
    dataset = Checked.__new__(Checked)  # exists before __init__, so that errors can name its folders
    with _lock_dataset(root), _restrict_unpickling(trust):
        try:
            dataset.__init__(root=str(root), **options)  # type: ignore[misc]
            return extract(dataset)
        except ModuleNotFoundError as error:
            raise ImportError(f"{base.__name__} needs another package ({error}): pip install {error.name}") from None
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or isinstance(error, MemoryError | _ReadOnlyError):
                raise
            raise _explain_error(dataset, error, trust) from None


def _explain_error(dataset: InMemoryDataset, error: Exception, trust: bool) -> Exception:
    """Return an error that names the remedy when a dataset cannot be downloaded or read."""
    raw, reason, advice = Path(dataset.raw_dir), str(error) or type(error).__name__, ""
    lacking = ", ".join(Path(path).name for path in dataset.raw_paths if not os.path.exists(path))
    if lacking and not isinstance(error, zipfile.BadZipFile):
        reason = _PROMPT_ERROR if isinstance(error, EOFError) else reason
        return RuntimeError(
            f"{raw} lacks {lacking}, and the download failed ({reason}): connect to the network, copy the files there, "
            "or set root to a folder that has them"
        )
    if isinstance(error, pickle.UnpicklingError):
        cause = re.search(r"((?:Unsupported|Trying) .*?)\.(?:\s|$)", reason, re.MULTILINE)
        reason = cause[1] if cause else reason.splitlines()[0]
        reason = f"a file holds more than tensors and PyG's own data, or is damaged: {reason}"
        if not trust:  # torch rejects some modules even with trust
            advice = ". If its source is trusted, trust=True (data.trust=true) opens it and runs the code in it"
    return ValueError(f"delete and load again: {raw.parent} ({reason}){advice}")


@contextmanager
def _restrict_unpickling(trust: bool) -> Iterator[None]:
    """Restrict PyG and ogb to unpickling tensors and PyG data unless trusted; Planetoid raw files: arrays only."""
    # ogb's files hold these classes without registering them with torch.
    safe = torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage])
    with _unpickling_lock, safe, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Weights only load failed|Environment variable TORCH_FORCE")
        before = {name: os.environ.pop(name, None) for name in (_FORCE_SAFE_VAR, _FORCE_UNSAFE_VAR)}
        variable = _FORCE_UNSAFE_VAR if trust else _FORCE_SAFE_VAR
        os.environ[variable] = "1"
        original, planetoid_io.pickle = planetoid_io.pickle, SimpleNamespace(load=_load_safely)
        try:
            yield
        finally:
            planetoid_io.pickle = original
            del os.environ[variable]
            os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def _lock_dataset(base: Path) -> Iterator[None]:
    """Hold a lock across processes while a dataset is downloaded and processed."""
    root = cache_root()
    with nullcontext() if root is None else locked(root, "data", checksum(str(base.resolve()))):
        yield
