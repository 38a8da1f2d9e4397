"""Which rows of other parts the coming mini-batches read: known before they are read, as their keys are."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
from torch_geometric.sampler import HeteroSamplerOutput

from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.partitioned.remote import Remote


def count_future(
    loader: PipelineLoader, remote: Remote, epoch: int, batches: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sample coming mini-batches without features; return, by type, nodes of other parts and how often each is read."""
    if callable(set_epoch := getattr(loader.sampler, "set_epoch", None)):
        set_epoch(epoch)
    partition, mine = remote.partition, np.flatnonzero(remote.server == remote.exchange.rank)
    seen: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in partition.nodes]
    for task in islice(loader.tasks(epoch), batches):
        out = loader.pipeline.sample(task).out
        nodes = out.node if isinstance(out, HeteroSamplerOutput) else {None: out.node}
        for name, ids in nodes.items():
            node_type = partition.number.get(name, 0)
            owner = partition.owner[node_type].numpy()[ids.numpy()]
            seen[node_type].append(np.unique(ids.numpy()[~np.isin(owner, mine)]))
    return [np.unique(np.concatenate(ids), return_counts=True) for ids in seen]


def top_accessed_rows(
    counts: Sequence[tuple[np.ndarray, np.ndarray]], row_bytes: Sequence[int], budget: int
) -> list[np.ndarray]:
    """Return the nodes that are read most often, as many as fit the budget in bytes, ascending, by node type."""
    node, often = (np.concatenate(both) for both in zip(*counts, strict=True))
    node_type = np.repeat(np.arange(len(counts)), [ids.size for ids, _ in counts])
    sizes = np.array(row_bytes)[node_type]
    # A row saves its bytes each time that it is read, and takes them once: what counts is how often.
    order = np.lexsort((node, node_type, -often))
    kept = order[np.cumsum(sizes[order]) <= budget]
    return [np.sort(node[kept[node_type[kept] == number]]) for number in range(len(counts))]
