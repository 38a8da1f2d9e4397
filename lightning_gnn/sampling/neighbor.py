"""PyG sampler for homogeneous and heterogeneous graphs, based on :func:`lightning_gnn.ops.sample_neighbors`."""

from __future__ import annotations

import copy
import warnings
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
from lightning_gnn.graph.remote import RemoteCSCGraph
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
from lightning_gnn.sampling.blocks import SEMANTICS
from lightning_gnn.sampling.deferred_edges import LazyEdgeIds, has_lazy_e_id
from lightning_gnn.sampling.edge_attributes import NodeTime, with_times, with_weights
from lightning_gnn.sampling.non_edges import FilteredNegatives, draw_non_edges
from lightning_gnn.sampling.seed_edges import check_reverse, without_seed_edges

Fanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]
_GIVE_TIMES = "give input_time, or edge_label_time for edges to predict (DataModule: input_train_time)"
Output: TypeAlias = SamplerOutput | HeteroSamplerOutput


class OffsetSeedInput(NodeSamplerInput):  # type: ignore[misc]
    """Consecutive seeds, int64 ``[n]``, with their offset in a larger mini-batch; user samplers pass it on."""

    def __init__(self, seeds: NodeSamplerInput, first: int) -> None:
        super().__init__(seeds.input_id, seeds.node, seeds.time, seeds.input_type)
        self.first = first


