"""Neighbour sampling in plain Python: the definition that every other backend is tested against."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gnn.ops.hashing import draw, node_key, tree_key


def pick_edges(begin: int, degree: int, fanout: int, stream: int, replace: bool) -> list[int]:
    """Pick in-edges of one node: all in CSC order if the fanout allows, else the first picks of a Fisher-Yates shuffle.

    Args:
        begin: Position of the node's first in-edge.
        degree: Its number of in-edges.
        fanout: How many to pick; below zero means all.
        stream: The node's random stream.
        replace: Draw with replacement.
    """
    if fanout < 0 or (degree <= fanout and not replace):
        return list(range(begin, begin + degree))
    if degree == 0:
        return []
    if replace:
        return [begin + draw(stream, j, degree) for j in range(fanout)]
    order = list(range(degree))
    for j in range(fanout):
        r = j + draw(stream, j, degree - j)
        order[j], order[r] = order[r], order[j]
    return [begin + position for position in order[:fanout]]


def sample_reference(
    indptr: Sequence[int],
    indices: Sequence[int],
    seeds: Sequence[int],
    fanouts: Sequence[int],
    key: int,
    replace: bool = False,
    disjoint: bool = False,
    first_tree: int = 0,
) -> tuple[list[int], list[int], list[int], list[int], list[int] | None, list[int], list[int]]:
    """Sample one mini-batch; see :func:`lightning_gnn.ops.sample_neighbors`.

    Returns:
        ``node``, ``row``, ``col``, ``edge``, ``tree`` (None unless disjoint), nodes per hop, edges per hop.
    """
    node, tree = list(seeds), list(range(len(seeds)))
    local: dict[tuple[int, int], int] = {}
    for t, v in enumerate(node):
        local.setdefault((tree[t] if disjoint else 0, v), t)
    row: list[int] = []
    col: list[int] = []
    edge: list[int] = []
    node_counts, edge_counts = [len(node)], []
    low = 0
    for fanout in fanouts:
        high, first_edge = len(node), len(edge)
        for t in range(low, high):
            begin, end = indptr[node[t]], indptr[node[t] + 1]
            own_key = tree_key(key, first_tree + tree[t]) if disjoint else key
            for e in pick_edges(begin, end - begin, fanout, node_key(own_key, node[t]), replace):
                edge.append(e)
                col.append(t)
        for e, t in zip(edge[first_edge:], col[first_edge:], strict=True):
            root = tree[t] if disjoint else 0
            if (root, indices[e]) not in local:
                local[root, indices[e]] = len(node)
                node.append(indices[e])
                tree.append(root)
            row.append(local[root, indices[e]])
        low = high
        node_counts.append(len(node) - high)
        edge_counts.append(len(edge) - first_edge)
    return node, row, col, edge, tree if disjoint else None, node_counts, edge_counts
