"""``lgnn plan strategy=hyscale``: what the performance model predicts for a run, and what limits each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_gnn.graph.workload import Platform, Processor
from lightning_gnn.hyscale.checks import check_training
from lightning_gnn.hyscale.decisions import read_decisions
from lightning_gnn.hyscale.first_mapping import accelerator_rate, describe_workload, measure_platform
from lightning_gnn.hyscale.mapping import Mapping
from lightning_gnn.hyscale.model import PerformanceModel
from lightning_gnn.hyscale.options import check_shares
from lightning_gnn.hyscale.pipeline import split_seeds
from lightning_gnn.hyscale.platform_numbers import Numbers, complete, flat_numbers, save_numbers
from lightning_gnn.hyscale.sampling_share import find_sampling, wanted_sampling
from lightning_gnn.hyscale.scaling import ScalingPoint, scaling_study
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.hyscale.work_share import Trainers, default_threads, num_cores, seeds_of_iteration
from lightning_gnn.runtime.files import LARGEST_JSON, read_text

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class HybridForecast:
    """What the performance model says about a run.

    Args:
        model: With its platform and workload.
        best: The mapping with the shortest iteration.
        begin: The mapping that the run begins with.
        origins: Where each number of the platform is from.
        scaling: Points of the scaling study; empty without accelerators.
    """

    model: PerformanceModel
    best: Mapping
    begin: Mapping
    origins: dict[str, str]
    scaling: Sequence[ScalingPoint] = ()

    def save(self, directory: str | Path) -> None:
        """Write ``plan.yaml``, and ``platform.yaml`` for other plans."""
        rows = {name: {"seconds": seconds, "bound_by": bound} for name, seconds, bound in stages(self.model, self.best)}
        state = {
            "best": self._predicted(self.best),
            "begin": self._predicted(self.begin),
            "stages_of_best": rows,
            "scaling": [
                {
                    "nodes": point.nodes,
                    "accelerators": point.accelerators,
                    "iteration_s": point.iteration,
                    "mteps": point.mteps,
                    "speedup": point.speedup,
                    "limit": point.limit,
                }
                for point in self.scaling
            ],
        }
        (Path(directory) / "plan.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(state)))
        save_numbers(self.model.platform, Path(directory) / "platform.yaml")

    def _predicted(self, mapping: Mapping) -> dict[str, Any]:
        model = self.model
        times = {"iteration_s": model.iteration_time(mapping), "epoch_s": model.epoch_time(mapping)}
        return {**mapping.to_dict(), **times, "mteps": model.mteps(mapping)}


def forecast(
    given: Numbers,
    plan: DictConfig,
    datamodule: pl.LightningDataModule,
    module: pl.LightningModule,
    trainer: pl.Trainer,
) -> HybridForecast:
    """Measure what is not given, and ask the performance model.

    Args:
        given: Numbers of the machine, as :func:`~lightning_gnn.hyscale.platform_numbers.given_numbers` returns them.
        plan: The keys of ``conf/plan.yaml``.
        datamodule: Whose training loader is to be shared out.
        module: What is to be trained.
        trainer: With a :class:`~lightning_gnn.hyscale.HyScaleStrategy`.

    Raises:
        TypeError: The loader cannot be shared out.
        ValueError: Numbers are missing or impossible, or the loader does not tell its fanouts.
    """
    strategy = trainer.strategy
    assert isinstance(strategy, HyScaleStrategy)
    datamodule.prepare_data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    check_training(loader, module)
    nodes = given.get("num_nodes", trainer.num_nodes)
    total = seeds_of_iteration(loader) // nodes
    if total < 1:
        raise ValueError(f"the plan needs mini-batches of a known size, with a seed for each of {nodes} nodes")
    workload, sampled_per_s = describe_workload(loader, module, total, strategy.transfer_dtype)
    if workload is None:
        raise ValueError("the plan needs a loader that tells its fanouts, and node features data.x as one tensor")
    sampling_wanted = wanted_sampling(strategy.accelerator_sampling, strategy.drm)
    here = Trainers((_CPU,) * strategy.cpu_trainers + tuple(strategy.accelerators), strategy.cpu_trainers)

    def measure() -> Platform:
        sampling = find_sampling(sampling_wanted, loader, here)
        there = 0.0 if sampling is None else accelerator_rate(sampling, loader, total)
        return measure_platform(Trainers.of(1, strategy.accelerators), sampled_per_s, there)

    platform, origins = complete(given, measure, nodes)
    if not strategy.cpu_trainers and not platform.num_accelerators:
        raise ValueError("cpu_trainers=0 and no accelerator: nobody would train; set trainer.strategy.cpu_trainers=1")
    model = PerformanceModel(platform, workload)
    num_workers = getattr(loader, "num_threads", None) or loader.num_workers
    threads = strategy.threads or default_threads(num_workers, strategy.cpu_trainers > 0, strategy.drm is not False)
    own = sum(threads) if platform.cores == num_cores() else platform.cores
    best = model.best_mapping(strategy.cpu_trainers, max(own, 2 + strategy.cpu_trainers))
    scaling: Sequence[ScalingPoint] = ()
    if platform.accelerator is not None:
        scaling = scaling_study(platform, workload, plan.accelerators, plan.nodes, strategy.cpu_trainers)
    begin = _begin(strategy, platform, best, threads, sampling_wanted)
    return HybridForecast(model, best, begin, origins, scaling)


def _begin(
    strategy: HyScaleStrategy,
    platform: Platform,
    best: Mapping,
    threads: tuple[int, int, int],
    sampling: str | float,
) -> Mapping:
    """Return the mapping that the strategy begins with: what it is told, the best one where nothing is told."""
    if not isinstance(strategy.drm, bool):
        return read_decisions(read_text(strategy.drm, LARGEST_JSON).splitlines())[0].mapping
    trainers = Trainers((_CPU,) * (strategy.cpu_trainers + platform.num_accelerators), strategy.cpu_trainers)
    weights = check_shares(strategy.shares, len(trainers.devices))
    if weights is None and strategy.cpu_share == "auto" and trainers.num_cpu and trainers.num_accelerators:
        weights, threads = list(best.shares), strategy.threads or best.threads
    if weights is None:
        weights = trainers.weights(0.5 if strategy.cpu_share == "auto" else float(strategy.cpu_share))
    seeds = tuple(stop - start for start, stop in split_seeds(best.total, weights))
    there = platform.accelerator_sampling * platform.num_accelerators
    if isinstance(sampling, str):  # both are done at the same time
        sampling = there / (there + platform.sampled_edges(threads[0])) if there else 0.0
    return Mapping(seeds, strategy.cpu_trainers, threads, sampling if there else 0.0)


def stages(model: PerformanceModel, mapping: Mapping) -> list[tuple[str, float, str]]:
    """Return name, seconds and what it is bound by of each stage that exists."""
    platform, times = model.platform, model.stage_times(mapping)
    sampler, loader, trainer = mapping.threads
    reading = platform.read_bandwidth(loader)
    memory = "CPU memory" if reading >= platform.cpu.memory_bandwidth else _threads(loader)
    travelling = f", features as {model.workload.transfer_dtype}" if model.workload.transfer_dtype else ""
    links = ["PCIe" if platform.num_accelerators else "", "network" if platform.num_nodes > 1 else ""]
    found: list[tuple[str, float | None, str]] = [
        (
            "Sampling, CPU",
            times.sample_cpu,
            f"{_threads(sampler)}, {_rate(platform.sampled_edges(sampler), 'edges/s')}",
        ),
        ("Sampling, accelerators", times.sample_accelerator, _rate(platform.accelerator_sampling, "edges/s") + " each"),
        ("Feature Loading", times.load, f"{memory}, {_rate(reading, 'B/s')}"),
        ("Data Transfer", times.transfer, f"PCIe, {_rate(platform.pcie_bandwidth, 'B/s')}{travelling}"),
    ]
    cpu = model.cpu_trainer(trainer, mapping.cpu_trainers)
    groups = [("Propagation, CPU", times.train_cpu, cpu, mapping.seeds[: mapping.cpu_trainers])]
    if platform.accelerator is not None:
        there = mapping.seeds[mapping.cpu_trainers :]
        groups.append(("Propagation, accelerators", times.train_accelerator, platform.accelerator, there))
    for name, seconds, processor, seeds in groups:
        slowest = max((s or 0.0 for s in seconds), default=0.0)
        found.append((name, slowest or None, _propagation_bound(model, processor, max(seeds, default=0))))
    found.append(("Synchronisation", model.sync_time() or None, " and ".join(filter(None, links))))
    turns = f"{_threads(sum(mapping.threads))} take turns on {platform.cores}"
    found.append(("CPU cores", model.turns_time(mapping) or None, turns))
    return [(name, seconds, bound) for name, seconds, bound in found if seconds is not None]


def _propagation_bound(model: PerformanceModel, processor: Processor, seeds: float) -> str:
    """Return whether a trainer is busier with memory (aggregation) or with arithmetic (update)."""
    layers = range(1, model.workload.num_layers + 1)
    aggregate = sum(2 * model.aggregate_time(layer, seeds, processor.memory_bandwidth) for layer in layers)
    update = sum((2 if layer == 1 else 3) * model.update_time(layer, seeds, processor.flops) for layer in layers)
    part = max(aggregate, update) / (aggregate + update) if aggregate + update else 0.0
    if aggregate >= update:
        return f"aggregation ({part:.0%}), memory at {_rate(processor.memory_bandwidth, 'B/s')}"
    return f"update ({part:.0%}), {_rate(processor.flops, 'FLOP/s')}"


def print_forecast(found: HybridForecast, console: Console) -> None:
    """Print platform, mapping, stages and scaling."""
    model, platform, work = found.model, found.model.platform, found.model.workload
    table = _table("Machine", ["", "", "from"])
    numbers = flat_numbers(platform)
    for name, origin in found.origins.items():
        table.add_row(name, _shown(name, numbers.get(name, 0)), origin)
    console.print(table)

    size = work.sizes(found.best.total)
    kind = "as measured" if work.measured is not None else "as expected"
    console.print(
        f"An iteration of a node: {found.best.total:,} seeds, {size.vertices[0]:,.0f} vertices and "
        f"{size.edges[0]:,.0f} edges, {kind}; widths {'-'.join(map(str, work.widths))}",
        highlight=False,
    )
    rows = stages(model, found.best)
    iteration = model.iteration_time(found.best)
    table = _table(f"Best mapping: {found.best}", ["stage", "ms", "of the iteration", "bound by"])
    for name, seconds, bound in rows:
        row = (name, f"{1e3 * seconds:.4g}", f"{seconds / iteration:.0%}", bound)
        own = seconds + model.sync_time() if name.startswith("Propagation") else seconds
        table.add_row(*row, style="bold" if own > 0.999 * iteration else None)
    table.add_section()
    table.add_row("Iteration", f"{1e3 * iteration:.4g}", "", "the slowest stage; trainers, then their synchronisation")
    table.add_row("Epoch", f"{1e3 * model.epoch_time(found.best):.4g}", "", f"{work.num_train:,} seeds")
    table.add_row("MTEPS", f"{model.mteps(found.best):.4g}", "", "million edges trained on per second")
    console.print(table)
    if found.begin == found.best:
        console.print("The run begins with this mapping.", highlight=False)
    else:
        console.print(
            f"The run begins with {found.begin}: an iteration of {1e3 * model.iteration_time(found.begin):.4g} ms, "
            f"{model.mteps(found.begin):.4g} MTEPS.",
            highlight=False,
        )
    if found.scaling:
        _print_scaling(found, console)


def _print_scaling(found: HybridForecast, console: Console) -> None:
    names = ["nodes", "accelerators", "seeds on the CPU", "iteration ms", "sync ms", "MTEPS", "speedup", "limit"]
    table = _table("Scaling: every accelerator brings its seeds", names)
    before = found.scaling[0].nodes
    for point in found.scaling:
        if point.nodes != before:
            table.add_section()
        before = point.nodes
        share = f"{point.mapping.cpu_seeds / point.mapping.total:.1%}"
        times = (f"{1e3 * point.iteration:.4g}", f"{1e3 * point.sync:.3g}")
        speed = (f"{point.mteps:.4g}", f"{point.speedup:.2f}")
        table.add_row(str(point.nodes), str(point.accelerators), share, *times, *speed, point.limit)
    console.print(table)
    if found.model.platform.network_bandwidth == inf and any(point.nodes > 1 for point in found.scaling):
        console.print(
            "The network between nodes is left out: give plan.platform.network_bandwidth (bytes per second).",
            highlight=False,
        )


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    words = ("", "stage", "from", "limit", "bound by")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if name in words and (index == 0 or name) else "right")
    table.columns[0].style = "cyan"
    return table


def _shown(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{threads}: {_rate(rate, 'edges/s')}" for threads, rate in value)
    if isinstance(value, int):
        return str(value).lower()
    if name.endswith("flops"):
        return _rate(value, "FLOP/s")
    if name.endswith("bandwidth"):
        return _rate(value, "B/s")
    if name.endswith("sampling"):
        return _rate(value, "edges/s")
    return f"{value:.3g}"


def _rate(value: float, unit: str) -> str:
    if value == inf:
        return "no limit"
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}" if unit != "edges/s" else f"{value / 1e6:.3g} M edges/s"
    return f"{value:.3g} {unit}"


def _threads(number: int) -> str:
    return f"{number} thread" + ("s" if number != 1 else "")
