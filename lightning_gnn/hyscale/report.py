"""``lgnn plan strategy=hyscale``: what the performance model predicts for a run, and what limits each stage."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_gnn.hyscale.checks import check_training
from lightning_gnn.hyscale.decisions import read_decisions
from lightning_gnn.hyscale.first_mapping import (
    accelerator_rate,
    describe_workload,
    find_sampling,
    measure_platform,
    wanted_sampling,
)
from lightning_gnn.hyscale.loader import split_seeds
from lightning_gnn.hyscale.mapping import TaskMapping
from lightning_gnn.hyscale.model import PerformanceModel, ScalingPoint, scaling_study
from lightning_gnn.hyscale.options import (
    Trainers,
    allowed_drm,
    check_shares,
    default_threads,
    measurements_decide,
    replays,
    seeds_of_iteration,
)
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.hyscale.workload import Platform, Processor
from lightning_gnn.runtime.cores import num_cores
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
    best: TaskMapping
    begin: TaskMapping
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

    def _predicted(self, mapping: TaskMapping) -> dict[str, Any]:
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
    """Measure what is not given, and ask the performance model."""
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
    here = strategy.trainers
    assert here is not None
    num_cpu = here.num_cpu

    def measure() -> Platform:
        sampling = find_sampling(sampling_wanted, loader, here)
        there = 0.0 if sampling is None else accelerator_rate(sampling, loader, total)
        return measure_platform(Trainers.of(1, strategy.accelerators), sampled_per_s, there)

    platform, origins = complete(given, measure, nodes)
    if not num_cpu and not platform.num_accelerators:
        raise ValueError("cpu_trainers=0 and no accelerator: nobody would train; set trainer.strategy.cpu_trainers=1")
    model = PerformanceModel(platform, workload)
    num_workers = getattr(loader, "num_threads", None) or loader.num_workers
    threads = strategy.threads or default_threads(num_workers, here, allowed_drm(strategy.drm) is not False)
    own = sum(threads) if platform.cores == num_cores() else platform.cores
    best = model.best_mapping(num_cpu, max(own, 2 + num_cpu))
    scaling: Sequence[ScalingPoint] = ()
    if platform.accelerator is not None:
        scaling = scaling_study(platform, workload, plan.accelerators, plan.nodes, num_cpu)
    begin = _begin(strategy, num_cpu, platform, best, threads, sampling_wanted)
    return HybridForecast(model, best, begin, origins, scaling)


def _begin(
    strategy: HyScaleStrategy,
    num_cpu: int,
    platform: Platform,
    best: TaskMapping,
    threads: tuple[int, int, int],
    sampling: str | float,
) -> TaskMapping:
    """Return the mapping that the strategy begins with: what it is told, the best one where nothing is told."""
    if replays(strategy.drm):
        return read_decisions(read_text(strategy.drm, LARGEST_JSON).splitlines())[0].mapping
    trainers = Trainers((_CPU,) * (num_cpu + platform.num_accelerators), num_cpu)
    weights = check_shares(strategy.shares, len(trainers.devices))
    if weights is None and strategy.cpu_share == "auto" and not measurements_decide():
        weights = trainers.equal_weights
    elif weights is None and strategy.cpu_share == "auto" and trainers.num_cpu and trainers.num_accelerators:
        weights, threads = list(best.shares), strategy.threads or best.threads
    if weights is None:
        weights = trainers.weights(0.5 if strategy.cpu_share == "auto" else float(strategy.cpu_share))
    seeds = tuple(stop - start for start, stop in split_seeds(best.total, weights))
    there = platform.accelerator_sampling * platform.num_accelerators
    if isinstance(sampling, str):  # both are done at the same time
        sampling = there / (there + platform.sampled_edges(threads[0])) if there else 0.0
    return TaskMapping(seeds, num_cpu, threads, sampling if there else 0.0)


def stages(model: PerformanceModel, mapping: TaskMapping) -> list[tuple[str, float, str]]:
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


_PROCESSOR = ("flops", "memory_bandwidth", "pipelined")
_WHOLE = ("cores", "num_accelerators", "num_nodes")
NAMES = (
    *(f"cpu.{name}" for name in _PROCESSOR),
    "cores",
    *(f"accelerator.{name}" for name in _PROCESSOR),
    "num_accelerators",
    "pcie_bandwidth",
    "sampling",
    "accelerator_sampling",
    "core_bandwidth",
    "num_nodes",
    "network_bandwidth",
    "network_latency",
)
"""Fields of :class:`~lightning_gnn.hyscale.workload.Platform`, dotted."""
OF_THE_CPU = ("cpu.flops", "cpu.memory_bandwidth", "cores", "core_bandwidth", "sampling")
OF_ACCELERATORS = ("accelerator.flops", "accelerator.memory_bandwidth", "pcie_bandwidth")

Numbers = dict[str, Any]
"""Values by dotted name; those that are not known are left out."""


def given_numbers(file: str | None, keys: Mapping[str, Any]) -> Numbers:
    """Return what the user gives.

    Args:
        file: YAML or JSON with fields of :class:`~lightning_gnn.hyscale.workload.Platform`, or None.
        keys: Such fields, nested; they win over the file's. None stands for what is not given.
    """
    numbers: Numbers = {}
    if file is not None:
        path = Path(to_absolute_path(file))
        if not path.is_file():
            raise FileNotFoundError(f"plan.platform_file={file}: there is no such file")
        try:
            content = OmegaConf.to_container(OmegaConf.load(StringIO(read_text(path))))
        except Exception as error:
            raise ValueError(f"plan.platform_file={file} is neither YAML nor JSON: {error}") from error
        numbers.update(_flat(content, f"plan.platform_file={file}"))
    return numbers | _flat(dict(keys), "plan.platform")


def complete(given: Numbers, measure: Callable[[], Platform], num_nodes: int = 1) -> tuple[Platform, dict[str, str]]:
    """Put given and measured numbers together.

    Args:
        measure: Called where something that can be measured is not given; it tells what this machine has.
        num_nodes: Where they are not given.
    """
    count = given.get("num_accelerators")
    needed = [*OF_THE_CPU, *(OF_ACCELERATORS if count else ())]
    measured: Numbers = {}
    if count is None or any(name not in given for name in needed):
        measured = flat_numbers(measure())
        del measured["num_nodes"]
    found = measured | {"num_nodes": num_nodes} | given
    if count is None and not found["num_accelerators"]:
        found["num_accelerators"] = int(any(name.startswith("accelerator.") for name in given))
    if not found["num_accelerators"]:
        found = {name: value for name, value in found.items() if name not in OF_ACCELERATORS}
    elif missing := [name for name in OF_ACCELERATORS if name not in found]:
        raise ValueError(
            f"num_accelerators={found['num_accelerators']}, but there is none here to measure; also give "
            + ", ".join(f"plan.platform.{name}" for name in missing)
        )
    origin = {name: "given" if name in given else "measured" if name in measured else "configured" for name in found}
    return _platform(found), {name: origin[name] for name in NAMES if name in origin}


def flat_numbers(platform: Platform) -> Numbers:
    """Return a platform's numbers by dotted name, without those of parts that it does not have or leaves out."""
    numbers: Numbers = {}
    for name in NAMES:
        value: Any = platform
        for part in name.split("."):
            value = None if value is None else getattr(value, part)
        measured = name in OF_THE_CPU or (name in OF_ACCELERATORS and platform.num_accelerators)
        if measured or name == "num_accelerators" or value not in (None, False, inf, 0.0):
            numbers[name] = value
    return numbers


