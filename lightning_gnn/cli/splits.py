"""Default splits: train, validation and test nodes, and the edges to predict."""

import copy
from typing import TypeAlias

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage, NodeStorage
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.typing import EdgeType
from torch_geometric.utils import index_to_mask

from lightning_gnn.datamodules.node import as_ids, seeds_in
from lightning_gnn.graph.adjacency import with_adj_t_values
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import edges_of
from lightning_gnn.loading.random_state import keyed_random

Graph: TypeAlias = Data | HeteroData
_DEFAULT_NUM_LINKS = {"num_train": 20000, "num_val": 2000, "num_test": 5000}
"""Links to predict in a graph with at least twice their number; smaller graphs use fewer in proportion."""


def fill_splits(part: Data | NodeStorage) -> str:
    """Add missing splits of labeled nodes, drawn with a fixed seed, and drop empty ones; return a note for the user."""
    if (y := part.get("y")) is None:
        return ""
    given = {stage: seeds_in(part, stage) for stage in ("train", "val", "test")}
    nodes = {stage: None if seeds is None else as_ids(seeds) for stage, (_, seeds) in given.items()}
    for stage, (name, _) in given.items():
        if (seeds := nodes[stage]) is not None and not seeds.numel():
            del part[name.removeprefix("data.")]
            nodes[stage] = None
    pool = nodes["train"]
    if pool is None:
        is_labeled = ~y.isnan() if y.is_floating_point() else y >= 0
        pool = (is_labeled if y.dim() == 1 else is_labeled.all(dim=1)).nonzero().view(-1)
        taken = [seeds for seeds in nodes.values() if seeds is not None]
        pool = pool[~torch.isin(pool, torch.cat(taken))] if taken else pool
        missing = [stage for stage in ("val", "test") if nodes[stage] is None]
    else:
        missing = ["val"] if nodes["val"] is None else []
    if (nodes["train"] is not None and not missing) or len(pool) <= len(missing):
        return ""  # the DataModule raises an error that names what is missing
    pool = pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))]
    for stage in missing:
        count = max(1, round(len(pool) / 10))
        part[f"{stage}_mask"], pool = index_to_mask(pool[:count], y.size(0)), pool[count:]
    for name in ("train_idx", "train_index"):
        part.pop(name, None)
    part.train_mask = index_to_mask(pool, y.size(0))
    drawn = [stage for stage in ("train", "val", "test") if nodes[stage] is None and f"{stage}_mask" in part]
    return f"data has no nodes for {', '.join(drawn)}: {len(pool)} train, and tenths for the others, drawn at random"


def split_links(
    data: Graph,
    kind: EdgeType | None = None,
    num_train: float | None = None,
    num_val: float | None = None,
    num_test: float | None = None,
    seed: int = 0,
    negatives: bool = False,
) -> tuple[Graph, Graph, Graph]:
    """Split edges with PyG from ``seed`` alone, so that all runs of a sweep predict the same edges.

    With ``negatives``, the training edges have as many non-links, drawn once; the other splits always have them.
    The sizes are numbers or fractions. By default they are 20,000, 2,000 and 5,000, scaled down to half of the links.
    """
    data = with_adj_t_values(data)
    if kind is None:
        edges = CSCGraph.from_data(data).to_edge_index() if data.edge_index is None else data.edge_index
        weights = {key: data[key] for key in ("edge_weight", "edge_attr") if data.get(key) is not None}
        graph: Graph = Data(x=data.x, edge_index=edges, **weights)
        part, reverses = graph, None
    else:
        graph, edges, reverse = copy.copy(data), edges_of(data, kind), (kind[2], f"rev_{kind[1]}", kind[0])
        reverses = [reverse] if reverse in data.edge_types else None
        part = _with_edges(graph[kind], edges)
        if reverses:
            for key in [key for key in graph[reverse] if key not in part]:
                del graph[reverse][key]
            _with_edges(graph[reverse], edges.flip(0))  # PyG derives each split's reverse edges from it
    undirected = not reverses and (kind is None or kind[0] == kind[2]) and part.is_undirected()
    num_links = edges.size(1) // (1 + undirected)
    scale = min(1.0, num_links / 2 / sum(_DEFAULT_NUM_LINKS.values()))
    counts = {"num_train": num_train, "num_val": num_val, "num_test": num_test}
    for name in (name for name, count in counts.items() if count is None):
        counts[name] = max(1, int(_DEFAULT_NUM_LINKS[name] * scale))
    split = RandomLinkSplit(
        num_val=counts["num_val"],
        num_test=counts["num_test"],
        is_undirected=undirected,
        add_negative_train_samples=negatives,
        disjoint_train_ratio=counts["num_train"],
        edge_types=None if kind is None else [kind],
        rev_edge_types=reverses,
    )
    try:
        with keyed_random(int(seed)):  # PyG samples non-edges with Python's generator
            train, val, test = split(graph)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"task.split does not fit a graph of {edges.size(1)} edges: {error}") from error
    for evaluated in (val, test):
        _alternate(evaluated if kind is None else evaluated[kind])
    return train, val, test


def _with_edges(store: EdgeStorage, edges: torch.Tensor) -> EdgeStorage:
    """Store the topology of an edge type as ``edge_index`` alone; return the store."""
    for key in ("graph", "adj_t"):
        store.pop(key, None)
    store.edge_index = edges
    return store


def _alternate(split: Data | EdgeStorage) -> None:
    """Interleave links and non-links, so that each mini-batch has both: PyG puts all links first."""
    position = torch.empty(split.edge_label.numel(), dtype=torch.float64)
    for mask in (split.edge_label > 0, split.edge_label == 0):
        count = int(mask.sum())
        position[mask] = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    order = torch.argsort(position, stable=True)
    split.edge_label, split.edge_label_index = split.edge_label[order], split.edge_label_index[:, order]
