"""Computes the device memory that a graph, its attributes and its mini-batches need, and plans their placement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler.base import SubgraphType

from lightning_gnn.features.disk_features import DiskFeatures
from lightning_gnn.features.hot_cache import SECTOR_BYTES, Cacheable, hottest_of_types, row_cost
from lightning_gnn.features.table import FeatureTable
from lightning_gnn.gpu_sampling.access_counts import AccessCounts
from lightning_gnn.gpu_sampling.budget import PlacedArray, Placement, place_parts
from lightning_gnn.gpu_sampling.options import PlacementOptions
from lightning_gnn.gpu_sampling.shards import LIST_SHIFT, ROW_SHIFT, BlockCyclicLayout
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.graph.stores import StoreType
from lightning_gnn.loading.batch import Attribute
from lightning_gnn.sampling.neighbor import NeighborSampler, nonuniform_features

TOPOLOGY = "topology"
_ON_GPUS = ("device", "shard")
START_EDGES = 1 << 22  # initial scratch memory of the kernels, in edges (DeviceSampler.START_EDGES)
_INITIAL_BATCHES, _MAX_BATCHES = 8, 128  # mini-batches that are pre-sampled at first, and at most
_MIN_RATE_GAIN = 0.01  # stop pre-sampling if twice as many mini-batches raise the hit rate by less
_SIZE_MARGIN = 1.25  # assumed size of a large mini-batch, relative to the mean


@dataclass(frozen=True, eq=False)
class Demand:
    """Arrays and mini-batches that need device memory."""

    sampler: NeighborSampler  # sampler of the training mini-batches, on the CPU
    tables: Mapping[Attribute, FeatureTable]  # matrices of node and edge features, in host memory
    others: Mapping[Attribute, Tensor]  # further attributes, always stored on the device
    of_edges: Collection[Attribute]  # the edge attributes
    by_row: Collection[Attribute]  # attributes in others with one row per node or edge, which mini-batches contain
    on_disk: Mapping[Attribute, DiskFeatures]  # out-of-core features: only the rows of mini-batches are on the device
    placing: PlacementOptions
    batches_on_device: int = 3  # number of mini-batches, with features, on the device at a time
    gpus: int = 1  # GPUs of the machine that tables may be sharded across

    def plan(self, memory: int, count_reads: Callable[[range], AccessCounts]) -> Placement:
        """Plan for a device with ``memory`` free bytes."""
        seen = count_reads(range(1))
        plan = self._plan(memory, seen)
        if not any(part.place == "pinned" for part in plan.parts):
            return plan
        if seen.num_batches and any(seen.rows[name].any() for name in seen.rows):
            # Double the sample until the plan's hit rate on unseen mini-batches hardly improves.
            seen, rate = seen + count_reads(range(1, _INITIAL_BATCHES)), -1.0
            while True:
                plan = self._plan(memory, seen)
                unseen = count_reads(range(seen.num_batches, 2 * seen.num_batches))
                previous, rate = rate, plan.rate(self.parts(unseen))
                seen += unseen
                if rate - previous < _MIN_RATE_GAIN or seen.num_batches >= _MAX_BATCHES:
                    break
            # Report the hit rate on unseen mini-batches: it predicts the hit rate in training.
            plan = self._plan(memory, seen)
            if self.gpus > 1:  # the plan overrates caches, which are fitted to the sample, compared with shards
                uncached = self._plan(memory, seen, 0)
                if (uncached_rate := uncached.rate(self.parts(unseen))) > rate:
                    plan, rate = uncached, uncached_rate
            plan = replace(plan, hit_rate=rate, num_batches=seen.num_batches)
        return plan

    def _plan(self, memory: int, reads: AccessCounts, cache_bytes: int | None = None) -> Placement:
        limit = self.placing.cache_budget if cache_bytes is None else cache_bytes
        fixed = sum(value.nbytes for value in self.others.values())
        bulk = self.bulk_size(memory, reads)
        plan = place_parts(self.parts(reads), memory, buffers=self.buffers(bulk, reads), fixed=fixed, cache_bytes=limit)
        return replace(plan, bulk=bulk)

    def parts(self, reads: AccessCounts) -> list[PlacedArray]:
        """Return the topology and the tables, with their access counts."""
        return [self._topology(reads), *(self._table(attribute, reads) for attribute in self.tables)]

    @staticmethod
    def name_of(attribute: Attribute) -> str:
        """Return the name of a table, such as ``data.x``."""
        node_type, key = attribute
        return f"data.{key}" if node_type is None else f"data[{node_type!r}].{key}"

    def _topology(self, reads: AccessCounts) -> PlacedArray:
        graph, whole = self.sampler.graph, self.sampler.whole_graph
        relations = [graph] if isinstance(graph, CSCGraph) else [*graph.relations.values()]
        offsets = sum(relation.indptr.nbytes for relation in relations)  # always on the device
        needs_both = self.sampler.subgraph_type == SubgraphType.induced and whole is not graph
        total = graph.num_bytes + (whole.num_bytes if needs_both else 0)
        # One random read of a neighbor, and one of the edge's original position if edges have attributes.
        reads_per_edge = 1 + (bool(self.of_edges) and any(relation.edge_ids is not None for relation in relations))
        cost = float(sum(reads.edges.values()) * SECTOR_BYTES * reads_per_edge)
        hot, has_cache = None, self._is_plain and self.placing.cache_budget != 0
        if has_cache and reads.lists is not None and isinstance(graph, CSCGraph):
            sizes = graph.in_degrees.numpy() * graph.indices.element_size()
            hot = Cacheable(reads.lists.numpy(), sizes, SECTOR_BYTES, 8 * graph.num_nodes)
        shard_bytes = None
        if self._is_plain and isinstance(graph, CSCGraph) and not needs_both:
            ids = 0 if graph.edge_ids is None else graph.edge_ids.element_size()
            rows = BlockCyclicLayout(graph.num_edges, self.gpus, LIST_SHIFT).size
            shard_bytes = offsets + rows * (graph.indices.element_size() + ids)
        return PlacedArray(TOPOLOGY, total, self.placing.topology, cost, offsets, hot, None, shard_bytes, self.gpus)

    def _table(self, attribute: Attribute, reads: AccessCounts) -> PlacedArray:
        table, name, place = self.tables[attribute], self.name_of(attribute), self.placing.features
        width, scale = self._row_bytes(attribute)
        total = table.num_nodes * (width + scale)
        shard_bytes = BlockCyclicLayout(table.num_nodes, self.gpus, ROW_SHIFT).size * width + scale * table.num_nodes
        if attribute in self.of_edges:
            cost = float(row_cost(width) * reads.edges[attribute[0]])
            return PlacedArray(name, total, place, cost, 0, None, None, shard_bytes, self.gpus)
        counts, cost = reads.rows[attribute[0]].numpy(), float(row_cost(width))
        sizes, lookup = np.full(table.num_nodes, width, np.int64), (4 + scale) * table.num_nodes
        has_cache = self.placing.cache_budget != 0 or self.placing.cache_rows
        hot = Cacheable(counts, sizes, cost, lookup) if has_cache else None
        part = PlacedArray(name, total, place, float(counts.sum() * cost), 0, hot, None, shard_bytes, self.gpus)
        if self.placing.cache_rows:
            cached = self._cached_rows.get(attribute, torch.empty(0, dtype=torch.int64))
            part = replace(part, cached=cached, pinned_bytes=lookup * bool(cached.numel()) + width * cached.numel())
        return part

    @cached_property
    def _cached_rows(self) -> dict[Attribute, Tensor]:
        """Rows that ``cache_rows`` selects of each ``x`` that may be in host memory, int64 ``[n]``."""
        graph, on_gpus = self.sampler.graph, self.placing.features in _ON_GPUS
        names = [name for name in self.tables if name[1] == "x" and name not in self.of_edges and not on_gpus]
        degrees = {name: _out_degrees(graph, name[0]) for name in names}
        return hottest_of_types(degrees, self.placing.cache_rows) if names else {}

    def buffers(self, bulk: int, reads: AccessCounts) -> int:
        """Return the bytes of mini-batches and of the kernels' scratch memory."""
        count = max(reads.num_batches, 1)
        nodes = {name: _SIZE_MARGIN * float(rows.sum()) / count for name, rows in reads.rows.items()}
        edges = {name: _SIZE_MARGIN * number / count for name, number in reads.edges.items()}
        num_nodes, num_edges = sum(nodes.values()), sum(edges.values())
        topology, features = 8 * num_nodes + 24 * num_edges, 0.0
        for attribute in [*self.tables, *self.on_disk, *self.by_row]:
            features += (edges if attribute in self.of_edges else nodes)[attribute[0]] * self._out_bytes(attribute)
        graph = self.sampler.graph
        sizes = graph.sizes.values() if isinstance(graph, HeteroCSCGraph) else [graph.num_nodes]
        total = sum(graph.num_edges.values()) if isinstance(graph.num_edges, dict) else graph.num_edges
        hops = len(self.sampler.num_neighbors) if isinstance(self.sampler.num_neighbors, list) else 1
        capacity = max(bulk * num_edges, min(START_EDGES, bulk * (hops * total + 2 * num_nodes)))
        words = 0 if self.sampler.disjoint else sum(sizes) * (12 if self._uses_queue else 8 * bulk)
        per_edge = 80 if self.sampler.disjoint else 12
        scratch = words + per_edge * capacity + 8 * min(capacity, bulk * (sum(sizes) + num_nodes))
        return int(scratch + bulk * topology + self.batches_on_device * (topology + features))

    def bulk_size(self, memory: int, reads: AccessCounts) -> int:
        """Return the mini-batches per launch: buffers take at most a quarter of the memory, node words an eighth."""
        graph = self.sampler.graph
        if not isinstance(graph, CSCGraph) or not self._is_plain or self._uses_queue or self.sampler.disjoint:
            return 1
        bulk = max(1, min(self.placing.bulk, memory // 8 // (8 * max(graph.num_nodes, 1))))
        while bulk > 1 and self.buffers(bulk, reads) > memory // 4:
            bulk //= 2
        return bulk

    @property
    def _is_plain(self) -> bool:
        return not nonuniform_features(self.sampler)

    @property
    def _uses_queue(self) -> bool:
        return self.placing.mode == "persistent"

    def _row_bytes(self, attribute: Attribute) -> tuple[int, int]:
        """Return the bytes of a stored row, and of its scale."""
        table = self.tables[attribute]
        if table.scales is not None or (self.placing.quantize and attribute[1] == "x"):
            return table.num_features, 4
        return table.row_bytes, 0

    def _out_bytes(self, attribute: Attribute) -> float:
        """Return the bytes of a row in a mini-batch."""
        if attribute in self.on_disk:
            return self.on_disk[attribute].row_bytes
        if attribute not in self.tables:
            value = self.others[attribute]
            return value.nbytes / max(value.size(0), 1)
        table = self.tables[attribute]
        return table.num_features * (4 if self._row_bytes(attribute)[1] else table.dtype.itemsize)


def _out_degrees(graph: CSCGraph | HeteroCSCGraph, name: StoreType) -> Tensor:
    """Return the out-degree of each node of a type over all edge types, int64 ``[num_nodes]``."""
    if isinstance(graph, CSCGraph):
        return graph.out_degrees
    degrees = torch.zeros(graph.sizes[str(name)], dtype=torch.int64)
    for (source, _, _), relation in graph.relations.items():
        if source == name:
            degrees += relation.out_degrees
    return degrees
