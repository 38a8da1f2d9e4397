"""Validation of the user's data; each error names the problem, its location and the remedy."""

from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import is_sparse

from lightning_gnn.features.table import check_finite_rows
from lightning_gnn.graph.csc import check_ids, unexpected_graph, unwrap
from lightning_gnn.runtime.lightning import rank_zero_info
from lightning_gnn.runtime.memory_info import total_bytes

_MAX_MAPPED_BYTES = 1 << 30  # larger memory-mapped tables are not checked, as reading them takes too long
_MEMORY_PATHS = ("/dev/", "/memfd:", "/SYSV")  # mapped paths that are memory, not files on disk
_ID_DTYPES = (torch.int32, torch.int64)
_EDGE_KEYS = ("edge_attr", "edge_weight")


def check_node_data(data: Data, check_features: bool = False, dense: bool = True) -> None:
    """Check the attributes that training needs; the topology is checked when it is converted."""
    # Check the type of the graph and its number of nodes.
    if not isinstance(data, Data):
        error = unexpected_graph(data, "a homogeneous torch_geometric.data.Data")
        raise TypeError(f"{error}; use data.to_homogeneous()") if isinstance(data, HeteroData) else error
    num_nodes = data.num_nodes
    if not isinstance(num_nodes, (Integral, NoneType)):
        raise TypeError(f"data.num_nodes must be a whole number, but is {num_nodes!r}")
    # Loaders index single rows, which requires a dense layout.
    for key, value in data._store.items():
        of_rows = key != "adj_t" and (data.is_node_attr(key) or data.is_edge_attr(key))
        if dense and of_rows and is_sparse(value):
            raise ValueError(f"data.{key} is sparse, but rows are read one by one; use data.{key}.to_dense()")
    # Lists of numbers would stay lists in every mini-batch.
    for key in ("x", "y", *_EDGE_KEYS):
        value = data.get(key)
        if _is_number_list(value):
            type_name = type(value).__name__
            raise TypeError(f"data.{key} is a {type_name} of numbers, but must be a tensor; use torch.tensor")
    # Node attributes need one row per node; a number of nodes inferred from the edges is often too small.
    for key in ("x", "y", "train_mask", "val_mask", "test_mask"):
        value = data.get(key)
        if isinstance(value, (Tensor, np.ndarray)) and (value.ndim == 0 or value.shape[0] != num_nodes):
            is_inferred = "num_nodes" not in data and data.get("x") is None
            fix = "; set data.num_nodes, which is otherwise inferred from the edges" if is_inferred else ""
            raise ValueError(f"data.{key} has the shape {list(value.shape)}, but the graph has {num_nodes} nodes{fix}")
    # A single NaN or infinity would spread to the whole model.
    if check_features:
        _check_features(data)


def check_hetero_data(data: HeteroData, check_features: bool = False) -> None:
    """Check the attributes of a heterogeneous graph; see :func:`check_node_data` and :func:`check_edge_data`."""
    for store in data.node_stores:
        node_type = store._key
        count = store.num_nodes
        if count is None:
            raise ValueError(f"the number of nodes of {node_type!r} is unknown: set data[…].num_nodes")
        part = Data.from_dict({key: value for key, value in store.items() if key != "num_nodes"})
        part.num_nodes = count
        _check_type(check_node_data, part, f"data[{node_type!r}]", check_features)
    for store in data.edge_stores:
        if not isinstance(store.get("edge_index"), Tensor) and store.get("adj_t") is None:
            continue
        part = Data.from_dict({key: store[key] for key in ("edge_index", "adj_t", *_EDGE_KEYS) if key in store})
        _check_type(check_edge_data, part, f"data[{store._key}]")
        if check_features:
            _check_type(_check_features, part, f"data[{store._key}]")


def _check_type(check: Callable[..., None], data: Data, name: str, *options: bool) -> None:
    """Run a check for one type of a heterogeneous graph, and add the type to its error message."""
    try:
        check(data, *options)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("data.", f"{name}.")) from None


def _is_number_list(value: object) -> bool:
    """Return whether a value is a (nested) list of numbers; lists of strings and other objects are valid attributes."""
    inner = value
    while isinstance(inner, (list, tuple)) and inner:
        inner = inner[0]
    return isinstance(value, (list, tuple)) and isinstance(inner, (Real, Tensor, np.ndarray))


def _check_features(data: Data) -> None:
    """Raise a ValueError if node or edge features contain NaN or infinity."""
    for key, kind in (("x", "node"), *((key, "edge") for key in _EDGE_KEYS)):
        value = data.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            value = torch.as_tensor(value)
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and not is_sparse(value):
            _check_finite(value, f"data.{key}", kind)


def check_edge_data(data: Data) -> None:
    """Check the rows of edge attributes; with another number of rows, PyG would copy them whole into mini-batches."""
    topology = {key: data[key] for key in ("edge_index", "adj_t") if data.get(key) is not None}
    if not topology:
        return
    num_edges = Data.from_dict(topology).num_edges
    for key in _EDGE_KEYS:
        value = data.get(key)
        if isinstance(value, (Tensor, np.ndarray)) and (value.ndim == 0 or value.shape[0] != num_edges):
            raise ValueError(f"data.{key} has the shape {list(value.shape)}, but the graph has {num_edges} edges")


