"""Forecast which rows of other parts the coming mini-batches read, by sampling them in advance with their keys."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
from torch_geometric.sampler import HeteroSamplerOutput

from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.partitioned.remote import Remote


def count_future(
    loader: PipelineLoader, remote: Remote, epoch: int, batches: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sample coming mini-batches without features; return nodes of other parts and their access counts by node type."""
    if callable(set_epoch := getattr(loader.sampler, "set_epoch", None)):
        set_epoch(epoch)
    partition, local_parts = remote.partition, np.flatnonzero(remote.server == remote.exchange.rank)
    accessed: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in partition.nodes]
    for task in islice(loader.tasks(epoch), batches):
        out = loader.pipeline.sample(task).out
        nodes = out.node if isinstance(out, HeteroSamplerOutput) else {None: out.node}
        for name, ids in nodes.items():
            node_type = partition.number.get(name, 0)
            owner = partition.owner[node_type].numpy()[ids.numpy()]
            accessed[node_type].append(np.unique(ids.numpy()[~np.isin(owner, local_parts)]))
    return [np.unique(np.concatenate(ids), return_counts=True) for ids in accessed]


def top_accessed_rows(
    counts: Sequence[tuple[np.ndarray, np.ndarray]], row_bytes: Sequence[int], budget: int
) -> list[np.ndarray]:
    """Select the most accessed nodes whose rows fit ``budget`` bytes; return them by node type, ascending."""
    node, num_accesses = (np.concatenate(arrays) for arrays in zip(*counts, strict=True))
    node_type = np.repeat(np.arange(len(counts)), [ids.size for ids, _ in counts])
    sizes = np.array(row_bytes)[node_type]
    # A cached row of b bytes saves b bytes per access, so the gain per byte is the number of accesses.
    order = np.lexsort((node, node_type, -num_accesses))
    selected = order[np.cumsum(sizes[order]) <= budget]
    return [np.sort(node[selected[node_type[selected] == number]]) for number in range(len(counts))]
