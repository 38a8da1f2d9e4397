"""Heterogeneous, temporal, weighted and LABOR neighbor sampling on a GPU, with one cooperative launch per batch.

The result is that of ``lightning_gnn.ops.sample.reference``. The host synchronizes once per batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lightning_gnn.triton_kernels import relations as layout
from lightning_gnn.triton_kernels.hops import CAPACITY, CODE, FIRST_TREE, REPLACE, STAMP
from lightning_gnn.triton_kernels.relations import emit_relations_kernel, relation_kernel
from lightning_gnn.triton_kernels.sample import LARGEST, UNTOUCHED, DeviceSampler

MOST_STAGES = CODE.value // 2 - 1  # number of stages that the code in a node's word can distinguish


class RelationArrays(NamedTuple):
    """Contiguous arrays of one edge type, in device memory or pinned host memory."""

    source: int  # index of the source node type
    target: int  # index of the target node type
    fanouts: list[int]  # in-edges to pick per target, for each hop
    indptr: Tensor  # offsets, int64 [num_targets + 1]
    indices: Tensor  # sources, int32 or int64 [num_edges]
    time: Tensor | None = None  # times of the edges, ascending in each list, int64 [num_edges], or None
    weight: Tensor | None = None  # weights of the edges, all positive, float64 [num_edges], or None
    prefix: Tensor | None = None  # inclusive prefix sums of each list's weights, float64 [num_edges], or None
    parallel: Tensor | None = None  # number of earlier edges in the list with the same source, int32 [num_edges]


class Picking(NamedTuple):
    """Rules for picking edges."""

    replace: bool = False
    disjoint: bool = False  # one tree per seed
    first_tree: int = 0  # position of the first seed in the whole mini-batch
    newest: bool = False  # pick only the newest eligible edges
    labor: tuple[int, int] | None = None  # batches per renewal of a variate, and the number of the batch
    until: Tensor | None = None  # latest eligible time of each tree, int64 [trees]; None: all edges are eligible
    after: Tensor | None = None  # exclusive lower bound of eligible times of each tree, int64 [trees]


RelationSample = tuple[list[Tensor], list[Tensor], list[list[int]], list[Tensor], list[Tensor], list[list[int]]]
"""For each node type: ids ``[n]``, trees ``[n]`` (empty unless disjoint), nodes per hop (seeds first). For each edge
type: local ids of sources and targets ``[2, m]``, positions ``[m]``, edges per hop. Tensors are int64 on the device."""


class TritonRelationSampler(DeviceSampler):  # type: ignore[misc]
    """Samples mini-batches of one heterogeneous graph; see ``TritonNeighborSampler``."""

    # Scratch memory: 8 bytes per node of the graph; 12 per edge a batch may have (16 if an edge type has 2^31 or more
    # edges); 4 per node, and 16 per node of one type; if disjoint, none per node of the graph, but 32 to 64 more per
    # edge and 4 per node.

    def __init__(
        self, num_nodes: Sequence[int], device: torch.device, num_programs: int | None = None, num_warps: int = 4
    ) -> None:
        super().__init__(device, num_programs, num_warps)
        self.num_nodes = list(num_nodes)
        if sum(num_nodes) > LARGEST:
            raise ValueError(f"the graph has {sum(num_nodes)} nodes, but this sampler numbers them in 31 bits")

    def sample(
        self,
        relations: Sequence[RelationArrays],  # sorted by name, all with the same number of hops
        seeds: Sequence[Tensor],  # for each node type, not checked, int32 or int64 [batch_size]; may repeat
        starts: Sequence[int],  # tree of the first seed of each node type
        keys: Sequence[Sequence[int]],  # for each hop and edge type, 64-bit
        picking: Picking,
    ) -> RelationSample:
        """Sample in-neighbors of the seeds, hop by hop, and edge type by edge type within a hop."""
        with self.exclusive():
            on_device = [ids.to(self.device) for ids in seeds]
            batch = RelationBatch(self, relations, on_device, list(starts), keys, picking)
            sizes = batch.run()
            while needed := sizes[layout.NEEDED.value]:
                batch.grow(needed)
                sizes = batch.run()
            return batch.emit(sizes)


@dataclass(eq=False)
class RelationBatch:
    """One mini-batch while it is being sampled."""

    sampler: TritonRelationSampler  # owner of the scratch memory
    relations: Sequence[RelationArrays]  # this and the rest: as for TritonRelationSampler.sample
    seeds: list[Tensor]  # on the sampler's device
    starts: list[int]
    keys: Sequence[Sequence[int]]
    picking: Picking

    def __post_init__(self) -> None:
        self.num_types, self.num_relations = len(self.seeds), len(self.relations)
        self.num_hops = len(self.relations[0].fanouts) if self.relations else 0
        self.num_stages = self.num_hops * self.num_relations
        if self.num_stages > MOST_STAGES:
            raise ValueError(
                f"{self.num_hops} hops of {self.num_relations} edge types are {self.num_stages} sampling steps, but "
                f"this sampler supports at most {MOST_STAGES}"
            )
        self.num_seeds = [ids.numel() for ids in self.seeds]
        self.limit = LARGEST - sum(self.num_seeds)
        if self.picking.disjoint:  # the hash table has two to four slots per node
            self.limit = (LARGEST >> 2) - sum(self.num_seeds)
        self.bound = self._bound()
        self.capacity = max(min(self.bound, self.limit, self.sampler._start_capacity), 1)
        limits = self.picking.until, self.picking.after
        self.until, self.after = (None if times is None else times.to(self.sampler.device) for times in limits)

    def _bound(self) -> int:
        """Return an upper bound of the batch's edges."""
        rows, total, disjoint = self.num_seeds, 0, self.picking.disjoint
        for hop in range(self.num_hops):
            new = [0] * self.num_types
            for relation in self.relations:
                # A duplicated seed is expanded twice; in later hops, each node is expanded once (per tree if disjoint).
                times = rows[relation.target] if hop == 0 else sum(self.num_seeds) if disjoint else 1
                largest, fanout = times * relation.indices.numel(), relation.fanouts[hop]
                edges = largest if fanout < 0 else rows[relation.target] * fanout
                edges = edges if self.picking.replace else min(edges, largest)
                new[relation.source] += edges
                total += edges
            rows = new if disjoint else [min(a, b) for a, b in zip(new, self.sampler.num_nodes, strict=True)]
        return total

    def grow(self, needed: int) -> None:
        """Raise the capacity to at least ``needed`` edges; later stages may need more."""
        if needed > self.limit:
            num_seeds = sum(self.num_seeds)
            raise ValueError(f"a batch of {num_seeds} seeds has at least {needed} edges; the limit is {self.limit}")
        self.capacity = min(self.bound, self.limit, max(needed + needed // 4, 2 * self.capacity))
        self.sampler._start_capacity = max(self.sampler._start_capacity, self.capacity)

    def run(self) -> list[int]:
        """Sample into the scratch memory, synchronize with the host once, and return the sizes."""
        # Bound the nodes of each type: disjoint trees may repeat nodes; otherwise each node is found at most once.
        s, disjoint = self.sampler, self.picking.disjoint
        most = [
            (self.capacity if disjoint else min(self.capacity, size)) + number
            for size, number in zip(s.num_nodes, self.num_seeds, strict=True)
        ]
        self.nodes_at = [sum(most[:number]) for number in range(self.num_types)]
        # Allocate the scratch memory for these bounds; edge ids take 64 bits only if they need to.
        wide = any(relation.indices.numel() >= 2**31 for relation in self.relations)
        self.src = s.scratch("src", self.capacity, torch.int32)
        self.col = s.scratch("col", self.capacity, torch.int32)
        self.eid = s.scratch("wide_eid" if wide else "eid", self.capacity, torch.int64 if wide else torch.int32)
        self.nodes = s.scratch("nodes", sum(most), torch.int32)
        self.rowptr = s.scratch("rowptr", max(most, default=0) + 1, torch.int32)
        self.begins = s.scratch("begins", max(most, default=0), torch.int64)
        self.degrees = s.scratch("degrees", max(most, default=0), torch.int32)
        self.sizes = s.scratch("sizes", 1 + (self.num_stages + 1) * (1 + self.num_types), torch.int64)
        self.counts = s.scratch("counts", s.most_programs(), torch.int64)
        # Disjoint samples look up nodes in a hash table, all others in an array over all nodes.
        self.trees, self.table, self.slots = self.nodes, self.sizes, 1
        if disjoint:
            self.slots = triton.next_power_of_2(2 * (self.capacity + sum(self.num_seeds)))
            self.trees = s.scratch("trees", sum(most), torch.int32)
            self.table = s.scratch("table", self.slots, torch.int64)
            self.table[: self.slots].fill_(-1)
            self.state = s.scratch("slot_state", self.slots, torch.int64, UNTOUCHED)
        else:
            self.state = s.scratch("state", sum(s.num_nodes), torch.int64, UNTOUCHED)
        # The seeds are the first nodes of their types.
        for at, start, ids in zip(self.nodes_at, self.starts, self.seeds, strict=True):
            self.nodes[at : at + ids.numel()] = ids
            if disjoint:
                torch.arange(start, start + ids.numel(), out=self.trees[at : at + ids.numel()])
        # Launch all stages, and wait once for the sizes.
        self._write_control()
        self._launch()
        used = 1 + (self.num_stages + 1) * (1 + self.num_types)
        sizes: list[int] = s.fetch(self.sizes[:used]).read()
        return sizes

    def _write_control(self) -> None:
        """Write the parameters of the batch and of its stages to the kernel's control words."""
        s, picking = self.sampler, self.picking
        size = layout.TABLES.value + self.num_stages * layout.STAGE_SIZE.value + self.num_types * layout.TYPE_SIZE.value
        if s._host_control.numel() < size:
            s._host_control = s.host_words(2 * size)
        words = s._host_control.numpy()  # free for reuse: the last batch ended with a synchronization
        words[:size] = 0  # including the counter of the barrier
        batches_per_renewal, batch_number = picking.labor or (1, 0)
        for place, word in (
            (STAMP, s.next_stamp()), (REPLACE, picking.replace), (CAPACITY, self.capacity),
            (FIRST_TREE, picking.first_tree), (layout.NUM_TYPES, self.num_types), (layout.NUM_STAGES, self.num_stages),
            (layout.OFTEN, batches_per_renewal), (layout.BATCH, batch_number), (layout.NEWEST, picking.newest),
            (layout.UNTIL, _address(self.until)), (layout.AFTER, _address(self.after)),
        ):  # fmt: skip
            words[place.value] = word
        tables, width = words[layout.TABLES.value : size], layout.STAGE_SIZE.value
        stages = tables[: self.num_stages * width].reshape(-1, width)
        first_id = [sum(s.num_nodes[:number]) for number in range(self.num_types)]
        step = 1 + self.num_types  # words per stage in `sizes`
        for number, relation in enumerate(self.relations):
            own = stages[number :: self.num_relations]
            own[:, layout.INDPTR.value : layout.ROWS_FROM.value] = (
                _address(relation.indptr), _address(relation.indices), relation.indices.element_size() // 4,
                _address(relation.time) if self.until is not None else 0, _address(relation.weight),
                _address(relation.prefix), _address(relation.parallel), relation.source, first_id[relation.source],
                self.nodes_at[relation.source], self.nodes_at[relation.target],
            )  # fmt: skip
            for hop, fanout in enumerate(relation.fanouts):
                key = self.keys[hop][number] & (2**64 - 1)
                own[hop, : layout.INDPTR.value] = key - ((key >> 63) << 64), fanout
                rows = 2 + hop * self.num_relations * step + relation.target
                edges = 1 + (hop * self.num_relations + number) * step
                own[hop, layout.ROWS_FROM.value :] = rows - self.num_relations * step if hop else -1, rows, edges
        types = tables[stages.size :].reshape(-1, layout.TYPE_SIZE.value)
        for number, row in enumerate(zip(self.nodes_at, first_id, self.num_seeds, strict=True)):
            types[number, :3] = row
        self.control = s.scratch("control", s._host_control.numel(), torch.int64)
        self.control[:size].copy_(s._host_control[:size], non_blocking=True)

    def _launch(self) -> None:
        """Launch all stages as one cooperative kernel."""
        s = self.sampler
        args = (
            self.control, self.state, self.nodes, self.trees, self.rowptr, self.begins, self.degrees, self.src,
            self.eid, self.col, self.table, self.slots, self.sizes, self.counts,
        )  # fmt: skip
        variant = {
            "DISJOINT": self.picking.disjoint,
            "TEMPORAL": self.until is not None,
            "WEIGHTED": any(relation.weight is not None for relation in self.relations),
            "LABOR": self.picking.labor is not None,
        }
        options = {
            **variant, "R": 32 * s.num_warps, "T": 64 * s.num_warps, "P": triton.next_power_of_2(s.most_programs()),
            "num_warps": s.num_warps, "launch_cooperative_grid": True,
        }  # fmt: skip
        end = 1 + layout.PHASES.value * self.num_stages
        programs = s.fit_grid(relation_kernel, (*variant.values(), self.eid.dtype), (*args, 0, end), options)
        for begin, stop in s.split_phases(0, end, programs):
            relation_kernel[(programs,)](*args, begin, stop, **options)

    def emit(self, sizes: list[int]) -> RelationSample:
        """Copy the batch out of the scratch memory."""
        # Read the bounds of edges and nodes after each stage from the sizes.
        device, num_rel = self.sampler.device, self.num_relations
        rows = [sizes[1 + stage * (1 + self.num_types) :][: 1 + self.num_types] for stage in range(self.num_stages + 1)]
        edges_at = [row[0] for row in rows]
        counts = [[edges_at[i + 1] - edges_at[i] for i in range(r, self.num_stages, num_rel)] for r in range(num_rel)]
        total, most = edges_at[-1], max((max(own, default=0) for own in counts), default=0)
        # The edges of all relations share one allocation, with the edges of each relation contiguous.
        edge_index = torch.empty(2 * total, dtype=torch.int64, device=device)
        edge = torch.empty(total, dtype=torch.int64, device=device)
        before = [sum(map(sum, counts[:r])) for r in range(num_rel + 1)]
        # Copy the edges of all stages in one launch, which looks up the local ids of their sources.
        if total:
            table = [
                (edges_at[hop * num_rel + r], counts[r][hop], sum(counts[r][:hop]), before[r], sum(counts[r]))
                for hop in range(self.num_hops)
                for r in range(num_rel)
            ]
            emit_relations_kernel[(triton.cdiv(most, 1024), self.num_stages)](
                self.state, self.src, self.eid, self.col, torch.tensor(table, device=device), edge_index, edge, T=1024
            )
        # Copy the nodes and trees of each type, and count them by hop.
        node_counts, node, tree = [], [], []
        for number, at in enumerate(self.nodes_at):
            offsets = [0, *(rows[hop * num_rel][1 + number] for hop in range(self.num_hops + 1))]
            node_counts.append([b - a for a, b in pairwise(offsets)])
            node.append(self.nodes[at : at + offsets[-1]].to(torch.int64))
            tree.append(self.trees[at : at + (offsets[-1] if self.picking.disjoint else 0)].to(torch.int64))
        return (
            node,
            tree,
            node_counts,
            [edge_index[2 * a : 2 * b].view(2, b - a) for a, b in pairwise(before)],
            [edge[a:b] for a, b in pairwise(before)],
            counts,
        )


def _address(tensor: Tensor | None) -> int:
    """Return the address of a tensor, or 0 for None; the kernel never reads that of an empty tensor."""
    return 0 if tensor is None else tensor.data_ptr()
