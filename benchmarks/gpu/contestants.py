"""Contestants of ``benchmarks.gpu.first``, on one graph.

Mini-batches and training steps of the DataModules, of PyG's loader with its PrefetchLoader, and of cuGraph-PyG and
GraphBolt if they can be imported.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch_geometric.data import Data

from benchmarks import peers
from benchmarks.device_clock import Clock, rounds
from benchmarks.timed_epochs import TimedBatches

BULKS = (2, 4, 8, 16)
FETCH_SIZES = (32, 128)
WARM = 8
"""Number of warm-up mini-batches: one bulk."""
CLASSES = 32


@dataclass
class First:
    """Sizes and device of the measurements."""

    device: torch.device
    nodes: int = 2_449_029
    edges: int = 61_859_140
    features: int = 100
    fanouts: tuple[int, ...] = (15, 10, 5)
    batch_size: int = 1024
    batches: int = 40
    runs: int = 5
    warm: int = WARM
    small: dict[str, Any] = field(default_factory=dict)
    """Options of samplers under the interpreter."""

    def __post_init__(self) -> None:
        from lightning_gnn.datasets.synthetic import power_law_graph
        from lightning_gnn.graph.csc import CSCGraph

        indptr, indices = power_law_graph(self.nodes, self.edges, exponent=3.0, seed=0)
        self.host = CSCGraph.from_csc(indptr, indices.int())
        self.clock = Clock(self.device)
        generator = torch.Generator().manual_seed(1)
        number = max(WARM, *BULKS)
        self.seeds = [torch.randperm(self.nodes, generator=generator)[: self.batch_size] for _ in range(number)]

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
        contestants = getattr(self, part)()
        figures: dict[str, Any] = {}
        for name, seen in rounds(contestants, self.runs + 1).items():  # the first round compiles and warms up
            values = seen if isinstance(seen, str) else [float(f"{value:.4g}") for value in seen[1:]]
            figures[name] = {"failed": seen} if isinstance(seen, str) else {
                "values": values, "median": statistics.median(values),
            }  # fmt: skip
        return figures

    # samples

    def _sampler(self, graph: Any, **options: Any) -> Any:
        from benchmarks.gpu.baselines import BaselineSampler

        indptr = graph.indptr.to(self.device)
        return BaselineSampler(indptr, graph.indices, device=self.device, **options, **self.small)

    def _by_cpu(self, turn: int) -> list[Any]:
        from lightning_gnn.ops import sample_neighbors

        out = sample_neighbors(self.host, self.seeds[turn % len(self.seeds)], self.fanouts, turn, backend="numba")
        return [part.to(self.device) if isinstance(part, Tensor) else part for part in out]

    def _alone(self, sampler: Any, turn: int) -> float:
        seeds = self.seeds_there[turn % len(self.seeds)]
        return self.clock.wall(lambda: sampler.sample(seeds, self.fanouts, turn))

    def _together(self, sampler: Any, bulk: int, turn: int) -> float:
        from lightning_gnn.triton_kernels.sample_bulk import sample_bulk

        keys = list(range(turn, turn + bulk))
        return self.clock.wall(lambda: sample_bulk(sampler, self.seeds_there[:bulk], self.fanouts, keys)) / bulk

    @cached_property
    def seeds_there(self) -> list[Tensor]:
        """The seeds on the device."""
        return [seeds.to(self.device) for seeds in self.seeds]

    def check(self) -> str | None:
        """Compare a bulk with the CPU's samples; return the differences."""
        from lightning_gnn.triton_kernels.sample_bulk import sample_bulk

        made = sample_bulk(self._sampler(self.host.to(self.device)), self.seeds_there[:2], self.fanouts, [0, 1])
        for turn, ours in enumerate(made):
            wanted = self._by_cpu(turn)
            if not all(torch.equal(ours[part], wanted[part]) for part in range(3)):
                return f"WRONG SAMPLE: mini-batch {turn} of a bulk differs from the CPU's"
        return None

    def samples(self) -> dict[str, Callable[[int], float]]:
        """Complete samples, from seeds on the device to int64 tensors there, by the wall clock."""
        there = self.host.to(self.device)
        fused = self._sampler(there)
        return {
            "fused": partial(self._alone, fused),
            **{f"bulk of {bulk}": partial(self._together, fused, bulk) for bulk in BULKS},
            **{
                f"queue, fetch {size}": partial(self._alone, self._sampler(there, mode="persistent", fetch_size=size))
                for size in FETCH_SIZES
            },
            "hop by hop, with the host": partial(self._alone, self._sampler(there, mode="hop_by_hop")),
            "CPU and transfer": lambda turn: self.clock.wall(lambda: self._by_cpu(turn)),
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
        node = self._by_cpu(0)[0]
        on_cpu, out = node.cpu(), torch.empty(node.numel(), self.features, device=self.device)
        staged = torch.empty(out.shape, pin_memory=on_gpu)
        quarter = host.cached(top_accessed(self.host.out_degrees, self.nodes // 4), self.device)

        def by_the_cpu() -> None:
            out.copy_(torch.index_select(values, 0, on_cpu, out=staged), non_blocking=True)

        def wall(call: Callable[[], Any], turn: int) -> float:
            return self.clock.wall(call)

        return {
            "edges on the device, bulk of 8": partial(self._together, self._sampler(self.host.to(self.device)), 8),
            "edges in pinned memory, bulk of 8": partial(self._together, self._sampler(pinned), 8),
            "edges in pinned memory, queue": partial(self._alone, self._sampler(pinned, mode="persistent")),
            "edges read by the CPU": lambda turn: self.clock.wall(lambda: self._by_cpu(turn)),
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
        from torch_geometric.data.lightning import LightningNodeData

        from lightning_gnn import NeighborDataModule, PersistentSamplerDataModule

        shared = {"num_neighbors": list(self.fanouts), "batch_size": self.batch_size}
        gpu = partial(PersistentSamplerDataModule, self.data, self.train_nodes, seed=0, device=self.device, **shared)
        workers = {"num_workers": 4, "pin_memory": self.device.type == "cuda"}
        made: dict[str, Callable[[], Any]] = {
            "persistent, bulk=8": partial(gpu, bulk=8),
            "persistent, bulk=1": partial(gpu, bulk=1),
            "persistent, the queue": partial(gpu, mode="persistent"),
            "persistent, features pinned": partial(gpu, features="pinned"),
            "persistent, all pinned": partial(gpu, features="pinned", topology="pinned"),
            "NeighborDataModule": partial(NeighborDataModule, self.data, self.train_nodes, seed=0, **shared, **workers),
        }
        if peers.can_sample():
            made["PyG"] = partial(LightningNodeData, self.data, self.train_nodes, **shared, **workers)
        return made

    def loaders(self) -> dict[str, Callable[[int], float]]:
        """Mini-batches with features and labels on the device, without training."""
        from torch_geometric.loader import PrefetchLoader

        contestants = {}
        for name, make in self.datamodules().items():
            loader = _later(lambda make=make: make().train_dataloader())
            if not name.startswith("persistent"):  # PyG's class for copying on a separate stream
                name, loader = f"{name} with PrefetchLoader", _later(partial(self._prefetched, PrefetchLoader, loader))
            contestants[name] = partial(self._iterate, loader)
        if peers.importable("cugraph_pyg"):
            contestants["cuGraph-PyG"] = partial(self._iterate, _later(self._cugraph))
        if peers.importable("dgl.graphbolt"):
            contestants["GraphBolt"] = partial(self._iterate, _later(self._graphbolt))
        return contestants

    def _prefetched(self, wrapper: Any, loader: Callable[[], Any]) -> Any:
        return wrapper(loader(), device=self.device) if self.device.type == "cuda" else loader()

    def _iterate(self, loader: Callable[[], Iterable[Any]], turn: int) -> float:
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
        return {name: partial(self._train, make) for name, make in self.datamodules().items()}

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


def _later(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that creates an object at its first call and caches it."""
    kept: list[Any] = []

    def get() -> Any:
        if not kept:
            kept.append(make())
        return kept[0]

    return get