def _check_finite(values: Tensor, name: str, kind: str) -> None:
    if _is_on_disk(values):
        size = f"{values.nbytes / 2**30:.1f} GiB"
        rank_zero_info(f"{name} is memory-mapped and has {size}: it is not checked for NaN and infinity")
        return
    fix = "clean them, or set check_features=False if the model or a transform expects them"
    check_finite_rows(values, name, kind=kind, fix=fix)


def _is_on_disk(values: Tensor) -> bool:
    """Return whether checking a table would read a large file."""
    if not values.is_cpu or values.nbytes <= _MAX_MAPPED_BYTES:
        return False
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux: assume that a table above half of the memory is mapped
        return values.nbytes > total_bytes() // 2
    # Look up the middle: the first page can be in the same line as another mapping before it.
    middle = values.data_ptr() + values.nbytes // 2
    for line in lines:
        start, end = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
        if start <= middle < end:
            path = "".join(line.split(maxsplit=5)[5:])
            return path.startswith("/") and not path.startswith(_MEMORY_PATHS)
    return False


def check_nodes(nodes: object, num_nodes: int, name: str) -> Tensor:
    """Return selected nodes as a bool mask or int64 ids; a value named ``…mask`` must be a mask."""
    refuse_type(nodes, name, "node")
    selected = _as_tensor(nodes, name, "a bool mask or int64 ids")
    if selected.dim() == 2 and selected.shape == (num_nodes, 1):
        selected = selected.view(-1)
    if selected.dim() != 1:
        has_splits = selected.dim() == 2 and selected.size(0) == num_nodes
        fix = f": it has {selected.size(1)} splits; select one column, such as {name}[:, 0]" if has_splits else ""
        raise ValueError(f"{name} must have one dimension, but has the shape {list(selected.shape)}{fix}")
    if selected.dtype == torch.bool:
        if selected.numel() != num_nodes:
            raise ValueError(f"{name} is a mask of {selected.numel()} entries, but the graph has {num_nodes} nodes")
        return selected
    # One value per node, all 0 or 1, is an integer mask rather than node ids.
    is_integer_mask = selected.numel() == num_nodes > 2 and bool(((selected == 0) | (selected == 1)).all())
    if is_integer_mask or name.endswith("mask"):
        raise TypeError(f"{name} is {selected.dtype}, but a mask must be torch.bool; use {name}.bool()")
    if selected.dtype not in _ID_DTYPES:
        raise TypeError(f"{name} must be a bool mask or int64 ids, but is {selected.dtype}")
    check_ids(selected, num_nodes, name)
    return selected.to(torch.int64)


def check_labels(data: Data, nodes: Tensor, name: str) -> None:
    """Raise a ValueError if ``data.y`` is NaN or infinite at these nodes; elsewhere this may mean unlabeled."""
    y = data.get("y")
    if isinstance(y, np.ndarray) and y.dtype.kind == "f":
        y = torch.as_tensor(y)
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return
    ids = nodes.nonzero().view(-1) if nodes.dtype == torch.bool else nodes
    fix = f"leave these nodes out of {name}"
    check_finite_rows(y[ids.to(y.device)], f"data.y at {name}", fix=fix, rows=ids)


def check_edges(edges: object, sizes: tuple[int, int], name: str) -> Tensor:
    """Return edges ``[2, n]``, a tensor, an array or lists, as an int64 tensor."""
    refuse_type(edges, name, "edge")
    pairs = _as_tensor(edges, name, "an int64 tensor [2, n]")
    if pairs.dtype not in _ID_DTYPES:
        raise TypeError(f"{name} must be an int64 tensor [2, n], but is {pairs.dtype}")
    if pairs.dim() != 2 or pairs.size(0) != 2:
        fix = "; transpose it" if pairs.dim() == 2 and pairs.size(1) == 2 else ""
        raise ValueError(f"{name} must have the shape [2, n], but has {list(pairs.shape)}{fix}")
    for side, count in enumerate(sizes):
        check_ids(pairs[side], count, name)
    return unwrap(pairs).to(torch.int64)


def check_edge_labels(labels: object, num_edges: int, name: str) -> Tensor:
    """Return edge labels ``[n, ...]``, a tensor, an array or lists, as a tensor with one finite label per edge."""
    values = _as_tensor(labels, name, "numbers, one per edge")
    if values.dim() == 0 or values.size(0) != num_edges:
        raise ValueError(f"{name} must have one label per edge, {num_edges}, but has the shape {list(values.shape)}")
    if values.is_floating_point():
        check_finite_rows(values, name, kind="edge", fix="leave these edges out")
    return values


def refuse_type(values: object, name: str, kind: str) -> None:
    """Raise a TypeError for a type, or a pair (type, selection), which PyG expects only for heterogeneous graphs."""
    first = values[0] if isinstance(values, (tuple, list)) and values else values
    if isinstance(first, str) or (isinstance(first, tuple) and first and isinstance(first[0], str)):
        raise TypeError(f"{name} names the {kind} type {first!r}, but the graph is homogeneous; pass only the {kind}s")


def _as_tensor(values: Any, name: str, expected: str) -> Tensor:
    if isinstance(values, Tensor):
        return values
    try:
        if not len(values):
            return torch.empty(0, dtype=torch.int64)
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        shown = repr(values)
        shown = shown if len(shown) <= 60 else f"a {type(values).__name__}"
        raise TypeError(f"{name} must be {expected}, but is {shown} ({error})") from None