def save_numbers(platform: Platform, path: str | Path) -> Path:
    """Write a file that ``plan.platform_file`` takes."""
    config = OmegaConf.create()
    numbers = flat_numbers(platform)
    del numbers["num_nodes"]  # which is the run's
    for name, value in numbers.items():
        OmegaConf.update(config, name, [list(point) for point in value] if isinstance(value, tuple) else value)
    text = "# Numbers of a machine, for plan.platform_file: seconds, bytes and operations without prefixes.\n"
    Path(path).write_text(text + OmegaConf.to_yaml(config))
    return Path(path)


def _flat(content: Any, where: str) -> Numbers:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must hold names and numbers, but holds {reprlib.repr(content)}")
    numbers: Numbers = {}
    for name, value in content.items():
        nested = value if isinstance(value, Mapping) else None
        for dotted, number in (
            {name: value} if nested is None else {f"{name}.{k}": v for k, v in nested.items()}
        ).items():
            if dotted not in NAMES:
                raise ValueError(f"{where}: {dotted} is unknown; use {', '.join(NAMES)}")
            if number is not None:
                numbers[dotted] = _checked(dotted, number, where)
    return numbers


def _checked(name: str, value: Any, where: str) -> Any:
    if name.endswith("pipelined"):
        if not isinstance(value, bool):
            raise ValueError(f"{where}: {name} is true or false, but is {reprlib.repr(value)}")
        return value
    try:
        if name == "sampling" and isinstance(value, (list, tuple)):
            return tuple((int(threads), float(rate)) for threads, rate in value)
        number = float(value)
        if isinstance(value, bool) or (name in _WHOLE and number != int(number)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        kind = "a whole number" if name in _WHOLE else "a number"
        raise ValueError(f"{where}: {name} must be {kind}, but is {reprlib.repr(value)}") from None
    return int(number) if name in _WHOLE else number


def _platform(numbers: Numbers) -> Platform:
    """Build it."""
    fields = {name: value for name, value in numbers.items() if "." not in name}
    for owner in ("cpu", "accelerator"):
        if owner == "accelerator" and not numbers["num_accelerators"]:
            continue
        fields[owner] = Processor(
            **{name: numbers[f"{owner}.{name}"] for name in _PROCESSOR if f"{owner}.{name}" in numbers}
        )
    return Platform(**fields)
