"""Predict epoch time and memory on several machines from counted traffic, measured work and a given network.

Threads prepare mini-batches, and request neighbor lists and rows from other ranks, while the model trains on earlier
ones: the time of a step is that of :func:`~lightning_gnn.planning.overlap.rhythm`, or that of the network if longer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_gnn.planning.overlap import rhythm

NODE_BYTES = 8  # per requested node
PICK_BYTES = 16  # per edge in a response: its source and its index


@dataclass(frozen=True)
class Network:
    """A full-duplex network between the machines."""

    bandwidth: float  # bytes per second of a machine, in each direction
    latency: float = 0.0  # one-way latency of a message in seconds

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"the network's bandwidth={self.bandwidth!r} must be above 0 bytes per second")
        if not self.latency >= 0:
            raise ValueError(f"the network's latency={self.latency!r} must be 0 or more seconds")


@dataclass(frozen=True)
class Work:
    """Measured cost of a mini-batch on one machine with the whole graph."""

    prepare_s: float  # thread-seconds of sampling and of loading features
    step_s: float  # seconds of a training step
    fixed_s: float = 0.0  # seconds of the training thread outside of the step, independent of the mini-batch size
    workers: int = 1  # sampling threads; 0: the training thread prepares
    cores: int = 1
    serial_step_s: float = 0.0  # seconds of a step with one thread, the total work of a step; 0 if unknown
    nodes: float = 0.0  # nodes of the mini-batch; smaller ones cost proportionally less. 0: all cost the same
    gradient_bytes: int = 0  # all-reduced after each step
    message_s: float = 0.0  # seconds per byte to pack and unpack a message
    slowdown: float = 1.0  # factor by which preparing and training take longer in parallel


@dataclass(frozen=True)
class Traffic:
    """Average requests between ranks for a mini-batch."""

    request_bytes: np.ndarray  # bytes of the requests that each rank sends in each round, [rounds, ranks]
    response_bytes: np.ndarray  # bytes of the responses that it receives, [rounds, ranks]
    sent: np.ndarray  # bytes of requests and responses that each rank sends in a step, [ranks]
    nodes: float  # nodes of a mini-batch
    remote_rows: float  # rows of these nodes that are requested from other ranks
    steps: float  # mini-batches of an epoch; a smaller last one counts in proportion to its seeds

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.sent.size)

    @property
    def remote_bytes(self) -> float:
        """Bytes of requests and responses for a mini-batch, on average over the ranks."""
        return float((self.request_bytes + self.response_bytes).sum() / self.ranks)


@dataclass(frozen=True)
class Prediction:
    """Predicted times on a number of machines."""

    ranks: int
    epoch_s: float  # seconds of an epoch
    step_s: float  # seconds from one step to the next, the maximum of bounds
    bounds: dict[str, float]  # seconds of training, preparing, network and cores
    traffic: Traffic  # traffic that it was predicted from

    @property
    def bound(self) -> str:
        """Name of the largest of :attr:`bounds`."""
        return max(self.bounds, key=self.bounds.__getitem__)


def predict(traffic: Traffic, work: Work, network: Network) -> Prediction:
    """Predict the epoch time of the slowest rank; ranks synchronize in each step."""
    ranks, scale = traffic.ranks, min(1.0, traffic.nodes / work.nodes) if work.nodes else 1.0
    # Preparing: local work, and the latency and transfer of each round of requests.
    exchanged = (traffic.request_bytes + traffic.response_bytes).sum(0)
    rounds = ((traffic.request_bytes + traffic.response_bytes) > 0).sum(0)
    waiting = 2 * network.latency * rounds + exchanged / network.bandwidth
    local = work.slowdown * scale * work.prepare_s + work.message_s * exchanged
    # Training: the step, and a ring all-reduce of the gradients.
    reduced = 2 * (ranks - 1) / ranks * work.gradient_bytes
    reducing = reduced / network.bandwidth + 2 * (ranks - 1) * network.latency if work.gradient_bytes else 0.0
    step = work.slowdown * (scale * work.step_s + work.fixed_s)
    serial = work.slowdown * (scale * max(work.step_s, work.serial_step_s) + work.fixed_s)
    rhythms = [
        rhythm(own, work.workers, step, serial + packed, work.cores, waiting_s=waited, reducing_s=reducing)
        for own, packed, waited in zip(local, work.message_s * traffic.sent, waiting, strict=True)
    ]
    transfer = (np.maximum(traffic.sent, traffic.response_bytes.sum(0)) + reduced) / network.bandwidth
    if work.workers:
        # Threads wait for the slowest rank, which leaves the network idle: C threads on n machines use it for
        # C / (C + n - 1) of the time (Zahorjan et al.: Balanced Job Bound Analysis of Queueing Networks, CACM 1982).
        clients = ranks * (work.workers + (work.gradient_bytes > 0))
        transfer *= (clients + ranks - 1) / clients
    names = ("training", "preparing", "cores") if work.workers else ("training",)
    bounds = {name: float(max(getattr(each, name) for each in rhythms)) for name in names}
    bounds["network"] = float(transfer.max())
    longest, first = max(bounds.values()), float((local + waiting).max()) if work.workers else 0.0
    return Prediction(ranks, first + traffic.steps * longest, longest, bounds, traffic)


def machine_memory(
    nodes: Mapping[Any, tuple[int, int]],
    edges: Mapping[Any, tuple[int, int]],
    row_bytes: Mapping[Any, int],
    ranks: int,
    batch_bytes: float = 0.0,
    batches: int = 0,
    cache: int = 0,  # bytes for cached rows of other parts
) -> dict[str, float]:
    """Return the bytes of one machine: neighbor lists, feature rows, node owners, cache and mini-batches.

    ``nodes`` and ``edges`` have the number in the graph and the number in the machine's part by type.
    """

    # Node and edge ids are int32 if they fit, else int64.
    def id_bytes(count: int) -> int:
        return 4 if count < 1 << 31 else 8

    # Add up the neighbor lists with edge attributes, the node rows, and the owner of each node.
    lists = sum(
        8 * (nodes[None if name is None else name[2]][1] + 1)
        + edges[name][1] * (id_bytes(nodes[None if name is None else name[0]][0]) + id_bytes(edges[name][0]))
        for name in edges
    )
    edge_attributes = sum(edges[name][1] * row_bytes.get(("edge", name), 0) for name in edges)
    rows = sum(count * (8 + row_bytes.get(name, 0)) for name, (_, count) in nodes.items())
    owners = sum(count for count, _ in nodes.values()) * (1 if ranks <= 128 else 2)
    return {
        "lists": lists + edge_attributes,
        "rows": rows,
        "owners": owners,
        "cache": cache,
        "mini-batches": batches * batch_bytes,
    }
