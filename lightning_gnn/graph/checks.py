"""Checks of a user's data at the boundary: each says what is wrong, where, and what to do."""

from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import is_sparse

from lightning_gnn.features.table import check_finite_rows
from lightning_gnn.graph.csc import check_ids
from lightning_gnn.runtime.memory_info import total_bytes

_MAPPED = 1 << 30  # bytes of a memory-mapped table that are read only to be checked; a disk may give no more in seconds
_MEMORY = ("/dev/", "/memfd:", "/SYSV")  # names of what is mapped as a file and is memory
_INTEGERS = (torch.int32, torch.int64)
_OF_EDGES = ("edge_attr", "edge_weight")


def check_node_data(data: Data, check_features: bool = False, dense: bool = True) -> None:
    """Check the attributes that training rests on; the topology is checked when it is converted."""
    # Check the type of the graph and its number of nodes.
    if not isinstance(data, Data):
        fix = "; data.to_homogeneous() makes one" if isinstance(data, HeteroData) else ""
        raise TypeError(f"expected a homogeneous torch_geometric.data.Data, got {type(data).__name__}{fix}")
    num_nodes = data.num_nodes
    if not isinstance(num_nodes, (Integral, NoneType)):
        raise TypeError(f"data.num_nodes must be a whole number, but is {num_nodes!r}")
    # Loaders index single rows, which needs a dense layout.
    for key, value in data._store.items():
        of_rows = key != "adj_t" and (data.is_node_attr(key) or data.is_edge_attr(key))
        if dense and of_rows and is_sparse(value):
            raise ValueError(f"data.{key} is sparse, but rows are read one by one; use data.{key}.to_dense()")
    # Lists of numbers would stay lists in every mini-batch.
    for key in ("x", "y", *_OF_EDGES):
        value = data.get(key)
        if _holds_numbers(value):
            raise TypeError(
                f"data.{key} is a {type(value).__name__} of numbers, but must be a tensor; use torch.tensor"
            )
    # Attributes of nodes need a row for each node; a number of nodes guessed from the edges is often too small.
    for key in ("x", "y", "train_mask", "val_mask", "test_mask"):
        value = data.get(key)
        if isinstance(value, (Tensor, np.ndarray)) and (value.ndim == 0 or value.shape[0] != num_nodes):
            guessed = "num_nodes" not in data and data.get("x") is None
            fix = "; set data.num_nodes, which else is guessed from the edges" if guessed else ""
            raise ValueError(f"data.{key} has the shape {list(value.shape)}, but the graph has {num_nodes} nodes{fix}")
    # A single NaN or infinity would spread to the whole model.
    if check_features:
        _check_features(data)


def check_hetero_data(data: HeteroData, check_features: bool = False) -> None:
    """Check the attributes of a graph with types as :func:`check_node_data` and :func:`check_edge_data` do."""
    for store in data.node_stores:
        node_type = store._key
        count = store.num_nodes
        if count is None:
            raise ValueError(f"the number of nodes of {node_type!r} is unknown: set data[…].num_nodes")
        part = Data.from_dict({key: value for key, value in store.items() if key != "num_nodes"})
        part.num_nodes = count
        _named(check_node_data, part, f"data[{node_type!r}]", check_features)
    for store in data.edge_stores:
        if not isinstance(store.get("edge_index"), Tensor):
            continue
        part = Data.from_dict({key: store[key] for key in ("edge_index", *_OF_EDGES) if key in store})
        _named(check_edge_data, part, f"data[{store._key}]")
        if check_features:
            _named(_check_features, part, f"data[{store._key}]")


def _named(check: Callable[..., None], data: Data, name: str, *options: bool) -> None:
    """Run a check of a graph of one type, and name the type in what it says."""
    try:
        check(data, *options)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("data.", f"{name}.")) from None


def _holds_numbers(value: object) -> bool:
    """Whether these are lists of numbers, which would stay lists; texts and other objects do so rightly."""
    inner = value
    while isinstance(inner, (list, tuple)) and inner:
        inner = inner[0]
    return isinstance(value, (list, tuple)) and isinstance(inner, (Real, Tensor, np.ndarray))


def _check_features(data: Data) -> None:
    """Refuse NaN and infinity in features of nodes and edges."""
    for key, kind in (("x", "node"), *((key, "edge") for key in _OF_EDGES)):
        value = data.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            value = torch.as_tensor(value)
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and not is_sparse(value):
            _check_finite(value, f"data.{key}", kind)


def check_edge_data(data: Data) -> None:
    """Check the attributes of edges; with another number of rows they would go into mini-batches as they are."""
    if data.get("edge_index") is None:
        return
    for key in _OF_EDGES:
        value = data.get(key)
        if isinstance(value, (Tensor, np.ndarray)) and (value.ndim == 0 or value.shape[0] != data.num_edges):
            raise ValueError(f"data.{key} has the shape {list(value.shape)}, but the graph has {data.num_edges} edges")


