"""A sampler over the lists of all parts, and the rows that belong to what it samples."""

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

_TIMES_AT_ONCE = 1 << 20
"""Nodes whose times are read together where all are."""


class Connection:
    """Where a rank reads what lies in any part, once it is joined to the others."""

    def __init__(self) -> None:
        self.remote: Remote | None = None

    @property
    def open(self) -> Remote:
        """What reads."""
        if self.remote is None:
            fix = "a Trainer does it, or datamodule.setup('fit') on all ranks; read what is needed while they are"
            raise RuntimeError(f"the ranks of the partitioned graph are not joined: {fix}")
        return self.remote


class PartitionedSampler(NeighborSampler):
    """Samples, bit for bit as on one machine, from lists of which each rank has those of its parts."""

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
        # Find the node and edge types that have times or weights, by their numbers.
        self.partition, self.connection = partition, connection
        self.time_attr, self.weight_attr = time_attr, weight_attr
        of_nodes, of_edges = _having(partition.nodes, time_attr), _having(partition.edges, time_attr)
        weighted = _having(partition.edges, weight_attr)
        # Check that the attributes can be sampled by, as the sampler of a whole graph does.
        if time_attr is not None and bool(of_nodes) is bool(of_edges):
            both = "both nodes and edges have" if of_nodes else "neither nodes nor edges have"
            raise ValueError(f"{both} times called {time_attr!r}: give those of nodes, or those of edges")
        if weight_attr is not None and not weighted:
            raise ValueError(f"no edges have weights called {weight_attr!r}")
        if weight_attr is not None and time_attr is not None:
            raise ValueError(
                f"there is no weighted temporal sampling: leave out weight_attr={weight_attr!r}, or time_attr"
            )
        # Times of all types need the same kind of number, so that they can be compared.
        timed = of_nodes or of_edges
        self._timed = {
            edge_type: time_attr
            for edge_type in range(len(partition.edges))
            if (partition.ends(edge_type)[0] in of_nodes) or edge_type in of_edges
        }
        self._of_nodes = bool(of_nodes)
        kinds = partition.nodes if of_nodes else partition.edges
        self._floating = any(kinds[number].dtype(str(time_attr)).is_floating_point for number in timed)
        # The base class sees a graph without edges in memory, whose picks come from the ranks that hold them.
        super().__init__(self._described(weighted), num_neighbors, *args, **options)
        self.whole_graph = self._described([])
        if of_nodes:
            times = {partition.nodes[number].name: _Times(connection, number, str(time_attr)) for number in of_nodes}
            self.node_time: Any = times if partition.typed else times[None]
        # Ids of sampled edges are noted by thread, since mini-batches are sampled in parallel.
        self._weighted = weighted
        self._noted = threading.local()
        self.check_options()

    def _described(self, weighted: Sequence[int]) -> RemoteCSCGraph | RemoteHeteroCSCGraph:
        partition, by_weight = self.partition, bool(weighted)

        def remote_picker(relations: Sequence[Relation], key: int, rule: PickOptions, times: TimeWindow | None) -> Any:
            return self.connection.open.picks(relations, key, rule, times, by_weight)

        relations: dict[Any, Any] = {}
        for number, kind in enumerate(partition.edges):
            source, target = (partition.nodes[end].count for end in partition.ends(number))
            relations[kind.name] = RemoteCSCGraph.describe(
                source,
                target,
                kind.count,
                number,
                number in self._timed,
                self._floating,
                number in weighted,
                remote_picker,
            )
        if not partition.typed:
            return relations[None]  # type: ignore[no-any-return]
        return RemoteHeteroCSCGraph({kind.name: kind.count for kind in partition.nodes}, relations, remote_picker)

    def prepare(self) -> None:
        """Sort this rank's lists by time, or sum up their weights; asks other ranks for the times of sources."""
        remote = self.connection.open
        for number, part in remote.shard.parts.items():
            for edge_type in range(len(self.partition.edges)):
                if edge_type in self._timed:
                    lists = part.lists(edge_type)
                    graph = lists.with_time(self._times_of_edges(remote, number, edge_type, lists), self._floating)
                    for weighted in (False, True):
                        remote.shard.take_lists(number, edge_type, weighted, graph)
                elif edge_type in self._weighted:
                    rows = part.edge_rows[edge_type][str(self.weight_attr)]
                    remote.shard.take_lists(number, edge_type, True, part.lists(edge_type).with_weight(rows))

    def _times_of_edges(self, remote: Remote, part: int, edge_type: int, lists: CSCGraph) -> Tensor:
        name = str(self.time_attr)
        if not self._of_nodes:
            return remote.shard.parts[part].edge_rows[edge_type][name]
        sources, places = np.unique(lists.indices.numpy(), return_inverse=True)
        source, _ = self.partition.ends(edge_type)
        times = remote.node_rows(source, sources.astype(np.int64), [name])[name]
        return times[torch.from_numpy(places)]

    def original_positions(self, graph: CSCGraph, edge: Tensor) -> Tensor:
        """Turn places among the edges of all parts into places in the user's ``edge_index``, int64 ``[m]``."""
        assert isinstance(graph, RemoteCSCGraph)
        ids = self.connection.open.edge_rows(graph.number, edge.numpy(), [None])[None]
        if self.partition.edges[graph.number].attributes:
            vars(self._noted)[str(graph.number)] = ids, edge
            vars(ids)["places"] = edge  # which also come along where another thread loads the features
        return ids

    def places_of(self, edge_type: int, ids: Tensor) -> Tensor:
        """Return where edges are that were sampled, or some of those that this thread has sampled last."""
        if (sampled := vars(ids).get("places")) is not None:
            return sampled  # type: ignore[no-any-return]
        known, places = vars(self._noted).get(str(edge_type), (ids[:0], ids[:0]))
        order = known.argsort()
        at = torch.searchsorted(known[order], ids)
        if ids.numel() and (not known.numel() or not torch.equal(known[order][at.clamp(max=known.numel() - 1)], ids)):
            raise ValueError("attributes of edges that were not sampled are asked for; each part has only its own")
        found: Tensor = places[order][at]
        return found


