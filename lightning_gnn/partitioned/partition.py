"""From a graph to a folder of parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.graph.checks import check_edge_data, check_hetero_data, check_node_data
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.graph.stores import stores_of
from lightning_gnn.partitioned.assign import assign_nodes
from lightning_gnn.partitioned.folder import seeds_of, write_partition
from lightning_gnn.runtime.messages import removed
from lightning_gnn.sampling.neighbor import topology_of


@dataclass
class Summary:
    """What a partition is like."""

    parts: int  # how many
    nodes: list[int]  # of each part
    edges: list[int]  # into the nodes of each part
    seeds: list[int]  # for training, of each part
    cut: float  # fraction of the edges whose source is in another part than their target


def partition_graph(
    data: Data | HeteroData,
    folder: str | Path,
    parts: int,
    method: str = "metis",
    seed: int = 0,
    check_features: bool = True,
    tell: Callable[[str], None] = lambda message: None,
    links: Mapping[str, Tensor] | None = None,
    link_type: EdgeType | None = None,
    **gone: object,
) -> Summary:
    """Cut a graph into parts, and write each to a folder of its own.

    Parts are even, within 5 % or a node, in nodes, in edges into them and in training seeds, over all types together.

    Args:
        data: The graph, perhaps with training seeds as ``train_mask`` or ``train_idx`` (of one type).
        folder: Where to; new or empty.
        parts: How many parts.
        method: ``"metis"`` cuts few edges and has the whole graph in memory several times; ``"ldg"`` goes over the
            lists eight times, in order, and needs 18 bytes per node (for several types 8 per edge as well);
            ``"random"`` cuts all it can.
        seed: Of what is random.
        check_features: Look for NaN and infinity first.
        tell: Called with what is being done.
        links: Edges to predict, which the graph may lack, for :class:`~lightning_gnn.PartitionedLinkDataModule`:
            ``train``, ``val`` and ``test``, int64 ``[2, n]``; labels ``[n]`` of the latter two as ``val_labels`` and
            ``test_labels``; times ``[n]`` as ``train_time`` and so on.
        link_type: Their type, of a graph with types.

    Raises:
        FileExistsError: There is something in the folder.
        MemoryError, ModuleNotFoundError: METIS cannot be used.
        OSError: The disk has no room.
        TypeError, ValueError: The graph is not valid, or an option, or an attribute cannot be split.

    Examples:
        >>> import tempfile, torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn.partitioned import partition_graph
        >>> two = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]])  # two circles
        >>> data = Data(x=torch.eye(6), edge_index=two, train_mask=torch.ones(6, dtype=torch.bool))
        >>> summary = partition_graph(data, tempfile.mkdtemp(), parts=2, method="ldg")
        >>> summary.nodes, summary.cut
        ([3, 3], 0.0)
    """
    for option in gone:
        raise TypeError(removed(f"partition.{option}") or f"partition_graph has no option {option}")
    if isinstance(data, HeteroData):
        check_hetero_data(data, check_features)
    else:
        check_node_data(data, check_features)
        check_edge_data(data)
    graph = topology_of(data)
    seeds: dict[NodeType | None, Tensor] = {}
    for name, store in stores_of(data):
        if not isinstance(name, tuple) and (ids := seeds_of(store, "train")) is not None:
            seeds[name] = ids
    tell(f"sharing out the nodes ({method})")
    assignment = assign_nodes(graph, parts, method, seeds, seed)
    write_partition(data, folder, assignment, parts, method, tell, links, link_type)
    relations: dict[EdgeType | None, CSCGraph] = graph.relations if isinstance(graph, HeteroCSCGraph) else {None: graph}
    edges, cut, total = np.zeros(parts, np.int64), 0, 0
    for name, relation in relations.items():
        source, target = (assignment[None if name is None else name[end]].numpy() for end in (0, 2))
        degrees = relation.in_degrees.numpy()
        edges += np.bincount(target, weights=degrees, minlength=parts).astype(np.int64)
        for start in range(0, relation.num_nodes, 1 << 20):  # in blocks: the edges may not fit into memory
            stop = min(start + (1 << 20), relation.num_nodes)
            begin, end = relation.indptr[start].item(), relation.indptr[stop].item()
            here = np.repeat(target[start:stop], degrees[start:stop])
            cut += int((source[relation.indices[begin:end].numpy()] != here).sum())
        total += relation.num_edges
    return Summary(
        parts,
        np.sum([np.bincount(part.numpy(), minlength=parts) for part in assignment.values()], 0).tolist(),
        edges.tolist(),
        np.sum(
            [np.zeros(parts, np.int64)]
            + [np.bincount(assignment[name].numpy()[ids], minlength=parts) for name, ids in seeds.items()],
            0,
        ).tolist(),
        cut / max(total, 1),
    )  # fmt: skip
