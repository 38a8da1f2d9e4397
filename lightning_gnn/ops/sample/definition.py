"""Multi-hop neighbor sampling, with one definition for all backends.

*Picks.* Pick j of node v with in-degree d is step j of a forward Fisher-Yates shuffle of its in-edges, driven by a hash
of (key, v, j). Picks are uniform without replacement, and those of a smaller fanout are a prefix of those of a larger
one. If ``d <= fanout``, all in-edges are taken in CSC order. A node is expanded once, in the hop after its discovery.
Nodes are numbered seeds first, then the new nodes of each hop in order of first appearance in its edges. Edges are
ordered by (hop, target's local id, j). A duplicate seed has two local ids with the same picks; edges from it refer to
the first.

*Every hop.* With ``every_hop``, hop h expands all nodes found so far, in the order of their local ids (PGSampler,
algorithm 2 and section IV-B, as in DGL). Its picks are those of a sample of one hop with these nodes as seeds, the
fanout of hop h, and for h > 0 the key of hop h, so that a node draws independently in each hop.

*Disjoint samples* are one independent tree per seed. The position of the seed in the whole mini-batch is mixed into the
key: a node's picks differ between trees, even between two trees of the same seed, and a tree depends only on its seed
and that position, not on the other seeds of the call.

*Heterogeneous graphs.* Edge types are numbered by their sorted triples, and ids count within a node type. The number of
the edge type is mixed into the key, except for the first. In each hop, all edge types, in that order, expand the nodes
of their target type that the previous hop discovered.

*Times.* Each seed is the root of a tree, which excludes edges later than the seed's time. In-edges are sorted by time,
so the eligible in-edges of a node are a range of its list. Picks in that range are as above, or its newest edges.

*Weights.* Every pick is proportional to the weights of the remaining edges: 53 bits of the hash of (key, v, j) select
an edge by the prefix sums of the list's weights; if that edge was picked before, the next draw is tried.

*LABOR* (Balin and Catalyurek: Layer-Neighbor Sampling, NeurIPS 2023). A source has one variate, hashed from (key, hop,
source), for all targets. A target takes the in-edges with the smallest variates, in CSC order, so that targets share
sources and the sample has fewer nodes. Parallel edges have different variates.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.edge_attributes import time_limits
from lightning_gnn.graph.remote import RemoteCSCGraph, RemoteHeteroCSCGraph, RemotePicker
from lightning_gnn.ops.hashing import layer_key
from lightning_gnn.ops.library import runs_triton
from lightning_gnn.ops.sample.numba import sample_relations
from lightning_gnn.ops.sample.reference import sample_reference
from lightning_gnn.ops.sample.relation import Labor, PickOptions, Relation, Sampled, TimeWindow
from lightning_gnn.ops.sample.triton import sample_relations_triton, triton_sampler

BACKENDS = ("numba", "triton", "reference")


class NeighborSample(NamedTuple):
    """One sampled subgraph, of n nodes and m edges over h hops.

    Args:
        node: Global ids, int64 ``[n]``, seeds first.
        edge_index: Local ids of sources and targets, int64 ``[2, m]``.
        edge: Positions of the edges in CSC order, int64 ``[m]``.
        batch: Index of the seed of each node's tree, int64 ``[n]``, if disjoint, else None.
        num_sampled_nodes: Number of seeds, then of new nodes per hop, ``h + 1`` integers.
        num_sampled_edges: Number of edges per hop, ``h`` integers.
    """

    node: Tensor
    edge_index: Tensor
    edge: Tensor
    batch: Tensor | None
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]


def sample_neighbors(
    graph: CSCGraph,
    seeds: Tensor,
    fanouts: Sequence[int],
    key: int = 0,
    *,
    replace: bool = False,
    disjoint: bool = False,
    first_tree: int = 0,
    seed_time: Tensor | None = None,
    time_window: float | None = None,
    temporal_strategy: str = "uniform",
    labor: Labor | None = None,
    every_hop: bool = False,
    backend: str | None = None,
) -> NeighborSample:
    """Sample in-neighbors of the seeds, hop by hop.

    Args:
        graph: The topology, on the CPU, on a GPU, or in pinned memory. Edges with times are sampled by time, in one
            tree per seed; edges with weights by weight.
        seeds: Global ids of the seed nodes, int64 or int32 ``[batch_size]``, duplicates allowed. Checking them
            synchronizes a GPU.
        fanouts: In-edges to pick per node and hop; -1 takes all.
        key: The 64-bit key of this mini-batch, from :func:`~lightning_gnn.ops.batch_key`.
        replace: Sample with replacement.
        disjoint: Sample one independent tree per seed, without shared nodes.
        first_tree: Position of ``seeds[0]`` in the whole mini-batch, if the seeds are a slice of it; for ``disjoint``.
        seed_time: Times of the seeds, ``[batch_size]``, required if edges have times.
        time_window: Only edges in ``(t - time_window, t]`` are eligible for a seed at time t; by default all until t.
        temporal_strategy: ``"uniform"`` picks among the eligible edges, ``"last"`` takes the newest of them.
        labor: Sample by LABOR with these options.
        every_hop: Expand a node in every hop from its first on, with picks of its own in each; for uniform sampling.
        backend: ``"numba"``, ``"triton"`` or ``"reference"``; by default Triton if the graph or seeds are on a GPU.

    Raises:
        TypeError: ``seeds`` is not an integer tensor, or a fanout, the key or ``first_tree`` is not an integer.
        IndexError: A seed is out of range.
        ValueError: A value is out of range, only seeds or only edges have times, or options exclude each other.

    Examples:
        >>> import torch
        >>> from lightning_gnn import CSCGraph, sample_neighbors
        >>> edge_index = torch.tensor([[1, 2, 3, 4, 4], [0, 0, 0, 1, 2]])  # from source to target
        >>> graph = CSCGraph.from_edge_index(edge_index, num_nodes=5)
        >>> sample = sample_neighbors(graph, torch.tensor([0]), fanouts=[-1, 1])
        >>> sample.node  # the seed, then the new nodes of each hop
        tensor([0, 1, 2, 3, 4])
        >>> sample.edge_index  # local ids
        tensor([[1, 2, 3, 4, 4],
                [0, 0, 0, 1, 2]])
        >>> sample.num_sampled_nodes, sample.num_sampled_edges
        ([1, 3, 1], [3, 2])
    """
    # Check the arguments against the graph.
    fanouts = check_fanouts(fanouts)
    key = check_key(key)
    seeds = check_seeds(seeds, graph.num_nodes)
    rule = check_rule(
        replace, disjoint or graph.time is not None, first_tree, temporal_strategy, labor, graph.weight is not None
    )
    check_backend(backend)
    if every_hop and (rule.disjoint or labor is not None or graph.weight is not None or get_remote_picker(graph)):
        raise ValueError("every_hop=True is for uniform sampling of a local graph, without disjoint trees")
    times = time_windows([graph], [seeds], seed_time if seed_time is None else [seed_time], time_window)
    # Temporal, weighted, LABOR and partitioned sampling use the general sampler for relations.
    is_plain = times is None and labor is None and graph.weight is None and get_remote_picker(graph) is None
    if not is_plain:
        check_device(backend, [graph])
    # Without these options, Triton has a sampler for homogeneous graphs.
    device = seeds.device if graph.indptr.is_cpu else graph.indptr.device
    if is_plain and (backend == "triton" or (backend != "reference" and device.type != "cpu")):
        options = {"every_hop": True} if every_hop else {}
        sampler = triton_sampler(graph.indptr, graph.indices, None if backend == "triton" else device, **options)
        seeds = seeds if backend == "triton" else seeds.to(device)
        return NeighborSample(*sampler.sample(seeds, fanouts, key, replace, disjoint, rule.first_tree))
    # In all other cases the graph is sampled as a single relation.
    if every_hop:
        return _sample_every_hop(graph, seeds, fanouts, key, rule, backend)
    relation = describe(graph, 0, 0, fanouts, labor is not None)
    out = run(graph, [relation], [graph.num_nodes], [seeds], [0], key, rule, times, backend)
    (node,), (tree,), (node_counts,), (edge_index,), (edge,), (edge_counts,) = out
    return NeighborSample(node, edge_index, edge, tree if rule.disjoint else None, node_counts, edge_counts)


def _sample_every_hop(
    graph: CSCGraph, seeds: Tensor, fanouts: list[int], key: int, rule: PickOptions, backend: str | None
) -> NeighborSample:
    """Sample hop by hop on the CPU: the seeds of a hop are all nodes found so far."""
    node, node_counts = seeds.to(torch.int64), [seeds.numel()]
    ends, edges = [torch.empty(2, 0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for hop, fanout in enumerate(fanouts):
        relation = describe(graph, 0, 0, [fanout], labor=False)
        hop_key = layer_key(key, hop) if hop else key
        out = run(graph, [relation], [graph.num_nodes], [node], [0], hop_key, rule, None, backend)
        node_counts.append(out.node[0].numel() - node.numel())
        node = out.node[0]
        ends.append(out.edge_index[0])
        edges.append(out.edge[0])
    edge_counts = [part.numel() for part in edges[1:]]
    return NeighborSample(node, torch.cat(ends, 1), torch.cat(edges), None, node_counts, edge_counts)


def describe(graph: CSCGraph, source: int, target: int, fanouts: list[int], labor: bool) -> Relation:
    """Return the edges of one edge type in the form of the backends, with tensors as arrays."""
    names = ["indptr", "indices", "time", "weight", "prefix"]
    names += ["parallel"] * labor + ["coarse_time"] * (graph.indptr.device.type == "cpu")
    return Relation(source, target, fanouts, **{name: getattr(graph, name) for name in names})


def run(
    graph: object,
    relations: Sequence[Relation],
    num_nodes: Sequence[int],
    seeds: Sequence[Tensor],
    starts: Sequence[int],
    key: int,
    rule: PickOptions,
    times: TimeWindow | None,
    backend: str | None,
) -> Sampled:
    """Sample ``graph`` with the given backend or that of its device; the other arguments are as for ``numba``."""
    # A partitioned graph fetches picks from other ranks, which only the CPU backend supports.
    remote_picker = get_remote_picker(graph)
    if remote_picker is not None and backend not in (None, "numba"):
        raise ValueError(f"backend={backend!r} cannot sample a partitioned graph; use 'numba' or leave the backend out")
    # The GPU backend reads the tensors of the relations directly.
    if backend == "triton" or any(relation.indptr.device.type != "cpu" for relation in relations):
        return Sampled(*sample_relations_triton(graph, relations, num_nodes, seeds, starts, key, rule, times))
    convert: Callable[[Tensor], Any] = Tensor.tolist if backend == "reference" else Tensor.numpy
    converted, ids = [_convert_arrays(relation, convert) for relation in relations], [convert(part) for part in seeds]
    if backend == "reference":
        # The reference uses Python lists, and is deliberately simple and slow.
        limits = None if times is None else TimeWindow(*(None if limit is None else limit.tolist() for limit in times))
        sampled = sample_reference(converted, ids, starts, key, rule, limits)
    else:
        # Numba uses NumPy arrays that share memory with the tensors.
        fetch = None if remote_picker is None else remote_picker(relations, key, rule, times)
        sampled = sample_relations(converted, num_nodes, ids, starts, key, rule, times, fetch)
    tensors: dict[str, Any] = {}
    for name in ("node", "tree", "edge_index", "edge"):
        tensors[name] = [torch.as_tensor(array, dtype=torch.int64) for array in getattr(sampled, name)]
    return sampled._replace(**tensors)


def get_remote_picker(graph: object) -> RemotePicker | None:
    """Return the remote picker of a partitioned graph, or None for a local graph."""
    return graph.remote_picker if isinstance(graph, RemoteCSCGraph | RemoteHeteroCSCGraph) else None


def _convert_arrays(relation: Relation, convert: Callable[[Tensor], Any]) -> Relation:
    arrays = {name: value for name, value in relation._asdict().items() if isinstance(value, Tensor)}
    return relation._replace(**{name: convert(array) for name, array in arrays.items()})


def time_windows(
    graphs: Sequence[CSCGraph], seeds: Sequence[Tensor], seed_time: Sequence[Tensor] | None, window: float | None
) -> TimeWindow | None:
    """Return the time limits of each seed, in the order of the trees, or None if edges have no times."""
    timed = [graph for graph in graphs if graph.time is not None]
    if not timed:
        if seed_time is not None or window is not None:
            raise ValueError(
                "seed_time or time_window is given, but edges have no times: give time_attr, or see CSCGraph.with_time"
            )
        return None
    if seed_time is None:
        raise ValueError("edges have times, so seeds need times too: give seed_time")
    if len({graph.floating_time for graph in timed}) > 1:
        raise ValueError("edge types mix floating and integer times: see CSCGraph.with_time(floating=)")
    limits = []
    for ids, time in zip(seeds, seed_time, strict=True):
        limits.append(time_limits(time, window, timed[0].floating_time))
        if limits[-1][0].numel() != ids.numel():
            raise ValueError(f"seed_time has {limits[-1][0].numel()} times for {ids.numel()} seeds")
    empty = np.zeros(0, np.int64)
    until = np.concatenate([empty, *(latest.numpy() for latest, _ in limits)])
    after = [excluded.numpy() for _, excluded in limits if excluded is not None]
    return TimeWindow(until, np.concatenate(after) if after else None)


def check_rule(
    replace: bool, disjoint: bool, first_tree: int, temporal_strategy: str, labor: Labor | None, weighted: bool
) -> PickOptions:
    """Check and return the options by which edges are picked."""
    check_flags(replace=replace, disjoint=disjoint)
    first_tree = check_integer("first_tree", first_tree, 0, 2**62)
    if temporal_strategy not in ("uniform", "last"):
        raise ValueError(f"unknown temporal_strategy {temporal_strategy!r}; choose one of uniform, last")
    if labor is not None:
        wrong = {"replace": replace, "edge weights": weighted, "temporal_strategy='last'": temporal_strategy == "last"}
        for option in filter(wrong.get, wrong):
            raise ValueError(f"LABOR does not support {option}: it picks the edges with the smallest variates")
        check_flags(layer_dependency=labor.layer_dependency)
        check_integer("batch_dependency", labor.batch_dependency, 1, 2**31 - 1)
        check_integer("batch", labor.batch, 0, 2**62)
    return PickOptions(replace, disjoint, first_tree, temporal_strategy == "last", labor)


def check_device(backend: str | None, graphs: Sequence[CSCGraph]) -> None:
    """Raise a ValueError unless the backend supports types, times, weights and LABOR on the device of the graph."""
    devices = {graph.indptr.device for graph in graphs}
    if len(devices) > 1:
        raise ValueError(f"edge types are on different devices, {', '.join(sorted(map(str, devices)))}: use graph.to()")
    for device in devices:
        if device.type != "cpu" and (backend in ("numba", "reference") or not runs_triton(device)):
            raise ValueError(f"backend {backend or 'triton'} does not run on {device}: leave the graph on the CPU")


def check_fanouts(fanouts: Sequence[int]) -> list[int]:
    """Check the fanouts and return them as a list of integers."""
    if isinstance(fanouts, dict):
        raise TypeError(
            f"num_neighbors by edge type, {fanouts!r}, needs a heterogeneous graph: give one list, a fanout per hop"
        )
    if isinstance(fanouts, (str, bytes, set)) or not hasattr(fanouts, "__iter__") or getattr(fanouts, "ndim", 1) != 1:
        raise TypeError(f"num_neighbors must be a list of integers, one per hop, such as [15, 10], but is {fanouts!r}")
    out = [item.item() if hasattr(item, "item") else item for item in fanouts]  # NumPy or torch scalars
    for fanout in out:
        if isinstance(fanout, bool) or not isinstance(fanout, int):
            raise TypeError(f"num_neighbors holds {fanout!r}, but a fanout is an integer")
        if fanout < -1 or fanout > 2**31 - 1:
            raise ValueError(f"num_neighbors holds {fanout}, but a fanout is -1 (all neighbors), 0 or a positive int32")
    if not out:
        raise ValueError("num_neighbors is empty; give one fanout per hop, such as [15, 10]")
    return out


def check_seeds(seeds: Tensor, num_nodes: int) -> Tensor:
    """Check seeds, int64 or int32 ``[batch_size]``, and return them as contiguous int64."""
    if not isinstance(seeds, Tensor) or seeds.dtype not in (torch.int64, torch.int32):
        got = seeds.dtype if isinstance(seeds, Tensor) else type(seeds).__name__
        is_mask = getattr(seeds, "dtype", None) in (torch.bool, np.bool_)
        fix = "give torch.as_tensor(mask).nonzero().view(-1)" if is_mask else "give torch.as_tensor(seeds).long()"
        raise TypeError(f"seeds must be an int64 tensor of node ids, but are {got}: {fix}")
    if seeds.dim() != 1:
        raise ValueError(f"seeds must have one dimension, but have the shape {list(seeds.shape)}")
    if seeds.numel():
        low, high = (int(value) for value in torch.aminmax(seeds))
        if low < 0 or high >= num_nodes:
            raise IndexError(f"seeds hold node {low if low < 0 else high}, but the graph has {num_nodes} nodes")
    return seeds.to(torch.int64).contiguous()


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """Convert a Python, NumPy or torch integer to a Python int and check its range; ``name`` is for the message."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, but is {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}, but must lie between {low} and {high}")
    return number


def check_key(key: int) -> int:
    """Check that the key of a mini-batch is a signed 64-bit integer, and return it as a Python int."""
    return check_integer("key (see batch_key)", key, -(2**63), 2**63 - 1)


def check_flags(**flags: object) -> None:
    """Raise a TypeError unless all flags are booleans; a string such as ``"no"`` would be truthy."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False, but is {value!r}")


def check_backend(backend: str | None) -> None:
    """Raise a ValueError unless ``backend`` is one of ``BACKENDS``, or None."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"unknown sampling backend {backend!r}; choose one of {', '.join(BACKENDS)}")
