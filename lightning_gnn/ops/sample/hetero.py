"""Neighbor sampling in heterogeneous graphs: arguments and samples by node type and edge type."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.ops.sample.definition import (
    check_backend,
    check_device,
    check_fanouts,
    check_key,
    check_rule,
    check_seeds,
    describe,
    run,
    time_windows,
)
from lightning_gnn.ops.sample.relation import Labor

_NO_SEEDS = torch.empty(0, dtype=torch.int64)


class HeteroNeighborSample(NamedTuple):
    """One sampled heterogeneous subgraph, over h hops; it names all types of the graph, also those without samples.

    The fields are as in :class:`~lightning_gnn.ops.NeighborSample`, by node or edge type; ids count within a node type.
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
        graph: The topology, on the CPU, on a GPU, or in pinned memory; some edge types may have times, or weights.
        seeds: Ids of the seed nodes by node type, int64 or int32 ``[batch_size]``. Trees are numbered in the order of
            the types in this mapping.
        fanouts: In-edges to pick per node and hop, for all edge types or by edge type; -1 takes all.
        key: The key of this mini-batch, from :func:`~lightning_gnn.ops.batch_key`.
        replace, disjoint, first_tree, time_window, temporal_strategy, backend: As for
            :func:`~lightning_gnn.ops.sample_neighbors`; samples with times are always disjoint.
        seed_time: Times of the seeds by node type, required if any edge type has times.
        labor: Sample by LABOR; all edge types with the same source node type share the variates of the sources.

    Raises:
        TypeError: ``seeds`` is not a mapping, or as for :func:`~lightning_gnn.ops.sample_neighbors`.
        IndexError: A seed is out of range for its node type.
        ValueError: A type is unknown, fanouts are missing for an edge type or differ in length, or as for
            :func:`~lightning_gnn.ops.sample_neighbors`.

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
            f"seeds of a heterogeneous graph must be a mapping by node type, {{{next(iter(graph.sizes), '')!r}: ids}}, "
            f"but are {type(seeds).__name__}"
        )
    if unknown := [name for name in seeds if name not in graph.sizes]:
        raise ValueError(f"unknown node type of seeds {unknown[0]!r}: the node types are {', '.join(graph.sizes)}")
    # The operator has a single rule for all relations, so weights and times exclude each other.
    relations = list(graph.relations.values())
    weighted, temporal = any(relation.weight is not None for relation in relations), graph.is_temporal
    if weighted and temporal:
        raise ValueError("some edge types have weights and others times: weighted temporal sampling is not supported")
    rule = check_rule(replace, disjoint or temporal, first_tree, temporal_strategy, labor, weighted)
    check_backend(backend)
    check_device(backend, relations)
    # Number the seeds of all types consecutively, so that every tree has a unique number.
    checked = {name: _check_seeds(name, ids, graph.sizes[name]) for name, ids in seeds.items()}
    starts, total = dict.fromkeys(graph.sizes, 0), 0
    for name, ids in checked.items():
        starts[name] = total
        total += ids.numel()
    # The backends identify node types by index, and take relations in the order of the graph.
    times = time_windows(relations, list(checked.values()), _order_times(seed_time, checked), time_window)
    index = {name: i for i, name in enumerate(graph.sizes)}
    described = [
        describe(relation, index[edge_type[0]], index[edge_type[2]], by_type[edge_type], labor is not None)
        for edge_type, relation in graph.relations.items()
    ]
    out = run(
        graph,
        described,
        list(graph.sizes.values()),
        [checked.get(name, _NO_SEEDS) for name in graph.sizes],
        list(starts.values()),
        key,
        rule,
        times,
        backend,
    )
    # Convert the lists of results to dictionaries by type.
    node, tree = (dict(zip(graph.sizes, arrays, strict=True)) for arrays in (out.node, out.tree))
    edge_index, edge = (dict(zip(graph.relations, arrays, strict=True)) for arrays in (out.edge_index, out.edge))
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
    """Check the fanouts and return them by edge type."""
    if not isinstance(fanouts, Mapping):
        return dict.fromkeys(graph.relations, check_fanouts(fanouts))
    names = ", ".join(map(str, graph.relations))
    if unknown := [name for name in fanouts if name not in graph.relations]:
        raise ValueError(f"unknown edge type in num_neighbors {unknown[0]}: the edge types are {names}")
    if missing := [name for name in graph.relations if name not in fanouts]:
        raise ValueError(f"num_neighbors has no fanouts for {missing[0]}: give those of all edge types, {names}")
    checked = {name: check_fanouts(fanouts[name]) for name in graph.relations}
    hops = {name: len(numbers) for name, numbers in checked.items()}
    if len(set(hops.values())) > 1:
        raise ValueError(f"num_neighbors must have the same hops for all edge types, but has {hops}: pad with 0")
    return checked


def _check_seeds(name: NodeType, ids: Tensor, count: int) -> Tensor:
    try:
        return check_seeds(ids, count)
    except (TypeError, ValueError, IndexError) as error:
        raise type(error)(f"node type {name!r}: {error}") from None


def _order_times(time: Mapping[NodeType, Tensor] | None, seeds: Mapping[NodeType, Tensor]) -> list[Tensor] | None:
    if time is None:
        return None
    if missing := [name for name in seeds if name not in time]:
        raise ValueError(f"seed_time is missing for the seeds of {missing[0]!r}: give it for every node type of seeds")
    return [time[name] for name in seeds]
