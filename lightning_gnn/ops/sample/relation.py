"""What every backend is given: the edge types of a graph as arrays, and the rule by which edges are picked."""

from typing import Any, NamedTuple

from lightning_gnn.ops.hashing import layer_key, relation_key


class Relation(NamedTuple):
    """The edges of one type, stored by target; plain sequences for the reference, NumPy arrays for compiled code."""

    source: int  # type of the sources, as a number: the place of its name among the sorted names
    target: int  # type of the targets
    fanouts: list[int]  # in-edges to pick per target, for each hop
    indptr: Any  # offsets, int64 [num_targets + 1]
    indices: Any  # sources, int32 or int64 [num_edges]
    time: Any = None  # times of the edges, ascending in each list, int64 [num_edges], or None: an edge always counts
    coarse_time: Any = None  # every sixteenth of them, which stays in the cache while lists are searched
    weight: Any = None  # weights of the edges, all positive, float64 [num_edges], or None: all alike
    prefix: Any = None  # sums of a list's weights up to and with each edge, added in order, float64 [num_edges]
    parallel: Any = None
    """For LABOR, how many edges before this one in its list have the same source, int32 ``[num_edges]``, or None:
    none has any.
    """


class Labor(NamedTuple):
    """Layer-neighbour sampling (Balin and Catalyurek: Layer-Neighbor Sampling, NeurIPS 2023).

    Args:
        layer_dependency: Sources keep their variates from hop to hop.
        batch_dependency: In how many mini-batches a source's variate is renewed once.
        batch: Number of the mini-batch in its epoch; matters where ``batch_dependency`` is more than 1, and the key is
            then that of the epoch.
    """

    layer_dependency: bool = False
    batch_dependency: int = 1
    batch: int = 0


class Rule(NamedTuple):
    """How edges are picked."""

    replace: bool = False
    disjoint: bool = False  # one tree per seed
    first_tree: int = 0  # position of the first seed in the whole mini-batch
    last: bool = False  # of the edges whose time allows it, only the newest count
    labor: Labor | None = None  # pick by variates of the sources, or None: by draws of the targets


class Times(NamedTuple):
    """From when until when edges count for each tree."""

    until: Any  # the latest time that counts, int64 [trees]
    after: Any = None  # the latest time that no longer counts, int64 [trees], or None: all count that are early enough


class Frontier(NamedTuple):
    """The nodes that pick in-edges of one type in a hop, and how they do, as compiled code takes it."""

    place: Any  # where in indptr the lists are, int64, up to high: node, where it has all
    node: Any  # global ids, int64, up to high
    tree: Any  # their trees, int64, if disjoint
    low: int  # the first node that picks
    high: int  # one past the last
    fanout: int  # in-edges to pick per node; below zero means all
    replace: bool  # with replacement
    disjoint: bool  # trees draw independently
    key: Any  # of the hop, uint64
    first_tree: Any  # position of the first seed, uint64
    times: Any  # which in-edges count (~lightning_gnn.ops.sample.eligible.no_times)


def stage_key(key: int, hop: int, number: int, source: int, labor: Labor | None) -> int:
    """Derive the key with which an edge type picks in one hop from that of the mini-batch (all 64-bit, unsigned)."""
    if labor is None:
        return relation_key(key, number)
    return relation_key(key if labor.layer_dependency else layer_key(key, hop), source)


def most_draws(fanout: int) -> int:
    """Return how often an edge is drawn by weight at most before the rest is picked by going through what is left."""
    return 8 * fanout + 32
