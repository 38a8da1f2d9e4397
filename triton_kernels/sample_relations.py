"""Neighbor sampling on a GPU in graphs with types, times and weights, and LABOR: one cooperative launch per batch.

The result is that of ``lightning_gnn.ops.sample.reference``. There is one host synchronization per batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lightning_gnn.triton_kernels import relations as places
from lightning_gnn.triton_kernels.hops import CAPACITY, CODE, FIRST_TREE, REPLACE, STAMP
from lightning_gnn.triton_kernels.relations import emit_relations_kernel, relation_kernel
from lightning_gnn.triton_kernels.sample import LARGEST, UNTOUCHED, DeviceSampler

MOST_STAGES = CODE.value // 2 - 1  # how many stages the words of nodes tell apart


class RelationArrays(NamedTuple):
    """The edges of one type, in device memory or in pinned host memory, contiguous."""

    source: int  # type of the sources, as a number
    target: int  # type of the targets
    fanouts: list[int]  # in-edges to pick per target, for each hop
    indptr: Tensor  # offsets, int64 [num_targets + 1]
    indices: Tensor  # sources, int32 or int64 [num_edges]
    time: Tensor | None = None  # times of the edges, ascending in each list, int64 [num_edges], or None
    weight: Tensor | None = None  # weights of the edges, all positive, float64 [num_edges], or None
    prefix: Tensor | None = None  # sums of a list's weights up to and with each edge, float64 [num_edges], or None
    parallel: Tensor | None = None  # edges before one in its list with the same source, int32 [num_edges]


class Picking(NamedTuple):
    """How edges are picked."""

    replace: bool = False
    disjoint: bool = False  # one tree per seed
    first_tree: int = 0  # position of the first seed in the whole mini-batch
    newest: bool = False  # of the edges whose time allows it, only the newest count
    labor: tuple[int, int] | None = None  # in how many batches a variate is renewed once; the number of the batch
    until: Tensor | None = None  # the latest time that counts for each tree, int64 [trees], or None: all edges count
    after: Tensor | None = None  # latest time that no longer counts for each tree, int64 [trees]


RelationSample = tuple[list[Tensor], list[Tensor], list[list[int]], list[Tensor], list[Tensor], list[list[int]]]
"""By node type ids ``[n]``, trees ``[n]`` (empty unless disjoint), nodes per hop, seeds first; by edge type local ids
of sources and targets ``[2, m]``, positions ``[m]``, edges per hop. All int64 on the device."""


class TritonRelationSampler(DeviceSampler):  # type: ignore[misc]
    """Sample mini-batches of one graph of any number of types, as ``TritonNeighborSampler`` does of one type."""

    # Scratch memory: 8 bytes per node of the graph; 12 per edge a batch may have (16 where an edge type has 2^31 edges
    # and more); 4 per node, and 16 per node of one type; if disjoint, none per node of the graph, but 32 to 64 more per
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
        relations: Sequence[RelationArrays],  # in the order of their sorted names, all with as many hops
        seeds: Sequence[Tensor],  # of each node type, not checked, int32 or int64 [batch_size]; may repeat
        starts: Sequence[int],  # the tree of the first seed of each node type
        keys: Sequence[Sequence[int]],  # of each hop and edge type, 64-bit
        picking: Picking,
    ) -> RelationSample:
        """Sample in-neighbors of the seeds, hop by hop, in each of them edge type by edge type."""
        with self.exclusive():
            on_device = [ids.to(self.device) for ids in seeds]
            batch = RelationBatch(self, relations, on_device, list(starts), keys, picking)
            sizes = batch.run()
            while needed := sizes[places.NEEDED.value]:
                batch.grow(needed)
                sizes = batch.run()
            return batch.emit(sizes)


@dataclass(eq=False)
class RelationBatch:
    """One mini-batch on its way through a sampler."""

    sampler: TritonRelationSampler  # whose scratch memory it uses
    relations: Sequence[RelationArrays]  # as for TritonRelationSampler.sample, as the rest
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
                f"there are {self.num_hops} hops of {self.num_relations} edge types, but this sampler does at most "
                f"{MOST_STAGES} edge types, each hop counted"
            )
        self.num_seeds = [ids.numel() for ids in self.seeds]
        self.limit = LARGEST - sum(self.num_seeds)
        if self.picking.disjoint:  # the hash table has two to four slots for each node
            self.limit = (LARGEST >> 2) - sum(self.num_seeds)
        self.bound = self._bound()
        self.capacity = max(min(self.bound, self.limit, self.sampler._start), 1)
        limits = self.picking.until, self.picking.after
        self.until, self.after = (None if times is None else times.to(self.sampler.device) for times in limits)

    def _bound(self) -> int:
        """Bound the edges that the batch can have."""
        rows, total, disjoint = self.num_seeds, 0, self.picking.disjoint
        for hop in range(self.num_hops):
            new = [0] * self.num_types
            for relation in self.relations:
                # A seed given twice is expanded twice; from then on a node once, if disjoint once in each tree.
                times = rows[relation.target] if hop == 0 else sum(self.num_seeds) if disjoint else 1
                largest, fanout = times * relation.indices.numel(), relation.fanouts[hop]
                edges = largest if fanout < 0 else rows[relation.target] * fanout
                edges = edges if self.picking.replace else min(edges, largest)
                new[relation.source] += edges
                total += edges
            rows = new if disjoint else [min(a, b) for a, b in zip(new, self.sampler.num_nodes, strict=True)]
        return total

    def grow(self, needed: int) -> None:
        """Make room for a batch that needs room for at least so many edges; later stages may need more."""
        if needed > self.limit:
            raise ValueError(
                f"a batch of {sum(self.num_seeds)} seeds has at least {needed} edges, but {self.limit} may fit"
            )
        self.capacity = min(self.bound, self.limit, max(needed + needed // 4, 2 * self.capacity))
        self.sampler._start = max(self.sampler._start, self.capacity)

    def run(self) -> list[int]:
        """Sample into the scratch memory; return the sizes, after the batch's host synchronization."""
        # Bound the nodes of each type: disjoint trees may repeat nodes; otherwise each one is found at most once.
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
        # Disjoint trees find nodes in a hash table, all others in an array over all nodes.
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
        """Write what differs from stage to stage, and from batch to batch, to where the kernel reads it."""
        s, picking = self.sampler, self.picking
        size = places.TABLES.value + self.num_stages * places.STAGE_SIZE.value + self.num_types * places.TYPE_SIZE.value
        if s._host_control.numel() < size:
            s._host_control = s.host_words(2 * size)
        words = s._host_control.numpy()  # not in use: the last batch ended with a synchronization
        words[:size] = 0  # the counter of the barrier too
        often, number = picking.labor or (1, 0)
        for place, word in (
            (STAMP, s.next_stamp()), (REPLACE, picking.replace), (CAPACITY, self.capacity),
            (FIRST_TREE, picking.first_tree), (places.NUM_TYPES, self.num_types), (places.NUM_STAGES, self.num_stages),
            (places.OFTEN, often), (places.BATCH, number), (places.NEWEST, picking.newest),
            (places.UNTIL, _address(self.until)), (places.AFTER, _address(self.after)),
        ):  # fmt: skip
            words[place.value] = word
        tables, width = words[places.TABLES.value : size], places.STAGE_SIZE.value
        stages = tables[: self.num_stages * width].reshape(-1, width)
        first_id = [sum(s.num_nodes[:number]) for number in range(self.num_types)]
        step = 1 + self.num_types  # from what `sizes` has of a stage to what it has of the next
        for number, relation in enumerate(self.relations):
            own = stages[number :: self.num_relations]
            own[:, places.INDPTR.value : places.ROWS_FROM.value] = (
                _address(relation.indptr), _address(relation.indices), relation.indices.element_size() // 4,
                _address(relation.time) if self.until is not None else 0, _address(relation.weight),
                _address(relation.prefix), _address(relation.parallel), relation.source, first_id[relation.source],
                self.nodes_at[relation.source], self.nodes_at[relation.target],
            )  # fmt: skip
            for hop, fanout in enumerate(relation.fanouts):
                key = self.keys[hop][number] & (2**64 - 1)
                own[hop, : places.INDPTR.value] = key - ((key >> 63) << 64), fanout
                rows = 2 + hop * self.num_relations * step + relation.target
                edges = 1 + (hop * self.num_relations + number) * step
                own[hop, places.ROWS_FROM.value :] = rows - self.num_relations * step if hop else -1, rows, edges
        types = tables[stages.size :].reshape(-1, places.TYPE_SIZE.value)
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
        kinds = {
            "DISJOINT": self.picking.disjoint,
            "TEMPORAL": self.until is not None,
            "WEIGHTED": any(relation.weight is not None for relation in self.relations),
            "LABOR": self.picking.labor is not None,
        }
        options = {
            **kinds, "R": 32 * s.num_warps, "T": 64 * s.num_warps, "P": triton.next_power_of_2(s.most_programs()),
            "num_warps": s.num_warps, "launch_cooperative_grid": True,
        }  # fmt: skip
        end = 1 + places.PHASES.value * self.num_stages
        programs = s.resident(relation_kernel, (*kinds.values(), self.eid.dtype), (*args, 0, end), options)
        for begin, stop in s.ranges(0, end, programs):
            relation_kernel[(programs,)](*args, begin, stop, **options)

    def emit(self, sizes: list[int]) -> RelationSample:
        """Copy the batch out of the scratch memory."""
        # Read the bounds of edges and nodes from the sizes after each stage.
        device, kinds = self.sampler.device, self.num_relations
        rows = [sizes[1 + stage * (1 + self.num_types) :][: 1 + self.num_types] for stage in range(self.num_stages + 1)]
        edges_at = [row[0] for row in rows]
        counts = [[edges_at[i + 1] - edges_at[i] for i in range(r, self.num_stages, kinds)] for r in range(kinds)]
        total, most = edges_at[-1], max((max(own, default=0) for own in counts), default=0)
        # Edges of all relations share one allocation, in which those of a relation are contiguous.
        edge_index = torch.empty(2 * total, dtype=torch.int64, device=device)
        edge = torch.empty(total, dtype=torch.int64, device=device)
        before = [sum(map(sum, counts[:r])) for r in range(kinds + 1)]
        # Copy the edges of all stages in one launch, which looks up the local ids of their sources.
        if total:
            table = [
                (edges_at[hop * kinds + r], counts[r][hop], sum(counts[r][:hop]), before[r], sum(counts[r]))
                for hop in range(self.num_hops)
                for r in range(kinds)
            ]
            emit_relations_kernel[(triton.cdiv(most, 1024), self.num_stages)](
                self.state, self.src, self.eid, self.col, torch.tensor(table, device=device), edge_index, edge, T=1024
            )
        # Copy the nodes and trees of each type, and count them by hop.
        node_counts, node, tree = [], [], []
        for number, at in enumerate(self.nodes_at):
            known = [0, *(rows[hop * kinds][1 + number] for hop in range(self.num_hops + 1))]
            node_counts.append([b - a for a, b in pairwise(known)])
            node.append(self.nodes[at : at + known[-1]].to(torch.int64))
            tree.append(self.trees[at : at + (known[-1] if self.picking.disjoint else 0)].to(torch.int64))
        return (
            node,
            tree,
            node_counts,
            [edge_index[2 * a : 2 * b].view(2, b - a) for a, b in pairwise(before)],
            [edge[a:b] for a, b in pairwise(before)],
            counts,
        )


def _address(tensor: Tensor | None) -> int:
    """Return where a tensor begins, 0 if there is none; that of an empty one is never read."""
    return 0 if tensor is None else tensor.data_ptr()
