"""What a graph, its attributes and its mini-batches want of a device's memory, and the plan for all of them."""

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
from lightning_gnn.gpu_sampling.access_counts import Reads
from lightning_gnn.gpu_sampling.budget import PlacedArray, Placement, place_parts
from lightning_gnn.gpu_sampling.options import PlacementOptions
from lightning_gnn.gpu_sampling.shards import LIST_SHIFT, ROW_SHIFT, BlockCyclicLayout
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.graph.stores import StoreType
from lightning_gnn.loading.batch import Attribute
from lightning_gnn.sampling.neighbor import NeighborSampler, nonuniform_features

TOPOLOGY = "topology"
_ALL_THERE = ("device", "shard")
START_EDGES = 1 << 22  # for which the kernels take scratch memory at first (DeviceSampler.START_EDGES)
At = Attribute  # its type, None where there is one, and its name
_FIRST, _MOST = 8, 128  # mini-batches that are sampled to begin with, and at most
_SETTLED = 0.01  # what twice as many mini-batches must add to the hit rate to go on
_SPREAD = 1.25  # how much larger than their mean mini-batches may be


@dataclass(frozen=True, eq=False)
class Demand:
    """What wants to be on a device."""

    sampler: NeighborSampler  # on the CPU, of the training mini-batches
    tables: Mapping[At, FeatureTable]  # matrices of node and edge features, in host memory
    others: Mapping[At, Tensor]  # further attributes, which are always on the device
    of_edges: Collection[At]  # which of the attributes are those of edges
    by_row: Collection[At]  # which of others mini-batches have rows of
    on_disk: Mapping[At, DiskFeatures]  # matrices of which mini-batches alone have rows on the device
    placing: PlacementOptions
    held: int = 3  # mini-batches, with their features, on the device at a time
    gpus: int = 1  # of the machine, to which tables may be dealt out

    def plan(self, memory: int, read: Callable[[range], Reads]) -> Placement:
        """Plan for a device with so many free bytes."""
        seen = read(range(1))
        plan = self._plan(memory, seen)
        if not any(part.place == "pinned" for part in plan.parts):
            return plan
        if seen.num_batches and any(seen.rows[name].any() for name in seen.rows):
            # Twice as many each time, until the later half is served hardly better than by the plan before.
            seen, rate = seen + read(range(1, _FIRST)), -1.0
            while True:
                plan = self._plan(memory, seen)
                more = read(range(seen.num_batches, 2 * seen.num_batches))
                before, rate = rate, plan.rate(self.parts(more))
                seen += more
                if rate - before < _SETTLED or seen.num_batches >= _MOST:
                    break
            # What it serves of mini-batches that it has not seen is what it will serve.
            plan = self._plan(memory, seen)
            if self.gpus > 1:  # caches look better to what they are made by than to the rest; shards do not
                without = self._plan(memory, seen, 0)
                if (dealt := without.rate(self.parts(more))) > rate:
                    plan, rate = without, dealt
            plan = replace(plan, hit_rate=rate, num_batches=seen.num_batches)
        return plan

    def _plan(self, memory: int, reads: Reads, cache_bytes: int | None = None) -> Placement:
        most = self.placing.cache_budget if cache_bytes is None else cache_bytes
        fixed = sum(value.nbytes for value in self.others.values())
        bulk = self.bulk_size(memory, reads)
        plan = place_parts(self.parts(reads), memory, buffers=self.buffers(bulk, reads), fixed=fixed, cache_bytes=most)
        return replace(plan, bulk=bulk)

    def parts(self, reads: Reads) -> list[PlacedArray]:
        """Return the topology and the tables, with what some mini-batches read of them."""
        return [self._topology(reads), *(self._table(at, reads) for at in self.tables)]

    @staticmethod
    def name_of(at: At) -> str:
        """Return what a table is called: ``data.x``."""
        return f"data.{at[1]}" if at[0] is None else f"data[{at[0]!r}].{at[1]}"

    def _topology(self, reads: Reads) -> PlacedArray:
        graph, whole = self.sampler.graph, self.sampler.whole_graph
        relations = [graph] if isinstance(graph, CSCGraph) else [*graph.relations.values()]
        offsets = sum(relation.indptr.nbytes for relation in relations)  # always on the device
        twice = self.sampler.subgraph_type == SubgraphType.induced and whole is not graph
        total = graph.num_bytes + (whole.num_bytes if twice else 0)
        # A random read of a neighbor, and one of the edge's place in the user's order where it has rows.
        reads_per_edge = 1 + (bool(self.of_edges) and any(relation.edge_ids is not None for relation in relations))
        cost = float(sum(reads.edges.values()) * SECTOR_BYTES * reads_per_edge)
        hot = None
        if reads.lists is not None and isinstance(graph, CSCGraph) and self._is_plain and self._caches:
            sizes = graph.in_degrees.numpy() * graph.indices.element_size()
            hot = Cacheable(reads.lists.numpy(), sizes, SECTOR_BYTES, 8 * graph.num_nodes)
        dealt = None
        if self._is_plain and isinstance(graph, CSCGraph) and not twice:
            ids = 0 if graph.edge_ids is None else graph.edge_ids.element_size()
            rows = BlockCyclicLayout(graph.num_edges, self.gpus, LIST_SHIFT).size
            dealt = offsets + rows * (graph.indices.element_size() + ids)
        return PlacedArray(TOPOLOGY, total, self.placing.topology, cost, offsets, hot, None, dealt, self.gpus)

    def _table(self, at: At, reads: Reads) -> PlacedArray:
        table, name, place = self.tables[at], self.name_of(at), self.placing.features
        width, scale = self._row_bytes(at)
        total = table.num_nodes * (width + scale)
        dealt = BlockCyclicLayout(table.num_nodes, self.gpus, ROW_SHIFT).size * width + scale * table.num_nodes
        if at in self.of_edges:
            cost = float(row_cost(width) * reads.edges[at[0]])
            return PlacedArray(name, total, place, cost, 0, None, None, dealt, self.gpus)
        counts, cost = reads.rows[at[0]].numpy(), float(row_cost(width))
        sizes, lookup = np.full(table.num_nodes, width, np.int64), (4 + scale) * table.num_nodes
        hot = Cacheable(counts, sizes, cost, lookup) if self._caches or self.placing.cache_rows else None
        part = PlacedArray(name, total, place, float(counts.sum() * cost), 0, hot, None, dealt, self.gpus)
        if self.placing.cache_rows:
            kept = self._rows.get(at, torch.empty(0, dtype=torch.int64))
            part = replace(part, kept=kept, pinned_bytes=lookup * bool(kept.numel()) + width * kept.numel())
        return part

    @cached_property
    def _rows(self) -> dict[At, Tensor]:
        """Which rows ``cache_rows`` asks for, of each ``x`` that may be in host memory, int64 ``[n]``."""
        graph, there = self.sampler.graph, self.placing.features in _ALL_THERE
        names = [at for at in self.tables if at[1] == "x" and at not in self.of_edges and not there]
        degrees = {at: _out_degrees(graph, at[0]) for at in names}
        return hottest_of_types(degrees, self.placing.cache_rows) if names else {}

    def buffers(self, bulk: int, reads: Reads) -> int:
        """Return the bytes of mini-batches and of the kernels' scratch memory."""
        count = max(reads.num_batches, 1)
        nodes = {name: _SPREAD * float(rows.sum()) / count for name, rows in reads.rows.items()}
        edges = {name: _SPREAD * number / count for name, number in reads.edges.items()}
        num_nodes, num_edges = sum(nodes.values()), sum(edges.values())
        topology, features = 8 * num_nodes + 24 * num_edges, 0.0
        for at in [*self.tables, *self.on_disk, *self.by_row]:
            features += (edges if at in self.of_edges else nodes)[at[0]] * self._out_bytes(at)
        graph = self.sampler.graph
        sizes = graph.sizes.values() if isinstance(graph, HeteroCSCGraph) else [graph.num_nodes]
        total = sum(graph.num_edges.values()) if isinstance(graph.num_edges, dict) else graph.num_edges
        hops = len(self.sampler.num_neighbors) if isinstance(self.sampler.num_neighbors, list) else 1
        capacity = max(bulk * num_edges, min(START_EDGES, bulk * (hops * total + 2 * num_nodes)))
        words = 0 if self.sampler.disjoint else sum(sizes) * (12 if self._queue else 8 * bulk)
        per_edge = 80 if self.sampler.disjoint else 12
        scratch = words + per_edge * capacity + 8 * min(capacity, bulk * (sum(sizes) + num_nodes))
        return int(scratch + bulk * topology + self.held * (topology + features))

    def bulk_size(self, memory: int, reads: Reads) -> int:
        """Return how many mini-batches a launch samples: buffers take a quarter of the memory, words an eighth."""
        graph = self.sampler.graph
        if not isinstance(graph, CSCGraph) or not self._is_plain or self._queue or self.sampler.disjoint:
            return 1
        bulk = max(1, min(self.placing.bulk, memory // 8 // (8 * max(graph.num_nodes, 1))))
        while bulk > 1 and self.buffers(bulk, reads) > memory // 4:
            bulk //= 2
        return bulk

    @property
    def _is_plain(self) -> bool:
        return not nonuniform_features(self.sampler)

    @property
    def _queue(self) -> bool:
        return self.placing.mode == "persistent"

    @property
    def _caches(self) -> bool:
        return self.placing.cache_budget != 0

    def _row_bytes(self, at: At) -> tuple[int, int]:
        """Return the bytes of a stored row, and of its scale."""
        table = self.tables[at]
        if table.scales is not None or (self.placing.quantize and at[1] == "x"):
            return table.num_features, 4
        return table.row_bytes, 0

    def _out_bytes(self, at: At) -> float:
        """Return the bytes of a row in a mini-batch."""
        if at in self.on_disk:
            return self.on_disk[at].row_bytes
        if at not in self.tables:
            value = self.others[at]
            return value.nbytes / max(value.size(0), 1)
        table = self.tables[at]
        return table.num_features * (4 if self._row_bytes(at)[1] else table.dtype.itemsize)


def _out_degrees(graph: CSCGraph | HeteroCSCGraph, name: StoreType) -> Tensor:
    """Return how many edges come from each node of a type, int64 ``[num_nodes]``."""
    if isinstance(graph, CSCGraph):
        return graph.out_degrees
    degrees = torch.zeros(graph.sizes[str(name)], dtype=torch.int64)
    for (source, _, _), relation in graph.relations.items():
        if source == name:
            degrees += relation.out_degrees
    return degrees
