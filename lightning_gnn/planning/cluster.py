"""What an epoch takes on several machines, and how much memory: from counted traffic, measured work, a given network.

Threads prepare mini-batches, and ask other ranks for lists and rows, beside training on those before. So a step lasts
as long as the longest of four: training with the sum of the gradients, a thread's preparing over the number of threads,
what crosses the network, and what the cores have to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

NODE_BYTES = 8  # of a node that is asked for
PICK_BYTES = 16  # of an edge in an answer: its source and its place


@dataclass(frozen=True)
class Network:
    """Between machines, each of which sends and receives at the same time."""

    bandwidth: float  # bytes per second of a machine, in each direction
    latency: float = 0.0  # seconds of a message one way

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"the network's bandwidth={self.bandwidth!r} must be above 0 bytes per second")
        if not self.latency >= 0:
            raise ValueError(f"the network's latency={self.latency!r} must be 0 or more seconds")


@dataclass(frozen=True)
class Work:
    """What a mini-batch costs one machine with the whole graph, as it was measured."""

    prepare_s: float  # thread-seconds of sampling it and of loading its features
    step_s: float  # seconds of a training step
    fixed_s: float = 0.0  # seconds of the training thread beside it, whatever the size of the mini-batch
    workers: int = 1  # threads that prepare; 0: the training thread does
    cores: int = 1
    serial_step_s: float = 0.0  # a step with one thread, which is how much work it is; 0 where it is not known
    nodes: float = 0.0  # of the mini-batch; smaller ones cost proportionally less. 0: all cost the same
    gradient_bytes: int = 0  # that ranks sum up after each step
    message_s: float = 0.0  # seconds per byte to pack and unpack a message
    slowdown: float = 1.0  # by how much all takes longer side by side


@dataclass(frozen=True)
class Traffic:
    """What ranks ask of each other for a mini-batch, on average."""

    asked: np.ndarray  # bytes of the questions that each rank sends in each round, [rounds, ranks]
    answered: np.ndarray  # bytes of the answers that it gets, likewise
    sent: np.ndarray  # bytes of questions and answers that leave each rank in a step, [ranks]
    nodes: float  # nodes of a mini-batch
    remote_rows: float  # of these, rows that are asked of other ranks
    steps: float  # mini-batches of an epoch; what is left at its end counts by its seeds

    @property
    def ranks(self) -> int:
        """How many there are."""
        return int(self.sent.size)

    @property
    def remote_bytes(self) -> float:
        """Bytes of questions and answers for a mini-batch, on average over the ranks."""
        return float((self.asked + self.answered).sum() / self.ranks)


@dataclass(frozen=True)
class Prediction:
    """Of one number of machines."""

    ranks: int
    epoch_s: float  # seconds of an epoch
    step_s: float  # seconds from one step to the next
    bounds: dict[str, float]  # what sets that: the seconds of training, preparing, network and cores
    traffic: Traffic  # what it was predicted from

    @property
    def bound(self) -> str:
        """The longest of :attr:`bounds`."""
        return max(self.bounds, key=self.bounds.__getitem__)


def predict(traffic: Traffic, work: Work, network: Network) -> Prediction:
    """Predict an epoch, that of the slowest rank, as all wait for each other in each step."""
    ranks, share = traffic.ranks, min(1.0, traffic.nodes / work.nodes) if work.nodes else 1.0
    received = (traffic.asked + traffic.answered).sum(0)  # as much as is asked elsewhere leaves, on average
    rounds = ((traffic.asked + traffic.answered) > 0).sum(0)
    waiting = 2 * network.latency * rounds + received / network.bandwidth
    inside = work.slowdown * share * work.prepare_s + work.message_s * received
    preparing = inside + waiting
    summed = 2 * (ranks - 1) / ranks * work.gradient_bytes
    reducing = summed / network.bandwidth + 2 * (ranks - 1) * network.latency if work.gradient_bytes else 0.0
    training = work.slowdown * (share * work.step_s + work.fixed_s) + reducing
    crossing = (np.maximum(traffic.sent, traffic.answered.sum(0)) + summed) / network.bandwidth
    if work.workers:
        # Threads wait for the slowest rank, so the network is not always in use: with C of them and n machines for
        # C / (C + n - 1) of the time (Zahorjan et al.: Balanced Job Bound Analysis of Queueing Networks, CACM 1982).
        asking = ranks * (work.workers + (work.gradient_bytes > 0))
        crossing *= (asking + ranks - 1) / asking
        serial = share * max(work.step_s, work.serial_step_s) + work.fixed_s
        busy = work.slowdown * serial + inside + work.message_s * traffic.sent
        bounds = {
            "training": training,
            "preparing": max(preparing.max() / work.workers, inside.max() / min(work.workers, work.cores)),
            "network": crossing.max(),
            "cores": busy.max() / work.cores,
        }
    else:
        bounds = {"training": training + preparing.max(), "network": crossing.max()}
    bounds = {name: float(seconds) for name, seconds in bounds.items()}
    step, first = max(bounds.values()), float(preparing.max()) if work.workers else 0.0
    return Prediction(ranks, first + traffic.steps * step, step, bounds, traffic)


def machine_memory(
    nodes: Mapping[Any, tuple[int, int]],
    edges: Mapping[Any, tuple[int, int]],
    row_bytes: Mapping[Any, int],
    ranks: int,
    batch_bytes: float = 0.0,
    batches: int = 0,
    topology: str = "parts",
    cache: int = 0,  # bytes for rows of other parts
) -> dict[str, float]:
    """Return the bytes of one machine: of its lists, its rows, who owns what, its cache and its mini-batches."""
    # A machine holds the lists of the whole graph or of its own part.
    which = 0 if topology == "whole" else 1

    # Ids and places take four bytes each while they fit into 31 bits.
    def wide(count: int) -> int:
        return 4 if count < 1 << 31 else 8

    # Add up the lists with the attributes of edges, the rows of nodes, and the owner of each node.
    lists = sum(
        8 * (nodes[None if name is None else name[2]][which] + 1)
        + edges[name][which] * (wide(nodes[None if name is None else name[0]][0]) + wide(edges[name][0]))
        for name in edges
    )
    of_edges = sum(edges[name][which] * row_bytes.get(("edge", name), 0) for name in edges)
    rows = sum(count * (8 + row_bytes.get(name, 0)) for name, (_, count) in nodes.items())
    owners = sum(count for count, _ in nodes.values()) * (1 if ranks <= 128 else 2)
    return {
        "lists": lists + of_edges,
        "rows": rows,
        "owners": owners,
        "cache": cache,
        "mini-batches": batches * batch_bytes,
    }
