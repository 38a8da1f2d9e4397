"""PyG data objects that describe a partitioned graph: sizes and dtypes without rows, with or without topology."""

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
    """Return a graph whose attributes have the right shapes and dtypes, but are zeros that take no memory."""
    data: Data | HeteroData = HeteroData() if partition.is_hetero else Data()
    for name in partition.stores if partition.is_hetero else ():
        _ = data[name]  # creates the stores in this order
    for info in partition.nodes:
        store = data if info.name is None else data[info.name]
        _fill(store, info, partition.rest.get(info.name, {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyG warns that it infers the number
            inferred = (store if info.name is not None else data._store).num_nodes
        if inferred != info.count:
            store.num_nodes = info.count
    for info in partition.edges:
        store = data if info.name is None else data[info.name]
        _fill(store, info, {} if info.name is None else partition.rest.get(info.name, {}))
        store.edge_index = torch.zeros((2, 1), dtype=torch.int64).expand(2, info.count)
    graph_attributes = partition.rest.get(None, {})
    for key, value in graph_attributes.items() if partition.is_hetero else ():
        data[key] = value
    return data


def outline(root: str | Path) -> Data | HeteroData:
    """Describe a partitioned graph for building a model: types, sizes, features and number of classes."""
    partition = Partition(root)
    data: Data | HeteroData = without_rows(partition)
    for info in partition.nodes:
        store = data if info.name is None else data[info.name]
        for key, largest in info.largest.items():
            store[key] = torch.full((), largest, dtype=info.dtype(key)).expand(info.shape(key))
    return data


def with_topology(partition: Partition, time_attr: str | None = None) -> Data | HeteroData:
    """Return a graph with the topology and edge attributes of all parts in memory, and nodes without rows."""
    data: Data | HeteroData = without_rows(partition)
    parts = [partition.open(part) for part in range(partition.parts)]
    for number, info in enumerate(partition.edges):
        source, target = (partition.nodes[end].count for end in partition.ends(number))
        store = data._store if info.name is None else data[info.name]
        indptr = np.zeros(target + 1, np.int64)
        lists = [part.lists(number) for part in parts]
        owned = [part.ids[partition.ends(number)[1]] for part in parts]
        for ids, graph in zip(owned, lists, strict=True):
            indptr[1 + ids] = graph.indptr.diff().numpy()
        np.cumsum(indptr, out=indptr)
        indices: np.ndarray = np.empty(info.count, index_dtype(source))
        edge_ids: np.ndarray = np.empty(info.count, index_dtype(info.count))
        rows = {key: torch.empty(info.shape(key), dtype=info.dtype(key)) for key in info.attributes}
        # Scatter the lists of each part to the positions of their nodes in the whole graph.
        for part, ids, graph in zip(parts, owned, lists, strict=True):
            begins = indptr[:-1][ids] - graph.indptr.numpy()[:-1]
            position = np.repeat(begins, graph.indptr.diff().numpy()) + np.arange(graph.num_edges)
            indices[position], edge_ids[position] = graph.indices.numpy(), part.edge_ids[number].numpy()
            for key, values in rows.items():
                values[part.edge_ids[number].long()] = part.edge_rows[number][key]
        del store["edge_index"]
        store.graph = CSCGraph(
            torch.from_numpy(indptr), torch.from_numpy(indices), torch.from_numpy(edge_ids),
            source_count=None if info.name is None else source,
        )  # fmt: skip
        for key, values in rows.items():
            store[key] = values
    for number, info in enumerate(partition.nodes):
        if time_attr in info.attributes:
            times = torch.empty(info.shape(time_attr), dtype=info.dtype(time_attr))
            for part in parts:
                times[torch.from_numpy(part.ids[number])] = part.node_rows[number][time_attr]
            (data if info.name is None else data[info.name])[time_attr] = times
    return data


def _fill(store: BaseStorage, info: TypeInfo, rest: dict[str, object]) -> None:
    for key in info.attributes:
        store[key] = expanded_zeros(info.shape(key), info.dtype(key))
    for key, value in rest.items():
        store[key] = value


def expanded_zeros(shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return zeros that share one element of memory."""
    return torch.zeros((), dtype=dtype).expand(shape)
