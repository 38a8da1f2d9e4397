"""Accuracy of ``lgnn plan`` for several machines: 2, 4 and 8 processes with a limited network.

The processes exchange requests like machines, on their parts of a synthetic graph. A token bucket limits each one's
outgoing bandwidth, responses are delayed by the latency, and sampling and training are replaced by sleeps, since a few
cores cannot run many processes at full speed. The figure is seconds per epoch. Also reported are the prediction from
traffic counted on the whole graph, its error, and the same for the bytes sent per mini-batch.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import machine, parse, publish
from lightning_gnn import NeighborDataModule, PartitionedDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.partitioned import datamodule, partition_graph
from lightning_gnn.partitioned.exchange import RankRPC
from lightning_gnn.partitioned.folder import Partition
from lightning_gnn.planning.cluster import Network, Prediction, Work, predict
from lightning_gnn.planning.cluster_traffic import count_traffic

SIZES = {
    "nodes": (50_000, 400),
    "edges": (500_000, 3_000),
    "features": (64, 4),
    "batch_size": (128, 8),
    "steps": (16, 2),
    "ranks": (8, 2),
}
FANOUTS = [10, 10]
WITHIN = 0.2
"""Maximum error of the prediction."""


@dataclass(frozen=True)
class Case:
    """A network, and the durations of the sleeps."""

    bandwidth: float
    latency: float
    prepare_s: float
    step_s: float
    workers: int = 2
    order: str = "global"
    gradient_bytes: int = 400_000

    @property
    def work(self) -> Work:
        """Cost of each mini-batch."""
        return Work(self.prepare_s, self.step_s, workers=self.workers, cores=64, gradient_bytes=self.gradient_bytes)


CASES = {
    "training": Case(40e6, 1e-3, 0.1, 0.4),
    "preparing": Case(20e6, 40e-3, 0.25, 0.2, workers=1),
    "network": Case(4e6, 1e-3, 0.05, 0.1),
    "network, own seeds": Case(1e6, 1e-3, 0.05, 0.1, order="local"),
}
"""Cases by their bottleneck."""


PACKET = 8192
"""Bytes sent at once, so that concurrent messages share the bandwidth as on a network."""
_BURST = 0.02
"""Capacity of the token bucket in seconds, which compensates for threads that wake up late."""


class Bucket:
    """Limits the bytes per second."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def pass_through(self, nbytes: int) -> None:
        """Wait until the bytes are sent."""
        for start in range(0, nbytes, PACKET):
            now = time.monotonic()
            with self._lock:
                self._free = max(self._free, now - _BURST) + min(PACKET, nbytes - start) / self._rate
                wait = self._free - now
            if wait > 0:
                time.sleep(wait)


class LimitedExchange(RankRPC):
    """Route requests between ranks through this case's network, and sleep before requests for rows."""

    case: Case

    def __init__(self, *args: Any) -> None:
        self.limited, self.batches = False, 0
        self.out = Bucket(self.case.bandwidth)
        super().__init__(*args)

    def call(self, name: str, arguments: Any) -> dict[int, Any]:
        """Sleep for the preparation of a mini-batch, which fetches rows once, and send the request."""
        if self.limited and name == "node_rows":
            self.batches += 1
            time.sleep(self.case.prepare_s)
        return super().call(name, arguments)

    def _connect(self, tls: Any) -> None:
        super()._connect(tls)
        for client in self._clients:

            def get(request: bytes, get: Any = client.get) -> Any:
                if self.limited:
                    self.out.pass_through(len(request))
                return get(request)

            client.get = get  # type: ignore[method-assign]

    def _respond(self, request: bytes) -> Any:
        if self.limited:  # a round trip
            time.sleep(2 * self.case.latency)
        header, body = super()._respond(request)
        if self.limited:
            self.out.pass_through(len(header) + body.nbytes)
        return header, body

    def reduce(self) -> None:
        """All-reduce gradients with a ring."""
        self.out.pass_through(int(2 * (self.ranks - 1) / self.ranks * self.case.gradient_bytes))
        time.sleep(2 * (self.ranks - 1) * self.case.latency)
        dist.all_reduce(torch.zeros(1))


