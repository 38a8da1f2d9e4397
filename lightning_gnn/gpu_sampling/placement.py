"""Plans a GPU's memory: topology, features, caches of hot rows and lists, and mini-batches.

The cost of reading host memory is the number of bytes that cross the bus, counted in pre-sampled mini-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput
from torch_geometric.sampler.base import SubgraphType

from lightning_gnn.features.hot_cache import SECTOR_BYTES, Cacheable, CacheOrder, row_cost
from lightning_gnn.features.table import FeatureTable
from lightning_gnn.gpu_sampling.options import PlacementOptions
from lightning_gnn.gpu_sampling.sampler import START_EDGES
from lightning_gnn.gpu_sampling.shards import LIST_SHIFT, ROW_SHIFT, BlockCyclicLayout
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.stores import StoreType
from lightning_gnn.loading.batch import Attribute
from lightning_gnn.ops import batch_key
from lightning_gnn.runtime.messages import shown
from lightning_gnn.sampling.neighbor import NeighborSampler, nonuniform_features

TOPOLOGY = "topology"
MODEL_FRACTION = 0.25  # of the device's memory, reserved for the model and its activations
# Cost of a byte from another GPU, relative to a byte from host memory: NVLink has 9 to 12 times the bandwidth of the
# machine's PCIe (450 and 50 GB/s, 300 and 25 GB/s).
PEER_BYTE_COST = 0.1
_MOST_BULK = 32  # mini-batches per launch
_PLANNED_BATCHES, _CHECKED_BATCHES = 64, 8  # mini-batches that are pre-sampled for the plan, and for its hit rate
_DEGREE_WEIGHT = 0.25  # weight of out-degrees in the expected reads of a row: most rows are not in the sample
_SIZE_MARGIN = 1.25  # assumed size of a large mini-batch, relative to the mean
_EMPTY_INT64 = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class AccessCounts:
    """Access counts of some mini-batches; the key None stands for the single type of a homogeneous graph."""

    rows: dict[StoreType, Tensor]  # reads of each node's feature row, int64 [num_nodes]
    edges: dict[StoreType, int]  # number of edges
    lists: Tensor | None  # reads from each adjacency list, int64 [num_nodes]; None in heterogeneous graphs
    num_batches: int


def count_reads(
    sampler: NeighborSampler,
    inputs: NodeSamplerInput | EdgeSamplerInput,
    batch_size: int,
    batches: range,
    seed: int = 0,
    neg_sampling: NegativeSampling | None = None,
) -> AccessCounts:
    """Count the accesses of pre-sampled mini-batches (GNNLab, Yang et al., EuroSys 2022; DUCATI for lists)."""
    graph = sampler.graph
    types = (lambda part: {None: part}) if isinstance(graph, CSCGraph) else dict
    rows = {name: torch.zeros(size, dtype=torch.int64) for name, size in types(graph.num_nodes).items()}
    edges: dict[StoreType, int] = dict.fromkeys(types(graph.num_edges), 0)
    lists = torch.zeros_like(rows[None]) if None in rows else None
    num_seeds = (inputs.row if isinstance(inputs, EdgeSamplerInput) else inputs.node).numel()
    order = torch.randperm(num_seeds, generator=torch.Generator().manual_seed(seed % 2**63))
    for number in batches if num_seeds else ():
        first, key = number * batch_size, batch_key(seed, epoch=0, batch=number)
        seeds = inputs[order[torch.arange(first, first + min(batch_size, num_seeds)) % num_seeds]]
        if isinstance(seeds, EdgeSamplerInput):
            out = sampler.sample_from_edges(seeds, neg_sampling, key=key)
        else:
            out = sampler.sample_from_nodes(seeds, key=key)
        for name, ids in types(out.node).items():
            # A batch can contain a node several times: a duplicated seed, or once per tree of a disjoint sample.
            rows[name] += torch.bincount(ids, minlength=rows[name].numel())
        for name, targets in types(out.col).items():
            edges[name] += 0 if targets is None else targets.numel()
        if lists is not None:
            lists += torch.bincount(out.node[out.col], minlength=lists.numel())
    return AccessCounts(rows, edges, lists, len(batches))


@dataclass(frozen=True, eq=False)
class PlacedArray:
    """Array that mini-batches read, with its requested or planned placement."""

    name: str
    nbytes: int  # bytes on the device: all if stored there completely; in a plan, those planned without the cache
    place: str = "auto"  # device, shard, pinned, or before planning auto
    reads: float = 0.0  # cost of reading it from host memory, in bytes that cross the bus
    pinned_bytes: int = 0  # bytes that are on the device even if the array is pinned
    hot: Cacheable | None = None  # entries that can be cached if the array is pinned
    shard_bytes: int | None = None  # bytes on each GPU of the machine if sharded; None: it cannot be sharded
    gpus: int = 1  # number of GPUs for sharding
    nodes: Tensor = _EMPTY_INT64  # planned: nodes with cached rows or lists, int64 [n]
    cache_bytes: int = 0  # planned: bytes of the cache, including the lookup table

    @property
    def places(self) -> list[str]:
        """Possible placements, in ascending order of the reads saved; on one GPU, a shard is the whole array."""
        if self.place == "auto":
            return ["pinned", *["shard"] * (self.gpus > 1 and self.shard_bytes is not None), "device"]
        return ["device" if self.place == "shard" and self.gpus == 1 else self.place]

    def bytes_at(self, place: str) -> int:
        """Return its bytes on each device for a placement, without its cache."""
        return {"device": self.nbytes, "pinned": self.pinned_bytes, "shard": self.shard_bytes or 0}[place]

    def saved_at(self, place: str) -> float:
        """Return the read cost that a placement saves without a cache; reads from other GPUs cost a tenth."""
        peers = self.reads * (self.gpus - 1) / self.gpus
        return {"device": self.reads, "pinned": 0.0, "shard": self.reads - PEER_BYTE_COST * peers}[place]


@dataclass(frozen=True, eq=False)
class Placement:
    """Placement of all arrays, with the memory that they take."""

    memory: int  # free bytes of the device
    parts: tuple[PlacedArray, ...]
    fixed: int  # bytes of other attributes, which are always on the device
    buffers: int  # bytes of mini-batches and of the sampler's scratch memory
    bulk: int = 1  # mini-batches per sampling launch
    start_edges: int = 0  # estimated edges of a launch, for the initial size of the scratch memory
    hit_rate: float = 1.0  # fraction of the read bytes that avoids the bus; bytes from other GPUs count nine tenths
    num_batches: int = 0  # pre-sampled mini-batches; 0 if everything fits

    @property
    def nbytes(self) -> int:
        """Total bytes on the device."""
        return self.fixed + self.buffers + sum(part.nbytes + part.cache_bytes for part in self.parts)

    def __getitem__(self, name: str) -> PlacedArray:
        """Return the placement of an array by its name."""
        return next(part for part in self.parts if part.name == name)

    def rate(self, parts: Sequence[PlacedArray]) -> float:
        """Return the fraction of the read cost that is saved, for any access counts of the same arrays."""
        total, saved = sum(part.reads for part in parts), 0.0
        for placed, part in zip(self.parts, parts, strict=True):
            cached = 0.0 if part.hot is None else part.hot.reads[placed.nodes.numpy()].sum() * part.hot.cost
            saved += part.saved_at(placed.place) + float(cached)
        return min(1.0, saved / total) if total else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the plan's numbers as a JSON-serializable dictionary."""
        names = ("memory", "nbytes", "buffers", "bulk", "start_edges", "fixed", "hit_rate", "num_batches")
        parts = {
            part.name: {
                "place": part.place,
                "device_bytes": part.nbytes + part.cache_bytes,
                "cached": part.nodes.numel(),
            }
            for part in self.parts
        }
        return {**{name: getattr(self, name) for name in names}, "placement": parts}

    def __str__(self) -> str:
        items = []
        for part in self.parts:
            suffix = {"pinned": " (the rest in host memory)", "shard": f" (a shard on each of {part.gpus} GPUs)"}
            items.append(f"{part.name} {shown(part.nbytes + part.cache_bytes)}{suffix.get(part.place, '')}")
        items.append(f"mini-batches {shown(self.buffers)}" + (f", {self.bulk} per launch" if self.bulk > 1 else ""))
        items += [f"other attributes {shown(self.fixed)}"] if self.fixed else []
        summary = f"{shown(self.nbytes)} of {shown(self.memory)} on the device: {'; '.join(items)}"
        if not self.num_batches:
            return summary
        source = f"estimated from {self.num_batches} pre-sampled mini-batches"
        return f"{summary}\n{self.hit_rate:.0%} of the bytes that mini-batches read are on the device, {source}"


