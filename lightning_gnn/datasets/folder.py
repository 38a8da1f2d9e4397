"""Memory-mapped graph folders of ``.npy`` files, which may be larger than memory."""

import os
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn.datasets.hetero_folder import is_hetero_folder, load_hetero_folder
from lightning_gnn.datasets.synthetic import Labels
from lightning_gnn.datasets.topology_files import TOPOLOGY, load_topology
from lightning_gnn.features.arrays import expect_scattered_reads, load_array, save_arrays
from lightning_gnn.features.table import FeatureTable
from lightning_gnn.graph.adjacency import with_adj_t_values
from lightning_gnn.graph.checks import check_edge_data, check_node_data, check_nodes
from lightning_gnn.graph.csc import CSCGraph, check_integers
from lightning_gnn.runtime.urls import cached_path, local_path

SPLITS = ("train", "val", "test")
EDGE_ATTRIBUTES = ("edge_weight", "edge_attr")
_STORED = ("x", "y", "edge_index", "adj_t", "graph", "num_nodes", *EDGE_ATTRIBUTES)
_EXPECTED = (
    "x.npy, either indptr.npy and indices.npy or edge_index.npy, and optionally edge_ids.npy, edge_weight.npy, "
    "edge_attr.npy, y.npy and {train,val,test}_mask.npy or {train,val,test}_idx.npy"
)


def load_folder(
    root: str | Path, mmap: bool = True, check: bool = True, labels: Labels = "classes"
) -> Data | HeteroData:
    """Read a graph from a folder of ``.npy`` files.

    A folder with a subfolder ``nodes`` holds a heterogeneous graph (:func:`~lightning_gnn.graph.load_hetero_folder`).
    A homogeneous folder needs ``x.npy`` and a topology; labels and splits are optional:

    - ``x.npy``: features, float32, float16 or bfloat16 ``[N, F]`` (bfloat16 has NumPy's dtype ``V2``).
    - ``indptr.npy``, ``indices.npy`` and optionally ``edge_ids.npy``: the topology as stored by a :class:`CSCGraph`.
    - ``edge_index.npy``, int32 or int64 ``[2, E]``, instead of these. The first load sorts it by target; with a million
      edges or more, the result is cached in the user's cache (see ``lgnn cache``) until the file changes.
    - ``y.npy``: class numbers, integers ``[N]`` or ``[N, 1]``, or floats with integral values, where NaN marks an
      unlabeled node and becomes -1. ``labels`` selects other contents.
    - ``edge_weight.npy`` ``[E]`` and ``edge_attr.npy`` ``[E]`` or ``[E, D]``: edge weights and attributes, in the order
      of ``edge_index``, or of ``edge_ids``.
    - ``train_mask.npy`` bool ``[N]`` or ``train_idx.npy`` int64 ``[n]``, and ``val_…`` (or ``valid_…``) and ``test_…``.

    Args:
        root: The folder, or its URL.
        mmap: Memory-map the arrays; writes never reach the files.
        check: Check all ids, in one pass over the topology and the splits; a large topology that passed is not
            checked again until its files change. Without the check, an id out of range crashes the sampler.
        labels: Contents of ``y.npy``: ``"classes"``; ``"several"``, 0 or 1 for each label, ``[N, L]``; or
            ``"numbers"``, ``[N]`` or ``[N, T]``. Ignored for heterogeneous graphs, whose arrays are loaded unchanged.

    Returns:
        ``Data`` with ``x``, ``y`` int64 ``[N]`` (several: unchanged; numbers: floating), edge attributes, the splits
        under the names of their files (``valid_…`` as ``val_…``) and the topology as ``graph``, a :class:`CSCGraph`;
        or ``HeteroData``.

    Raises:
        FileNotFoundError: The folder or a required file is missing.
        TypeError: An array has a wrong dtype.
        ValueError: A file is truncated, a shape or length is wrong, a node or edge id is out of range, a topology or a
            split is given twice.
    """
    root = cached_path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder; expected one with {_EXPECTED}")
    if is_hetero_folder(root):
        return load_hetero_folder(root, mmap, check)
    x = load_features(root / "x.npy", mmap)
    data = Data(x=x, graph=load_topology(root, x.size(0), mmap, check, f"x has {x.size(0)} rows, one per node"))
    for name in EDGE_ATTRIBUTES:
        if os.path.lexists(root / f"{name}.npy"):
            data[name] = _read_edge_attribute(root / f"{name}.npy", data.graph.num_edges, mmap)
    path = root / "y.npy"
    if os.path.lexists(path):  # a dangling link is an error, not a missing file
        data.y = _read_labels(path, labels, x.size(0), mmap)
    for split in SPLITS:
        paths = [
            path
            for name in ((split, "valid") if split == "val" else (split,))
            for path in (root / f"{name}_mask.npy", root / f"{name}_idx.npy")
            if os.path.lexists(path)
        ]
        if len(paths) > 1:
            raise ValueError(f"{paths[0]} and {paths[1].name} both give the {split} split; remove one of them")
        for path in paths:
            suffix = path.stem.rpartition("_")[2]
            data[f"{split}_{suffix}"] = _read_split(path, suffix, x.size(0), mmap, check)
    return data


