"""Neighbor sampler over all parts, and the attribute tables from which its loaders gather."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.remote import RemoteCSCGraph, RemoteHeteroCSCGraph
from lightning_gnn.ops.sample.relation import PickOptions, Relation, TimeWindow
from lightning_gnn.partitioned.folder import Partition, TypeInfo
from lightning_gnn.partitioned.remote import Remote
from lightning_gnn.sampling.neighbor import Fanouts, NeighborSampler

_NODES_PER_BLOCK = 1 << 20  # nodes whose times are read together when all are needed


class Connection:
    """Access to all parts, available once the ranks are connected by ``setup``."""

    def __init__(self) -> None:
        self.remote: Remote | None = None

    @property
    def open(self) -> Remote:
        """The open access to all parts; raises a RuntimeError outside of ``setup`` and ``teardown``."""
        if self.remote is None:
            fix = "use a Trainer, or call datamodule.setup('fit') on all ranks, and read before teardown"
            raise RuntimeError(f"the ranks of the partitioned graph are not connected: {fix}")
        return self.remote


class PartitionedSampler(NeighborSampler):
    """Samples neighbors from all parts, bit for bit as a single machine with the whole graph."""

    def __init__(
        self,
        partition: Partition,
        connection: Connection,
        num_neighbors: Fanouts,
        *args: Any,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        **options: Any,
    ) -> None:
        # Find the indices of the node and edge types that have times or weights.
        self.partition, self.connection = partition, connection
        self.time_attr, self.weight_attr = time_attr, weight_attr
        timed_nodes, timed_edges = _types_with(partition.nodes, time_attr), _types_with(partition.edges, time_attr)
        weighted = _types_with(partition.edges, weight_attr)
        # Check the attributes as the sampler of a whole graph does.
        if time_attr is not None and bool(timed_nodes) is bool(timed_edges):
            found = "both nodes and edges have" if timed_nodes else "neither nodes nor edges have"
            raise ValueError(f"{found} times called {time_attr!r}: give those of nodes, or those of edges")
        if weight_attr is not None and not weighted:
            raise ValueError(f"no edges have weights called {weight_attr!r}")
        if weight_attr is not None and time_attr is not None:
            raise ValueError(
                f"weighted temporal sampling is not supported: leave out weight_attr={weight_attr!r}, or time_attr"
            )
        # Times of all types are compared, so they are all integers or all floating.
        timed = timed_nodes or timed_edges
        self._timed = {
            edge_type: time_attr
            for edge_type in range(len(partition.edges))
            if (partition.ends(edge_type)[0] in timed_nodes) or edge_type in timed_edges
        }
        self._has_node_times = bool(timed_nodes)
        infos = partition.nodes if timed_nodes else partition.edges
        self._floating = any(infos[number].dtype(str(time_attr)).is_floating_point for number in timed)
        # The base class gets graphs without edges in memory; calls to the owning ranks pick the edges.
        super().__init__(self._describe_graph(weighted), num_neighbors, *args, **options)
        self.whole_graph = self._describe_graph([])
        if timed_nodes:
            times = {partition.nodes[number].name: _Times(connection, number, str(time_attr)) for number in timed_nodes}
            self.node_time: Any = times if partition.is_hetero else times[None]
        # The sampled edges are stored per thread, since mini-batches are sampled in parallel.
        self._weighted = weighted
        self._last_edges = threading.local()
        self.check_options()

    @property
    def is_temporal(self) -> bool:
        """Whether edges have times, also if a graph with times of nodes has no edges."""
        return self.time_attr is not None

    def _describe_graph(self, weighted: Sequence[int]) -> RemoteCSCGraph | RemoteHeteroCSCGraph:
        partition, by_weight = self.partition, bool(weighted)

        def remote_picker(relations: Sequence[Relation], key: int, rule: PickOptions, times: TimeWindow | None) -> Any:
            return self.connection.open.picks(relations, key, rule, times, by_weight)

        relations: dict[Any, Any] = {}
        for number, info in enumerate(partition.edges):
            source, target = (partition.nodes[end].count for end in partition.ends(number))
            is_timed, is_weighted = number in self._timed, number in weighted
            relations[info.name] = RemoteCSCGraph.describe(
                source, target, info.count, number, is_timed, self._floating, is_weighted, remote_picker
            )
        if not partition.is_hetero:
            return relations[None]  # type: ignore[no-any-return]
        return RemoteHeteroCSCGraph({info.name: info.count for info in partition.nodes}, relations, remote_picker)

    def prepare(self) -> None:
        """Sort this rank's neighbor lists by time, or accumulate their weights; reads times of remote sources."""
        remote = self.connection.open
        for number, part in remote.shard.parts.items():
            for edge_type in range(len(self.partition.edges)):
                if edge_type in self._timed:
                    lists = part.lists(edge_type)
                    graph = lists.with_time(self._edge_times(remote, number, edge_type, lists), self._floating)
                    for weighted in (False, True):
                        remote.shard.set_lists(number, edge_type, weighted, graph)
                elif edge_type in self._weighted:
                    rows = part.edge_rows[edge_type][str(self.weight_attr)]
                    remote.shard.set_lists(number, edge_type, True, part.lists(edge_type).with_weight(rows))

    def _edge_times(self, remote: Remote, part: int, edge_type: int, lists: CSCGraph) -> Tensor:
        name = str(self.time_attr)
        if not self._has_node_times:
            return remote.shard.parts[part].edge_rows[edge_type][name]
        sources, inverse = np.unique(lists.indices.numpy(), return_inverse=True)
        source, _ = self.partition.ends(edge_type)
        times = remote.node_rows(source, sources.astype(np.int64), [name])[name]
        return times[torch.from_numpy(inverse)]

    def original_positions(self, graph: CSCGraph, edge: Tensor) -> Tensor:
        """Convert edge numbers over all parts to positions in the user's ``edge_index``, int64 ``[m]``."""
        assert isinstance(graph, RemoteCSCGraph)
        ids = self.connection.open.edge_rows(graph.number, edge.numpy(), [None])[None]
        if self.partition.edges[graph.number].attributes:
            vars(self._last_edges)[str(graph.number)] = ids, edge
            vars(ids)["edge_numbers"] = edge  # for the case that another thread gathers the attributes
        return ids

    def edge_numbers(self, edge_type: int, ids: Tensor) -> Tensor:
        """Return the numbers over all parts of sampled edges, or of some of those that this thread sampled last."""
        if (sampled := vars(ids).get("edge_numbers")) is not None:
            return sampled  # type: ignore[no-any-return]
        known, numbers = vars(self._last_edges).get(str(edge_type), (ids[:0], ids[:0]))
        order = known.argsort()
        index = torch.searchsorted(known[order], ids)
        if ids.numel() and (
            not known.numel() or not torch.equal(known[order][index.clamp(max=known.numel() - 1)], ids)
        ):
            raise ValueError("attributes of edges can be read only for the edges of a mini-batch")
        result: Tensor = numbers[order][index]
        return result