class NeighborSampler(BaseSampler):  # type: ignore[misc]
    """Neighbor sampler for PyG's ``NodeLoader``, ``LinkLoader`` and ``LightningNodeData``, and for our loaders.

    The ``edge`` of its output holds positions in the user's ``edge_index``, so ``edge_permutation`` is None.

    Args:
        data: The graph, homogeneous (``Data``, ``CSCGraph``) or heterogeneous (``HeteroData``, ``HeteroCSCGraph``).
        num_neighbors: Fanouts, one per hop; -1 takes all in-edges. For a heterogeneous graph optionally by edge type.
        replace: Draw with replacement.
        disjoint: Sample a separate tree for each seed, numbered by ``batch`` and drawn independently of other trees.
        seed: Random seed; by default torch's initial seed, which ``seed_everything`` sets.
        backend: ``"numba"`` or ``"reference"``; by default the one for the device.
        subgraph_type: ``"directional"``: the picked edges; ``"bidirectional"``: also their reverses; ``"induced"``: all
            edges of the graph between the sampled nodes.
        time_attr: Attribute with the times of nodes or edges. The tree of a seed then excludes edges and source nodes
            later than the seed; implies ``disjoint``.
        temporal_strategy: ``"uniform"``: pick uniformly among the edges that are early enough; ``"last"``: the latest.
        time_window: Only sample edges with times in ``(t - time_window, t]`` for a seed at time t; None: all up to t.
        weight_attr: Attribute with edge weights; edges are picked with probabilities proportional to them.
        sampling: ``"uniform"``, or ``"labor"``: targets share sources, so that mini-batches have fewer nodes.
        layer_dependency: With LABOR, also share sources across hops: even fewer nodes, but the hops are dependent.
        batch_dependency: With LABOR and our loaders, the number of consecutive mini-batches that share sources.
        semantics: ``"lowest_hop"``: a node is sampled once, in the lowest hop at which it is found, as in PyG.
            ``"every_hop"``: in every hop from its first on, as in DGL and PGSampler; each layer then trains on its own
            :func:`~lightning_gnn.sampling.layer_blocks`. For uniform sampling of homogeneous graphs.
        exclude_seed_edges: In link prediction, exclude the seed edges and their reverses from message passing. The
            reverse of ``(a, "rel", b)`` is ``(b, "rev_rel", a)``; a dict specifies other reverse edge types.

    Raises:
        TypeError: ``data`` is not a graph, or fanouts or the seed are not integers.
        ValueError: A graph, fanout, attribute or backend is invalid, or options exclude each other.

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
        sampling: str = "uniform",
        layer_dependency: bool = False,
        batch_dependency: int = 1,
        semantics: str = "lowest_hop",
        exclude_seed_edges: bool | Mapping[EdgeType, EdgeType] = False,
    ) -> None:
        # Attach times and weights to the topology; `whole_graph` stays unweighted for induced subgraphs.
        graph = topology_of(data)
        graph, self.node_time = with_times(graph, data, time_attr)
        self.graph: Any
        self.whole_graph: Any
        self.whole_graph, self.graph = graph, with_weights(graph, data, weight_attr)
        # Options shared with PyG's sampler.
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
        # Only LABOR, which draws variates by source, supports dependent layers or mini-batches.
        if sampling not in ("uniform", "labor"):
            raise ValueError(f"unknown sampling {sampling!r}; choose one of uniform, labor")
        if sampling == "uniform" and (layer_dependency or batch_dependency != 1):
            raise ValueError("layer_dependency and batch_dependency need sampling='labor'")
        self.labor = Labor(layer_dependency, batch_dependency) if sampling == "labor" else None
        if semantics not in SEMANTICS:
            raise ValueError(f"unknown semantics {semantics!r}; choose one of {', '.join(SEMANTICS)}")
        self.semantics = semantics
        self.exclude_seed_edges = exclude_seed_edges
        # Check the options against the edge types and times of the graph.
        if time_window is not None and not self.is_temporal:
            raise ValueError("time_window needs time_attr")
        check_reverse(exclude_seed_edges, self.graph.edge_types if isinstance(self.graph, HeteroCSCGraph) else None)
        self.check_options()

    def check_options(self) -> None:
        """Check the options that can also be set later."""
        check_window(self.time_window)
        check_rule(self.replace, self.disjoint, 0, self.temporal_strategy, self.labor, _has_weights(self.graph))
        others = [name for name in nonuniform_features(self) if not name.startswith("semantics")]
        others += ["a partitioned graph"] * isinstance(self.graph, RemoteCSCGraph) + ["disjoint=True"] * self.disjoint
        if self.semantics == "every_hop" and others:
            raise ValueError(f"semantics='every_hop' excludes {others[0]}: leave one of them out")
        if self.disjoint and self.subgraph_type == SubgraphType.induced:
            raise ValueError("disjoint=True (implied by times) needs subgraph_type='directional' or 'bidirectional'")

    @property
    def num_neighbors(self) -> Any:
        """Fanout of each hop, for a heterogeneous graph optionally by edge type."""
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
        """Which edges between the sampled nodes a mini-batch contains."""
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
        """Whether each seed has a separate tree (always True with times)."""
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
            inputs: The seeds, int64 ``[batch_size]``, optionally with their type and times.
            key: The random key of the mini-batch; by default drawn from torch's global random generator.

        Raises:
            IndexError: A seed is not in the graph.
            TypeError, ValueError: ``inputs`` is not a ``NodeSamplerInput``, or types or times are missing or unknown.
        """
        if not isinstance(inputs, NodeSamplerInput):
            raise TypeError(f"expected NodeSamplerInput(None, seeds), got {type(inputs).__name__}")
        key = self._next_key() if key is None else key
        first = inputs.first if isinstance(inputs, OffsetSeedInput) else 0
        return self._add_reverses(node_sample(inputs, lambda seeds, times: self._sample(seeds, times, key, first)))

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None, key: int | None = None
    ) -> Output:
        """Sample the neighborhoods of both endpoints of some edges, and of negative edges.

        Disjoint trees are numbered by edge, as in PyG, but each endpoint has a separate tree, drawn independently.

        Args:
            inputs: Sources and targets, int64 ``[batch_size]`` each, with optional labels, times and type.
            neg_sampling: PyG's settings of negative edges; their endpoints are also drawn from the key.
            key: Same as for :meth:`sample_from_nodes`.
        """
        # Check the types and times of the input against the graph.
        if not isinstance(inputs, EdgeSamplerInput):
            raise TypeError(f"expected EdgeSamplerInput(None, sources, targets), got {type(inputs).__name__}")
        key = self._next_key() if key is None else key
        if inputs.time is not None and not self.is_temporal:
            raise ValueError("edge_label_time needs edges with times: give time_attr")
        if (inputs.input_type is None) is isinstance(self.graph, HeteroCSCGraph):
            raise ValueError(
                "edges of a heterogeneous graph need a type: give edge_label_index=(edge_type, edges)"
                if inputs.input_type is None
                else f"edges of the type {inputs.input_type} were given, but the graph is homogeneous"
            )
        # A negative edge without a time could leak the future into the sample.
        if neg_sampling is not None and self.node_time is not None and inputs.time is None:
            raise ValueError("negative edges need times if nodes have times: give edge_label_time (input_train_time)")
        # Also draw the negative edges from the key, so that the mini-batch is reproducible.
        negatives: Any = None if neg_sampling is None else _KeyedNegatives(neg_sampling, key)
        node_time = self.node_time  # only limits the negatives
        if isinstance(neg_sampling, FilteredNegatives):
            ends = (None, None) if inputs.input_type is None else (inputs.input_type[0], inputs.input_type[-1])
            times = [node_time.get(end) if isinstance(node_time, dict) else node_time for end in ends]
            negatives = draw_non_edges(inputs, negatives, neg_sampling.known, (times[0], times[1]), self.disjoint)
            node_time = None
        out = edge_sample(
            inputs,
            lambda seeds, times: self._sample(seeds, times, key),
            self.graph.num_nodes,
            self.disjoint,
            node_time,
            negatives,
        )
        # The model must not see the edges that it predicts.
        if self.exclude_seed_edges:
            named = self.exclude_seed_edges if isinstance(self.exclude_seed_edges, Mapping) else {}
            out = without_seed_edges(out, inputs, named)
        return self._add_reverses(out)

    def _sample(self, seeds: Any, times: NodeTime, key: int, first: int = 0) -> Output:
        """Sample seeds, int64 ``[n]``, or by type in a heterogeneous graph; samplers for other devices override it."""
        if isinstance(self.graph, HeteroCSCGraph):
            if not isinstance(seeds, dict):
                raise ValueError(
                    "seeds of a heterogeneous graph need a type: give input_nodes=(node_type, ids or mask)"
                )
            if times is None and self.is_temporal:
                times = {name: self._times_of(name, ids) for name, ids in seeds.items()}
            return self._sample_types(seeds, times, key, first)
        check_untyped(seeds)
        if times is None and self.is_temporal:
            if self.node_time is None:
                raise ValueError(f"edges have times, but seeds do not: {_GIVE_TIMES}")
            times = self.node_time[seeds.cpu()]
        assert not isinstance(times, dict)
        fanouts, options = self.num_neighbors, self._options(key, first)
        options["every_hop"] = self.semantics == "every_hop"
        sample = sample_neighbors(self.graph, seeds, fanouts, seed_time=times, **options, backend=self.backend)
        return self.as_output(sample)

    def as_output(self, out: NeighborSample) -> SamplerOutput:
        """Convert a sample of a homogeneous graph to PyG's class."""
        if self.subgraph_type == SubgraphType.induced:
            return self._induce(out)
        sampled = SamplerOutput(
            node=out.node,
            row=out.edge_index[0],
            col=out.edge_index[1],
            edge=self._edges(self.graph, out.edge),
            batch=out.batch,
            num_sampled_nodes=out.num_sampled_nodes,
            num_sampled_edges=out.num_sampled_edges,
        )
        if self.semantics == "every_hop":
            sampled.every_hop = True
        return sampled

    def _options(self, key: int, first: int) -> dict[str, Any]:
        labor = self.labor
        if labor is not None and labor.batch_dependency > 1:
            if not isinstance(key, BatchKey):
                raise ValueError(
                    "batch_dependency needs numbered mini-batches: use the loaders of lightning_gnn, or a key from "
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
            raise ValueError(f"seeds of {name!r} have no times: {_GIVE_TIMES}")
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
            is_inside = {name: whole.edge_index[name][0] < out.node[name[0]].numel() for name in edge_index}
            edge_index = {name: whole.edge_index[name][:, is_inside[name]] for name in is_inside}
            edge = {name: whole.edge[name][is_inside[name]] for name in is_inside}
        return HeteroSamplerOutput(
            node=out.node,
            row={name: ends[0] for name, ends in edge_index.items()},
            col={name: ends[1] for name, ends in edge_index.items()},
            edge={name: self._edges(graph.relations[name], positions) for name, positions in edge.items()},
            batch=out.batch,
            **counts,
        )

    def _induce(self, out: NeighborSample) -> SamplerOutput:
        """Return all edges of the graph between the sampled nodes."""
        graph = self.graph if self.graph.weight is None else self.whole_graph
        whole = self._in_edges(graph, out.node)
        is_inside = whole.edge_index[0] < out.node.numel()
        return SamplerOutput(
            node=out.node,
            row=whole.edge_index[0, is_inside],
            col=whole.edge_index[1, is_inside],
            edge=self.original_positions(graph, whole.edge[is_inside]),
            batch=out.batch,
        )

    def _in_edges(self, graph: CSCGraph, nodes: Tensor) -> NeighborSample:
        """Sample all in-edges of some nodes as one hop; samplers for other devices override it."""
        return sample_neighbors(graph, nodes, [-1], 0, backend=self.backend)

    def _add_reverses(self, out: Output) -> Output:
        if self.subgraph_type != SubgraphType.bidirectional:
            return out
        bidirectional = out.to_bidirectional()
        if isinstance(bidirectional, SamplerOutput):
            bidirectional.edge = _deduplicate_edge_ids(out)
        return bidirectional

    def _edges(self, graph: CSCGraph, edge: Tensor) -> Tensor | LazyEdgeIds:
        """Return positions in the user's ``edge_index``, or lazy ids in a :func:`deferred` block."""
        if graph.edge_ids is not None and has_lazy_e_id():
            return LazyEdgeIds(edge, partial(self.original_positions, graph))
        return self.original_positions(graph, edge)

    def original_positions(self, graph: CSCGraph, edge: Tensor) -> Tensor:
        """Convert positions in CSC order to positions in the user's ``edge_index``, int64 ``[m]``."""
        if graph.edge_ids is None:
            return edge
        out = pool.empty(edge.shape, torch.int64)
        take(graph.edge_ids.numpy(), edge.numpy(), out.numpy())
        return out

    def _next_key(self) -> int:
        """Return a key for a caller that gives none, such as PyG's loaders."""
        if self.semantics == "every_hop":
            warnings.warn(
                "semantics='every_hop': PyG's loaders drop which edges belong to a layer, so each layer of a model "
                "uses those of all hops; use NeighborDataModule, or layer_blocks(batch, every_hop=True)",
                stacklevel=3,
            )
        # torch seeds its global generator per worker process and epoch, but identically on all ranks.
        return int(batch_key(self.seed, rank=self._rank.get(), batch=int(torch.randint(2**62, ()))))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.graph}, num_neighbors={self.num_neighbors})"


