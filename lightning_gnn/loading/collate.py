"""From a sampled subgraph to a mini-batch of PyG: ids, features, and which of the nodes are seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.sampler import EdgeSamplerInput, HeteroSamplerOutput, NegativeSampling, NodeSamplerInput
from torch_geometric.typing import EdgeType, TensorFrame

from lightning_gnn.features.disk_features import DiskFeatures
from lightning_gnn.features.table import FeatureTable
from lightning_gnn.graph.stores import AttributeName, name_of, of_edges, of_nodes, stores_of
from lightning_gnn.loading.batch import NO_NODES, Attribute, Batch
from lightning_gnn.loading.compact_ids import both_of
from lightning_gnn.ops import gather_rows
from lightning_gnn.sampling.deferred_edges import LazyEdgeIds, attach_lazy_e_id
from lightning_gnn.sampling.neighbor import Output

Allocator = Callable[[AttributeName, Sequence[int], torch.dtype], Tensor]
"""Returns an uninitialized CPU tensor for the rows of an attribute, given its name, shape and dtype."""
Tables: TypeAlias = Mapping[AttributeName, FeatureTable | DiskFeatures]
_TOPOLOGY = ("edge_index", "adj_t", "graph")


def collate(
    data: Batch,
    out: Output,
    tables: Tables,  # where to gather some attributes from instead of data, by name
    trained: Collection[Attribute],
    permutation: Tensor | dict[EdgeType, Tensor] | None = None,  # sampler's edges to the user's, int64 [num_edges]
    allocate: Allocator | None = None,  # returns the memory that rows on the CPU are gathered into
) -> tuple[Batch, dict[Attribute, Tensor]]:
    """Return PyG's mini-batch of a subgraph, and the rows of ``trained`` attributes, which are left out of it."""
    batch, deferred = copy.copy(data), dict[Attribute, Tensor]()
    typed = isinstance(out, HeteroSamplerOutput)
    for name, store in stores_of(data):
        part = batch[name] if typed else batch._store
        parts: list[Any] = [out.node, out.row, out.col, out.edge]
        parts = [(values or {}).get(name) for values in parts] if typed else parts
        node, row, col, edge = parts
        # PyG gives a type that was not reached empty stores.
        if typed and isinstance(name, str) and node is None:
            node = NO_NODES
        elif typed and not isinstance(name, str) and row is None:
            row, col, edge = NO_NODES, NO_NODES, NO_NODES
        positions = permutation.get(name) if isinstance(permutation, dict) else permutation
        if edge is not None and positions is not None:
            edge = positions[edge.to(torch.int64)]

        # The subgraph's edges take the place of the graph's.
        for key in ("graph", "adj_t"):
            if key in part:
                del part[key]
        if row is not None:
            part.edge_index = _stacked(row, col)

        # Attributes of nodes and edges are cut to the rows of the subgraph; what is neither stays.
        for key in store:
            if key in _TOPOLOGY:
                continue
            if key == "num_nodes":
                part.num_nodes = node.numel()
                continue
            if not of_nodes(store, key) and not of_edges(store, key):
                continue
            ids = node if of_nodes(store, key) else edge
            if isinstance(ids, LazyEdgeIds):
                ids = edge = ids.ids()
            if ids is None:
                part[key] = None
            elif (name, key) in trained:
                part[key], deferred[name, key] = torch.empty(0), ids  # keeps its place among the attributes
            else:
                part[key] = gather_attribute(data, store, key, ids, tables, allocate)

        if node is not None and "n_id" not in store:
            part.n_id = node
        if isinstance(edge, LazyEdgeIds) and "e_id" not in store:
            attach_lazy_e_id(part, edge)
        elif edge is not None and "e_id" not in store:
            part.e_id = edge
        original = row is not None and out.orig_row is not None and out.orig_col is not None
        if original and (not typed or name in out.orig_row):
            ends = (out.orig_row[name], out.orig_col[name]) if typed else (out.orig_row, out.orig_col)
            part._orig_edge_index = torch.stack(ends)
    for key in ("batch", "num_sampled_nodes", "num_sampled_edges"):
        if typed:
            batch.set_value_dict(key, getattr(out, key) or {})
        else:
            batch[key] = getattr(out, key)
    return batch, deferred


def gather_attribute(
    data: Batch, store: BaseStorage, key: str, ids: Tensor, tables: Tables, allocate: Allocator | None = None
) -> Tensor | np.ndarray | TensorFrame | list[object]:
    """Return some rows of an attribute, from its table if it has one, else from the graph."""
    value, name, on_host = store[key], name_of(store, key), allocate is not None and ids.is_cpu
    if name in tables:
        table = tables[name]
        if on_host:
            assert allocate is not None
            return table.gather(ids, out=allocate(name, (ids.numel(), table.num_features), table.dtype))
        return table.gather(ids)
    dim = data.__cat_dim__(key, value, store)
    if isinstance(value, Tensor) and value.is_cpu and ids.is_cpu and dim == 0:
        if on_host and type(value) is Tensor:
            assert allocate is not None
            return gather_rows(value, ids, out=allocate(name, (ids.numel(), *value.shape[1:]), value.dtype))
        return gather_rows(value, ids)
    if isinstance(value, Tensor):
        return value.index_select(dim, ids.to(value.device))
    if isinstance(value, np.ndarray):
        rows = np.take(value, ids.cpu().numpy(), axis=dim)
        return torch.from_numpy(rows) if rows.dtype.kind in "biufc" else rows
    if isinstance(value, TensorFrame):
        return value[ids.to(value.device)]
    return [value[i] for i in ids.tolist()]


def attach_seed_metadata(batch: Batch, out: Output, seeds: NodeSamplerInput) -> None:
    """Attach ``input_id``, ``batch_size`` and times of the seeds, to their type in a heterogeneous graph."""
    part = batch[seeds.input_type] if isinstance(batch, HeteroData) else batch
    part.input_id, part.seed_time = out.metadata
    part.batch_size = out.metadata[0].size(0)


def attach_edge_metadata(
    batch: Batch,
    out: Output,
    seeds: EdgeSamplerInput,
    neg_sampling: NegativeSampling | None,
) -> None:
    """Attach ``input_id`` and the labeled edges, or the triplets, in local ids."""
    edges = source = target = batch
    if isinstance(batch, HeteroData):
        name = seeds.input_type
        edges, source, target = batch[name], batch[name[0]], batch[name[-1]]
    edges.input_id = out.metadata[0]
    if neg_sampling is None or neg_sampling.is_binary():
        edges.edge_label_index, edges.edge_label, edges.edge_label_time = out.metadata[1:4]
        return
    source.src_index, target.dst_pos_index, target.dst_neg_index, time = out.metadata[1:5]
    source.seed_time = target.seed_time = time
    for key in ("edge_label_index", "edge_label_time"):
        if key in edges:
            del edges[key]


def _stacked(row: Tensor, col: Tensor) -> Tensor:
    """Return ``edge_index``, without a copy where both are the rows of one tensor."""
    both = both_of(row, col)
    return torch.stack([row, col]) if both is None else both