def place_parts(
    parts: Sequence[PlacedArray], memory: int, *, buffers: int = 0, fixed: int = 0, cache_bytes: int | None = None
) -> Placement:
    """Choose placements and caches of topology and tables, to maximize the reads served from device memory.

    Source: DUCATI's benefit of the next entry per byte, extended to whole tables and to mini-batches. A quarter of the
    memory is reserved for the model, unless the placements that the user requested need it.
    """
    for part in parts:
        if part.places == ["shard"] and part.shard_bytes is None:
            raise ValueError(f"{part.name} cannot be sharded across {part.gpus} GPUs; place it 'device' or 'pinned'")
    least = buffers + fixed + sum(part.bytes_at(part.places[0]) for part in parts)
    if least > memory:
        sizes = [f"{part.name} {shown(part.bytes_at(at))}" for part in parts if (at := part.places[0]) != "pinned"]
        raise ValueError(
            f"the device needs {shown(least)}, but has {shown(memory)} free: "
            f"{', '.join([*sizes, f'mini-batches {shown(buffers)}', f'other attributes {shown(fixed)}'])}; place "
            "topology or features 'auto' or 'pinned', or make prefetch, bulk or the mini-batches smaller"
        )
    limit = max(least, memory - int(MODEL_FRACTION * memory))
    order = CacheOrder([part.hot for part in parts if part.hot is not None])
    cacheable = [number for number, part in enumerate(parts) if part.hot is not None]
    best: tuple[float, Any] = (-1.0, None)
    for places, saved, used in _place_greedily(parts, limit - buffers - fixed):
        hot = [index for index, number in enumerate(cacheable) if places[number] == "pinned"]
        # Skip placements that could not win even if every read of a cacheable array were a hit.
        if saved + sum(parts[cacheable[index]].reads for index in hot) > best[0]:
            left = limit - buffers - fixed - used
            caches = order.best(left if cache_bytes is None else min(cache_bytes, left), hot)
            best = max(best, (saved + sum(caches.gains), (places, caches)), key=lambda found: found[0])
    places, caches = best[1]
    placed = [replace(p, place=at, nbytes=p.bytes_at(at), hot=None) for p, at in zip(parts, places, strict=True)]
    for number, nodes, nbytes in zip(cacheable, caches.nodes, caches.nbytes, strict=True):
        placed[number] = replace(placed[number], nodes=nodes, cache_bytes=nbytes)
    plan = Placement(memory, tuple(placed), fixed, buffers)
    return replace(plan, hit_rate=plan.rate(parts))


