"""Inputs and outputs of the sampling backends: edge types as arrays, pick options, time limits, and samples."""

from typing import Any, NamedTuple

import numpy as np

from lightning_gnn.ops.hashing import Word, layer_key, relation_key

Numbers = Any  # a list for the reference, an array for compiled code, a tensor for a GPU, or None


class Relation(NamedTuple):
    """The edges of one edge type in CSC order, as lists for the reference or NumPy arrays for compiled code."""

    source: int  # index of the source node type among the sorted names
    target: int  # index of the target node type
    fanouts: list[int]  # in-edges to pick per target, for each hop
    indptr: Numbers  # offsets, int64 [num_targets + 1]
    indices: Numbers  # sources, int32 or int64 [num_edges]
    time: Numbers = None  # times of the edges, ascending in each list, int64 [num_edges], or None: all eligible
    coarse_time: Numbers = None  # every sixteenth time, which stays in the cache during searches
    weight: Numbers = None  # positive weights of the edges, float64 [num_edges], or None: uniform
    prefix: Numbers = None  # inclusive prefix sums of the weights of each list, in order, float64 [num_edges]
    parallel: Numbers = None  # LABOR: earlier edges of the same source in the list, int32 [num_edges], or None: all 0


class Labor(NamedTuple):
    """Layer-neighbor sampling (Balin and Catalyurek: Layer-Neighbor Sampling, NeurIPS 2023).

    With ``layer_dependency``, sources have the same variates in all hops. The variate of a source is renewed once in
    ``batch_dependency`` mini-batches; if that is not 1, the key is that of the epoch, and ``batch`` the number in it.
    """

    layer_dependency: bool = False
    batch_dependency: int = 1
    batch: int = 0


class PickOptions(NamedTuple):
    """Options by which edges are picked."""

    replace: bool = False
    disjoint: bool = False  # one tree per seed
    first_tree: int = 0  # position of the first seed in the whole mini-batch
    last: bool = False  # take the newest eligible edges
    labor: Labor | None = None  # pick by variates of the sources, or None: by random draws of the targets


class TimeWindow(NamedTuple):
    """The eligible times ``(after, until]`` of each tree."""

    until: Numbers  # latest eligible time, int64 [trees]
    after: Numbers = None  # exclusive lower bound, int64 [trees], or None for no bound


class Sampled(NamedTuple):
    """A sampled mini-batch, as lists by node type or edge type; the elements are lists, arrays or tensors."""

    node: list[Numbers]  # global ids, int64 [n]
    tree: list[Numbers]  # trees of the nodes, int64 [n] if disjoint, else [0]
    num_sampled_nodes: list[list[int]]  # number of seeds, then of new nodes per hop
    edge_index: list[Numbers]  # local ids of sources and targets, int64 [2, m]
    edge: list[Numbers]  # positions in CSC order, int64 [m]
    num_sampled_edges: list[list[int]]  # edges per hop


class Frontier(NamedTuple):
    """The nodes that pick in-edges of one edge type in a hop, and the options, in the form of compiled code."""

    lists: np.ndarray  # index of each node's list in indptr, int64, up to high: node itself in a complete indptr
    node: np.ndarray  # global ids, int64, up to high
    tree: np.ndarray  # trees of the nodes, int64, if disjoint
    low: int  # first node that picks
    high: int  # one past the last node that picks
    fanout: int  # in-edges to pick per node; below zero means all
    replace: bool  # with replacement
    disjoint: bool  # trees are independent
    key: Word  # key of the hop, uint64
    first_tree: Word  # position of the first seed, uint64
    times: tuple[Any, ...]  # temporal, number of the first node, and from that node on: first eligible in-edge, count


def stage_key(key: int, hop: int, number: int, source: int, labor: Labor | None) -> int:
    """Derive the key of an edge type in one hop from the mini-batch's key (all unsigned 64-bit)."""
    if labor is None:
        return relation_key(key, number)
    return relation_key(key if labor.layer_dependency else layer_key(key, hop), source)


def max_draws(fanout: int) -> int:
    """Return the maximum number of weighted draws, after which the remaining edges are scanned instead."""
    return 8 * fanout + 32