def nonuniform_features(sampler: BaseSampler) -> list[str]:
    """Return the names of options that differ from uniform sampling in a homogeneous graph."""
    graph, subgraph_type = getattr(sampler, "graph", None), getattr(sampler, "subgraph_type", SubgraphType.directional)
    options = {
        "a heterogeneous graph": isinstance(graph, HeteroCSCGraph),
        "time_attr": bool(getattr(sampler, "is_temporal", False)),
        "weight_attr": _has_weights(graph),
        "semantics='every_hop'": getattr(sampler, "semantics", None) == "every_hop",
        "sampling='labor'": getattr(sampler, "labor", None) is not None,
        "subgraph_type": subgraph_type != SubgraphType.directional,
        "exclude_seed_edges": bool(getattr(sampler, "exclude_seed_edges", False)),
    }
    return [name for name, is_used in options.items() if is_used]


def _has_weights(graph: CSCGraph | HeteroCSCGraph | None) -> bool:
    relations = graph.relations.values() if isinstance(graph, HeteroCSCGraph) else [graph]
    return any(getattr(relation, "weight", None) is not None for relation in relations)


def topology_of(data: Data | HeteroData | CSCGraph | HeteroCSCGraph) -> Any:
    """Return the topology of a PyG graph; a topology is returned unchanged."""
    if isinstance(data, CSCGraph | HeteroCSCGraph):
        return data
    return HeteroCSCGraph.from_data(data) if isinstance(data, HeteroData) else CSCGraph.from_data(data)