def _place_greedily(parts: Sequence[PlacedArray], room: int) -> list[tuple[tuple[str, ...], float, int]]:
    """Return placements with the reads that they save and their bytes, the most saved first.

    They are steps of the order by reads saved per byte, and this order after each array in turn.
    """
    steps = []
    for number, part in enumerate(parts):
        for old, new in pairwise(part.places):
            size = max(part.bytes_at(new) - part.bytes_at(old), 1)
            steps.append(((part.saved_at(old) - part.saved_at(new)) / size, number, new))
    steps.sort(key=lambda step: step[0])

    def measured(places: tuple[str, ...]) -> tuple[float, int]:
        both = list(zip(parts, places, strict=True))
        return sum(part.saved_at(place) for part, place in both), sum(part.bytes_at(place) for part, place in both)

    start = tuple(part.places[0] for part in parts)
    found = {start: measured(start)}
    for first in [[], *([step] for step in steps)]:
        places, value = start, found[start]
        for _, number, place in [*first, *steps]:
            changed = (*places[:number], place, *places[number + 1 :])
            more = measured(changed)
            if more[0] >= value[0] and more[1] <= room:
                places, value = changed, more
                if not first:
                    found[places] = value
        found[places] = value
    # At equal savings the device is preferred, which does not depend on a cache's estimate.
    return sorted(((places, *value) for places, value in found.items()), key=lambda each: (-each[1], -each[2]))