class _Times:
    """The times of all nodes of a type, of which a few at a time are read."""

    def __init__(self, connection: Connection, node_type: int, name: str) -> None:
        self._connection, self._node_type, self._name = connection, node_type, name
        self._first: Tensor | None = None

    def __getitem__(self, ids: Tensor) -> Tensor:
        read = self._connection.open.node_rows(self._node_type, ids.flatten().cpu().numpy(), [self._name])
        return read[self._name].view(ids.shape)

    def argmin(self) -> Tensor:
        """Return the first of the earliest nodes, which negative edges end at where drawn ones are too late."""
        if self._first is None:  # threads that look at the same time find the same
            count = self._connection.open.partition.nodes[self._node_type].count
            earliest = []
            for first in range(0, count, _TIMES_AT_ONCE):
                times = self[torch.arange(first, min(first + _TIMES_AT_ONCE, count))]
                earliest.append((times.min().item(), first + int(times.argmin())))
            self._first = torch.tensor(min(earliest)[1])
        return self._first


class NodeRows:
    """An attribute of nodes as loaders gather it; those of one type, ``beside``, cross the network together."""

    def __init__(
        self, connection: Connection, node_type: int, key: str, beside: Sequence[str], memo: threading.local
    ) -> None:
        self._connection, self._node_type, self._key = connection, node_type, key
        self._beside, self._memo = list(beside), memo

    def gather(self, ids: Tensor) -> Tensor:
        """Return the rows of some nodes, int64 ``[n]``."""
        kept, rows = vars(self._memo).get("rows", (None, {}))
        if kept is not ids or self._key not in rows:
            rows = self._connection.open.node_rows(self._node_type, ids.numpy(), self._beside)
        found: Tensor = rows.pop(self._key)
        vars(self._memo)["rows"] = (ids, rows) if rows else (None, {})
        return found


class EdgeRows:
    """An attribute of edges as loaders gather it, by their ids."""

    def __init__(self, sampler: Callable[[], PartitionedSampler], edge_type: int, key: str) -> None:
        self._sampler, self._edge_type, self._key = sampler, edge_type, key

    def gather(self, ids: Tensor) -> Tensor:
        """Return the rows of some edges, int64 ``[m]``."""
        sampler = self._sampler()
        places = sampler.places_of(self._edge_type, ids)
        rows = sampler.connection.open.edge_rows(self._edge_type, places.numpy(), [self._key])
        found: Tensor = rows[self._key]
        return found


def _having(kinds: Sequence[TypeInfo], name: str | None) -> list[int]:
    return [] if name is None else [number for number, kind in enumerate(kinds) if name in kind.attributes]
