"""Neighbor sampling in plain Python: the definition that all backends are tested against."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from lightning_gnn.ops.hashing import GOLDEN, draw, draw_fraction, mix, node_key, tree_key
from lightning_gnn.ops.sample.relation import Labor, PickOptions, Relation, Sampled, TimeWindow, max_draws, stage_key


def pick_uniform(begin: int, degree: int, fanout: int, stream: int, replace: bool) -> list[int]:
    """Pick in-edges of a node: all in CSC order if there are few or the fanout is negative, else by Fisher-Yates."""
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


def pick_weighted(begin: int, weight: Sequence[float], fanout: int, stream: int, replace: bool) -> list[int]:
    """Pick in-edges of a node one by one, with probabilities proportional to the weights of the remaining edges."""
    degree = len(weight)
    if fanout < 0 or (degree <= fanout and not replace):
        return list(range(begin, begin + degree))
    if degree == 0:
        return []
    prefix = list(accumulate(weight))

    def hit(j: int) -> int:
        return min(bisect_right(prefix, draw_fraction(stream, j) * prefix[-1]), degree - 1)

    if replace:
        return [begin + hit(j) for j in range(fanout)]
    picks: list[int] = []
    number = 0
    while len(picks) < fanout and number < max_draws(fanout):
        position = hit(number)
        if position not in picks:
            picks.append(position)
        number += 1
    while len(picks) < fanout:  # the remaining edges have almost no weight
        remaining = [position for position in range(degree) if position not in picks]
        sums = list(accumulate(weight[position] for position in remaining))
        index = bisect_right(sums, draw_fraction(stream, number) * sums[-1])
        picks.append(remaining[min(index, len(remaining) - 1)])
        number += 1
    return [begin + position for position in picks]


def variate(key: int, source: int, parallel: int, labor: Labor) -> int:
    """Return the variate of an edge: that of its source, which all targets share."""
    stream = node_key(key, source)
    if (length := labor.batch_dependency) > 1:
        # The source determines the mini-batches that renew its variate, so that each renews a fraction of the sources.
        period = (labor.batch + node_key(0, source) % length) // length
        stream = mix(stream + (period + 1) * GOLDEN)
    return mix(stream + parallel * GOLDEN) if parallel else stream


def pick_labor(
    begin: int, sources: Sequence[int], parallel: Sequence[int] | None, fanout: int, key: int, labor: Labor
) -> list[int]:
    """Pick the in-edges of a node with the smallest variates, in CSC order; ties are resolved by position."""
    degree = len(sources)
    if fanout < 0 or degree <= fanout:
        return list(range(begin, begin + degree))
    variates = [variate(key, u, 0 if parallel is None else parallel[i], labor) for i, u in enumerate(sources)]
    return [begin + position for position in sorted(sorted(range(degree), key=variates.__getitem__)[:fanout])]


def eligible(
    relation: Relation, begin: int, end: int, tree: int, fanout: int, rule: PickOptions, times: TimeWindow | None
) -> range:
    """Return the eligible in-edges of a node for the time of its tree: a range, because times ascend."""
    if relation.time is None or times is None:
        return range(begin, end)
    edge_times = relation.time[begin:end]
    first = begin + (0 if times.after is None else bisect_right(edge_times, times.after[tree]))
    last = max(first, begin + bisect_right(edge_times, times.until[tree]))
    return range(max(first, last - fanout) if rule.last and fanout >= 0 else first, last)


def sample_reference(
    relations: Sequence[Relation],
    seeds: Sequence[Sequence[int]],
    starts: Sequence[int],
    key: int,
    rule: PickOptions,
    times: TimeWindow | None = None,
) -> Sampled:
    """Sample one mini-batch; see :mod:`lightning_gnn.ops.sample.definition`."""
    # Nodes of each type are numbered in order of discovery, seeds first; disjoint trees do not share nodes.
    node = [list(ids) for ids in seeds]
    tree = [list(range(start, start + len(ids))) for ids, start in zip(seeds, starts, strict=True)]
    local: list[dict[tuple[int, int], int]] = [{} for _ in seeds]
    for ids, trees, local_ids in zip(node, tree, local, strict=True):
        for t, v in enumerate(ids):
            local_ids.setdefault((trees[t] if rule.disjoint else 0, v), t)
    # Edges are collected by relation; `low` is the start of the current hop's frontier.
    row: list[list[int]] = [[] for _ in relations]
    col: list[list[int]] = [[] for _ in relations]
    edge: list[list[int]] = [[] for _ in relations]
    node_counts = [[len(ids)] for ids in node]
    edge_counts: list[list[int]] = [[] for _ in relations]
    low = [0 for _ in node]
    for hop in range(max((len(relation.fanouts) for relation in relations), default=0)):
        high = [len(ids) for ids in node]
        # A relation picks for the frontier of its target type, not for nodes that other relations add in this hop.
        for number, relation in enumerate(relations):
            s, fanout, first_edge = relation.source, relation.fanouts[hop], len(edge[number])
            hop_key = stage_key(key, hop, number, s, rule.labor)
            for t in range(low[relation.target], high[relation.target]):
                v, root = node[relation.target][t], tree[relation.target][t]
                own_key = tree_key(hop_key, rule.first_tree + root) if rule.disjoint else hop_key
                # Pick among the eligible edges: by LABOR, by weight or uniformly.
                own = eligible(relation, relation.indptr[v], relation.indptr[v + 1], root, fanout, rule, times)
                begin, end = own.start, own.stop
                if rule.labor is not None:
                    parallel = None if relation.parallel is None else relation.parallel[begin:end]
                    picks = pick_labor(begin, relation.indices[begin:end], parallel, fanout, own_key, rule.labor)
                elif relation.weight is not None:
                    stream = node_key(own_key, v)
                    picks = pick_weighted(begin, relation.weight[begin:end], fanout, stream, rule.replace)
                else:
                    picks = pick_uniform(begin, end - begin, fanout, node_key(own_key, v), rule.replace)
                edge[number] += picks
                col[number] += [t] * len(picks)
            # Assign local ids to new nodes in the order of the picks.
            for e, t in zip(edge[number][first_edge:], col[number][first_edge:], strict=True):
                root, u = tree[relation.target][t], relation.indices[e]
                identity = (root if rule.disjoint else 0, u)
                if identity not in local[s]:
                    local[s][identity] = len(node[s])
                    node[s].append(u)
                    tree[s].append(root)
                row[number].append(local[s][identity])
            edge_counts[number].append(len(edge[number]) - first_edge)
        # The nodes discovered in this hop are the frontier of the next one.
        low = high
        for counts, ids, before in zip(node_counts, node, high, strict=True):
            counts.append(len(ids) - before)
    ends = [[*pair] for pair in zip(row, col, strict=True)]
    return Sampled(node, tree if rule.disjoint else [[] for _ in tree], node_counts, ends, edge, edge_counts)
