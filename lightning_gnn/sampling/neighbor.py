"""A PyG sampler on top of :func:`lightning_gnn.ops.sample_neighbors`, for graphs of one type and of several."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import NumNeighbors, SubgraphType
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.features.memory_pool import pool
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.edge_attributes import check_window
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.ops import Labor, NeighborSample, batch_key, sample_hetero_neighbors, sample_neighbors
from lightning_gnn.ops.gather.numba import take
from lightning_gnn.ops.hashing import BatchKey
from lightning_gnn.ops.sample.definition import (
    check_backend,
    check_fanouts,
    check_flags,
    check_integer,
    check_key,
    check_rule,
)
from lightning_gnn.ops.sample.hetero import fanouts_by_type
from lightning_gnn.sampling.deferred_edges import LazyEdgeIds, has_lazy_e_id
from lightning_gnn.sampling.edge_attributes import NodeTime, with_times, with_weights
from lightning_gnn.sampling.seed_edges import check_reverse, without_seed_edges

Fanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]
_GIVE_TIMES = "give input_time, or edge_label_time for edges to predict (input_train_time of a DataModule)"
Output: TypeAlias = SamplerOutput | HeteroSamplerOutput


class OffsetSeedInput(NodeSamplerInput):  # type: ignore[misc]
    """Consecutive seeds, int64 ``[n]``, that know where they stand in a larger mini-batch; user samplers hand it on."""

    def __init__(self, seeds: NodeSamplerInput, first: int) -> None:
        super().__init__(seeds.input_id, seeds.node, seeds.time, seeds.input_type)
        self.first = first


class NeighborSampler(BaseSampler):  # type: ignore[misc]
    """Neighbor sampling for PyG's ``NodeLoader``, ``LinkLoader`` and ``LightningNodeData``, and for ours.

    The ``edge`` of its output holds positions in the user's ``edge_index``, so it needs no ``edge_permutation``.

    Args:
        data: The graph, of one type (``Data``, ``CSCGraph``) or of several (``HeteroData``, ``HeteroCSCGraph``).
        num_neighbors: In-edges to pick per node, one number per hop; -1 takes all. With several types also a list for
            each edge type.
        replace: Draw with replacement.
        disjoint: One tree per seed, numbered by ``batch``; trees are drawn independently of each other.
        seed: Start of the random stream; by default torch's initial seed, which ``seed_everything`` sets.
        backend: ``"numba"`` or ``"reference"``; by default the one for the device.
        subgraph_type: ``"directional"``: the edges that were picked; ``"bidirectional"``: and their reverses;
            ``"induced"``: all that the graph has between the nodes that were found.
        time_attr: Attribute with the times of nodes or of edges. A seed then sees no edge, and no source, that is later
            than its own time; it has a tree of its own.
        temporal_strategy: ``"uniform"``: pick among the edges that are early enough; ``"last"``: take the newest.
        time_window: Edges of the times in ``(t - time_window, t]`` count for a seed of the time t; by default all
            until t.
        weight_attr: Attribute with the weights of edges, in proportion to which they are picked.
        sampler: ``"uniform"``, or ``"labor"``: targets share their sources, so that mini-batches have fewer nodes.
        layer_dependency: With LABOR, all hops share them: fewer nodes again, hops that depend on each other.
        batch_dependency: With LABOR and our loaders, so many consecutive mini-batches share them too.
        exclude_seed_edges: In link prediction, take the edges that are to be predicted out of the messages, and their
            reverses: of ``(a, "rel", b)`` those of ``(b, "rev_rel", a)``. A dict names other reverse edge types.

    Raises:
        TypeError: ``data`` is no graph, or fanouts or the seed are no integers.
        ValueError: A graph, fanout, attribute or backend that is not valid, or options that exclude each other.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from torch_geometric.loader import NodeLoader
        >>> from lightning_gnn import NeighborSampler
        >>> path = Data(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), num_nodes=5)
        >>> sampler = NeighborSampler(path, num_neighbors=[1, 1])
        >>> batch = next(iter(NodeLoader(path, sampler, input_nodes=torch.tensor([4]))))
        >>> batch.n_id, batch.edge_index
        (tensor([4, 3, 2]), tensor([[1, 2],
                [0, 1]]))
    """

    def __init__(
        self,
        data: Data | HeteroData | CSCGraph | HeteroCSCGraph,
        num_neighbors: Fanouts | NumNeighbors,
        replace: bool = False,
        disjoint: bool = False,
        seed: int | None = None,
        backend: str | None = None,
        *,
        subgraph_type: SubgraphType | str = "directional",
        time_attr: str | None = None,
        temporal_strategy: str = "uniform",
        time_window: float | None = None,
        weight_attr: str | None = None,
        sampler: str = "uniform",
        layer_dependency: bool = False,
        batch_dependency: int = 1,
        exclude_seed_edges: bool | Mapping[EdgeType, EdgeType] = False,
    ) -> None:
        # Attach times and weights to the topology; `whole_graph` stays unweighted, as induced subgraphs take all edges.
        graph = topology_of(data)
        graph, self.node_time = with_times(graph, data, time_attr)
        self.graph: Any
        self.whole_graph: Any
        self.whole_graph, self.graph = graph, with_weights(graph, data, weight_attr)
        # Options that PyG's sampler has as well.
        self.num_neighbors = num_neighbors
        check_flags(replace=replace, disjoint=disjoint)
        self.replace = replace
        self._disjoint = disjoint
        self.seed = torch.initial_seed() if seed is None else check_integer("seed", seed, -(2**63), 2**64 - 1)
        check_backend(backend)
        self.backend = backend
        self._rank = ProcessRank()
        self.subgraph_type = subgraph_type
        self.temporal_strategy = temporal_strategy
        self.time_window = time_window
        # LABOR draws variates by source, and only it can make picks depend on other layers or mini-batches.
        if sampler not in ("uniform", "labor"):
            raise ValueError(f"unknown sampler {sampler!r}; choose one of uniform, labor")
        if sampler == "uniform" and (layer_dependency or batch_dependency != 1):
            raise ValueError("layer_dependency and batch_dependency need sampler='labor'")
        self.labor = Labor(layer_dependency, batch_dependency) if sampler == "labor" else None
        self.exclude_seed_edges = exclude_seed_edges
        # Check the options against the graph, whose edge types and times are known by now.
        if time_window is not None and not self.is_temporal:
            raise ValueError("time_window needs times: give time_attr")
        check_reverse(exclude_seed_edges, self.graph.edge_types if isinstance(self.graph, HeteroCSCGraph) else None)
        self.check_options()

    def check_options(self) -> None:
        """Check what can be set later, too."""
        check_window(self.time_window)
        check_rule(self.replace, self.disjoint, 0, self.temporal_strategy, self.labor, _has_weights(self.graph))
        if self.disjoint and self.subgraph_type == SubgraphType.induced:
            raise ValueError("disjoint=True, as with times, has no induced subgraphs: use subgraph_type='directional'")

    @property
    def num_neighbors(self) -> Any:
        """Fanout of each hop, with several types perhaps of each edge type."""
        return self._num_neighbors

    @num_neighbors.setter
    def num_neighbors(self, value: Fanouts | NumNeighbors) -> None:
        typed, fanouts = isinstance(self.graph, HeteroCSCGraph), value
        if isinstance(value, NumNeighbors):
            fanouts = fanouts_in(value, self.graph.edge_types) if typed else value.get_values()
        if typed and isinstance(fanouts, Mapping):
            self._num_neighbors: Any = fanouts_by_type(self.graph, fanouts)
        else:
            self._num_neighbors = check_fanouts(fanouts)  # type: ignore[arg-type]

    @property
    def subgraph_type(self) -> SubgraphType:
        """Which edges between the sampled nodes a mini-batch has."""
        return self._subgraph_type

    @subgraph_type.setter
    def subgraph_type(self, value: SubgraphType | str) -> None:
        self._subgraph_type = known_subgraph_type(value)

    @property
    def is_temporal(self) -> bool:
        """Whether edges have times."""
        return bool(self.graph.is_temporal) or self.node_time is not None

    @property
    def disjoint(self) -> bool:
        """Whether each seed has a tree of its own, as with times it does."""
        return self._disjoint or self.is_temporal

    @disjoint.setter
    def disjoint(self, value: bool) -> None:
        self._disjoint = value

    def with_options(self, **options: object) -> NeighborSampler:
        """Return a sampler over the same graph with some attributes changed, such as ``num_neighbors``."""
        other = copy.copy(self)
        for name, value in options.items():
            setattr(other, name, value)
        other.check_options()
        return other

    def sample_from_nodes(self, inputs: NodeSamplerInput, key: int | None = None) -> Output:
        """Sample the neighborhoods of some seeds.

        Args:
            inputs: The seeds, int64 ``[batch_size]``, perhaps with their type and times.
            key: The key of the mini-batch; by default one is drawn from torch's global random stream.

        Raises:
            IndexError: A seed outside the graph.
            TypeError, ValueError: No ``NodeSamplerInput``, or seeds that lack types or times, or have unknown ones.
        """
        if not isinstance(inputs, NodeSamplerInput):
            raise TypeError(f"expected NodeSamplerInput(None, seeds), got {type(inputs).__name__}")
        key = self._next_key() if key is None else key
        first = inputs.first if isinstance(inputs, OffsetSeedInput) else 0
        return self._both_ways(node_sample(inputs, lambda seeds, times: self._sample(seeds, times, key, first)))

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None, key: int | None = None
    ) -> Output:
        """Sample the neighborhoods of both ends of some edges, and of negative edges beside them.

        Disjoint trees are numbered by edge, as PyG does, but each end has a tree of its own, drawn independently.

        Args:
            inputs: Sources and targets, int64 ``[batch_size]`` each, with optional labels, times and type.
            neg_sampling: PyG's description of the negative edges; their ends are drawn from the key too.
            key: The key of the mini-batch, as for :meth:`sample_from_nodes`.
        """
        # Check that the input fits the graph: its types, and its times.
        if not isinstance(inputs, EdgeSamplerInput):
            raise TypeError(f"expected EdgeSamplerInput(None, sources, targets), got {type(inputs).__name__}")
        key = self._next_key() if key is None else key
        if inputs.time is not None and not self.is_temporal:
            raise ValueError("edge_label_time is given, but edges of the graph have no times: give time_attr")
        if (inputs.input_type is None) is isinstance(self.graph, HeteroCSCGraph):
            raise ValueError(
                "edges of a graph with several types need theirs: give edge_label_index=(edge_type, edges)"
                if inputs.input_type is None
                else f"edges of the type {inputs.input_type} were given, but the graph has one type"
            )
        # A negative edge without a time could leak the future into the sample.
        if neg_sampling is not None and self.node_time is not None and inputs.time is None:
            raise ValueError("negative edges need times where nodes have some: give edge_label_time (input_train_time)")
        # Draw the negative edges from the key as well, so that the mini-batch is reproducible.
        negatives = None if neg_sampling is None else _KeyedNegatives(neg_sampling, key)
        out = edge_sample(
            inputs,
            lambda seeds, times: self._sample(seeds, times, key),
            self.graph.num_nodes,
            self.disjoint,
            self.node_time,
            negatives,
        )
        # The edges to be predicted must not be seen by the model.
        if self.exclude_seed_edges:
            named = self.exclude_seed_edges if isinstance(self.exclude_seed_edges, Mapping) else {}
            out = without_seed_edges(out, inputs, named)
        return self._both_ways(out)

    def _sample(self, seeds: Any, times: NodeTime, key: int, first: int = 0) -> Output:
        """Sample seeds, int64 ``[n]``, by type in a heterogeneous graph; what another device's sampler overrides."""
        if isinstance(self.graph, HeteroCSCGraph):
            if not isinstance(seeds, dict):
                raise ValueError(
                    "seeds of a graph with several types need theirs: give input_nodes=(node_type, ids or mask)"
                )
            if times is None and self.is_temporal:
                times = {name: self._times_of(name, ids) for name, ids in seeds.items()}
            return self._sample_types(seeds, times, key, first)
        check_untyped(seeds)
        if times is None and self.is_temporal:
            if self.node_time is None:
                raise ValueError(f"times are those of edges, so seeds have none: {_GIVE_TIMES}")
            times = self.node_time[seeds.cpu()]
        assert not isinstance(times, dict)
        fanouts, options = self.num_neighbors, self._options(key, first)
        sample = sample_neighbors(self.graph, seeds, fanouts, seed_time=times, **options, backend=self.backend)
        return self.as_output(sample)

    def as_output(self, out: NeighborSample) -> SamplerOutput:
        """Return a sample of a homogeneous graph as PyG has it."""
        if self.subgraph_type == SubgraphType.induced:
            return self._induced(out)
        return SamplerOutput(
            node=out.node,
            row=out.edge_index[0],
            col=out.edge_index[1],
            edge=self._edges(self.graph, out.edge),
            batch=out.batch,
            num_sampled_nodes=out.num_sampled_nodes,
            num_sampled_edges=out.num_sampled_edges,
        )

    def _options(self, key: int, first: int) -> dict[str, Any]:
        labor = self.labor
        if labor is not None and labor.batch_dependency > 1:
            if not isinstance(key, BatchKey):
                raise ValueError(
                    "batch_dependency needs mini-batches with numbers: use the loaders of lightning_gnn, or a key from "
                    "batch_key"
                )
            labor = labor._replace(batch=key.number)
            key = key.epoch_key - ((key.epoch_key >> 63) << 64)
        return {
            "key": check_key(key),
            "replace": self.replace,
            "disjoint": self.disjoint,
            "first_tree": first,
            "time_window": self.time_window if self.graph.is_temporal else None,
            "temporal_strategy": self.temporal_strategy,
            "labor": labor,
        }

    def _times_of(self, name: NodeType, ids: Tensor) -> Tensor:
        if not isinstance(self.node_time, dict) or name not in self.node_time:
            raise ValueError(f"seeds of {name!r} have no times of their own: {_GIVE_TIMES}")
        return self.node_time[name][ids.cpu()]

    def _sample_types(
        self, seeds: dict[NodeType, Tensor], times: NodeTime, key: int, first: int
    ) -> HeteroSamplerOutput:
        graph = self.graph
        assert not isinstance(times, Tensor)
        out = sample_hetero_neighbors(
            graph,
            seeds,
            self.num_neighbors,
            seed_time=times if graph.is_temporal or self.node_time is None else None,
            **self._options(key, first),
            backend=self.backend,
        )
        edge_index, edge, counts = out.edge_index, out.edge, {
            "num_sampled_nodes": out.num_sampled_nodes,
            "num_sampled_edges": out.num_sampled_edges,
        }  # fmt: skip
        if self.subgraph_type == SubgraphType.induced:
            graph, counts = self.whole_graph, {}
            whole = sample_hetero_neighbors(graph, out.node, [-1], backend=self.backend)
            inside = {name: whole.edge_index[name][0] < out.node[name[0]].numel() for name in edge_index}
            edge_index = {name: whole.edge_index[name][:, inside[name]] for name in inside}
            edge = {name: whole.edge[name][inside[name]] for name in inside}
        return HeteroSamplerOutput(
            node=out.node,
            row={name: both[0] for name, both in edge_index.items()},
            col={name: both[1] for name, both in edge_index.items()},
            edge={name: self._edges(graph.relations[name], places) for name, places in edge.items()},
            batch=out.batch,
            **counts,
        )

    def _induced(self, out: NeighborSample) -> SamplerOutput:
        """Return all edges that the graph has between the sampled nodes."""
        graph = self.graph if self.graph.weight is None else self.whole_graph
        whole = self._in_edges(graph, out.node)
        inside = whole.edge_index[0] < out.node.numel()
        return SamplerOutput(
            node=out.node,
            row=whole.edge_index[0, inside],
            col=whole.edge_index[1, inside],
            edge=self.original_positions(graph, whole.edge[inside]),
            batch=out.batch,
        )

    def _in_edges(self, graph: CSCGraph, nodes: Tensor) -> NeighborSample:
        """Return all in-edges of some nodes, as a sample of one hop; what another device's sampler overrides."""
        return sample_neighbors(graph, nodes, [-1], 0, backend=self.backend)

    def _both_ways(self, out: Output) -> Output:
        if self.subgraph_type != SubgraphType.bidirectional:
            return out
        both = out.to_bidirectional()
        if isinstance(both, SamplerOutput):
            both.edge = _first_edges(out)
        return both

    def _edges(self, graph: CSCGraph, edge: Tensor) -> Tensor | LazyEdgeIds:
        """Return places in the user's ``edge_index``, or what looks them up later, if this thread asked for that."""
        if graph.edge_ids is not None and has_lazy_e_id():
            return LazyEdgeIds(edge, partial(self.original_positions, graph))
        return self.original_positions(graph, edge)

    def original_positions(self, graph: CSCGraph, edge: Tensor) -> Tensor:
        """Turn positions in CSC order into positions in the user's ``edge_index``, int64 ``[m]``."""
        if graph.edge_ids is None:
            return edge
        out = pool.empty(edge.shape, torch.int64)
        take(graph.edge_ids.numpy(), edge.numpy(), out.numpy())
        return out

    def _next_key(self) -> int:
        # torch seeds its global stream in each worker process and epoch, but equally on all ranks.
        return int(batch_key(self.seed, rank=self._rank.get(), batch=int(torch.randint(2**62, ()))))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.graph}, num_neighbors={self.num_neighbors})"


