"""Count the traffic between ranks on sampled mini-batches of a partitioned graph."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, NodeSamplerInput
from torch_geometric.typing import NodeType

from lightning_gnn.loading.batch import BatchTask
from lightning_gnn.partitioned.folder import rows_of
from lightning_gnn.partitioned.future import top_accessed_rows
from lightning_gnn.planning.cluster import NODE_BYTES, PICK_BYTES, Traffic
from lightning_gnn.sampling.neighbor import Output

Owners: TypeAlias = Mapping[NodeType | None, np.ndarray]  # owning rank of each node, by node type
_CACHE_BATCHES = 4  # mini-batches to select the cached rows with, per mini-batch whose traffic is counted
ENVELOPE = 210  # overhead of a message in bytes: names, sampling options, dtypes and shapes


def row_bytes(data: Data | HeteroData) -> dict[Any, int]:
    """Return the bytes of all attributes of one node by its type, and of one edge by ``("edge", type)``."""
    widths: dict[Any, int] = {}
    for name, rows_by_kind in rows_of(data)[0].items():
        for kind, rows in rows_by_kind.items():
            width = sum(math.prod(value.shape[1:]) * value.element_size() for value in rows.values())
            widths[name if kind == "node" else ("edge", name)] = width
    return widths


def count_traffic(
    loader: Any,
    owner: Owners,  # owning rank of each node, integer ``[num_nodes]``, by node type (None in a homogeneous graph)
    ranks: int,
    order: str = "global",
    batches: int = 32,  # approximate number to sample; at least two per rank
    cache: int = 0,
) -> Traffic:
    """Sample mini-batches of each rank, and count the bytes that they would exchange over the network."""
    seeds = len(loader.dataset)
    generator = torch.Generator().manual_seed(loader.pipeline.seed % 2**62)
    shuffled = torch.randperm(seeds, generator=generator)
    own = [shuffled[rank::ranks] for rank in range(ranks)]
    if order == "local":
        inputs = loader.input_data
        seed_nodes = inputs.node if isinstance(inputs, NodeSamplerInput) else inputs.col
        seed_owner = owner[inputs.input_type[2] if isinstance(inputs.input_type, tuple) else inputs.input_type]
        seed_rank = seed_owner[seed_nodes.cpu().numpy()][shuffled.numpy()]
        own = [shuffled[torch.from_numpy(seed_rank == rank)] for rank in range(ranks)]
    longest, size = max(map(len, own)), loader.batch_size
    if not min(map(len, own)):
        without = next(rank for rank, rank_seeds in enumerate(own) if not len(rank_seeds))
        raise ValueError(f"rank {without} of {ranks} would have no training seeds")
    each, widths = max(2, -(-batches // ranks)), row_bytes(loader.data)
    request_bytes, response_bytes, sent, nodes, rows = [], [], np.zeros(ranks), 0.0, 0.0

    def sample(rank: int, number: int, epoch: int) -> Output:
        start = number * size % len(own[rank])
        index = torch.cat([own[rank][start:], own[rank][:start]])[:size]
        return loader.pipeline.sample(BatchTask(epoch, rank * each + number, index)).out

    for rank in range(ranks):
        exchanged, cached = [], {}
        if cache:
            # Mini-batches of another epoch decide which rows are cached: those that they read most often.
            others = (sample(rank, number, 1) for number in range(_CACHE_BATCHES * each))
            cached = _select_cached(others, owner, rank, widths, cache)
        for number in range(each):
            out = sample(rank, number, 0)
            batch_bytes, count, remote = _count_exchange(out, owner, ranks, rank, widths, cached)
            exchanged.append(batch_bytes)
            nodes, rows = nodes + count / (ranks * each), rows + remote / (ranks * each)
        mean = np.mean(exchanged, 0)  # [rounds, ranks, 2]
        request_bytes.append(mean[:, :, 0].sum(1))
        response_bytes.append(mean[:, :, 1].sum(1))
        sent += mean[:, :, 1].sum(0)
        sent[rank] += mean[:, :, 0].sum()
    return Traffic(np.stack(request_bytes, 1), np.stack(response_bytes, 1), sent, nodes, rows, max(1.0, longest / size))


def _select_cached(
    outs: Iterable[Output], owner: Owners, rank: int, widths: Mapping[Any, int], budget: int
) -> dict[NodeType | None, np.ndarray]:
    """Return whether a rank caches the row of each node, bool ``[num_nodes]`` by node type."""
    names = [name for name in owner if name in widths]
    num_accesses = {name: np.zeros(owner[name].size, np.int64) for name in names}
    for out in outs:
        for name, ids in (out.node if isinstance(out, HeteroSamplerOutput) else {None: out.node}).items():
            if name in num_accesses:
                num_accesses[name][np.unique(ids.numpy())] += 1
    counts = []
    for name in names:
        nodes = np.flatnonzero((num_accesses[name] > 0) & (owner[name] != rank))
        counts.append((nodes, num_accesses[name][nodes]))
    cached = {name: np.zeros(owner[name].size, np.bool_) for name in names}
    for name, nodes in zip(names, top_accessed_rows(counts, [widths[name] for name in names], budget), strict=True):
        cached[name][nodes] = True
    return cached


def _count_exchange(
    out: Output, owner: Owners, ranks: int, rank: int, widths: Mapping[Any, int],
    cached: Mapping[NodeType | None, np.ndarray],
) -> tuple[np.ndarray, int, int]:  # fmt: skip
    """Return a rank's request and response bytes per peer, ``[rounds, ranks, 2]``, its nodes, and its remote rows."""
    is_hetero = isinstance(out, HeteroSamplerOutput)
    sampled: list[Any] = [out.node, out.col, out.num_sampled_nodes, out.num_sampled_edges]
    by_type: list[dict[Any, Any]] = sampled if is_hetero else [{None: value} for value in sampled]
    nodes, cols, nodes_per_hop, edges_per_hop = by_type
    if sampled[3] is None or any(sum(edges) != cols[name].numel() for name, edges in edges_per_hop.items()):
        raise ValueError("network traffic is counted hop by hop, which needs subgraph_type='directional'")
    owner_of_local = {name: owner[name][ids.numpy()] for name, ids in nodes.items()}
    rounds = []

    def add_round(*requests: tuple[np.ndarray, int, np.ndarray, int]) -> None:
        """Add a round of requests: the rank and bytes of each requested item, and of each item in the response."""
        bytes_ = np.zeros((ranks, 2))
        for requested, request_bytes, returned, response_bytes in requests:
            bytes_[:, 0] += request_bytes * np.bincount(requested, minlength=ranks)
            bytes_[:, 1] += NODE_BYTES * np.bincount(requested, minlength=ranks) * (returned is not requested)
            bytes_[:, 1] += response_bytes * np.bincount(returned, minlength=ranks)
        bytes_[bytes_[:, 0] > 0] += ENVELOPE
        bytes_[rank] = 0
        rounds.append(bytes_)

    for hop in range(max((len(edges) for edges in edges_per_hop.values()), default=0)):
        requests = []
        for name, edges in edges_per_hop.items():
            target = name[2] if is_hetero else None
            first = sum(nodes_per_hop[target][:hop])
            frontier = owner_of_local[target][first : first + nodes_per_hop[target][hop]]
            col = cols[name][sum(edges[:hop]) : sum(edges[: hop + 1])].numpy()
            requests.append((frontier, NODE_BYTES, owner_of_local[target][col], PICK_BYTES))
        add_round(*requests)
    total = remote = 0
    for name, ids in nodes.items():
        distinct = ids.numpy() if getattr(out, "batch", None) is None else np.unique(ids.numpy())
        row_owner = owner[name][distinct[~cached[name][distinct]] if name in cached else distinct]
        total, remote = total + ids.numel(), remote + int((row_owner != rank).sum())
        if name in widths:
            add_round((row_owner, NODE_BYTES, row_owner, widths[name]))
    for name, col in cols.items():
        if ("edge", name) in widths:
            edge_owner = owner_of_local[name[2] if is_hetero else None][col.numpy()]
            add_round((edge_owner, NODE_BYTES, edge_owner, widths["edge", name]))
    return np.stack(rounds) if rounds else np.zeros((0, ranks, 2)), total, remote
