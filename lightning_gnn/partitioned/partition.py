"""From a graph to a folder of parts, with what that will cost in training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, NodeSamplerInput
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.graph.checks import check_edge_data, check_hetero_data, check_node_data
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.graph.stores import stores_of
from lightning_gnn.ops.hashing import batch_key
from lightning_gnn.partitioned.assign import assign_nodes
from lightning_gnn.partitioned.folder import seeds_of, write_partition
from lightning_gnn.sampling.neighbor import NeighborSampler, topology_of


@dataclass
class Summary:
    """What a partition is like.

    Args:
        parts: How many.
        nodes: Of each part.
        edges: Into the nodes of each part.
        seeds: Training seeds of each part.
        cut: Fraction of the edges whose source is in another part than their target.
        rows: Nodes of a mini-batch, on average, with the seeds in the order of one machine.
        elsewhere: Of these, in other parts than the rank's.
        elsewhere_local: In other parts, with seeds of the rank's own part.
    """

    parts: int
    nodes: list[int]
    edges: list[int]
    seeds: list[int]
    cut: float
    rows: float | None = None
    elsewhere: float | None = None
    elsewhere_local: float | None = None


def partition_graph(
    data: Data | HeteroData,
    folder: str | Path,
    parts: int,
    method: str = "metis",
    seed: int = 0,
    num_neighbors: Sequence[int] = (10, 10),
    batch_size: int = 1024,
    batches: int = 20,
    check_features: bool = True,
    tell: Callable[[str], None] = lambda message: None,
    links: Mapping[str, Tensor] | None = None,
    link_type: EdgeType | None = None,
) -> Summary:
    """Cut a graph into parts, write each to a folder of its own, and sample to see what a rank will ask of others.

    Args:
        data: The graph, with its training seeds as ``train_mask`` or ``train_idx`` (of one type) if they are to be
            shared out evenly.
        folder: Where to; new or empty.
        parts: How many parts.
        method: ``"metis"``, ``"ldg"`` or ``"random"``: see :func:`~lightning_gnn.partitioned.assign.assign_nodes`.
        seed: Of what is random.
        num_neighbors: Fanouts of the mini-batches that are sampled to count by.
        batch_size: Their seeds.
        batches: How many of them, in each order of the seeds; 0 counts nothing.
        check_features: Look for NaN and infinity first.
        tell: Called with what is being done.
        links: Edges to predict, which the graph may lack: ``train``, ``val`` and ``test``, int64 ``[2, n]``; labels
            ``[n]`` of the latter two as ``val_labels`` and ``test_labels``; times ``[n]`` as ``train_time`` and so on.
            A :class:`~lightning_gnn.PartitionedLinkDataModule` takes them where it is given none.
        link_type: Their type, of a graph with types.

    Raises:
        FileExistsError: There is something in the folder.
        MemoryError, ModuleNotFoundError: METIS cannot be used.
        OSError: The disk has no room.
        TypeError: An attribute cannot be split.
        ValueError: The graph is not valid, or an option.

    Examples:
        >>> import tempfile, torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn.partitioned import partition_graph
        >>> two = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]])  # two circles
        >>> data = Data(x=torch.eye(6), edge_index=two, train_mask=torch.ones(6, dtype=torch.bool))
        >>> summary = partition_graph(data, tempfile.mkdtemp(), parts=2, method="ldg", batch_size=3)
        >>> summary.nodes, summary.cut
        ([3, 3], 0.0)
    """
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
    summary = Summary(
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
    if batches and len(seeds) == 1 and num_neighbors:
        tell("counting the rows that ranks will ask of each other")
        _count(summary, graph, assignment, seeds, list(num_neighbors), batch_size, batches, seed)
    return summary


def _count(
    summary: Summary, graph: CSCGraph | HeteroCSCGraph, assignment: Mapping[NodeType | None, Tensor],
    seeds: dict[NodeType | None, Tensor], fanouts: list[int], batch_size: int, batches: int, seed: int,
) -> None:  # fmt: skip
    """Count the rows of sampled mini-batches, of ranks in turns."""
    sampler = NeighborSampler(graph, fanouts, seed=seed)
    (name, ids), parts = next(iter(seeds.items())), summary.parts
    order = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(seed))
    shuffled = ids[order]
    owner = assignment[name].numpy()
    for local in (False, True):
        rows, elsewhere, counted = 0, 0, 0
        for number in range(batches):
            rank = number % parts
            own = shuffled[torch.from_numpy(owner[shuffled.numpy()] == rank)] if local else shuffled[rank::parts]
            chosen = own[number // parts * batch_size :][:batch_size]
            if not chosen.numel():
                continue
            out = sampler.sample_from_nodes(
                NodeSamplerInput(None, chosen, input_type=name), key=batch_key(seed, rank, batch=number)
            )
            nodes = out.node if isinstance(out, HeteroSamplerOutput) else {None: out.node}
            for kind, found in nodes.items():
                rows += found.numel()
                elsewhere += int((assignment[kind].numpy()[found.numpy()] != rank).sum())
            counted += 1
        if counted:
            if local:
                summary.elsewhere_local = elsewhere / counted
            else:
                summary.rows, summary.elsewhere = rows / counted, elsewhere / counted
