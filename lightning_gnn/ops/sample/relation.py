"""What every backend is given: the edge types of a graph as arrays, and the rule by which edges are picked."""

from typing import Any, NamedTuple

import numpy as np

from lightning_gnn.ops.hashing import Word, layer_key, relation_key

Numbers = Any  # a list for the reference, an array for compiled code, a tensor for a GPU, or None


class Relation(NamedTuple):
    """The edges of one type, stored by target; plain sequences for the reference, NumPy arrays for compiled code."""

    source: int  # type of the sources, as a number: the place of its name among the sorted names
    target: int  # type of the targets
    fanouts: list[int]  # in-edges to pick per target, for each hop
    indptr: Numbers  # offsets, int64 [num_targets + 1]
    indices: Numbers  # sources, int32 or int64 [num_edges]
    time: Numbers = None  # times of the edges, ascending in each list, int64 [num_edges], or None: all count
    coarse_time: Numbers = None  # every sixteenth of them, which stays in the cache while lists are searched
    weight: Numbers = None  # weights of the edges, all positive, float64 [num_edges], or None: all the same
    prefix: Numbers = None  # sums of a list's weights up to and with each edge, added in order, float64 [num_edges]
    parallel: Numbers = None  # for LABOR, edges before with the same source, int32 [num_edges], or None: none has any


class Labor(NamedTuple):
    """Layer-neighbor sampling (Balin and Catalyurek: Layer-Neighbor Sampling, NeurIPS 2023).

    With ``layer_dependency`` sources keep their variates from hop to hop. In ``batch_dependency`` mini-batches a
    source's variate is renewed once; if that is not 1, the key is that of the epoch, and ``batch`` the number in it.
    """

    layer_dependency: bool = False
    batch_dependency: int = 1
    batch: int = 0


class PickOptions(NamedTuple):
    """How edges are picked."""

    replace: bool = False
    disjoint: bool = False  # one tree per seed
    first_tree: int = 0  # position of the first seed in the whole mini-batch
    last: bool = False  # of the edges whose time allows it, only the newest count
    labor: Labor | None = None  # pick by variates of the sources, or None: by draws of the targets


class TimeWindow(NamedTuple):
    """From when until when edges count for each tree."""

    until: Numbers  # the latest time that counts, int64 [trees]
    after: Numbers = None  # the latest time that no longer counts, int64 [trees], or None: all early ones count


class Sampled(NamedTuple):
    """A mini-batch, by number of the node type, then by number of the edge type, in lists, arrays or tensors."""

    node: list[Numbers]  # ids, int64 [n]
    tree: list[Numbers]  # trees, int64 [n] if disjoint, else [0]
    num_sampled_nodes: list[list[int]]  # seeds, then new nodes per hop
    edge_index: list[Numbers]  # local ids of sources and targets, int64 [2, m]
    edge: list[Numbers]  # positions, int64 [m]
    num_sampled_edges: list[list[int]]  # per hop


class Frontier(NamedTuple):
    """The nodes that pick in-edges of one type in a hop, and how they do, as compiled code takes it."""

    place: np.ndarray  # where in indptr the lists are, int64, up to high: node, where it has all
    node: np.ndarray  # global ids, int64, up to high
    tree: np.ndarray  # their trees, int64, if disjoint
    low: int  # the first node that picks
    high: int  # one past the last
    fanout: int  # in-edges to pick per node; below zero means all
    replace: bool  # with replacement
    disjoint: bool  # trees draw independently
    key: Word  # of the hop, uint64
    first_tree: Word  # position of the first seed, uint64
    times: tuple[Any, ...]  # whether they matter; of nodes from some number on, first in-edge that counts, how many do


def stage_key(key: int, hop: int, number: int, source: int, labor: Labor | None) -> int:
    """Derive the key with which an edge type picks in one hop from that of the mini-batch (all 64-bit, unsigned)."""
    if labor is None:
        return relation_key(key, number)
    return relation_key(key if labor.layer_dependency else layer_key(key, hop), source)


def most_draws(fanout: int) -> int:
    """Return how often an edge is drawn by weight at most before the rest is picked by going through what is left."""
    return 8 * fanout + 32