@dataclass(frozen=True, eq=False)
class Demand:
    """Arrays and mini-batches that need device memory."""

    sampler: NeighborSampler  # sampler of the training mini-batches, on the CPU
    tables: Mapping[Attribute, FeatureTable]  # matrices of node and edge features, in host memory
    others: Mapping[Attribute, Tensor]  # further attributes, always stored on the device
    row_bytes: Mapping[Attribute, float]  # bytes of a row in a mini-batch, of each attribute with rows
    of_edges: Collection[Attribute]  # the edge attributes
    placing: PlacementOptions
    batches_on_device: int = 3  # number of mini-batches, with features, on the device at a time
    gpus: int = 1  # GPUs of the machine that tables may be sharded across

    def plan(self, memory: int, count_reads: Callable[[range], AccessCounts]) -> Placement:
        """Plan for a device with ``memory`` free bytes; the hit rate is that of mini-batches not used for planning."""
        seen = count_reads(range(1))
        plan = self._plan(memory, seen)
        if all(part.place != "pinned" for part in plan.parts) or not any(rows.any() for rows in seen.rows.values()):
            return plan
        plan, number = self._plan(memory, count_reads(range(_PLANNED_BATCHES))), _PLANNED_BATCHES + _CHECKED_BATCHES
        unseen = self._parts(count_reads(range(_PLANNED_BATCHES, number)), 0.0)
        return replace(plan, hit_rate=plan.rate(unseen), num_batches=number)

    def _plan(self, memory: int, reads: AccessCounts) -> Placement:
        bulk = 1
        if self._is_uniform and self.placing.mode == "fused" and not self.sampler.disjoint:
            # Words of all nodes take at most an eighth of the memory, and all buffers a quarter.
            bulk = max(1, min(self.placing.bulk, _MOST_BULK, memory // (64 * max(self.sampler.graph.num_nodes, 1))))
        while True:
            buffers, edges = self._buffers(bulk, reads)
            if bulk == 1 or buffers <= memory // 4:
                break
            bulk //= 2
        fixed, limit = sum(value.nbytes for value in self.others.values()), self.placing.cache_budget
        plan = place_parts(self._parts(reads), memory, buffers=buffers, fixed=fixed, cache_bytes=limit)
        return replace(plan, bulk=bulk, start_edges=edges)

    def _buffers(self, bulk: int, reads: AccessCounts) -> tuple[int, int]:
        """Return the bytes of mini-batches and of the kernels' scratch memory, and the edges of a launch."""
        margin = _SIZE_MARGIN / max(reads.num_batches, 1)
        nodes = {name: margin * float(rows.sum()) for name, rows in reads.rows.items()}
        edges = {name: margin * number for name, number in reads.edges.items()}
        num_nodes, num_edges = sum(nodes.values()), sum(edges.values())
        topology = 8 * num_nodes + 24 * num_edges
        features = sum(
            size * (edges if attribute in self.of_edges else nodes)[attribute[0]]
            for attribute, size in self.row_bytes.items()
        )
        graph, disjoint = self.sampler.graph, self.sampler.disjoint
        is_single = isinstance(graph, CSCGraph)
        graph_nodes = graph.num_nodes if is_single else sum(graph.sizes.values())
        # A launch counts its seeds too, which are nodes without an edge.
        most = capacity = int(bulk * max(num_edges, num_nodes))
        if not self._is_uniform:
            total = graph.num_edges if is_single else sum(graph.num_edges.values())
            hops = len(self.sampler.num_neighbors) if isinstance(self.sampler.num_neighbors, list) else 1
            capacity = max(capacity, min(START_EDGES, int(hops * total + 2 * num_nodes)))
        words = 0 if disjoint else graph_nodes * (8 * bulk if self.placing.mode == "fused" else 12)
        scratch = words + (80 if disjoint else 12) * capacity + 8 * min(capacity, bulk * (graph_nodes + num_nodes))
        # A launch can end while half of the previous one waits.
        waiting = (bulk + bulk // 2) * topology + self.batches_on_device * (topology + features)
        return int(scratch + waiting), most

    def _parts(self, reads: AccessCounts, degree_weight: float = _DEGREE_WEIGHT) -> list[PlacedArray]:
        """Return the topology and the tables, with their access counts."""
        return [self._topology(reads), *(self._table(attribute, reads, degree_weight) for attribute in self.tables)]

    def _topology(self, reads: AccessCounts) -> PlacedArray:
        graph, whole = self.sampler.graph, self.sampler.whole_graph
        relations = [graph] if isinstance(graph, CSCGraph) else [*graph.relations.values()]
        needs_both = self.sampler.subgraph_type == SubgraphType.induced and whole is not graph
        # One random read of a neighbor, and one of the edge's original position if edges have attributes.
        reads_per_edge = 1 + (bool(self.of_edges) and any(relation.edge_ids is not None for relation in relations))
        part = PlacedArray(
            TOPOLOGY,
            graph.num_bytes + (whole.num_bytes if needs_both else 0),
            self.placing.topology,
            float(sum(reads.edges.values()) * SECTOR_BYTES * reads_per_edge),
            pinned_bytes=sum(relation.indptr.nbytes for relation in relations),  # offsets are always on the device
            gpus=self.gpus,
        )
        if not self._is_uniform or not isinstance(graph, CSCGraph) or reads.lists is None:
            return part
        if self.placing.cache_budget != 0:
            sizes = graph.in_degrees.numpy() * graph.indices.element_size()
            part = replace(part, hot=Cacheable(reads.lists.numpy(), sizes, SECTOR_BYTES, 8 * graph.num_nodes))
        entry = graph.indices.element_size() + (0 if graph.edge_ids is None else graph.edge_ids.element_size())
        rows = BlockCyclicLayout(graph.num_edges, self.gpus, LIST_SHIFT).size
        return replace(part, shard_bytes=part.pinned_bytes + rows * entry)

    def _table(self, attribute: Attribute, reads: AccessCounts, degree_weight: float) -> PlacedArray:
        table, (name, _), hot = self.tables[attribute], attribute, None
        width, scale = (table.num_features, 4) if is_int8(attribute, table, self.placing) else (table.row_bytes, 0)
        number, cost = table.num_nodes, float(row_cost(width))
        if attribute not in self.of_edges and self.placing.cache_budget != 0:
            counts, graph = reads.rows[name].numpy(), self.sampler.graph
            relations = {(None,): graph} if isinstance(graph, CSCGraph) else graph.relations
            sources = [relation.out_degrees.numpy() for key, relation in relations.items() if key[0] == name]
            if degree_weight and (total := sum(int(degrees.sum()) for degrees in sources)):
                share = degree_weight * float(counts.sum()) / total
                counts = (1 - degree_weight) * counts + share * sum(sources)
            hot = Cacheable(counts, np.full(number, width), cost, (4 + scale) * number)
        return PlacedArray(
            name_of_table(attribute),
            number * (width + scale),
            self.placing.features,
            cost * float(reads.edges[name] if attribute in self.of_edges else reads.rows[name].sum()),
            hot=hot,
            shard_bytes=BlockCyclicLayout(number, self.gpus, ROW_SHIFT).size * width + scale * number,
            gpus=self.gpus,
        )

    @property
    def _is_uniform(self) -> bool:
        """Whether one kernel samples all hops of a homogeneous graph uniformly."""
        return not nonuniform_features(self.sampler)


def is_int8(attribute: Attribute, table: FeatureTable, placing: PlacementOptions) -> bool:
    """Return whether a table is stored as int8 with a scale per row."""
    return table.scales is not None or (placing.quantize and attribute[1] == "x")


def name_of_table(attribute: Attribute) -> str:
    """Return the name of a table in plans, such as ``data.x``."""
    node_type, key = attribute
    return f"data.{key}" if node_type is None else f"data[{node_type!r}].{key}"
