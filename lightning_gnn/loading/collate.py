"""Collates a sampled subgraph into a PyG mini-batch: topology, ids, features, and seed metadata."""

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
from lightning_gnn.loading.compact_ids import shared_base
from lightning_gnn.ops import gather_rows
from lightning_gnn.sampling.deferred_edges import LazyEdgeIds, attach_lazy_e_id
from lightning_gnn.sampling.neighbor import Output

Allocator = Callable[[AttributeName, Sequence[int], torch.dtype], Tensor]
"""Returns an uninitialized CPU tensor for the rows of an attribute, given its name, shape and dtype."""
Tables: TypeAlias = Mapping[AttributeName, FeatureTable | DiskFeatures]
_TOPOLOGY_KEYS = ("edge_index", "adj_t", "graph")


def collate(
    data: Batch,
    out: Output,
    tables: Tables,  # replace attributes of data as the source of rows, by name
    trained: Collection[Attribute],  # attributes that require gradients
    permutation: Tensor | dict[EdgeType, Tensor] | None = None,  # sampler's edges to the user's, int64 [num_edges]
    allocate: Allocator | None = None,  # allocates the output of gathers on the CPU
) -> tuple[Batch, dict[Attribute, Tensor]]:
    """Return PyG's mini-batch without the rows of ``trained`` attributes, and the ids of these rows."""
    batch, deferred = copy.copy(data), dict[Attribute, Tensor]()
    is_hetero = isinstance(out, HeteroSamplerOutput)
    for name, store in stores_of(data):
        target = batch[name] if is_hetero else batch._store
        parts: list[Any] = [out.node, out.row, out.col, out.edge]
        parts = [(values or {}).get(name) for values in parts] if is_hetero else parts
        node, row, col, edge = parts
        # Like PyG, create empty stores for types that were not reached.
        if is_hetero and isinstance(name, str) and node is None:
            node = NO_NODES
        elif is_hetero and not isinstance(name, str) and row is None:
            row, col, edge = NO_NODES, NO_NODES, NO_NODES
        positions = permutation.get(name) if isinstance(permutation, dict) else permutation
        if edge is not None and positions is not None:
            edge = positions[edge.to(torch.int64)]

        # Replace the graph's edges with those of the subgraph.
        for key in ("graph", "adj_t"):
            if key in target:
                del target[key]
        if row is not None:
            base = shared_base(row, col)  # no copy if both are the rows of one tensor
            target.edge_index = torch.stack([row, col]) if base is None else base

        # Select the subgraph's rows of node and edge attributes; other attributes are passed through.
        for key in store:
            if key in _TOPOLOGY_KEYS:
                continue
            if key == "num_nodes":
                target.num_nodes = node.numel()
                continue
            if not of_nodes(store, key) and not of_edges(store, key):
                continue
            ids = node if of_nodes(store, key) else edge
            if isinstance(ids, LazyEdgeIds):
                ids = edge = ids.ids()
            if ids is None:
                target[key] = None
            elif (name, key) in trained:
                target[key], deferred[name, key] = torch.empty(0), ids  # placeholder that fixes the attribute order
            else:
                target[key] = gather_attribute(data, store, key, ids, tables, allocate)

        if node is not None and "n_id" not in store:
            target.n_id = node
        if isinstance(edge, LazyEdgeIds) and "e_id" not in store:
            attach_lazy_e_id(target, edge)
        elif edge is not None and "e_id" not in store:
            target.e_id = edge
        has_original = row is not None and out.orig_row is not None and out.orig_col is not None
        if has_original and (not is_hetero or name in out.orig_row):
            ends = (out.orig_row[name], out.orig_col[name]) if is_hetero else (out.orig_row, out.orig_col)
            target._orig_edge_index = torch.stack(ends)
    if getattr(out, "every_hop", False):
        batch.every_hop = True
    for key in ("batch", "num_sampled_nodes", "num_sampled_edges"):
        if is_hetero:
            batch.set_value_dict(key, getattr(out, key) or {})
        else:
            batch[key] = getattr(out, key)
    return batch, deferred


def gather_attribute(
    data: Batch, store: BaseStorage, key: str, ids: Tensor, tables: Tables, allocate: Allocator | None = None
) -> Tensor | np.ndarray | TensorFrame | list[object]:
    """Return the rows ``ids`` of an attribute, from its table if it has one, else from the graph."""
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
    """Attach ``input_id``, ``batch_size`` and ``seed_time``, in a heterogeneous graph to the seeds' node type."""
    target = batch[seeds.input_type] if isinstance(batch, HeteroData) else batch
    target.input_id, target.seed_time = out.metadata
    target.batch_size = out.metadata[0].size(0)


def attach_edge_metadata(
    batch: Batch, out: Output, seeds: EdgeSamplerInput, neg_sampling: NegativeSampling | None
) -> None:
    """Attach ``input_id`` and the labeled edges, or the triplets, as local node ids."""
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