def save_folder(data: Data, root: str | Path) -> Path:
    """Write a graph to a folder that :func:`load_folder` reads; the folder must not hold a graph yet.

    ``data`` has ``x`` float32, float16 or bfloat16 ``[N, F]``, a topology (``edge_index``, ``adj_t`` or ``graph``), and
    optionally ``edge_weight`` ``[E]``, ``edge_attr`` ``[E, D]``, ``y`` ``[N]`` and ``{train,val,test}_mask`` bool
    ``[N]`` or ``{train,val,test}_idx`` int64 ``[n]``. The values of ``adj_t`` are stored as an edge attribute.
    """
    root = local_path(root)
    check_node_data(data)
    data = with_adj_t_values(data)
    check_edge_data(data)
    splits = [f"{split}_{suffix}" for split in SPLITS for suffix in ("mask", "idx") if f"{split}_{suffix}" in data]
    if unknown := set(data.keys()) - {*_STORED, *splits}:
        raise ValueError(f"a folder cannot store data.{', data.'.join(sorted(unknown))}; remove it from data first")
    if data.get("x") is None:
        raise ValueError("data has no x: a folder needs features, floating [num_nodes, num_features]")
    num_nodes = data.x.size(0)
    arrays = {name: check_nodes(data[name].detach().cpu(), num_nodes, f"data.{name}") for name in splits}
    if data.get("y") is not None:
        arrays["y"] = class_numbers(data.y.detach().cpu(), num_nodes, "data.y")
    for name in EDGE_ATTRIBUTES:
        if data.get(name) is not None:
            arrays[name] = torch.as_tensor(data[name]).detach().cpu()
    features = FeatureTable(data.x.detach().cpu())
    graph = CSCGraph.from_data(data)
    if graph.weight is not None or graph.time is not None:
        raise ValueError("data.graph has times or weights, which are not saved: store weights as data.edge_weight")
    if graph.num_nodes != num_nodes:
        raise ValueError(f"data.graph has {graph.num_nodes} nodes, but data.x has {num_nodes} rows")
    for name in ("x", "edge_index", *TOPOLOGY, *arrays):
        if os.path.lexists(root / f"{name}.npy"):
            raise FileExistsError(f"{root} holds {name}.npy already; choose an empty folder")
    topology = {name: getattr(graph, name) for name in TOPOLOGY}
    save_arrays(root, {"x": features.values, **arrays, **topology})  # x.npy is written last
    return root


def load_features(path: Path, mmap: bool = True) -> Tensor:
    """Read float32, float16 or bfloat16 features ``[N, F]``; with ``mmap`` they stay in their file."""
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{path} does not exist; expected {_EXPECTED}")
    values = load_array(path, mmap)
    try:
        values = FeatureTable(values).values
    except TypeError as error:
        raise TypeError(f"{path}: {error}; convert it with x.astype(np.float32)") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return expect_scattered_reads(values) if mmap else values


def _read_edge_attribute(path: Path, num_edges: int, mmap: bool) -> Tensor:
    values = load_array(path, mmap)
    if values.dim() == 0 or values.size(0) != num_edges:
        raise ValueError(f"{path} has the shape {list(values.shape)}, but there are {num_edges} edges")
    return values


def _read_labels(path: Path, labels: Labels, num_nodes: int, mmap: bool) -> Tensor:
    y = load_array(path, mmap)
    if labels == "classes":
        return class_numbers(y, num_nodes, str(path))
    dims = {"several": (2,), "numbers": (1, 2)}.get(labels)
    if dims is None:
        raise ValueError(f"labels={labels!r} is unknown; use classes, several or numbers")
    if y.dim() not in dims or y.size(0) != num_nodes or y.is_complex():
        shape = "[N, L]" if labels == "several" else "[N] or [N, T]"
        raise ValueError(
            f"{path} is {y.dtype} {list(y.shape)}, but labels={labels!r} needs {shape}, and x has {num_nodes} rows"
        )
    return y.float() if labels == "numbers" and not y.is_floating_point() else y


def class_numbers(y: Tensor, num_nodes: int, name: str) -> Tensor:
    """Return labels ``[N]`` or ``[N, 1]`` as int64 ``[N]``, NaN as -1."""
    if list(y.shape) not in ([num_nodes], [num_nodes, 1]):
        raise ValueError(f"{name} has the shape {list(y.shape)}, but x has {num_nodes} rows: give one label per node")
    if y.dtype == torch.bool or y.is_complex():
        raise TypeError(f"{name} must be int64 (or floats, NaN for unlabeled nodes), but is {y.dtype}")
    y = y.reshape(num_nodes)
    if not y.is_floating_point():
        return y.to(torch.int64)
    labels = y.masked_fill(y.isnan(), -1.0)
    if bool((invalid := (labels != labels.trunc()) | labels.isinf()).any()):
        node = int(invalid.nonzero()[0])
        fix = "for other numbers give task=regression (in Python, labels='numbers')"
        raise ValueError(f"{name} holds {float(y[node])} for node {node}, but class numbers must be integers; {fix}")
    return labels.to(torch.int64)


def _read_split(path: Path, suffix: str, num_nodes: int, mmap: bool, check: bool) -> Tensor:
    nodes = load_array(path, mmap)
    if (nodes.dtype == torch.bool) != (suffix == "mask"):
        expected = "bool; node ids belong in …_idx.npy" if suffix == "mask" else "int64; a mask belongs in …_mask.npy"
        raise TypeError(f"{path} is {nodes.dtype}, but must be {expected}")
    if not check and suffix == "idx":
        check_integers(nodes, str(path))
        return nodes.to(torch.int64)
    try:
        return check_nodes(nodes, num_nodes, str(path))
    except ValueError as error:
        raise ValueError(f"{error}; x.npy has {num_nodes} rows, one per node") from None
