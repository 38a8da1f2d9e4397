"""Samples, launches, mini-batches, training steps and places of data on one graph; contestants run in turns.

The DataModules against PyG's loader with its PrefetchLoader, and cuGraph-PyG and GraphBolt if they can be imported.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch_geometric.data import Data

from benchmarks import peers
from benchmarks.device_clock import Clock, Launch, busy, failure, rounds
from benchmarks.gpu import phases
from benchmarks.harness import shortened
from benchmarks.timed_epochs import TimedBatches
from lightning_gnn.datasets.synthetic import power_law_graph
from lightning_gnn.graph.csc import CSCGraph

UNITS = {
    "layers": "ms", "profile": "ms", "steps": "ms", "samples": "us", "phases": "us", "launches": "us", "loaders": "ms",
    "places": "us",
}  # fmt: skip
"""The parts that :meth:`OneGraph.measure` takes, with their unit per mini-batch."""
WARPS, PROGRAMS = (2, 4, 8), (1, 2, 3, 4, 8)
FETCH_SIZES = (5, 32, 128)
"""Tasks that a program of the queue claims at a time; a program of PGSampler claims 5."""
LEVEL = ("expand", "settle")
"""The launches of a level, ``triton_kernels/hops.py``."""
CLASSES = 32


@dataclass
class OneGraph:
    """A graph on one device, with the sizes of the measurements; by default that of ogbn-products."""

    device: torch.device
    nodes: int = 2_449_029
    edges: int = 61_859_140
    exponent: float = 3.0
    features: int = 100
    fanouts: tuple[int, ...] = (15, 10, 5)
    batch_size: int = 1024
    batches: int = 40
    runs: int = 5
    bulks: tuple[int, ...] = (2, 4, 8, 16, 32)
    warm: int = 8  # mini-batches before those that count: one bulk
    small: dict[str, Any] = field(default_factory=dict)  # options of samplers under the interpreter

    def __post_init__(self) -> None:
        indptr, indices = power_law_graph(self.nodes, self.edges, exponent=self.exponent, seed=0)
        self.host = CSCGraph.from_csc(indptr, indices.int())
        self.clock = Clock(self.device)
        generator = torch.Generator().manual_seed(1)
        number = max(8, *self.bulks)
        self.seeds = [torch.randperm(self.nodes, generator=generator)[: self.batch_size] for _ in range(number)]
        self.seeds_there = [seeds.to(self.device) for seeds in self.seeds]

    @cached_property
    def data(self) -> Data:
        """The graph as PyG's, with random features and labels."""
        generator = torch.Generator().manual_seed(0)
        targets = torch.repeat_interleave(torch.arange(self.nodes), self.host.indptr.diff())
        return Data(
            x=torch.rand(self.nodes, self.features, generator=generator),
            y=torch.randint(CLASSES, (self.nodes,), generator=generator),
            edge_index=torch.stack([self.host.indices.long(), targets]),
        )

    @cached_property
    def train_nodes(self) -> Tensor:
        """Seeds of all mini-batches of a round."""
        order = torch.randperm(self.nodes, generator=torch.Generator().manual_seed(2))
        return order[: (self.batches + self.warm) * self.batch_size]

    def measure(self, part: str) -> dict[str, Any]:
        """Return the figures of one part: the values and median of each contestant, or its error."""
        if part == "phases":
            return figures(phases.measure(self))
        counted = min(self.runs, 3) if part in ("profile", "steps", "loaders") else self.runs  # long ones
        return figures(rounds(getattr(self, part)(), counted + 1))  # the first round compiles and warms up

    def layers(self) -> dict[str, Callable[[int], float]]:
        """Return the contestants of :mod:`benchmarks.gpu.layers`."""
        from benchmarks.gpu.layers import contestants

        return contestants(self)

    # samples

    def sampler(self, graph: Any, **options: Any) -> Any:
        """Return a sampler whose offsets are on the device."""
        from benchmarks.gpu.baselines import BaselineSampler  # here, as a machine without Triton imports this file

        indptr = graph.indptr.to(self.device)
        return BaselineSampler(indptr, graph.indices, device=self.device, **self.small | options)

    def by_cpu(self, turn: int) -> list[Any]:
        """Sample on the CPU, and copy the sample."""
        from lightning_gnn.ops import sample_neighbors

        seeds = self.seeds[turn % len(self.seeds)][: self.batch_size]
        out = sample_neighbors(self.host, seeds, self.fanouts, turn, backend="numba")
        return [part.to(self.device) if isinstance(part, Tensor) else part for part in out]

    def sample(self, sampler: Any, turn: int) -> Any:
        """Sample on the device."""
        return sampler.sample(self.seeds_there[turn % len(self.seeds)][: self.batch_size], self.fanouts, turn)

    def bulk(self, sampler: Any, number: int, turn: int) -> list[Any]:
        """Sample several mini-batches together."""
        from lightning_gnn.triton_kernels.sample_bulk import sample_bulk

        return sample_bulk(sampler, self.seeds_there[:number], self.fanouts, [*range(turn, turn + number)])

    def alone(self, sampler: Any, turn: int) -> float:
        """Return the us of a sample."""
        return self.clock.wall(lambda: self.sample(sampler, turn))

    def _together(self, sampler: Any, number: int, turn: int) -> float:
        return self.clock.wall(lambda: self.bulk(sampler, number, turn)) / number

    def launched(self, sampler: Any, turn: int, timed: bool = True) -> list[Launch]:
        """Return the launches of a sample; if untimed, only with the host's launch times."""
        from benchmarks.gpu import baselines
        from lightning_gnn.triton_kernels import sample

        made = self.clock.launches(lambda: self.sample(sampler, turn), (sample, baselines), timed)
        # If the scratch memory had to grow, ignore the launches before.
        return (
            made[-(len(LEVEL) * (len(self.fanouts) + 1) + 1) :] if sampler.mode in ("hop_by_hop", "launches") else made
        )

    def kernels(self, sampler: Any, turn: int) -> float:
        """Return the us of all kernels of a sample, the copy to the output included."""
        return sum(launch.us for launch in self.launched(sampler, turn))

    def check(self) -> dict[str, Any]:
        """Compare samples of each mode and a bulk with the CPU's; return the differences and the sizes of a sample."""
        there = self.host.to(self.device)
        fused, queue, hop_by_hop = (self.sampler(there, mode=mode) for mode in ("fused", "persistent", "hop_by_hop"))
        calls: dict[str, Callable[[int], Any]] = {
            "fused": partial(self.sample, fused),
            "bulk of 2": lambda turn: self.bulk(fused, 2, 0)[turn],
            "queue": partial(self.sample, queue),
            "hop by hop": partial(self.sample, hop_by_hop),
        }
        wrong, sizes = self.compare(calls, 2)
        return {"wrong": [f"{name}: {what}" for name, what in wrong.items()], **sizes}

    def compare(self, calls: dict[str, Callable[[int], Any]], turns: int) -> tuple[dict[str, str], dict[str, Any]]:
        """Compare mini-batches of each contestant with the CPU's; return the differences, and the last one's sizes."""
        wrong: dict[str, str] = {}
        for turn in range(turns):
            wanted = self.by_cpu(turn)
            sizes = {"nodes": [*wanted[4]], "edges": [*wanted[5]]}
            for name in [name for name in calls if name not in wrong]:
                try:
                    made = calls[name](turn)
                    pairs = zip(("node", "edge_index", "edge"), made, wanted, strict=False)
                    parts = [part for part, ours, theirs in pairs if not torch.equal(ours, theirs)]
                    parts += ["sizes"] * ([[*made[4]], [*made[5]]] != [*sizes.values()])
                    if parts:
                        what = f"{' and '.join(parts)} of mini-batch {turn} differ{'s' * (len(parts) == 1)}"
                        wrong[name] = f"WRONG SAMPLE: {what} from the CPU's"
                except Exception as error:
                    wrong[name] = failure(error)
        return wrong, sizes

    def samples(self) -> dict[str, Callable[[int], float]]:
        """Complete samples, from seeds on the device to int64 tensors there, by the wall clock."""
        there = self.host.to(self.device)
        fused = self.sampler(there)
        return {
            "fused": partial(self.alone, fused),
            **{f"bulk of {bulk}": partial(self._together, fused, bulk) for bulk in self.bulks},
            **{
                f"queue, fetch {size}": partial(self.alone, self.sampler(there, mode="persistent", fetch_size=size))
                for size in FETCH_SIZES
            },
            "hop by hop, with the host": partial(self.alone, self.sampler(there, mode="hop_by_hop")),
            "CPU and transfer": lambda turn: self.clock.wall(lambda: self.by_cpu(turn)),
        }

    def launches(self) -> dict[str, Callable[[int], float]]:
        """Kernels of a fused sample, by the shape of the launch."""
        there = self.host.to(self.device)
        shapes = [*itertools.product(WARPS, PROGRAMS)][: 1 if self.small else None]
        return {
            f"{warps} warps, {programs} programs per multiprocessor": partial(
                self.kernels, self.sampler(there, **{"num_warps": warps, "programs_per_sm": programs} | self.small)
            )
            for warps, programs in shapes
        }

    def places(self) -> dict[str, Callable[[int], float]]:
        """Edges and features in each possible location, read by the GPU or by the CPU."""
        from lightning_gnn.features.hot_cache import top_accessed
        from lightning_gnn.features.table import FeatureTable

        on_gpu = self.device.type == "cuda"
        pinned = self.host.pin_memory() if on_gpu else self.host
        values = torch.rand(self.nodes, self.features)
        values = values.pin_memory() if on_gpu else values
        there, host = FeatureTable(values.to(self.device)), FeatureTable(values)
        node = self.by_cpu(0)[0]
        on_cpu, out = node.cpu(), torch.empty(node.numel(), self.features, device=self.device)
        staged = torch.empty(out.shape, pin_memory=on_gpu)
        hot = top_accessed(self.host.out_degrees, self.nodes // 4)
        quarter = host.cached(hot, self.device)

        def by_the_cpu() -> None:
            out.copy_(torch.index_select(values, 0, on_cpu, out=staged), non_blocking=True)

        def wall(call: Callable[[], Any], turn: int) -> float:
            return self.clock.wall(call)

        return {
            "edges on the device, bulk of 8": partial(self._together, self.sampler(self.host.to(self.device)), 8),
            "edges in pinned memory, bulk of 8": partial(self._together, self.sampler(pinned), 8),
            "edges in pinned memory, a quarter of the lists cached, bulk of 8": partial(
                self._together, self.sampler(pinned, cached=self.host.cache_adjacency(hot, self.device)), 8
            ),
            "edges in pinned memory, queue": partial(self.alone, self.sampler(pinned, mode="persistent")),
            "edges read by the CPU": lambda turn: self.clock.wall(lambda: self.by_cpu(turn)),
            "features on the device": partial(wall, lambda: there.gather(node, out)),
            "features on the device, torch.index_select": partial(
                wall, lambda: torch.index_select(there.values, 0, node, out=out)
            ),
            "features in pinned memory, a quarter of the rows cached": partial(wall, lambda: quarter.gather(node, out)),
            "features in pinned memory": partial(wall, lambda: host.gather(node, out)),
            "features read by the CPU": partial(wall, by_the_cpu),
        }

    # loaders

    def datamodules(self) -> dict[str, Callable[[], Any]]:
        """DataModules of this package, and PyG's, by name."""
        from lightning_gnn import NeighborDataModule, PersistentSamplerDataModule

        shared = {"num_neighbors": list(self.fanouts), "batch_size": self.batch_size}
        gpu = partial(PersistentSamplerDataModule, self.data, self.train_nodes, seed=0, device=self.device, **shared)
        workers = {"num_workers": 4, "pin_memory": self.device.type == "cuda"}
        made: dict[str, Callable[[], Any]] = {
            "persistent, bulk=8": partial(gpu, bulk=8),
            "persistent, bulk=1": partial(gpu, bulk=1),
            "persistent, the queue": partial(gpu, mode="persistent"),
            "persistent, features pinned": partial(gpu, features="pinned"),
            "persistent, features pinned, a quarter cached": partial(
                gpu, features="pinned", cache_bytes=self.nodes * self.features
            ),
            "persistent, all pinned": partial(gpu, features="pinned", topology="pinned"),
            "NeighborDataModule": partial(NeighborDataModule, self.data, self.train_nodes, seed=0, **shared, **workers),
        }
        if peers.can_sample():
            made["PyG"] = partial(peers.PyGNodeData, self.data, self.train_nodes, **shared, **workers)
        return made

    def loaders(self) -> dict[str, Callable[[int], float]]:
        """Mini-batches with features and labels on the device, without training."""
        from torch_geometric.loader import PrefetchLoader

        contestants = {}
        for name, make in self.datamodules().items():
            if name.startswith("persistent"):
                loader = cache(lambda make=make: make().train_dataloader())
            else:  # with PyG's class for copying on a separate stream
                name = f"{name} with PrefetchLoader"
                loader = cache(lambda make=make: PrefetchLoader(make().train_dataloader(), device=self.device))
            contestants[name] = partial(self.iterate, loader)
        if peers.importable("cugraph_pyg"):
            contestants["cuGraph-PyG"] = partial(self.iterate, cache(self._cugraph))
        if peers.importable("dgl.graphbolt"):
            contestants["GraphBolt"] = partial(self.iterate, cache(self._graphbolt))
        return contestants

    def iterate(self, loader: Callable[[], Iterable[Any]], turn: int) -> float:
        """Return the ms per mini-batch, excluding the first bulk."""
        batches = iter(loader())
        for _ in range(self.warm):
            next(batches)
        start, count = self.clock.now(), 0
        for _ in itertools.islice(batches, self.batches):
            count += 1
        return (self.clock.now() - start) / max(count, 1) / 1e3

    def _cugraph(self) -> Any:
        import cugraph_pyg
        from cugraph_pyg.loader import NeighborLoader

        graph, features = cugraph_pyg.data.GraphStore(), cugraph_pyg.data.TensorDictFeatureStore()
        graph[("node", "to", "node"), "coo", False, (self.nodes, self.nodes)] = self.data.edge_index
        features["node", "x"], features["node", "y"] = self.data.x, self.data.y
        return NeighborLoader(
            (features, graph), num_neighbors=list(self.fanouts), input_nodes=self.train_nodes,
            batch_size=self.batch_size,
        )  # fmt: skip

    def _graphbolt(self) -> Any:
        import dgl.graphbolt as gb

        graph = gb.fused_csc_sampling_graph(self.host.indptr, self.host.indices).to(self.device)
        key = ("node", None, "x")
        features = gb.BasicFeatureStore({key: gb.TorchBasedFeature(self.data.x.to(self.device))})
        items = gb.ItemSet((self.train_nodes, self.data.y[self.train_nodes]), names=("seeds", "labels"))
        pipe = gb.ItemSampler(items, batch_size=self.batch_size, shuffle=True).copy_to(self.device)
        # GraphBolt's layers start at the seeds with the last fanout.
        pipe = pipe.sample_neighbor(graph, [torch.tensor([fanout]) for fanout in reversed(self.fanouts)])
        return gb.DataLoader(pipe.fetch_feature(features, node_feature_keys=["x"]))

    # training

    def steps(self) -> dict[str, Callable[[int], float]]:
        """Training steps of a GraphSAGE model with one layer per hop, through Lightning's Trainer."""
        made = {name: partial(self._train, make) for name, make in self.datamodules().items()}
        pinned, best = made["persistent, features pinned"], made["persistent, bulk=8"]
        return made | {
            "persistent, features pinned, read by all programs": partial(self._read_by_all, pinned),
            "persistent, bulk=8, TF32": partial(self._in_tf32, best),
        }

    def profile(self) -> dict[str, Callable[[int], float]]:
        """Whether the device is idle in a training step: a step, one under the profiler, and the time with kernels."""
        step = partial(self._train, self.datamodules()["persistent, bulk=8"])
        seen = cache(lambda turn: busy(partial(step, turn), self.device))
        return {
            "a step": step,
            "a step under the profiler": lambda turn: seen(turn)[0],
            "the device is busy": lambda turn: seen(turn)[1] / (self.batches + 1) / 1e3,
            "launches": lambda turn: seen(turn)[2] / (self.batches + 1),
        }

    def _in_tf32(self, train: Callable[[int], float], turn: int) -> float:
        """Train with products in TF32."""
        torch.set_float32_matmul_precision("high")
        try:
            return train(turn)
        finally:
            torch.set_float32_matmul_precision("highest")

    def _read_by_all(self, train: Callable[[int], float], turn: int) -> float:
        """Train while host memory is read by as many programs as the device can run."""
        from lightning_gnn.triton_kernels import gather

        with mock.patch.object(gather, "BUS_BYTES", 1 << 62):
            return train(turn)

    def _train(self, make: Callable[[], Any], turn: int) -> float:
        from lightning_gnn.nn import GraphSAGE, NodeClassifier

        model = NodeClassifier(GraphSAGE(self.features, 256, len(self.fanouts), CLASSES), CLASSES)
        timed = TimedBatches()
        trainer = pl.Trainer(
            accelerator="gpu" if self.device.type == "cuda" else "cpu", devices=1, max_epochs=1, callbacks=[timed],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            limit_train_batches=self.batches + 1,  # the first step samples a bulk and is not counted
        )  # fmt: skip
        trainer.fit(model, make())
        return timed.seconds() * 1e3


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return the values after the first round and their median for each contestant, or its error."""
    result: dict[str, Any] = {}
    for name, seen in found.items():
        values = seen if isinstance(seen, str) else [shortened(value) for value in seen[1:]]
        more = {"failed": seen} if isinstance(seen, str) else {"values": values, "median": statistics.median(values)}
        result[name] = more
    return result
