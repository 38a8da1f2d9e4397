"""Cells of ``benchmarks.collective.epochs``: collective batching on a GPU with one model and one number of cores.

Topology and features are in pinned memory, with a cache of hot rows that all contestants share. All of them run in one
process pinned to the given number of cores; a plain training loop, without Lightning, drives each loader:

- collective: :class:`CollectiveDataModule`'s loader with its measured plan;
- CPU-only: :class:`NeighborDataModule`'s loader with PyG's PrefetchLoader, which transfers on a separate stream, and
  the collective loader with a plan that assigns everything to the CPU;
- GPU-only: :class:`PersistentSamplerDataModule`'s loader;
- random split: the same two samplers; each mini-batch is assigned to the CPU with a probability, prepared ahead by the
  same number of threads, and transferred on a separate stream when it is due: no buffers, no plan.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import PrefetchLoader

from benchmarks.harness import measure, shortened
from benchmarks.papers.morphgl import SHARES, used
from benchmarks.sampling.minibatch import make_data
from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.collective.routes import HostRoute
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.nn import GAT, GCN, GraphSAGE, NodeClassifier
from lightning_gnn.runtime.timeline import Timeline
from lightning_gnn.sampling.neighbor import NeighborSampler

CLASSES = 32
FANOUTS = [15, 10, 5]
HIDDEN = {"GraphSAGE": 256, "GCN": 16, "GAT": 64}
"""Section 5.1."""
KINDS = {"GraphSAGE": GraphSAGE, "GCN": GCN, "GAT": GAT}
PREDICTED = {"collective": "collective", "CPU-only, the loader's ring": "cpu", "GPU-only": "gpu"}
"""Contestants whose epochs a plan predicts, and their keys in it."""
GPU_BUFFERS = (1, 2, 4, 8, 10, 16, 32, 64)
_PERIOD_S = 0.05
"""Seconds between two samples of GPU utilization."""


class Bench:
    """One graph, and the contestants that train on it."""

    def __init__(
        self, sizes: dict[str, int], device: torch.device, profile_batches: int = 10, data: Data | None = None
    ) -> None:
        self.sizes = sizes
        self.device = device
        self.profile_batches = profile_batches
        made = (sizes["nodes"], sizes["edges"], sizes["features"], CLASSES)
        self.data = make_data(*made) if data is None else data
        generator = torch.Generator().manual_seed(1)
        self.order = torch.randperm(sizes["nodes"], generator=generator)
        self.sampler = NeighborSampler(self.data, FANOUTS, seed=0)
        self.shared = self.datamodule(sizes["batch_size"], sizes["cache_rows"], 10)

    def datamodule(self, batch_size: int, cache_rows: int, gpu_buffer_size: int) -> CollectiveDataModule:
        """Return the DataModule that places the graph and creates the loaders."""
        nodes, row_bytes = self.sizes["nodes"], 4 * self.sizes["features"]
        cache_bytes = cache_rows * row_bytes + 4 * nodes if cache_rows else 0  # with the lookup table
        gpu: dict[str, Any] = {"topology": "pinned", "features": "pinned", "cache_bytes": cache_bytes}
        if self.device.type == "cpu":
            gpu = {"gpu_route": "cpu"}
        return CollectiveDataModule(
            self.data,
            self.order[: self.sizes["batches"] * batch_size],
            node_sampler=self.sampler,
            batch_size=batch_size,
            seed=0,
            gpu_buffer_size=gpu_buffer_size,
            profile_batches=self.profile_batches,
            **gpu,
        )

    def loader(self, datamodule: CollectiveDataModule, workers: int) -> Any:
        """Return a collective loader without a plan; its ``prefetcher.route`` is the GPU's pipeline."""
        datamodule.num_workers = workers
        loader = datamodule.train_dataloader()
        loader.prefetcher.plan = None
        return loader

    def step(self, model: str) -> Callable[[Data], None]:
        """Return a function that trains on one mini-batch without synchronizing the GPU."""
        torch.manual_seed(0)
        network = KINDS[model](self.sizes["features"], HIDDEN[model], 3, CLASSES)
        module = NodeClassifier(network, CLASSES).to(self.device)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)

        def step(batch: Data) -> None:
            batch = batch.to(self.device)
            size = batch.batch_size
            loss = F.cross_entropy(module(batch)[:size], batch.y[:size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    def epoch(self, batches: Iterable[Data], step: Callable[[Data], None]) -> float:
        """Train one epoch and return its seconds."""
        self.wait()
        start = time.perf_counter()
        for batch in batches:
            step(batch)
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Synchronize the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def cpu_only(self, workers: int) -> Iterable[Data]:
        """Return a loader of mini-batches prepared by CPU threads and transferred on a separate stream."""
        loader = NeighborDataModule(
            self.data,
            self.order[: self.sizes["batches"] * self.sizes["batch_size"]],
            node_sampler=self.sampler,
            batch_size=self.sizes["batch_size"],
            num_workers=workers,
            seed=0,
            pin_memory=self.device.type == "cuda",
        ).train_dataloader()
        return PrefetchLoader(loader, self.device) if self.device.type == "cuda" else loader

    def random_split(self, loader: Any, ratio: float, workers: int) -> Iterator[Data]:
        """Yield an epoch in which the CPU prepares each mini-batch with the given probability."""
        draws, batching = random.Random(0), loader.prefetcher
        tasks = list(loader.tasks(0))
        on_cpu = [draws.random() < ratio for _ in tasks]
        ahead = [task for task, taken in zip(tasks, on_cpu, strict=True) if taken][::-1]
        host, prepared = HostRoute(loader.pipeline, batching.ring, None), dict[int, Future[Any]]()
        if batching.ring is not None:
            batching.ring.capacity = 3 * workers
        with ThreadPoolExecutor(workers, initializer=_one_thread) as pool:
            for task, taken in zip(tasks, on_cpu, strict=True):
                while ahead and len(prepared) < 2 * workers:
                    following = ahead.pop()
                    prepared[following.index] = pool.submit(host.prepare, following)
                if taken:
                    entry = batching.routes.transfer(task.index, prepared.pop(task.index).result())
                    yield batching.routes.arrive(entry).batch
                else:
                    yield batching.route.prepare(task).batch

    def cell(self, model: str, cores: int, runs: int, only: str = "", is_watched: bool = True) -> dict[str, Any]:
        """Measure all contestants with one model and one number of cores, including the main thread's.

        Args:
            only: Measure collective batching and the contestants with this text in their name.
            is_watched: Whether to train three more epochs for the utilization of cores, PCIe and GPU.
        """
        workers, step = cores - 1, self.step(model)
        with kept_on(cores) as given:
            loader = self.loader(self.shared, workers)
            for batch in islice(_on_device(loader), 2):  # compiles kernels
                step(batch)
            planning = self._plan(loader, step)
            plan: CollectivePlan = loader.prefetcher.plan
            cpu_plan = CollectivePlan("cpu", 1, 2 * workers, times=plan.times)

            def by(chosen: CollectivePlan | None, batches: Callable[[], Iterable[Data]]) -> Callable[[], float]:
                def call() -> float:
                    loader.prefetcher.plan = chosen
                    return self.epoch(batches(), step)

                return call

            salient = self.cpu_only(workers)
            ways = {
                "collective": by(plan, lambda: loader),
                "CPU-only, PrefetchLoader": by(plan, lambda: salient),
                "CPU-only, the loader's ring": by(cpu_plan, lambda: loader),
                "GPU-only": by(plan, lambda: _on_device(loader)),
            }
            ratios: dict[str, float] = {}
            times = plan.times
            for ratio in SHARES if only in "random split" else []:
                if ratios and times is not None and ratio * len(loader) * times.cpu > 2 * min(ratios.values()):
                    break  # lower bound from the workers' time
                ratios[f"{ratio:g}"] = self.epoch(self.random_split(loader, ratio, workers), step)
            if ratios:
                best = float(min(ratios, key=lambda ratio: ratios[ratio]))
                ways["random split"] = by(plan, lambda: self.random_split(loader, best, workers))
            chosen = {way: call for way, call in ways.items() if way == "collective" or only in way}
            rows = measure({f"{_named(way)}, {model}, {cores} cores": call for way, call in chosen.items()}, runs)
            utilisation = {
                way: self._utilisation(loader, step, one)
                for way, one in (
                    ("collective", plan),
                    ("CPU-only", cpu_plan),
                    ("GPU-only", CollectivePlan("gpu", 1, 0)),
                )
                if is_watched
            }
            loader.prefetcher.close()
        measured = rows[0]["median"]
        predicted = plan.epoch_s.get("collective")
        batches = self.sizes["batches"]
        medians = {way: row["median"] for way, row in zip(chosen, rows, strict=True)}
        rates = {
            way: {"measured": shortened(batches / medians[way]), "predicted": shortened(batches / plan.epoch_s[key])}
            for way, key in PREDICTED.items()
            if way in medians and plan.epoch_s.get(key)
        }
        return {
            "model": model,
            "cores": cores,
            "cores_given": given,
            "workers": workers,
            "plan": str(plan).splitlines(),
            "mode": plan.mode,
            "buffers": plan.buffers,
            "predicted_s": predicted,
            "error": None if not predicted else round(measured / predicted - 1, 4),
            "planning": {**planning, "epochs": round(planning["seconds"] / measured, 2)},
            "random_split_s": {ratio: round(seconds, 4) for ratio, seconds in ratios.items()},
            "utilisation": utilisation,
            "mini-batches per s": rates,
            "rows": rows,
        }

    def buffers(self, model: str, cores: int, batch_size: int, runs: int) -> dict[str, Any]:
        """Measure epochs for several sizes of the GPU's buffer, with the remaining memory for the cache (figure 9).

        Cache and buffer together hold as many rows as the graph has.
        """
        step, workers = self.step(model), cores - 1
        with kept_on(cores):
            probe = self.datamodule(batch_size, 0, 1)
            rows_per_batch = int(next(_on_device(probe.train_dataloader())).num_nodes)
            contestants: dict[str, Callable[[], float] | None] = {}
            points: dict[str, dict[str, Any]] = {}
            loaders = []
            for size in GPU_BUFFERS:
                cache_rows = self.sizes["nodes"] - size * rows_per_batch
                if cache_rows < 0 or size > self.sizes["batches"] // 2:
                    break
                loader = self.loader(self.datamodule(batch_size, cache_rows, size), workers)
                self._plan(loader, step)
                loaders.append(loader)
                name = f"ours, collective, {model}, {cores} cores, GPU buffer of {size}"
                contestants[name] = lambda loader=loader: self.epoch(loader, step)  # type: ignore[misc]
                points[name] = {"gpu_buffer_size": size, "cache_rows": cache_rows, "mode": loader.prefetcher.plan.mode}
                points[name]["buffers"] = loader.prefetcher.plan.buffers
            for row in measure(contestants, runs):
                points[row["name"]]["seconds"] = row["median"]
            for loader in loaders:
                loader.prefetcher.close()
        return {"batch_size": batch_size, "rows_per_batch": rows_per_batch, "points": list(points.values())}

    def _plan(self, loader: Any, step: Callable[[Data], None]) -> dict[str, float]:
        """Train until a plan exists; return the seconds and mini-batches until then."""
        self.wait()
        start, batches = time.perf_counter(), 0
        for _ in range(4):
            for batch in loader:
                if loader.prefetcher.plan is not None:
                    break
                step(batch)
                batches += 1
            if loader.prefetcher.plan is not None:
                break
        seconds = time.perf_counter() - start
        loader.prefetcher.stop()
        if loader.prefetcher.plan is None:
            raise RuntimeError("no plan after four epochs")
        return {"seconds": round(seconds, 3), "batches": batches}

    def _utilisation(self, loader: Any, step: Callable[[Data], None], plan: CollectivePlan) -> dict[str, Any]:
        """Train an epoch with a timeline; return the utilization of cores, PCIe and GPU, and the driver's figure."""
        loader.prefetcher.plan, loader.prefetcher.timeline = plan, Timeline()
        process = psutil.Process()
        before = process.cpu_times()
        with _watched(self.device) as seen:
            seconds = self.epoch(loader, step)
        after = process.cpu_times()
        timeline, loader.prefetcher.timeline = loader.prefetcher.timeline, None
        cores = (after.user + after.system - before.user - before.system) / seconds
        driver = round(sum(seen) / len(seen) / 100, 3) if seen else None
        return {"by timeline": used(timeline, seconds), "process_cores": round(cores, 2), "gpu_by_driver": driver}


def _on_device(loader: Any) -> Iterator[Data]:
    """Yield an epoch in which the GPU alternates between preparing and training."""
    route = loader.prefetcher.route
    return (route.finish(route.prepare(task)) for task in loader.tasks(0))


def _named(way: str) -> str:
    return f"ours, {way}" if way == "collective" else way


def _one_thread() -> None:
    torch.get_num_threads()
    torch.set_num_threads(1)


@contextmanager
def kept_on(cores: int) -> Iterator[int]:
    """Pin all current and future threads of the process to a number of cores; yield the number in effect."""
    if not hasattr(os, "sched_setaffinity"):
        yield os.cpu_count() or 1
        return
    everywhere = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    some = set(sorted(everywhere)[:cores])
    try:
        _keep(some)
        torch.set_num_threads(1)
        yield len(some)
    finally:
        _keep(everywhere)
        torch.set_num_threads(threads)


def _keep(cores: set[int]) -> None:
    for thread in psutil.Process().threads():
        try:
            os.sched_setaffinity(thread.id, cores)
        except ProcessLookupError:
            continue  # it has ended


@contextmanager
def _watched(device: torch.device) -> Iterator[list[int]]:
    """Sample the GPU utilization periodically; the list stays empty without the driver's Python bindings."""
    seen: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_PERIOD_S):
            try:
                seen.append(torch.cuda.utilization(device))
            except Exception:  # such as missing driver bindings
                return

    watcher = threading.Thread(target=watch, daemon=True)
    if device.type == "cuda":
        watcher.start()
    try:
        yield seen
    finally:
        over.set()
        if watcher.is_alive():
            watcher.join(timeout=5)


def cells(
    bench: Bench,
    models: Sequence[str],
    cores: Sequence[int],
    runs: int,
    only: str,
    limit: float,
    keep: Callable[[dict[str, Any]], None],
    is_watched: bool = True,
) -> list[dict[str, Any]]:
    """Measure all cells, passing each to ``keep``; return the skipped ones with the reason."""
    start = time.perf_counter()
    skipped = []
    for model in models:
        for count in cores:
            if time.perf_counter() - start > limit:
                skipped.append({"model": model, "cores": count, "why": "the time was up"})
                continue
            keep(bench.cell(model, count, runs, only, is_watched))
    return skipped