def known_subgraph_type(value: SubgraphType | str) -> SubgraphType:
    """Convert the user's value, which LightningNodeData passes on, to PyG's enum."""
    try:
        return SubgraphType(value)
    except ValueError:
        kinds = ", ".join(kind.value for kind in SubgraphType)
        raise ValueError(f"unknown subgraph_type {value!r}; choose one of {kinds}") from None


def _deduplicate_edge_ids(out: SamplerOutput) -> Tensor:
    """Return the edge ids of a bidirectional subgraph by (target, source); the first id of duplicate edges."""
    num_nodes = out.node.numel()
    ends = torch.cat([out.col * num_nodes + out.row, out.row * num_nodes + out.col])
    ends, order = ends.sort(stable=True)
    is_first = torch.ones_like(ends, dtype=torch.bool)
    is_first[1:] = ends[1:] != ends[:-1]
    edge: Tensor = torch.cat([out.edge, out.edge])[order[is_first]]
    return edge


class ProcessRank:
    """The rank of this process; its pickled copy stores the rank for spawned workers."""

    def __init__(self) -> None:
        self._parent = 0

    def get(self) -> int:
        """Return the rank; 0 outside a distributed run."""
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if grouped else self._parent

    def __getstate__(self) -> dict[str, int]:
        return {"_parent": self.get()}