class _Times:
    """The times of all nodes of a type, read on demand."""

    def __init__(self, connection: Connection, node_type: int, name: str) -> None:
        self._connection, self._node_type, self._name = connection, node_type, name
        self._first: Tensor | None = None

    def __getitem__(self, ids: Tensor) -> Tensor:
        rows = self._connection.open.node_rows(self._node_type, ids.flatten().cpu().numpy(), [self._name])
        return rows[self._name].view(ids.shape)

    def argmin(self) -> Tensor:
        """Return the first of the earliest nodes, the fallback for sampled negative nodes that are too late."""
        if self._first is None:  # not locked: concurrent threads compute the same value
            count = self._connection.open.partition.nodes[self._node_type].count
            earliest = []
            for first in range(0, count, _NODES_PER_BLOCK):
                times = self[torch.arange(first, min(first + _NODES_PER_BLOCK, count))]
                earliest.append((times.min().item(), first + int(times.argmin())))
            self._first = torch.tensor(min(earliest)[1])
        return self._first


class NodeRows:
    """Table of a node attribute for loaders; one request reads all attributes (``all_keys``) of a node type."""

    def __init__(
        self, connection: Connection, node_type: int, key: str, all_keys: Sequence[str], memo: threading.local
    ) -> None:
        self._connection, self._node_type, self._key = connection, node_type, key
        self._all_keys, self._memo = list(all_keys), memo

    def gather(self, ids: Tensor) -> Tensor:
        """Return the rows of nodes ``ids``, int64 ``[n]``."""
        last_ids, rows = vars(self._memo).get("rows", (None, {}))
        if last_ids is not ids or self._key not in rows:
            rows = self._connection.open.node_rows(self._node_type, ids.numpy(), self._all_keys)
        values: Tensor = rows.pop(self._key)
        vars(self._memo)["rows"] = (ids, rows) if rows else (None, {})
        return values


class EdgeRows:
    """Table of an edge attribute for loaders."""

    def __init__(self, sampler: Callable[[], PartitionedSampler], edge_type: int, key: str) -> None:
        self._sampler, self._edge_type, self._key = sampler, edge_type, key

    def gather(self, ids: Tensor) -> Tensor:
        """Return the rows of edges ``ids`` of the last mini-batch, int64 ``[m]``."""
        sampler = self._sampler()
        numbers = sampler.edge_numbers(self._edge_type, ids)
        rows = sampler.connection.open.edge_rows(self._edge_type, numbers.numpy(), [self._key])
        values: Tensor = rows[self._key]
        return values


def _types_with(infos: Sequence[TypeInfo], name: str | None) -> list[int]:
    return [] if name is None else [number for number, info in enumerate(infos) if name in info.attributes]
