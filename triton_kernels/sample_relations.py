"""Heterogeneous, temporal, weighted and LABOR neighbor sampling on a GPU, with one cooperative launch per batch.

The result is that of ``lightning_gnn.ops.sample.reference``. The host synchronizes once per batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import triton
from torch import Tensor

from lightning_gnn.triton_kernels import relations as layout
from lightning_gnn.triton_kernels.relations import emit_relations_kernel, relation_kernel
from lightning_gnn.triton_kernels.sample import LARGEST, UNTOUCHED, DeviceSampler, check_fanouts

Relation: TypeAlias = Any
"""An edge type as a ``lightning_gnn.ops.sample.relation.Relation``, with tensors in device or pinned host memory."""


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

    # Scratch memory: 8 bytes per node of the graph; 28 per edge a batch may have (32 if an edge type has 2^31 or more
    # edges), or per pair of a node and an edge type that a hop expands, if there are more of them; 4 per node; if
    # disjoint, none per node of the graph, but 32 to 64 more per edge and 4 per node.

    def __init__(
        self,
        num_nodes: Sequence[int],
        device: torch.device,
        num_programs: int | None = None,
        num_warps: int = 8,
        programs_per_sm: int = DeviceSampler.PROGRAMS_PER_SM,
    ) -> None:
        super().__init__(device, num_programs, num_warps, programs_per_sm)
        self.num_nodes = list(num_nodes)
        if sum(num_nodes) > LARGEST:
            raise ValueError(f"the graph has {sum(num_nodes)} nodes, but this sampler numbers them in 31 bits")

    def sample(
        self,
        relations: Sequence[Relation],  # sorted by name, all with the same number of hops
        seeds: Sequence[Tensor],  # for each node type, not checked, int32 or int64 [batch_size]; may repeat
        starts: Sequence[int],  # tree of the first seed of each node type
        keys: Sequence[Sequence[int]],  # for each hop and edge type, 64-bit
        picking: Picking,
    ) -> RelationSample:
        """Sample in-neighbors of the seeds, hop by hop, and edge type by edge type within a hop."""
        with self.exclusive():
            batch = RelationBatch(self, relations, seeds, starts, keys, picking)
            sizes = batch.run()
            while needed := int(sizes[0]):
                batch.capacity = self.larger(needed, batch.capacity, batch.bound, batch.limit, sum(batch.num_seeds))
                sizes = batch.run()
            return batch.emit(sizes)


@dataclass(eq=False)
class RelationBatch:
    """One mini-batch while it is being sampled."""

    sampler: TritonRelationSampler  # owner of the scratch memory
    relations: Sequence[Relation]  # this and the rest: as for TritonRelationSampler.sample
    seeds: Sequence[Tensor]
    starts: Sequence[int]
    keys: Sequence[Sequence[int]]
    picking: Picking

    def __post_init__(self) -> None:
        self.num_types, self.num_relations = len(self.seeds), len(self.relations)
        self.num_hops = len(check_fanouts(self.relations[0].fanouts)) if self.relations else 0
        self.order = sorted(range(self.num_relations), key=lambda number: self.relations[number].source)
        self.num_seeds = [ids.numel() for ids in self.seeds]
        self.T = 32 * self.sampler.num_warps
        self.limit = LARGEST - sum(self.num_seeds) - self.num_relations * self.T
        if self.picking.disjoint:  # the hash table has two to four slots per node
            self.limit = (LARGEST >> 2) - sum(self.num_seeds)
        self.bound = self._bound()
        self.capacity = max(min(self.bound, self.limit, self.sampler._start_capacity), 1)

    def _bound(self) -> int:
        """Return an upper bound of the batch's edges, and of the rows that one hop expands for all edge types."""
        rows, total, most, disjoint = self.num_seeds, 0, 0, self.picking.disjoint
        for hop in range(self.num_hops):
            new = [0] * self.num_types
            most = max(most, sum(rows[relation.target] for relation in self.relations))
            for relation in self.relations:
                # A duplicated seed is expanded twice; in later hops, each node is expanded once (per tree if disjoint).
                times = rows[relation.target] if hop == 0 else sum(self.num_seeds) if disjoint else 1
                largest, fanout = times * relation.indices.numel(), relation.fanouts[hop]
                edges = largest if fanout < 0 else rows[relation.target] * fanout
                edges = edges if self.picking.replace else min(edges, largest)
                new[relation.source] += edges
                total += edges
            rows = new if disjoint else [min(a, b) for a, b in zip(new, self.sampler.num_nodes, strict=True)]
        return max(total, most)

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
        tiles = triton.cdiv(self.capacity, self.T) + self.num_relations
        self.src = s.scratch("src", self.capacity, torch.int32)
        self.col = s.scratch("col", self.capacity, torch.int32)
        self.eid = s.scratch("wide_eid" if wide else "eid", self.capacity, torch.int64 if wide else torch.int32)
        self.nodes = s.scratch("nodes", sum(most), torch.int32)
        self.rowptr = s.scratch("rowptr", tiles * self.T, torch.int32)
        self.begins = s.scratch("begins", tiles * self.T, torch.int64)
        self.degrees = s.scratch("degrees", tiles * self.T, torch.int32)
        self.totals = s.scratch("totals", 2 * tiles, torch.int64, 0)
        # Disjoint samples look up nodes in a hash table, all others in an array over all nodes.
        self.trees, self.table, self.slots = self.nodes, self.totals, 1
        if disjoint:
            self.slots = triton.next_power_of_2(2 * (self.capacity + sum(self.num_seeds)))
            self.trees = s.scratch("trees", sum(most), torch.int32)
            self.table = s.scratch("table", self.slots, torch.int64)
            self.table[: self.slots].fill_(-1)
            self.state = s.scratch("slot_state", self.slots, torch.int64, UNTOUCHED)
        else:
            self.state = s.scratch("state", sum(s.num_nodes), torch.int64, UNTOUCHED)
        # Launch all hops, and wait once for the sizes.
        self._write_control()
        self._launch()
        sizes: list[int] = s.fetch(self.sizes).read()
        return sizes

    def _write_control(self) -> None:
        """Copy the parameters of the batch, its seeds and times to the kernel's control words, at once."""
        s, picking, num_stages = self.sampler, self.picking, self.num_hops * self.num_relations
        edges_at = layout.NODES.value + (self.num_hops + 2) * self.num_types
        stages_at = edges_at + num_stages + 1
        types_at = stages_at + num_stages * layout.STAGE_SIZE.value
        # The seeds of each type follow the tables, then the times of the trees.
        inputs = [*self.seeds, *(limit for limit in (picking.until, picking.after) if limit is not None)]
        ends = np.cumsum([types_at + self.num_types * layout.TYPE_SIZE.value, *(part.numel() for part in inputs)])
        places = [slice(end - part.numel(), end) for end, part in zip(ends[1:].tolist(), inputs, strict=True)]
        size = int(ends[-1])
        if s._host_control.numel() < size:
            s._host_control = s.host_words(2 * size)
        words = s._host_control.numpy()  # free for reuse: the last batch ended with a synchronization
        words[:stages_at] = 0  # including the counters
        after_at = 0 if picking.after is None else ends[-2]
        until_at = ends[self.num_types]  # not read without times
        words[: layout.TYPES.value + 1] = (
            s.next_stamp(), self.num_types, self.num_relations, picking.replace, 0, self.capacity, picking.first_tree,
            *(picking.labor or (1, 0)), until_at, after_at, picking.newest, edges_at, stages_at, types_at,
        )  # fmt: skip
        # Types that are the source of no edge type keep their seeds; the kernel counts the others hop by hop.
        words[layout.NODES.value + self.num_types : edges_at] = self.num_seeds * (self.num_hops + 1)
        first_id = [sum(s.num_nodes[:number]) for number in range(self.num_types)]
        stages = words[stages_at:types_at].reshape(self.num_hops, self.num_relations, layout.STAGE_SIZE.value)
        sources = [-1, *(self.relations[number].source for number in self.order), -1]
        for place, number in enumerate(self.order):
            relation = self.relations[number]
            keys = [own[number] & (2**64 - 1) for own in self.keys]
            stages[:, place, layout.OWN_KEY.value] = [key - ((key >> 63) << 64) for key in keys]
            stages[:, place, layout.FANOUT.value] = relation.fanouts
            stages[:, place, layout.INDPTR.value : layout.ROWS_AT.value] = (
                _address(relation.indptr), _address(relation.indices), relation.indices.element_size() // 4,
                _address(relation.time) if picking.until is not None else 0, _address(relation.weight),
                _address(relation.prefix), _address(relation.parallel), relation.source, first_id[relation.source],
                self.nodes_at[relation.source], relation.target, self.nodes_at[relation.target],
                relation.source != sources[place], relation.source != sources[place + 2],
            )  # fmt: skip
        types = words[types_at : ends[0]].reshape(self.num_types, layout.TYPE_SIZE.value)
        types[:] = np.array([self.nodes_at, first_id, self.num_seeds, self.starts]).T
        self.control = s.scratch("control", s._host_control.numel(), torch.int64)
        self.sizes = self.control[layout.NEEDED.value : stages_at]
        for part, own in zip(inputs, places, strict=True):
            if part.is_cpu:
                s._host_control[own] = part
        self.control[:size].copy_(s._host_control[:size], non_blocking=True)
        for part, own in zip(inputs, places, strict=True):
            if not part.is_cpu:
                self.control[own] = part

    def _launch(self) -> None:
        """Launch all hops as one cooperative kernel."""
        s = self.sampler
        args = (
            self.control, self.state, self.nodes, self.trees, self.rowptr, self.begins, self.degrees, self.src,
            self.eid, self.col, self.table, self.slots, self.totals,
        )  # fmt: skip
        variant = {
            "DISJOINT": self.picking.disjoint,
            "TEMPORAL": self.picking.until is not None,
            "WEIGHTED": any(relation.weight is not None for relation in self.relations),
            "LABOR": self.picking.labor is not None,
        }
        options = {**variant, "T": self.T, "num_warps": s.num_warps, "launch_cooperative_grid": True}
        end = 1 + layout.PHASES.value * self.num_hops
        programs = s.fit_grid(relation_kernel, (*variant.values(), self.eid.dtype), (*args, 0, end), options)
        for begin, stop in s.split_phases(0, end, programs):
            relation_kernel[(programs,)](*args, begin, stop, **options)

    def emit(self, sizes: list[int]) -> RelationSample:
        """Copy the batch out of the scratch memory."""
        s, disjoint, num_stages = self.sampler, self.picking.disjoint, self.num_hops * self.num_relations
        edges_at = np.array(sizes[-num_stages - 1 :])
        nodes = np.array(sizes[1 : -num_stages - 1]).reshape(self.num_hops + 2, self.num_types)
        counts = np.diff(edges_at).reshape(self.num_hops, self.num_relations)
        # All outputs share one allocation, aligned to 16 bytes: edge_index and edge of each edge type, nodes, trees.
        total, found = counts.sum(0), nodes[-1]
        lengths = np.concatenate([2 * total, total, found, found * disjoint])
        ends = np.cumsum(lengths + lengths % 2)
        starts = ends - lengths - lengths % 2
        out = torch.empty(int(ends.max(initial=0)), dtype=torch.int64, device=s.device)
        parts = [out[a : a + length] for a, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
        index_at, edge_at, node_at, tree_at = np.split(
            starts, np.cumsum([self.num_relations, self.num_relations, self.num_types])
        )
        # Copy all stages and types in one launch, which looks up the local ids of the sources of edges.
        host = s.host_words(5 * (num_stages + self.num_types))
        places = host.numpy().reshape(-1, 5)
        outputs = (np.cumsum(counts, 0) - counts + at for at in (index_at, index_at + total, edge_at))
        places[:num_stages] = np.stack([edges_at[:-1].reshape(counts.shape), counts, *outputs], -1).reshape(-1, 5)
        places[num_stages:, :4] = np.stack([self.nodes_at, found, node_at, tree_at], -1)
        if most := int(places[:, 1].max(initial=0)):
            on_device = s.scratch("places", host.numel(), torch.int64)
            on_device[: host.numel()].copy_(host, non_blocking=True)
            emit_relations_kernel[(triton.cdiv(most, self.T), len(places))](
                self.state, self.nodes, self.trees, self.src, self.eid, self.col, on_device, num_stages, out,
                DISJOINT=disjoint, T=self.T, num_warps=s.num_warps,
            )  # fmt: skip
        back, first = np.argsort(self.order).tolist(), 2 * self.num_relations
        return (
            parts[first : first + self.num_types],
            parts[first + self.num_types :],
            np.diff(nodes, axis=0).T.tolist(),
            [parts[place].view(2, -1) for place in back],
            [parts[self.num_relations + place] for place in back],
            counts.T[back].tolist(),
        )


def _address(tensor: Tensor | None) -> int:
    """Return the address of a tensor, or 0 for None; the kernel never reads that of an empty tensor."""
    return 0 if tensor is None else tensor.data_ptr()