def _check_finite(values: Tensor, name: str, kind: str) -> None:
    if _is_on_disk(values):
        size = f"{values.nbytes / 2**30:.1f} GiB"
        rank_zero_info(f"{name} is memory-mapped and takes {size}: it is not searched for NaN and infinity")
        return
    fix = "clean them, or give check_features=False where the model or a transform expects them"
    check_finite_rows(values, name, kind=kind, fix=fix)


def _is_on_disk(values: Tensor) -> bool:
    """Whether reading all of a table would mean to read much from a file."""
    if not values.is_cpu or values.nbytes <= _MAPPED:
        return False
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux: what takes most of the memory is hardly in it
        return values.nbytes > total_bytes() // 2
    # The middle, since the first page can share its line with what lies before.
    middle = values.data_ptr() + values.nbytes // 2
    for line in lines:
        start, end = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
        if start <= middle < end:
            path = "".join(line.split(maxsplit=5)[5:])
            return path.startswith("/") and not path.startswith(_MEMORY)
    return False


def check_nodes(nodes: object, num_nodes: int, name: str) -> Tensor:
    """Return a bool mask, or ids as int64, of a choice of nodes; what is called ``…mask`` must be one."""
    refuse_type(nodes, name, "node")
    chosen = _as_tensor(nodes, name, "a bool mask or int64 ids")
    if chosen.dim() == 2 and chosen.shape == (num_nodes, 1):
        chosen = chosen.view(-1)
    if chosen.dim() != 1:
        several = chosen.dim() == 2 and chosen.size(0) == num_nodes
        fix = f": it holds {chosen.size(1)} splits; choose one of its columns, as in {name}[:, 0]" if several else ""
        raise ValueError(f"{name} must have one dimension, but has the shape {list(chosen.shape)}{fix}")
    if chosen.dtype == torch.bool:
        if chosen.numel() != num_nodes:
            raise ValueError(f"{name} is a mask of {chosen.numel()} entries, but the graph has {num_nodes} nodes")
        return chosen
    # Ids of nodes 0 and 1 alone, as many as there are nodes, are a mask of integers.
    one_per_node = chosen.numel() == num_nodes > 2 and bool(((chosen == 0) | (chosen == 1)).all())
    if one_per_node or name.endswith("mask"):
        raise TypeError(f"{name} is {chosen.dtype}, but a mask must be torch.bool; use {name}.bool()")
    if chosen.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be a bool mask or int64 ids, but is {chosen.dtype}")
    check_ids(chosen, num_nodes, name)
    return chosen.to(torch.int64)


def check_labels(data: Data, nodes: Tensor, name: str) -> None:
    """Refuse targets ``data.y`` that are NaN or infinite at some nodes; elsewhere that may mean unlabeled."""
    y = data.get("y")
    if isinstance(y, np.ndarray) and y.dtype.kind == "f":
        y = torch.as_tensor(y)
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return
    ids = nodes.nonzero().view(-1) if nodes.dtype == torch.bool else nodes
    fix = f"leave these nodes out of {name}"
    check_finite_rows(y[ids.to(y.device)], f"data.y at {name}", fix=fix, rows=ids)


def check_edges(edges: object, sizes: tuple[int, int], name: str) -> Tensor:
    """Return edges that are given as pairs of nodes ``[2, n]``, a tensor, an array or lists, as int64."""
    refuse_type(edges, name, "edge")
    pairs = _as_tensor(edges, name, "an int64 tensor [2, n]")
    if pairs.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be an int64 tensor [2, n], but is {pairs.dtype}")
    if pairs.dim() != 2 or pairs.size(0) != 2:
        fix = "; transpose it" if pairs.dim() == 2 and pairs.size(1) == 2 else ""
        raise ValueError(f"{name} must have the shape [2, n], but has {list(pairs.shape)}{fix}")
    for side, count in enumerate(sizes):
        check_ids(pairs[side], count, name)
    return pairs.as_subclass(Tensor).to(torch.int64)


def check_edge_labels(labels: object, num_edges: int, name: str) -> Tensor:
    """Check the labels of edges, numbers ``[n, ...]`` as a tensor, an array or lists."""
    found = _as_tensor(labels, name, "numbers, one per edge")
    if found.dim() == 0 or found.size(0) != num_edges:
        raise ValueError(f"{name} must hold one label per edge, {num_edges}, but has the shape {list(found.shape)}")
    if found.is_floating_point():
        check_finite_rows(found, name, kind="edge", fix="leave these edges out")
    return found


def refuse_type(values: object, name: str, kind: str) -> None:
    """Refuse what PyG takes for a heterogeneous graph: a type, or a pair of a type and what is chosen of it."""
    first = values[0] if isinstance(values, (tuple, list)) and values else values
    if isinstance(first, str) or (isinstance(first, tuple) and first and isinstance(first[0], str)):
        raise TypeError(f"{name} names the {kind} type {first!r}, but the graph has one type; give the {kind}s alone")


def _as_tensor(values: Any, name: str, wanted: str) -> Tensor:
    if isinstance(values, Tensor):
        return values
    try:
        if not len(values):
            return torch.empty(0, dtype=torch.int64)
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        shown = repr(values)
        shown = shown if len(shown) <= 60 else f"a {type(values).__name__}"
        raise TypeError(f"{name} must be {wanted}, but is {shown} ({error})") from None