def check_untyped(seeds: object) -> None:
    """Raise a ValueError if seeds are given by node type."""
    if isinstance(seeds, dict):
        raise ValueError(
            f"seeds of type {', '.join(map(repr, seeds))} were given, but the graph is homogeneous: give the ids or "
            "the mask without a type"
        )


class _KeyedNegatives:
    """PyG's negative sampling with a generator seeded by the mini-batch's key instead of the global generator."""

    def __init__(self, negatives: NegativeSampling, key: int) -> None:
        self.weights = {"src": negatives.src_weight, "dst": negatives.dst_weight}
        self.generator = torch.Generator().manual_seed(check_key(key))
        self.amount = negatives.amount
        self.is_binary = negatives.is_binary
        self.is_triplet = negatives.is_triplet

    def sample(self, num_samples: int, endpoint: str, num_nodes: int) -> Tensor:
        weight = self.weights[endpoint]
        if weight is None:
            return torch.randint(num_nodes, (num_samples,), generator=self.generator)
        if weight.numel() != num_nodes:
            raise ValueError(f"negative sampling has {weight.numel()} weights, but the graph has {num_nodes} nodes")
        return torch.multinomial(weight, num_samples, replacement=True, generator=self.generator)


def fanouts_in(numbers: NumNeighbors, edge_types: Sequence[EdgeType]) -> Any:
    """Return the fanouts of each edge type in PyG's ``NumNeighbors``."""
    joined = {"__".join(kind): kind for kind in edge_types}
    if isinstance(numbers.values, dict) and (lost := [kind for kind in edge_types if kind not in joined.values()]):
        raise ValueError(
            f"num_neighbors by edge type: PyG's NumNeighbors confuses {lost[0]} with {joined['__'.join(lost[0])]}; "
            "give one list, a fanout per hop, or rename one of them"
        )
    return numbers.get_values(edge_types)
