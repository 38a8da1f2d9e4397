"""A partitioned graph as loaders see it: of its size, without its rows, with or without its topology."""

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage

from lightning_gnn.graph.csc import CSCGraph, index_dtype
from lightning_gnn.partitioned.folder import Partition, TypeInfo


def without_rows(partition: Partition) -> Data | HeteroData:
    """Return a graph whose attributes have the right shapes and dtypes, hold zeros and take no memory."""
    data: Data | HeteroData = HeteroData() if partition.typed else Data()
    for name in partition.stores if partition.typed else ():
        _ = data[name]  # makes them, in this order
    for kind in partition.nodes:
        store = data if kind.name is None else data[kind.name]
        _fill(store, kind, partition.rest.get(kind.name, {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it guesses
            guessed = (store if kind.name is not None else data._store).num_nodes
        if guessed != kind.count:
            store.num_nodes = kind.count
    for kind in partition.edges:
        store = data if kind.name is None else data[kind.name]
        _fill(store, kind, {} if kind.name is None else partition.rest.get(kind.name, {}))
        store.edge_index = torch.zeros((2, 1), dtype=torch.int64).expand(2, kind.count)
    of_graph = partition.rest.get(None, partition.rest.get("", {}))  # the name that earlier releases gave it
    for key, value in of_graph.items() if partition.typed else ():
        data[key] = value
    return data


def outline(root: str | Path) -> Data | HeteroData:
    """Return what a model must know of a partitioned graph: types, sizes, features, and how many classes."""
    partition = Partition(root)
    data: Data | HeteroData = without_rows(partition)
    for kind in partition.nodes:
        for key, largest in kind.largest.items():
            (data if kind.name is None else data[kind.name])[key] = torch.full(
                (), largest, dtype=kind.dtype(key)
            ).expand(kind.shape(key))
    return data


def with_topology(partition: Partition, time_attr: str | None = None) -> Data | HeteroData:
    """Return a graph with the topology and the attributes of edges of all parts in memory, nodes without rows."""
    data: Data | HeteroData = without_rows(partition)
    parts = [partition.open(part) for part in range(partition.parts)]
    for number, kind in enumerate(partition.edges):
        source, target = (partition.nodes[end].count for end in partition.ends(number))
        store = data._store if kind.name is None else data[kind.name]
        indptr = np.zeros(target + 1, np.int64)
        lists = [part.lists(number) for part in parts]
        owned = [part.ids[partition.ends(number)[1]] for part in parts]
        for ids, graph in zip(owned, lists, strict=True):
            indptr[1 + ids] = graph.indptr.diff().numpy()
        np.cumsum(indptr, out=indptr)
        indices: np.ndarray = np.empty(kind.count, index_dtype(source))
        edge_ids: np.ndarray = np.empty(kind.count, index_dtype(kind.count))
        rows = {key: torch.empty(kind.shape(key), dtype=kind.dtype(key)) for key in kind.attributes}
        for part, ids, graph in zip(parts, owned, lists, strict=True):
            begins = indptr[:-1][ids] - graph.indptr.numpy()[:-1]
            at = np.repeat(begins, graph.indptr.diff().numpy()) + np.arange(graph.num_edges)
            indices[at], edge_ids[at] = graph.indices.numpy(), part.edge_ids[number].numpy()
            for key, into in rows.items():
                into[part.edge_ids[number].long()] = part.edge_rows[number][key]
        del store["edge_index"]
        store.graph = CSCGraph(
            torch.from_numpy(indptr), torch.from_numpy(indices), torch.from_numpy(edge_ids),
            source_count=None if kind.name is None else source,
        )  # fmt: skip
        for key, values in rows.items():
            store[key] = values
    for number, kind in enumerate(partition.nodes):
        if time_attr in kind.attributes:
            times = torch.empty(kind.shape(time_attr), dtype=kind.dtype(time_attr))
            for part in parts:
                times[torch.from_numpy(part.ids[number])] = part.node_rows[number][time_attr]
            (data if kind.name is None else data[kind.name])[time_attr] = times
    return data


def _fill(store: BaseStorage, kind: TypeInfo, rest: dict[str, object]) -> None:
    for key in kind.attributes:
        store[key] = nothing(kind.shape(key), kind.dtype(key))
    for key, value in rest.items():
        store[key] = value


def nothing(shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return zeros that take no memory."""
    return torch.zeros((), dtype=dtype).expand(shape)
