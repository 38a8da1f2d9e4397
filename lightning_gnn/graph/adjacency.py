"""Reads ``adj_t``, PyG's transposed adjacency matrix, whose rows are targets: its edges and their values."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage

GraphData = TypeVar("GraphData", Data, HeteroData)
_ATTRIBUTES = ("edge_weight", "edge_attr")


def transposed_csr(adj_t: object) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return offsets, sources and values of a transposed adjacency matrix that is sorted by target."""
    if isinstance(adj_t, Tensor) and adj_t.layout in (torch.sparse_csr, torch.sparse_csc):
        adj_t = adj_t.to_sparse_csr()
        return adj_t.crow_indices(), adj_t.col_indices(), adj_t.values()
    if hasattr(adj_t, "csr"):
        rowptr, col, values = adj_t.csr()
        return rowptr, col, values
    kind = f"a tensor of the layout {adj_t.layout}" if isinstance(adj_t, Tensor) else type(adj_t).__name__
    raise TypeError(
        f"adj_t must be a sparse tensor (torch.sparse_csr, sparse_csc or sparse_coo, see to_sparse_csr) or a "
        f"SparseTensor, but is {kind}"
    )


def coo_edges(adj_t: object) -> Tensor | None:
    """Return the edges of a COO matrix in its own order, which its values have, int64 ``[2, E]``; else None."""
    if not isinstance(adj_t, Tensor) or adj_t.layout != torch.sparse_coo:
        return None
    if adj_t.sparse_dim() != 2:
        raise ValueError(f"adj_t must have 2 sparse dimensions, targets and sources, but has {adj_t.sparse_dim()}")
    return adj_t._indices().flip(0)  # indices() requires unique edges, but parallel edges are valid


def with_adj_t_values(data: GraphData) -> GraphData:
    """Return the graph with the values of ``adj_t`` as edge attributes, in the order of its edges.

    As in PyG's layers, values ``[E]`` become ``edge_weight`` and values ``[E, D]`` become ``edge_attr``. A matrix in a
    layout of torch always has values, which PyG sets to 1 without weights. So if the values of all these matrices are
    exactly 1, the graph has no weights.

    Raises:
        TypeError: ``adj_t`` is not a sparse matrix.
        ValueError: The graph has another attribute of this name, its ``edge_index`` has another order, or the matrix
            requires gradients.
    """
    found: list[tuple[int, EdgeStorage, Tensor]] = []
    unweighted: list[int] = []
    for index, store in enumerate(data.edge_stores):
        if (values := _read_values(store)) is None:
            continue
        found.append((index, store, values))
        if isinstance(store.adj_t, Tensor) and values.dim() == 1 and bool((values == 1).all()):
            unweighted.append(index)
    added: list[tuple[int, str, Tensor]] = []
    for index, store, values in found:
        name = _ATTRIBUTES[values.dim() > 1]
        given = store.get(name)
        if given is None and len(unweighted) < len(found):
            added.append((index, name, values))
        elif given is not None and index not in unweighted and not _are_equal(given, values):
            raise ValueError(
                f"{_name(store)}.{name} and the values of {_name(store)}.adj_t differ, but both are the {name} of "
                f"its edges: remove one of them, as del {_name(store)}.{name} or T.ToSparseTensor(attr=None)"
            )
    if added:
        data = copy.copy(data)
        for index, name, values in added:
            data.edge_stores[index][name] = values
    for store in data.edge_stores:
        _check_order(store)
    return data


def _read_values(store: EdgeStorage) -> Tensor | None:
    """Return the values of ``adj_t``; None if edges have another topology or no values."""
    adj_t = store.get("adj_t")
    if adj_t is None or store.get("graph") is not None:
        return None
    try:
        values: Tensor | None = adj_t._values() if coo_edges(adj_t) is not None else transposed_csr(adj_t)[2]
    except (TypeError, ValueError) as error:
        raise type(error)(str(error) if store._key is None else f"edges of {store._key}: {error}") from None
    if values is not None and not values.is_leaf:  # a second mini-batch would backpropagate through them again
        name = _name(store)
        raise ValueError(f"{name}.adj_t requires gradients: to train weights, use {name}.edge_index and edge_weight")
    return values


def _check_order(store: EdgeStorage) -> None:
    """Raise a ValueError if attributes of edges have a row per edge of two topologies in different orders."""
    edge_index, adj_t = store.get("edge_index"), store.get("adj_t")
    if edge_index is None or adj_t is None or store.get("graph") is not None:
        return
    if all(store.get(name) is None for name in _ATTRIBUTES):
        return
    edges = coo_edges(adj_t)
    if edges is None:
        indptr, sources, _ = transposed_csr(adj_t)
        targets = torch.repeat_interleave(torch.arange(indptr.numel() - 1, device=indptr.device), indptr.diff())
        edges = torch.stack([sources.long(), targets])
    if not torch.equal(edges, edge_index.to(edges.device)):
        name = _name(store)
        raise ValueError(
            f"{name}.edge_index and {name}.adj_t have different edges or orders, so that the edges of its attributes "
            f"are ambiguous: remove one of them, as del {name}.adj_t"
        )


def _are_equal(given: object, values: Tensor) -> bool:
    other = torch.as_tensor(given, device=values.device)
    if other.shape != values.shape or other.dtype != values.dtype:
        return False
    return other.data_ptr() == values.data_ptr() or torch.allclose(other, values, 0, 0, equal_nan=True)


def _name(store: EdgeStorage) -> str:
    return "data" if store._key is None else f"data[{store._key}]"
