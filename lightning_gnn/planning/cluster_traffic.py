"""What ranks will ask of each other: counted on mini-batches that are really sampled, on a partition that is given."""

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

Owners: TypeAlias = Mapping[NodeType | None, np.ndarray]  # the rank that has each node, by type
_COUNTED = 4  # mini-batches by which is counted what a cache would hold, for each of those whose traffic is
ENVELOPE = 420  # bytes of a message beside what it is about: names, the sampling rule, dtypes and shapes


def row_bytes(data: Data | HeteroData) -> dict[Any, int]:
    """Return the bytes of all attributes of one node by its type, and of one edge by ``("edge", type)``."""
    found: dict[Any, int] = {}
    for name, kinds in rows_of(data)[0].items():
        for kind, rows in kinds.items():
            width = sum(math.prod(value.shape[1:]) * value.element_size() for value in rows.values())
            found[name if kind == "node" else ("edge", name)] = width
    return found


def count_traffic(
    loader: Any,
    owner: Owners,  # the rank that has each node, integer ``[num_nodes]``, by node type (None where there is one)
    ranks: int,
    order: str = "global",
    topology: str = "parts",  # ``"parts"``, or ``"whole"`` where each rank has all edges
    batches: int = 32,  # about how many to sample; each rank has two at least
    epoch: int = 0,
    cache: int = 0,
) -> Traffic:
    """Sample mini-batches of each rank, and count what would cross the network for them."""
    # The cache holds the rows that are read most often by other mini-batches, four times as many.
    seeds = len(loader.dataset)
    generator = torch.Generator().manual_seed(loader.pipeline.seed % 2**62 + epoch)
    shuffled = torch.randperm(seeds, generator=generator)
    own = [shuffled[rank::ranks] for rank in range(ranks)]
    if order == "local":
        given = loader.input_data
        places = given.node if isinstance(given, NodeSamplerInput) else given.col
        of_seeds = owner[given.input_type[2] if isinstance(given.input_type, tuple) else given.input_type]
        at = of_seeds[places.cpu().numpy()][shuffled.numpy()]
        own = [shuffled[torch.from_numpy(at == rank)] for rank in range(ranks)]
    longest, size = max(map(len, own)), loader.batch_size
    if not min(map(len, own)):
        without = next(rank for rank, listed in enumerate(own) if not len(listed))
        raise ValueError(f"rank {without} of {ranks} would have no training seeds")
    each, widths = max(2, -(-batches // ranks)), row_bytes(loader.data)
    asked, answered, sent, nodes, rows = [], [], np.zeros(ranks), 0.0, 0.0

    def sampled(rank: int, number: int, of: int) -> Output:
        start = number * size % len(own[rank])
        index = torch.cat([own[rank][start:], own[rank][:start]])[:size]
        return loader.pipeline.sample(BatchTask(of, rank * each + number, index)).out

    for rank in range(ranks):
        mine, kept = [], {}
        if cache:
            others = (sampled(rank, number, epoch + 1) for number in range(_COUNTED * each))
            kept = _kept(others, owner, rank, widths, cache)
        for number in range(each):
            out = sampled(rank, number, epoch)
            found, count, remote = _exchanged(out, owner, ranks, rank, widths, topology, kept)
            mine.append(found)
            nodes, rows = nodes + count / (ranks * each), rows + remote / (ranks * each)
        mean = np.mean(mine, 0)  # [rounds, ranks, 2]
        asked.append(mean[:, :, 0].sum(1))
        answered.append(mean[:, :, 1].sum(1))
        sent += mean[:, :, 1].sum(0)
        sent[rank] += mean[:, :, 0].sum()
    return Traffic(np.stack(asked, 1), np.stack(answered, 1), sent, nodes, rows, max(1.0, longest / size))


def _kept(
    outs: Iterable[Output], owner: Owners, rank: int, widths: Mapping[Any, int], budget: int
) -> dict[NodeType | None, np.ndarray]:
    """Return whether a rank keeps the row of each node, bool ``[num_nodes]`` by type."""
    names = [name for name in owner if name in widths]
    often = {name: np.zeros(owner[name].size, np.int64) for name in names}
    for out in outs:
        for name, ids in (out.node if isinstance(out, HeteroSamplerOutput) else {None: out.node}).items():
            if name in often:
                often[name][np.unique(ids.numpy())] += 1
    counts = []
    for name in names:
        nodes = np.flatnonzero((often[name] > 0) & (owner[name] != rank))
        counts.append((nodes, often[name][nodes]))
    kept = {name: np.zeros(owner[name].size, np.bool_) for name in names}
    for name, nodes in zip(names, top_accessed_rows(counts, [widths[name] for name in names], budget), strict=True):
        kept[name][nodes] = True
    return kept


def _exchanged(
    out: Output, owner: Owners, ranks: int, rank: int, widths: Mapping[Any, int], topology: str,
    kept: Mapping[NodeType | None, np.ndarray],
) -> tuple[np.ndarray, int, int]:  # fmt: skip
    """Return the bytes that a rank asks of each other and gets, ``[rounds, ranks, 2]``, its nodes, and remote rows."""
    typed = isinstance(out, HeteroSamplerOutput)
    sampled: list[Any] = [out.node, out.col, out.num_sampled_nodes, out.num_sampled_edges]
    by_type: list[dict[Any, Any]] = sampled if typed else [{None: value} for value in sampled]
    nodes, cols, found_nodes, found_edges = by_type
    if sampled[3] is None or any(sum(edges) != cols[name].numel() for name, edges in found_edges.items()):
        raise ValueError("what crosses the network is counted hop by hop, which needs subgraph_type='directional'")
    at = {name: owner[name][ids.numpy()] for name, ids in nodes.items()}
    rounds = []

    def add(*questions: tuple[np.ndarray, int, np.ndarray, int]) -> None:
        """Add a round: for each question the ranks that are asked for something, and its bytes; likewise answers."""
        bytes_ = np.zeros((ranks, 2))
        for asks, width, answers, answer in questions:
            bytes_[:, 0] += width * np.bincount(asks, minlength=ranks)
            bytes_[:, 1] += NODE_BYTES * np.bincount(asks, minlength=ranks) * (answers is not asks)
            bytes_[:, 1] += answer * np.bincount(answers, minlength=ranks)
        bytes_[bytes_[:, 0] > 0] += ENVELOPE
        bytes_[rank] = 0
        rounds.append(bytes_)

    if topology == "parts":
        for hop in range(max((len(edges) for edges in found_edges.values()), default=0)):
            questions = []
            for name, edges in found_edges.items():
                target = name[2] if typed else None
                first = sum(found_nodes[target][:hop])
                frontier = at[target][first : first + found_nodes[target][hop]]
                col = cols[name][sum(edges[:hop]) : sum(edges[: hop + 1])].numpy()
                questions.append((frontier, NODE_BYTES, at[target][col], PICK_BYTES))
            add(*questions)
    total = remote = 0
    for name, ids in nodes.items():
        asked = ids.numpy() if getattr(out, "batch", None) is None else np.unique(ids.numpy())
        distinct = owner[name][asked[~kept[name][asked]] if name in kept else asked]
        total, remote = total + ids.numel(), remote + int((distinct != rank).sum())
        if name in widths:
            add((distinct, NODE_BYTES, distinct, widths[name]))
    for name, col in cols.items() if topology == "parts" else ():
        if ("edge", name) in widths:
            place = at[name[2] if typed else None][col.numpy()]
            add((place, NODE_BYTES, place, widths["edge", name]))
    return np.stack(rounds) if rounds else np.zeros((0, ranks, 2)), total, remote
