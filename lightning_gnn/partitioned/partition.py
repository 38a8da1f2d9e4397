"""Partition a graph and write its parts to a folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.graph.adjacency import with_adj_t_values
from lightning_gnn.graph.checks import check_edge_data, check_hetero_data, check_node_data
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.graph.stores import stores_of
from lightning_gnn.partitioned.assign import assign_nodes
from lightning_gnn.partitioned.folder import check_new_folder, seeds_of, write_partition
from lightning_gnn.sampling.neighbor import topology_of


@dataclass
class Summary:
    """Sizes of the parts of a partitioned graph."""

    parts: int  # number of parts
    nodes: list[int]  # number of nodes of each part
    edges: list[int]  # number of edges into the nodes of each part
    seeds: list[int]  # number of training seeds of each part
    cut: float  # fraction of the edges whose source and target are in different parts


def partition_graph(
    data: Data | HeteroData,
    folder: str | Path,
    parts: int,
    method: str = "metis",
    seed: int = 0,
    check_features: bool = True,
    progress: Callable[[str], None] = lambda message: None,
    links: Mapping[str, Tensor] | None = None,
    link_type: EdgeType | None = None,
) -> Summary:
    """Partition a graph, and write each part to its own folder.

    Parts are balanced within 5 % or one node in nodes, in-edges and training seeds, summed over all types.

    Args:
        data: The graph, optionally with training seeds as ``train_mask`` or ``train_idx`` (of one node type).
        folder: New or empty output folder.
        parts: Number of parts.
        method: ``"metis"`` cuts the fewest edges and needs several copies of the graph in memory. ``"ldg"`` streams
            over the neighbor lists eight times, and needs 18 bytes per node (in heterogeneous graphs also 8 bytes per
            edge); with the writing of the parts, 55 bytes per node. ``"random"`` cuts the most edges.
        seed: Random seed.
        check_features: Check the features for NaN and infinity first.
        progress: Called with a progress message before each step.
        links: Edges to predict, which the graph need not contain, for
            :class:`~lightning_gnn.PartitionedLinkDataModule`: ``train``, ``val`` and ``test``, int64 ``[2, n]``; labels
            ``[n]`` of the latter two as ``val_labels`` and ``test_labels``; times ``[n]`` as ``train_time`` and so on.
        link_type: Edge type of ``links`` in a heterogeneous graph.

    Raises:
        FileExistsError: The folder is not empty.
        MemoryError, ModuleNotFoundError: METIS needs too much memory, or is not installed.
        OSError: The disk is full.
        TypeError, ValueError: The graph or an option is invalid, or an attribute cannot be split by rows. Before any
            work: the folder cannot be written to.

    Examples:
        >>> import tempfile, torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn.partitioned import partition_graph
        >>> two = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]])  # two cycles
        >>> data = Data(x=torch.eye(6), edge_index=two, train_mask=torch.ones(6, dtype=torch.bool))
        >>> summary = partition_graph(data, tempfile.mkdtemp(), parts=2, method="ldg")
        >>> summary.nodes, summary.cut
        ([3, 3], 0.0)
    """
    if isinstance(data, Data | HeteroData):
        data = with_adj_t_values(data)
    check_new_folder(folder)
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
    progress(f"assigning nodes to parts ({method})")
    assignment = assign_nodes(graph, parts, method, seeds, seed)
    write_partition(data, folder, assignment, parts, method, progress, links, link_type)
    relations: dict[EdgeType | None, CSCGraph] = graph.relations if isinstance(graph, HeteroCSCGraph) else {None: graph}
    edges, cut, total = np.zeros(parts, np.int64), 0, 0
    for name, relation in relations.items():
        source, target = (assignment[None if name is None else name[end]].numpy() for end in (0, 2))
        degrees = relation.in_degrees.numpy()
        edges += np.bincount(target, weights=degrees, minlength=parts).astype(np.int64)
        for start in range(0, relation.num_nodes, 1 << 20):  # in blocks: the edges may be larger than memory
            stop = min(start + (1 << 20), relation.num_nodes)
            begin, end = relation.indptr[start].item(), relation.indptr[stop].item()
            target_part = np.repeat(target[start:stop], degrees[start:stop])
            cut += int((source[relation.indices[begin:end].numpy()] != target_part).sum())
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
