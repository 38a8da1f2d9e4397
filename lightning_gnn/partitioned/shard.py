"""What one rank has of a partitioned graph, and what it answers the others from it: picks of its lists, rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.ops.sample.definition import describe
from lightning_gnn.ops.sample.numba import Picks, pick_from_lists
from lightning_gnn.ops.sample.relation import PickOptions, Relation, TimeWindow
from lightning_gnn.partitioned.folder import Partition


def holders(parts: int, ranks: int) -> list[list[int]]:
    """Return the ranks that have each part: one, or where there are more ranks than parts several."""
    if ranks <= parts:
        return [[part * ranks // parts] for part in range(parts)]
    held: list[list[int]] = [[] for _ in range(parts)]
    for rank in range(ranks):
        held[rank * parts // ranks].append(rank)
    return held


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
                        self.take_lists(number, edge_type, weighted, graph)

    def take_lists(self, part: int, edge_type: int, weighted: bool, graph: CSCGraph) -> None:
        """Sample from these lists from now on; their ``edge_ids`` are places among the part's edges."""
        tensors = describe(graph, 0, 0, [], True)
        arrays: dict[str, Any] = {
            key: value.numpy() for key, value in tensors._asdict().items() if isinstance(value, Tensor)
        }
        self._lists[part, edge_type, weighted] = tensors._replace(**arrays), graph.edge_ids

    def picks(
        self, weighted: bool, questions: Sequence[tuple[Any, ...]], rule: PickOptions, times: TimeWindow | None
    ) -> list[Picks]:
        """Answer what each (part, edge type, nodes, trees, fanout, key) picks; places are those among all edges."""
        out = []
        for part, edge_type, nodes, trees, fanout, key in questions:
            relation, places = self._lists[part, edge_type, weighted]
            _, target = self.partition.ends(edge_type)
            rows = self.parts[part].places(target, nodes)
            found = pick_from_lists(relation, nodes, rows, trees, fanout, key, rule, times)
            place = found.place if places is None else places.numpy()[found.place].astype(np.int64)
            out.append(found._replace(place=place + self.partition.first_edges(edge_type)[part]))
        return out

    def node_rows(self, node_type: int, questions: Sequence[tuple[int, np.ndarray]], keys: Sequence[str]) -> list[Any]:
        """Return, for each (part, nodes), the bytes of the rows of each attribute, uint8 ``[n, bytes]``."""
        out = []
        for part, nodes in questions:
            held = self.parts[part]
            places = torch.from_numpy(held.places(node_type, nodes))
            out.append([_bytes_of(held.node_rows[node_type][key], places) for key in keys])
        return out

    def edge_rows(
        self, edge_type: int, questions: Sequence[tuple[int, np.ndarray]], keys: Sequence[str | None]
    ) -> list[Any]:
        """Do so for edges, by their places among those of the part; the key None asks for their ids."""
        out = []
        for part, where in questions:
            held, places = self.parts[part], torch.from_numpy(where)
            out.append([
                held.edge_ids[edge_type][places].numpy().astype(np.int64)[:, None].view(np.uint8)
                if key is None else _bytes_of(held.edge_rows[edge_type][key], places)
                for key in keys
            ])  # fmt: skip
        return out


def _bytes_of(rows: Tensor, places: Tensor) -> np.ndarray:
    """Return some rows as bytes, uint8 ``[n, bytes]``; most wire formats know no bfloat16."""
    picked = rows.index_select(0, places).reshape(places.numel(), -1)
    width = picked.size(1) * picked.element_size()
    if not picked.numel():
        return np.empty((places.numel(), width), np.uint8)
    return picked.view(torch.uint8).numpy()