def nonuniform_features(sampler: BaseSampler) -> list[str]:
    """Return the names of what a sampler does beside picking uniformly in a graph of one type."""
    graph, kind = getattr(sampler, "graph", None), getattr(sampler, "subgraph_type", SubgraphType.directional)
    asked = {
        "a graph with types": isinstance(graph, HeteroCSCGraph),
        "time_attr": bool(getattr(sampler, "is_temporal", False)),
        "weight_attr": _has_weights(graph),
        "sampler='labor'": getattr(sampler, "labor", None) is not None,
        "subgraph_type": kind != SubgraphType.directional,
        "exclude_seed_edges": bool(getattr(sampler, "exclude_seed_edges", False)),
    }
    return [name for name, yes in asked.items() if yes]


def _has_weights(graph: CSCGraph | HeteroCSCGraph | None) -> bool:
    relations = graph.relations.values() if isinstance(graph, HeteroCSCGraph) else [graph]
    return any(getattr(relation, "weight", None) is not None for relation in relations)


def topology_of(data: Data | HeteroData | CSCGraph | HeteroCSCGraph) -> Any:
    """Return the topology of a graph of PyG's, or a topology as it is."""
    if isinstance(data, CSCGraph | HeteroCSCGraph):
        return data
    return HeteroCSCGraph.from_data(data) if isinstance(data, HeteroData) else CSCGraph.from_data(data)


