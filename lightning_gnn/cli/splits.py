"""Which edges are predicted, and which nodes train, where a graph does not say so."""

import copy
from typing import TypeAlias

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage, NodeStorage
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.typing import EdgeType
from torch_geometric.utils import index_to_mask

from lightning_gnn.datamodules.node import as_ids, seeds_in
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import edges_of
from lightning_gnn.loading.random_state import keyed_random

Graph: TypeAlias = Data | HeteroData
_LINKS = {"num_train": 20000, "num_val": 2000, "num_test": 5000}
"""How many links are predicted, of a graph with twice as many."""


def fill_splits(part: Data | NodeStorage) -> str:
    """Draw the splits that labeled nodes lack, always the same ones, and drop an empty one; return a note of it."""
    if (y := part.get("y")) is None:
        return ""
    given = {stage: seeds_in(part, stage) for stage in ("train", "val", "test")}
    nodes = {stage: None if found is None else as_ids(found) for stage, (_, found) in given.items()}
    for stage, (name, _) in given.items():
        if (found := nodes[stage]) is not None and not found.numel():
            del part[name.removeprefix("data.")]
            nodes[stage] = None
    pool = nodes["train"]
    if pool is None:
        known = ~y.isnan() if y.is_floating_point() else y >= 0
        pool = (known if y.dim() == 1 else known.all(dim=1)).nonzero().view(-1)
        taken = [found for found in nodes.values() if found is not None]
        pool = pool[~torch.isin(pool, torch.cat(taken))] if taken else pool
        missing = [stage for stage in ("val", "test") if nodes[stage] is None]
    else:
        missing = ["val"] if nodes["val"] is None else []
    if (nodes["train"] is not None and not missing) or len(pool) <= len(missing):
        return ""  # the DataModule says what is missing
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
) -> tuple[Graph, Graph, Graph]:
    """Split with PyG, from random streams of its own, so that each run of a sweep predicts the same edges.

    Each is a number or a fraction; None: 20,000, 2,000 and 5,000, or as many in proportion as are half of the links.
    """
    if kind is None:
        edges = CSCGraph.from_data(data).to_edge_index() if data.edge_index is None else data.edge_index
        graph: Graph = Data(x=data.x, edge_index=edges)
        part, reverses = graph, None
    else:
        graph, edges, reverse = copy.copy(data), edges_of(data, kind), (kind[2], f"rev_{kind[1]}", kind[0])
        reverses = [reverse] if reverse in data.edge_types else None
        part = _with_edges(graph[kind], edges)
        if reverses:
            for key in [key for key in graph[reverse] if key not in part]:
                del graph[reverse][key]
            _with_edges(graph[reverse], edges.flip(0))  # which PyG makes that of each split, with its attributes
    undirected = not reverses and (kind is None or kind[0] == kind[2]) and part.is_undirected()
    num_links = edges.size(1) // (1 + undirected)
    least = min(1.0, num_links / 2 / sum(_LINKS.values()))
    given = {"num_train": num_train, "num_val": num_val, "num_test": num_test}
    counts = {name: max(1, int(_LINKS[name] * least)) if count is None else count for name, count in given.items()}
    split = RandomLinkSplit(
        num_val=counts["num_val"],
        num_test=counts["num_test"],
        is_undirected=undirected,
        add_negative_train_samples=False,
        disjoint_train_ratio=counts["num_train"],
        edge_types=None if kind is None else [kind],
        rev_edge_types=reverses,
    )
    try:
        with keyed_random(int(seed)):  # PyG draws non-edges from Python's stream
            train, val, test = split(graph)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"task.split does not fit a graph of {edges.size(1)} edges: {error}") from error
    for evaluated in (val, test):
        _alternate(evaluated if kind is None else evaluated[kind])
    return train, val, test


def _with_edges(store: EdgeStorage, edges: torch.Tensor) -> EdgeStorage:
    """Return a type of edges that holds its topology as a tensor."""
    for key in ("graph", "adj_t"):
        store.pop(key, None)
    store.edge_index = edges
    return store


def _alternate(split: Data | EdgeStorage) -> None:
    """Let links and non-links alternate, so that each mini-batch has both: PyG puts all links first."""
    place = torch.empty(split.edge_label.numel(), dtype=torch.float64)
    for kind in (split.edge_label > 0, split.edge_label == 0):
        count = int(kind.sum())
        place[kind] = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    order = torch.argsort(place, stable=True)
    split.edge_label, split.edge_label_index = split.edge_label[order], split.edge_label_index[:, order]
