"""Multi-hop neighbor sampling, defined once for every backend.

Pick j of node v with in-degree d is the j-th step of a forward Fisher-Yates shuffle of its in-edges, driven by a hash
of (key, v, j): uniform without replacement, and the picks for a smaller fanout are the first of those for a larger one.
If ``d <= fanout`` all in-edges are taken in CSC order. A node is expanded once, at the lowest hop at which it is found.
Nodes are numbered seeds first, then the new nodes of each hop in order of first appearance over that hop's edges; edges
are ordered by (hop, target's local id, j). A seed given twice keeps both places, both with the same picks; edges from
it refer to the first place. Disjoint samples are one tree per seed. Disjoint trees are independent: the position of the
seed in the whole mini-batch is mixed into the key, so a node's picks differ from tree to tree, also between two trees
of one seed, and a tree depends on its seed and that position alone, not on which other seeds are sampled with it.

*Types.* Edge types are numbered by their sorted triples, ids are those within a node's type, and the number of the edge
type is mixed into the key, but for the first one. In each hop each edge type, in that order, expands the nodes of its
target type that the hop before has found.

*Times.* Each seed is the root of a tree, which sees no edge that is later than the seed's time. In-edges are sorted by
time, so what a node may pick of is a range of its list; it picks in it as above, or takes the newest.

*Weights.* Each pick is in proportion to the weight among the edges that are left: 53 bits of the hash of (key, v, j)
fall on an edge by the sums of the list's weights; an edge that is picked already is drawn again.

*LABOR* (Balin and Catalyurek: Layer-Neighbor Sampling, NeurIPS 2023). A source has a variate by (key, hop, source), the
same for all targets, and a target takes the in-edges with the smallest, in CSC order: targets share their sources, so
there are fewer nodes. Parallel edges have variates of their own.
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
from lightning_gnn.ops.sample.numba import sample_relations
from lightning_gnn.ops.sample.reference import sample_reference
from lightning_gnn.ops.sample.relation import Labor, PickOptions, Relation, Sampled, TimeWindow
from lightning_gnn.ops.sample.triton import runs_on, sample_relations_triton, triton_sampler
from lightning_gnn.runtime.messages import removed

BACKENDS = ("numba", "triton", "reference")


class NeighborSample(NamedTuple):
    """One sampled subgraph, of n nodes and m edges over h hops.

    Args:
        node: Global ids, int64 ``[n]``; the seeds come first.
        edge_index: Local ids of sources and targets, int64 ``[2, m]``.
        edge: Positions of the edges in CSC order, int64 ``[m]``.
        batch: The seed whose tree a node belongs to, int64 ``[n]``, if disjoint, else None.
        num_sampled_nodes: Seeds, then new nodes per hop, ``h + 1`` numbers.
        num_sampled_edges: Edges per hop, ``h`` numbers.
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
    backend: str | None = None,
) -> NeighborSample:
    """Sample in-neighbors of the seeds, hop by hop.

    Args:
        graph: The topology, on the CPU, on a GPU, or in pinned memory. Edges with times are sampled by time, into one
            tree per seed; edges with weights by weight.
        seeds: Global ids, int64 or int32 ``[batch_size]``, also several times; checking them waits for a GPU.
        fanouts: In-edges to pick per node and hop; -1 takes all.
        key: What :func:`~lightning_gnn.ops.batch_key` made for this mini-batch, 64-bit.
        replace: Draw with replacement.
        disjoint: One tree per seed, which shares no node with the others and is drawn independently of them.
        first_tree: Position of ``seeds[0]`` in the whole mini-batch, if they are a part of one; for ``disjoint`` alone.
        seed_time: Times of the seeds, ``[batch_size]``, if edges have times.
        time_window: Edges count for a seed of the time t in ``(t - time_window, t]``; by default all until t.
        temporal_strategy: ``"uniform"``: pick among the edges that count; ``"last"``: take the newest of them.
        labor: Sample by variates of the sources.
        backend: ``"numba"``, ``"triton"`` or ``"reference"``; by default Triton if the graph or the seeds are on a GPU.

    Raises:
        TypeError: Seeds that are no integer tensor, or fanouts, a key or a position that are no integers.
        IndexError, ValueError: A seed or a value out of range, times of seeds or edges alone, or options that clash.

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
    times = time_windows([graph], [seeds], seed_time if seed_time is None else [seed_time], time_window)
    # Temporal, weighted, LABOR and partitioned sampling are done by the general sampler for relations.
    plain = times is None and labor is None and graph.weight is None and picker_of(graph) is None
    if not plain:
        check_place(backend, [graph])
    # Without these options, Triton has a sampler for graphs of one type.
    device = seeds.device if graph.indptr.is_cpu else graph.indptr.device
    if plain and (backend == "triton" or (backend != "reference" and device.type != "cpu")):
        sampler = triton_sampler(graph.indptr, graph.indices, None if backend == "triton" else device)
        given = seeds if backend == "triton" else seeds.to(device)
        return NeighborSample(*sampler.sample(given, fanouts, key, replace, disjoint, rule.first_tree))
    # In all other cases the graph is sampled as one relation of one type.
    relation = describe(graph, 0, 0, fanouts, labor is not None)
    out = run(graph, [relation], [graph.num_nodes], [seeds], [0], key, rule, times, backend)
    (node,), (tree,), (node_counts,), (edge_index,), (edge,), (edge_counts,) = out
    return NeighborSample(node, edge_index, edge, tree if rule.disjoint else None, node_counts, edge_counts)


def describe(graph: CSCGraph, source: int, target: int, fanouts: list[int], labor: bool) -> Relation:
    """Return the edges of one type as backends read them, the arrays as tensors still."""
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
    """Sample by the backend, or by that of the device; ``graph`` is whose edges they are, the rest as for ``numba``."""
    # A partitioned graph brings its picks from other ranks, which only the CPU backend can do.
    remote_picker = picker_of(graph)
    if remote_picker is not None and backend not in (None, "numba"):
        raise ValueError(f"backend={backend!r} reads lists that are here, but those of a partitioned graph are not")
    # The GPU backend reads the tensors of the relations directly.
    if backend == "triton" or any(relation.indptr.device.type != "cpu" for relation in relations):
        return Sampled(*sample_relations_triton(graph, relations, num_nodes, seeds, starts, key, rule, times))
    convert: Callable[[Tensor], Any] = Tensor.tolist if backend == "reference" else Tensor.numpy
    plain, ids = [_converted(relation, convert) for relation in relations], [convert(part) for part in seeds]
    if backend == "reference":
        # It works on lists, and is slow and plain on purpose.
        limits = None if times is None else TimeWindow(*(None if part is None else part.tolist() for part in times))
        made = sample_reference(plain, ids, starts, key, rule, limits)
    else:
        # It works on NumPy arrays that share memory with the tensors.
        fetch = None if remote_picker is None else remote_picker(relations, key, rule, times)
        made = sample_relations(plain, num_nodes, ids, starts, key, rule, times, fetch)
    tensors: dict[str, Any] = {}
    for name in ("node", "tree", "edge_index", "edge"):
        tensors[name] = [torch.as_tensor(part, dtype=torch.int64) for part in getattr(made, name)]
    return made._replace(**tensors)


def picker_of(graph: object) -> RemotePicker | None:
    """Return whom to ask for picks, where the lists of a graph lie elsewhere."""
    return graph.remote_picker if isinstance(graph, RemoteCSCGraph | RemoteHeteroCSCGraph) else None


def _converted(relation: Relation, convert: Callable[[Tensor], Any]) -> Relation:
    arrays = {name: value for name, value in relation._asdict().items() if isinstance(value, Tensor)}
    return relation._replace(**{name: convert(array) for name, array in arrays.items()})


def time_windows(
    graphs: Sequence[CSCGraph], seeds: Sequence[Tensor], seed_time: Sequence[Tensor] | None, window: float | None
) -> TimeWindow | None:
    """Return what counts for each seed, in the order of the trees, or None if edges have no times."""
    timed = [graph for graph in graphs if graph.time is not None]
    if not timed:
        if seed_time is not None or window is not None:
            raise ValueError(
                "there are times of seeds, or a time_window, but edges have no times: give time_attr, or see "
                "CSCGraph.with_time"
            )
        return None
    if seed_time is None:
        raise ValueError("edges have times, so seeds need times too: give seed_time")
    if len({graph.floating_time for graph in timed}) > 1:
        raise ValueError("times of some edge types are floating, of others integers: see CSCGraph.with_time(floating=)")
    limits = []
    for ids, time in zip(seeds, seed_time, strict=True):
        limits.append(time_limits(time, window, timed[0].floating_time))
        if limits[-1][0].numel() != ids.numel():
            raise ValueError(f"there are {limits[-1][0].numel()} times of seeds, but {ids.numel()} seeds")
    none = np.zeros(0, np.int64)
    until = np.concatenate([none, *(part.numpy() for part, _ in limits)])
    after = [part.numpy() for _, part in limits if part is not None]
    return TimeWindow(until, np.concatenate(after) if after else None)


def check_rule(
    replace: bool, disjoint: bool, first_tree: int, temporal_strategy: str, labor: Labor | None, weighted: bool
) -> PickOptions:
    """Return how edges are picked."""
    check_flags(replace=replace, disjoint=disjoint)
    first_tree = check_integer("first_tree", first_tree, 0, 2**62)
    if temporal_strategy not in ("uniform", "last"):
        raise ValueError(f"unknown temporal_strategy {temporal_strategy!r}; choose one of uniform, last")
    if labor is not None:
        wrong = {"with replacement": replace, "by weight": weighted, "of the newest edges": temporal_strategy == "last"}
        for what in filter(wrong.get, wrong):
            raise ValueError(f"there is no LABOR sampling {what}: it takes the smallest variates of the sources")
        check_flags(layer_dependency=labor.layer_dependency)
        check_integer("batch_dependency", labor.batch_dependency, 1, 2**31 - 1)
        check_integer("batch", labor.batch, 0, 2**62)
    return PickOptions(replace, disjoint, first_tree, temporal_strategy == "last", labor)


def check_place(backend: str | None, graphs: Sequence[CSCGraph]) -> None:
    """Raise a ValueError unless the backend samples types, times, weights and LABOR where the graph is."""
    places = {graph.indptr.device for graph in graphs}
    if len(places) > 1:
        raise ValueError(f"edges of different types are on {' and '.join(sorted(map(str, places)))}: use graph.to()")
    for place in places:
        if place.type != "cpu" and (backend in ("numba", "reference") or not runs_on(place)):
            raise ValueError(f"the graph is on {place}, where {backend or 'triton'} does not run: leave it on the CPU")


def check_fanouts(fanouts: Sequence[int]) -> list[int]:
    """Return the fanouts as a list of integers."""
    if isinstance(fanouts, dict):
        raise TypeError(
            f"num_neighbors by edge type, {fanouts!r}, needs a heterogeneous graph: give one list, a fanout per hop"
        )
    if isinstance(fanouts, (str, bytes, set)) or not hasattr(fanouts, "__iter__") or getattr(fanouts, "ndim", 1) != 1:
        raise TypeError(f"num_neighbors must be a list of integers, one per hop, such as [15, 10], but is {fanouts!r}")
    out = [item.item() if hasattr(item, "item") else item for item in fanouts]  # of NumPy or torch
    for fanout in out:
        if isinstance(fanout, bool) or not isinstance(fanout, int):
            raise TypeError(f"num_neighbors holds {fanout!r}, but a fanout is an integer")
        if fanout < -1 or fanout > 2**31 - 1:
            raise ValueError(f"num_neighbors holds {fanout}, but a fanout is -1 (all neighbors), 0 or a positive int32")
    if not out:
        raise ValueError("num_neighbors is empty; give one fanout per hop, such as [15, 10]")
    return out


def check_seeds(seeds: Tensor, num_nodes: int) -> Tensor:
    """Return the seeds as contiguous int64; ``seeds``: int64 or int32 ``[batch_size]``."""
    if not isinstance(seeds, Tensor) or seeds.dtype not in (torch.int64, torch.int32):
        kind = seeds.dtype if isinstance(seeds, Tensor) else type(seeds).__name__
        mask = getattr(seeds, "dtype", None) in (torch.bool, np.bool_)
        fix = "give torch.as_tensor(mask).nonzero().view(-1)" if mask else "give torch.as_tensor(seeds).long()"
        raise TypeError(f"seeds must be an int64 tensor of node ids, but are {kind}: {fix}")
    if seeds.dim() != 1:
        raise ValueError(f"seeds must have one dimension, but have the shape {list(seeds.shape)}")
    if seeds.numel():
        low, high = (int(value) for value in torch.aminmax(seeds))
        if low < 0 or high >= num_nodes:
            raise IndexError(f"seeds hold node {low if low < 0 else high}, but the graph has {num_nodes} nodes")
    return seeds.to(torch.int64).contiguous()


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """Return an integer of Python, NumPy or torch as one of Python; ``name`` is for the message."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, but is {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}, but must lie between {low} and {high}")
    return number


def check_key(key: int) -> int:
    """Return the key of a mini-batch if it is a signed 64-bit integer, as for :func:`check_integer`."""
    return check_integer("key (see batch_key)", key, -(2**63), 2**63 - 1)


def check_flags(**flags: object) -> None:
    """Raise a TypeError unless all are booleans; a string such as ``"no"`` would count as true."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False, but is {value!r}")


def check_backend(backend: str | None) -> None:
    """Raise a ValueError unless this is one of ``BACKENDS``, or None."""
    if backend is not None and backend not in BACKENDS:
        unknown = f"unknown sampling backend {backend!r}; choose one of {', '.join(BACKENDS)}"
        raise ValueError(removed(f"backend={backend}") or unknown)
