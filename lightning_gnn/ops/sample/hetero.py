"""Neighbor sampling in a graph with several types of nodes and edges: arguments by type, and the sample by type."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.ops.sample.definition import (
    check_backend,
    check_fanouts,
    check_key,
    check_place,
    check_rule,
    check_seeds,
    describe,
    run,
    time_windows,
)
from lightning_gnn.ops.sample.relation import Labor

_NO_SEEDS = torch.empty(0, dtype=torch.int64)


class HeteroNeighborSample(NamedTuple):
    """One sampled subgraph with types, over h hops; all types of the graph are named, also those it has nothing of.

    Each is as in :class:`~lightning_gnn.ops.NeighborSample`, by node type or by edge type; ids are those within a type.
    """

    node: dict[NodeType, Tensor]
    edge_index: dict[EdgeType, Tensor]
    edge: dict[EdgeType, Tensor]
    batch: dict[NodeType, Tensor] | None
    num_sampled_nodes: dict[NodeType, list[int]]
    num_sampled_edges: dict[EdgeType, list[int]]


def sample_hetero_neighbors(
    graph: HeteroCSCGraph,
    seeds: Mapping[NodeType, Tensor],
    fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]],
    key: int = 0,
    *,
    replace: bool = False,
    disjoint: bool = False,
    first_tree: int = 0,
    seed_time: Mapping[NodeType, Tensor] | None = None,
    time_window: float | None = None,
    temporal_strategy: str = "uniform",
    labor: Labor | None = None,
    backend: str | None = None,
) -> HeteroNeighborSample:
    """Sample in-neighbors of the seeds along all edge types, as :func:`~lightning_gnn.ops.sample_neighbors` does.

    Args:
        graph: The topology, on the CPU, on a GPU, or in pinned memory; edges of some types may have times, or weights.
        seeds: Ids within each node type that has seeds, int64 or int32 ``[batch_size]``. Trees are numbered in the
            order of the types given here.
        fanouts: In-edges to pick per node and hop, for all edge types or for each; -1 takes all.
        key: What :func:`~lightning_gnn.ops.batch_key` made for this mini-batch.
        replace, disjoint, first_tree, time_window, temporal_strategy, backend: As there; always disjoint with times.
        seed_time: Times of the seeds by type, if edges of any type have times.
        labor: Sample by variates of the sources, which all edge types from one node type share.

    Raises:
        TypeError: Seeds by no type, or as for :func:`~lightning_gnn.ops.sample_neighbors`.
        IndexError: A seed that its type has no node of.
        ValueError: A type that the graph does not have, fanouts of too few types or of different lengths, or as there.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import HeteroData
        >>> from lightning_gnn import HeteroCSCGraph, sample_hetero_neighbors
        >>> data = HeteroData()
        >>> data["author"].num_nodes, data["paper"].num_nodes = 2, 3
        >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1], [0, 0, 2]])
        >>> data["paper", "cites", "paper"].edge_index = torch.tensor([[2], [0]])
        >>> graph = HeteroCSCGraph.from_data(data)
        >>> sample = sample_hetero_neighbors(graph, {"paper": torch.tensor([0])}, fanouts=[-1, -1])
        >>> sample.node
        {'author': tensor([0, 1]), 'paper': tensor([0, 2])}
        >>> sample.num_sampled_edges
        {('author', 'writes', 'paper'): [2, 1], ('paper', 'cites', 'paper'): [1, 0]}
    """
    # Check the fanouts, the key and the types that have seeds.
    by_type = fanouts_by_type(graph, fanouts)
    key = check_key(key)
    if not isinstance(seeds, Mapping):
        raise TypeError(
            f"seeds of a graph with types come by node type, as {{{next(iter(graph.sizes), '')!r}: ids}}, but are "
            f"{type(seeds).__name__}"
        )
    if unknown := [name for name in seeds if name not in graph.sizes]:
        raise ValueError(f"there are seeds of {unknown[0]!r}, but the node types are {', '.join(graph.sizes)}")
    # An operator has one rule for all relations, so that weights and times exclude each other.
    relations = list(graph.relations.values())
    weighted, temporal = any(part.weight is not None for part in relations), graph.is_temporal
    if weighted and temporal:
        raise ValueError("some edges have weights, others times: there is no weighted temporal sampling")
    rule = check_rule(replace, disjoint or temporal, first_tree, temporal_strategy, labor, weighted)
    check_backend(backend)
    check_place(backend, relations)
    # Number the seeds of all types through, so that every tree has a number of its own.
    given = {name: _checked(name, ids, graph.sizes[name]) for name, ids in seeds.items()}
    starts, total = dict.fromkeys(graph.sizes, 0), 0
    for name, ids in given.items():
        starts[name] = total
        total += ids.numel()
    # The backends know types by number, and relations in the order of the graph.
    times = time_windows(relations, list(given.values()), _in_order(seed_time, given), time_window)
    number = {name: place for place, name in enumerate(graph.sizes)}
    described = [
        describe(part, number[edge_type[0]], number[edge_type[2]], by_type[edge_type], labor is not None)
        for edge_type, part in graph.relations.items()
    ]
    out = run(
        graph,
        described,
        list(graph.sizes.values()),
        [given.get(name, _NO_SEEDS) for name in graph.sizes],
        list(starts.values()),
        key,
        rule,
        times,
        backend,
    )
    # Give the numbered results their names back.
    node, tree = (dict(zip(graph.sizes, parts, strict=True)) for parts in (out.node, out.tree))
    edge_index, edge = (dict(zip(graph.relations, parts, strict=True)) for parts in (out.edge_index, out.edge))
    return HeteroNeighborSample(
        node,
        edge_index,
        edge,
        tree if rule.disjoint else None,
        dict(zip(graph.sizes, out.num_sampled_nodes, strict=True)),
        dict(zip(graph.relations, out.num_sampled_edges, strict=True)),
    )


def fanouts_by_type(
    graph: HeteroCSCGraph, fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]]
) -> dict[EdgeType, list[int]]:
    """Return the fanouts of each edge type."""
    if not isinstance(fanouts, Mapping):
        return dict.fromkeys(graph.relations, check_fanouts(fanouts))
    named = ", ".join(map(str, graph.relations))
    if unknown := [name for name in fanouts if name not in graph.relations]:
        raise ValueError(f"num_neighbors has {unknown[0]}, but the edge types are {named}")
    if missing := [name for name in graph.relations if name not in fanouts]:
        raise ValueError(f"num_neighbors has no fanouts for {missing[0]}: give those of all edge types, {named}")
    checked = {name: check_fanouts(fanouts[name]) for name in graph.relations}
    hops = {name: len(numbers) for name, numbers in checked.items()}
    if len(set(hops.values())) > 1:
        raise ValueError(f"num_neighbors must have as many hops for each edge type, but has {hops}: fill up with 0")
    return checked


def _checked(name: NodeType, ids: Tensor, count: int) -> Tensor:
    try:
        return check_seeds(ids, count)
    except (TypeError, ValueError, IndexError) as error:
        raise type(error)(f"node type {name!r}: {error}") from None


def _in_order(time: Mapping[NodeType, Tensor] | None, seeds: Mapping[NodeType, Tensor]) -> list[Tensor] | None:
    if time is None:
        return None
    if missing := [name for name in seeds if name not in time]:
        raise ValueError(f"there are seeds of {missing[0]!r} without times: give seed_time for each type of seeds")
    return [time[name] for name in seeds]
