"""The parts of one rank, and the RPC handlers that sample and read rows from them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.ops.sample.definition import describe
from lightning_gnn.ops.sample.numba import Picks, pick_from_lists
from lightning_gnn.ops.sample.relation import Labor, PickOptions, Relation, TimeWindow
from lightning_gnn.partitioned.folder import Partition


def holders(parts: int, ranks: int) -> list[list[int]]:
    """Return the ranks that have each part: one, or several if there are more ranks than parts."""
    if ranks <= parts:
        return [[part * ranks // parts] for part in range(parts)]
    ranks_of: list[list[int]] = [[] for _ in range(parts)]
    for rank in range(ranks):
        ranks_of[rank * parts // ranks].append(rank)
    return ranks_of


class Shard:
    """The parts of one rank."""

    def __init__(self, partition: Partition, parts: Sequence[int], topology: bool = True) -> None:
        self.partition = partition
        self.parts = {number: partition.open(number) for number in parts}
        self._lists: dict[tuple[int, int, bool], tuple[Relation, Tensor | None]] = {}
        if topology:
            for number, part in self.parts.items():
                for edge_type in range(len(partition.edges)):
                    graph = part.lists(edge_type)
                    for weighted in (False, True):
                        self.set_lists(number, edge_type, weighted, graph)

    def set_lists(self, part: int, edge_type: int, weighted: bool, graph: CSCGraph) -> None:
        """Set the neighbor lists to sample from; their ``edge_ids`` are indices into the part's edges."""
        tensors = describe(graph, 0, 0, [], True)
        arrays: dict[str, Any] = {
            key: value.numpy() for key, value in tensors._asdict().items() if isinstance(value, Tensor)
        }
        self._lists[part, edge_type, weighted] = tensors._replace(**arrays), graph.edge_ids

    def picks(
        self, weighted: bool, requests: Sequence[tuple[Any, ...]], rule: PickOptions, times: TimeWindow | None
    ) -> list[Picks]:
        """Sample for each (part, edge type, nodes, trees, fanout, key); edges are numbered over all parts."""
        # A remote call has lists instead of tuples.
        labor = None if rule[-1] is None else Labor(*rule[-1])
        rule, times = PickOptions(*rule)._replace(labor=labor), None if times is None else TimeWindow(*times)
        out = []
        for part, edge_type, nodes, trees, fanout, key in requests:
            relation, edge_ids = self._lists[part, edge_type, weighted]
            _, target = self.partition.ends(edge_type)
            rows = self.parts[part].local_indices(target, nodes)
            picks = pick_from_lists(relation, nodes, rows, trees, fanout, key, rule, times)
            edges = picks.place if edge_ids is None else edge_ids.numpy()[picks.place].astype(np.int64)
            out.append(picks._replace(place=edges + self.partition.first_edges(edge_type)[part]))
        return out

    def node_rows(self, node_type: int, requests: Sequence[tuple[int, np.ndarray]], keys: Sequence[str]) -> list[Any]:
        """Return, for each (part, nodes), the rows of each attribute as bytes, uint8 ``[n, bytes]``."""
        out = []
        for part, nodes in requests:
            graph_part = self.parts[part]
            indices = torch.from_numpy(graph_part.local_indices(node_type, nodes))
            rows = graph_part.node_rows[node_type]
            out.append([as_bytes(rows[key].index_select(0, indices)) for key in keys])
        return out

    def edge_rows(
        self, edge_type: int, requests: Sequence[tuple[int, np.ndarray]], keys: Sequence[str | None]
    ) -> list[Any]:
        """Return the same for (part, indices of edges within the part); the key None stands for edge ids."""
        out = []
        for part, edges in requests:
            graph_part, indices = self.parts[part], torch.from_numpy(edges)
            rows: dict[Any, Tensor] = {None: graph_part.edge_ids[edge_type], **graph_part.edge_rows[edge_type]}
            gathered = {key: rows[key].index_select(0, indices) for key in keys}
            out.append([as_bytes(values.long() if key is None else values) for key, values in gathered.items()])
        return out


def as_bytes(rows: Tensor) -> np.ndarray:
    """View rows as bytes, uint8 ``[n, bytes]``, to read and write them: NumPy and most wire formats lack bfloat16."""
    flat = rows.view(rows.size(0), -1) if rows.numel() else rows.new_empty((rows.size(0), 0))
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty((rows.size(0), 0), np.uint8)
