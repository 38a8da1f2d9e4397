"""What every backend is given: the edge types of a graph as arrays, and the rule by which edges are picked."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_gnn.ops.hashing import layer_key, relation_key


class Relation(NamedTuple):
    """The edges of one type, stored by target; plain sequences for the reference, NumPy arrays for compiled code.

    Args:
        source: Type of the sources, as a number: the place of its name among the sorted names.
        target: Type of the targets.
        fanouts: In-edges to pick per target, for each hop.
        indptr: Offsets, int64 ``[num_targets + 1]``.
        indices: Sources, int32 or int64 ``[num_edges]``.
        time: Times of the edges, ascending in each list, int64 ``[num_edges]``, or None: an edge always counts.
        coarse_time: Every sixteenth of them, which stays in the cache while lists are searched.
        weight: Weights of the edges, all positive, float64 ``[num_edges]``, or None: all alike.
        prefix: Sums of a list's weights up to and with each edge, added in order, float64 ``[num_edges]``.
        parallel: For LABOR, how many edges before this one in its list have the same source, int32 ``[num_edges]``, or
            None: none has any.
    """

    source: int
    target: int
    fanouts: list[int]
    indptr: Any
    indices: Any
    time: Any = None
    coarse_time: Any = None
    weight: Any = None
    prefix: Any = None
    parallel: Any = None


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
    """How edges are picked.

    Args:
        disjoint: One tree per seed.
        first_tree: Position of the first seed in the whole mini-batch.
        last: Of the edges whose time allows it, only the newest count.
        labor: Pick by variates of the sources, or None: by draws of the targets.
    """

    replace: bool = False
    disjoint: bool = False
    first_tree: int = 0
    last: bool = False
    labor: Labor | None = None


class Times(NamedTuple):
    """From when until when edges count for each tree.

    Args:
        until: The latest time that counts, int64 ``[trees]``.
        after: The latest time that no longer counts, int64 ``[trees]``, or None: all count that are early enough.
    """

    until: Any
    after: Any = None


class Frontier(NamedTuple):
    """The nodes that pick in-edges of one type in a hop, and how they do, as compiled code takes it.

    Args:
        place: Where in ``indptr`` the lists are, int64, up to ``high``: ``node``, where it has all.
        node: Global ids, int64, up to ``high``.
        tree: Their trees, int64, if disjoint.
        low: The first node that picks.
        high: One past the last.
        fanout: In-edges to pick per node; below zero means all.
        replace: With replacement.
        disjoint: Trees draw independently.
        key: Of the hop, uint64.
        first_tree: Position of the first seed, uint64.
        times: Which in-edges count (:func:`~lightning_gnn.ops.sample.eligible.no_times`).
    """

    place: Any
    node: Any
    tree: Any
    low: int
    high: int
    fanout: int
    replace: bool
    disjoint: bool
    key: Any
    first_tree: Any
    times: Any


def stage_key(key: int, hop: int, number: int, source: int, labor: Labor | None) -> int:
    """Derive the key with which an edge type picks in one hop from that of the mini-batch (all 64-bit, unsigned).

    Args:
        hop: The hop.
    """
    if labor is None:
        return relation_key(key, number)
    return relation_key(key if labor.layer_dependency else layer_key(key, hop), source)


def most_draws(fanout: int) -> int:
    """Return how often an edge is drawn by weight at most before the rest is picked by going through what is left."""
    return 8 * fanout + 32