def known_subgraph_type(value: SubgraphType | str) -> SubgraphType:
    """Return PyG's enum; LightningNodeData hands on what the user wrote."""
    try:
        return SubgraphType(value)
    except ValueError:
        kinds = ", ".join(kind.value for kind in SubgraphType)
        raise ValueError(f"unknown subgraph_type {value!r}; choose one of {kinds}") from None


def _first_edges(out: SamplerOutput) -> Tensor:
    """Return the ids of the edges of a bidirectional subgraph, by (target, source): of several, the first one's."""
    num_nodes = out.node.numel()
    ends = torch.cat([out.col * num_nodes + out.row, out.row * num_nodes + out.col])
    ends, order = ends.sort(stable=True)
    first = torch.ones_like(ends, dtype=torch.bool)
    first[1:] = ends[1:] != ends[:-1]
    edge: Tensor = torch.cat([out.edge, out.edge])[order[first]]
    return edge


class ProcessRank:
    """Which process of a distributed run asks; a spawned worker gets a copy, which notes its parent's rank."""

    def __init__(self) -> None:
        self._parent = 0

    def get(self) -> int:
        """Return the rank; 0 outside a distributed run."""
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if grouped else self._parent

    def __getstate__(self) -> dict[str, int]:
        return {"_parent": self.get()}