def rank_main(rank: int, ranks: int, folder: str, sizes: dict[str, int], cases: dict[str, Case], pipe: Any) -> None:
    """Train on each case; report the seconds of each epoch, and the bytes requested per mini-batch."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    found = {}
    for name, case in cases.items():
        LimitedExchange.case = case
        datamodule.RankRPC = LimitedExchange  # type: ignore[misc]
        own = PartitionedDataModule(
            Path(folder) / "parts", num_neighbors=FANOUTS, batch_size=sizes["batch_size"], order=case.order,
            num_workers=case.workers, seed=0,
        )  # fmt: skip
        own.setup("fit")
        exchange: Any = own._exchange
        loader = own.train_dataloader()
        for _ in islice(iter(loader), 1):  # compiles
            pass
        times, asked = [], 0.0
        for _ in range(sizes["runs"]):
            exchange.all_gather(None)
            time.sleep(0.5)  # prefetched by the previous epoch
            exchange.all_gather(None)
            exchange.limited, exchange.batches, before = True, 0, exchange.sent + exchange.received
            start = time.perf_counter()
            for _ in islice(loader, sizes["steps"]):
                time.sleep(case.step_s)
                exchange.reduce()
            times.append(time.perf_counter() - start)
            exchange.limited = False
            exchange.all_gather(None)
            asked = (exchange.sent + exchange.received - before) / exchange.batches
        found[name] = times, asked
        own.teardown("fit")
    dist.destroy_process_group()
    pipe.send(found)


def measured(
    folder: str, ranks: int, sizes: dict[str, int], cases: dict[str, Case]
) -> dict[str, tuple[list[float], float]]:
    """Return, for each case, the seconds of each round's slowest rank, and the bytes requested per mini-batch."""
    context: Any = get_context("forkserver")
    context.set_forkserver_preload(["lightning_gnn.partitioned"])
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, folder, sizes, cases, pipes[rank][1]), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        results = []
        for receiver, _ in pipes:
            if not receiver.poll(300):
                raise TimeoutError(f"{ranks} processes have not trained within 300 s")
            results.append(receiver.recv())
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    slowest = {name: [max(times) for times in zip(*(one[name][0] for one in results), strict=True)] for name in cases}
    return {name: (slowest[name], statistics.mean(one[name][1] for one in results)) for name in cases}


def predicted(data: Any, folder: str, ranks: int, sizes: dict[str, int], case: Case) -> Prediction:
    """Return the predictions of the plan, from the whole graph and the owner of each node."""
    whole = NeighborDataModule(data, num_neighbors=FANOUTS, batch_size=sizes["batch_size"], num_workers=1, seed=0)
    whole.setup("fit")
    owner = {None: Partition(Path(folder) / "parts").owner[0].numpy()}
    traffic = count_traffic(whole.train_dataloader(), owner, ranks, case.order)
    return predict(traffic, case.work, Network(case.bandwidth, case.latency))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("several_machines", __doc__, SIZES, argv, runs=1)
    warnings.filterwarnings("ignore")
    described = machine()
    data = planted_power_law(args.nodes, args.edges, 16, args.features, homophily=0.9, split=(0.4, 0.1, 0.1))
    cases = {name: case for name, case in CASES.items() if args.only in name}
    rows, bytes_, errors = [], {}, {}
    for ranks in (2, 4, 8):
        if ranks > args.ranks:
            continue
        with tempfile.TemporaryDirectory() as folder:
            partition_graph(data, Path(folder) / "parts", ranks, "ldg")
            found = measured(folder, ranks, {**args.sizes, "runs": args.runs}, cases)
            for name, case in cases.items():
                told, (times, asked) = predicted(data, folder, ranks, args.sizes, case), found[name]
                seconds = statistics.median(times)
                full = told.epoch_s + (args.steps - told.traffic.steps) * told.step_s
                title = f"ours, {ranks} machines, {name}"
                figures = {"median": round(seconds, 3), "min": round(min(times), 3), "max": round(max(times), 3)}
                rows.append({"name": title, **figures, "values": [round(value, 3) for value in times]})
                errors[title] = [round(full, 3), told.bound, round(full / seconds - 1, 3)]
                bytes_[title] = [round(told.traffic.remote_bytes), round(asked)]
    within = sum(abs(error) <= WITHIN for _, _, error in errors.values())
    result = {
        "benchmark": "several_machines",
        "title": f"Epochs of {args.steps} steps, {args.nodes:,} nodes, {args.edges:,} edges",
        "unit": "s per epoch",
        "settings": {
            **args.sizes,
            "fanouts": FANOUTS,
            "runs": args.runs,
            "cases": {name: asdict(case) for name, case in cases.items()},
        },
        "machine": described,
        "rows": rows,
        "comparisons": [],
        "extra": {
            "predicted s, what sets the pace, error": errors,
            "bytes per mini-batch: predicted, sent": bytes_,
            f"cases within {WITHIN:.0%}": f"{within} of {len(errors)}",
            "median error": round(statistics.median(abs(error) for _, _, error in errors.values()), 3)
            if errors
            else None,
        },
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
