"""Graphs and comparisons for the tests of the Triton sampler."""

import random

import torch

from lightning_gnn.gpu_sampling.shards import BlockCyclicLayout, PeerShards
from lightning_gnn.ops.sample.reference import sample_reference
from lightning_gnn.ops.sample.relation import PickOptions, Relation


def csc(num_nodes, edges):
    """Sort (source, target) pairs by target; return (indptr, indices) as lists."""
    edges = sorted(edges, key=lambda edge: edge[1])
    indptr = [0] * (num_nodes + 1)
    for _, target in edges:
        indptr[target + 1] += 1
    for v in range(num_nodes):
        indptr[v + 1] += indptr[v]
    return indptr, [source for source, _ in edges]


def draw_graph(num_nodes, num_edges, seed, hub=0.3):
    """Draw a graph with duplicate edges, self-loops, isolated nodes and a hub, node 0."""
    rng = random.Random(seed)
    ends = [(rng.randrange(num_nodes), rng.randrange(num_nodes)) for _ in range(num_edges)]
    return csc(num_nodes, [(u, 0) if rng.random() < hub else (0, v) if rng.random() < hub else (u, v) for u, v in ends])


GRAPHS = {
    "path": csc(40, [(v + 1, v) for v in range(39)]),
    "cycle": csc(7, [((v + 1) % 7, v) for v in range(7)]),
    "star in": csc(50, [(v, 0) for v in range(1, 50)]),
    "star out": csc(50, [(0, v) for v in range(1, 50)]),
    "clique": csc(12, [(u, v) for u in range(12) for v in range(12) if u != v]),
    "self-loops": csc(6, [(v, v) for v in range(6) for _ in range(3)]),
    "duplicate edges": csc(8, [(1, 0)] * 40 + [(2, 1)] * 3 + [(0, 2)] * 2),
    "no edges": csc(9, []),
    "random": draw_graph(60, 300, seed=1),
}


class SmallCache(int):
    """Size of an L2 cache that any table of nodes fits into, but no word of a node."""

    def __lt__(self, words):
        return True


SMALL_CACHE = SmallCache(2**40)


def assert_equal_to_reference(
    sampler, graph, seeds, fanouts, key=1, replace=False, disjoint=False, first_tree=0, dtype=torch.int64
):
    """Assert that a Triton sample equals the reference exactly."""
    relation, rule = Relation(0, 0, fanouts, *graph), PickOptions(replace, disjoint, first_tree)
    wanted = [by_type[0] for by_type in sample_reference([relation], [seeds], [0], key, rule)]
    node, edge_index, edge, batch, nodes, edges = sampler.sample(
        torch.tensor(seeds, dtype=dtype), fanouts, key, replace, disjoint, first_tree
    )
    found = [node, torch.empty(0).long() if batch is None else batch, edge_index, edge]
    assert all(ids.dtype == torch.int64 for ids in found)
    assert (batch is None) != disjoint
    node, tree, edge_index, edge = (ids.tolist() for ids in found)
    assert [node, tree, nodes, edge_index, edge, edges] == wanted


def shard_table(table, num_shards, shift, own=0, place=lambda part: part):
    """Shard a table over GPUs with peer access; return the view of GPU ``own``.

    Each GPU gets ``2**shift`` consecutive rows at a time; ``place`` moves its part to a location without further room.
    """
    dealt = BlockCyclicLayout(table.size(0), num_shards, shift)
    parts = []
    for shard in range(num_shards):
        part = table.new_empty((dealt.size, table.size(1)))
        dealt.copy_shard(table, shard, part)
        parts.append(place(part[: sum(rows.numel() for _, rows in dealt.rows_of(shard))].clone()))
    addresses = torch.tensor([part.data_ptr() for part in parts])
    return PeerShards(dealt, parts[own], addresses, parts)