def check_untyped(seeds: object) -> None:
    """Raise a ValueError if seeds come by node type, as those of heterogeneous graphs do."""
    if isinstance(seeds, dict):
        raise ValueError(
            f"seeds of type {', '.join(map(repr, seeds))} were given, but the graph is homogeneous: give the ids or "
            "the mask without a type"
        )


class _KeyedNegatives:
    """PyG's negative sampling, drawn from the key of the mini-batch instead of the process's global stream."""

    def __init__(self, negatives: NegativeSampling, key: int) -> None:
        self._negatives = negatives
        self._generator = torch.Generator().manual_seed(check_key(key))
        self.amount = negatives.amount
        self.is_binary = negatives.is_binary
        self.is_triplet = negatives.is_triplet

    def sample(self, num_samples: int, endpoint: str, num_nodes: int) -> Tensor:
        weight = self._negatives.src_weight if endpoint == "src" else self._negatives.dst_weight
        if weight is None:
            return torch.randint(num_nodes, (num_samples,), generator=self._generator)
        if weight.numel() != num_nodes:
            raise ValueError(f"negative sampling has {weight.numel()} weights, but the graph has {num_nodes} nodes")
        return torch.multinomial(weight, num_samples, replacement=True, generator=self._generator)


def fanouts_in(numbers: NumNeighbors, edge_types: Sequence[EdgeType]) -> Any:
    """Return the fanouts of each edge type that PyG's ``NumNeighbors`` holds."""
    joined = {"__".join(kind): kind for kind in edge_types}
    if isinstance(numbers.values, dict) and (lost := [kind for kind in edge_types if kind not in joined.values()]):
        raise ValueError(
            f"num_neighbors by edge type: PyG's NumNeighbors takes {lost[0]} and {joined['__'.join(lost[0])]} for one; "
            "give one list, a fanout per hop, or rename one of them"
        )
    return numbers.get_values(edge_types)
