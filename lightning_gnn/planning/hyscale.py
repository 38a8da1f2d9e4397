"""``lgnn plan strategy=hyscale``: predict a run on this machine by the performance model, with each stage's limit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

import pytorch_lightning as pl
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_gnn.hyscale.checks import check_training
from lightning_gnn.hyscale.options import allowed_drm, default_threads, measurements_decide, replays, seeds_of_iteration
from lightning_gnn.hyscale.performance_model.calibrate import find_sampling, model_of, wanted_sampling
from lightning_gnn.hyscale.performance_model.model import PerformanceModel
from lightning_gnn.hyscale.performance_model.workload import Platform, Processor
from lightning_gnn.hyscale.resource_manager.decisions import read_decisions
from lightning_gnn.hyscale.resource_manager.mapping import TaskMapping
from lightning_gnn.hyscale.sharded_loader import split_seeds
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.loading.loaders import num_workers_of
from lightning_gnn.runtime.files import LARGEST_JSON, read_text


@dataclass(frozen=True)
class HybridForecast:
    """Predictions of the performance model for a run."""

    model: PerformanceModel
    best: TaskMapping  # the fastest mapping according to the model
    begin: TaskMapping  # the mapping that the run starts with

    def save(self, directory: str | Path) -> None:
        """Write ``plan.yaml`` to a directory."""
        rows = {name: {"seconds": seconds, "bound_by": bound} for name, seconds, bound in stages(self.model, self.best)}
        state = {
            "best": self._to_dict(self.best),
            "begin": self._to_dict(self.begin),
            "stages_of_best": rows,
            "platform": numbers_of(self.model.platform),
        }
        (Path(directory) / "plan.yaml").write_text(yaml.safe_dump(state, sort_keys=False))

    def _to_dict(self, mapping: TaskMapping) -> dict[str, object]:
        model = self.model
        times = {"iteration_s": model.iteration_time(mapping), "epoch_s": model.epoch_time(mapping)}
        return {**mapping.to_dict(), **times, "mteps": model.mteps(mapping)}


def forecast(datamodule: pl.LightningDataModule, module: pl.LightningModule, trainer: pl.Trainer) -> HybridForecast:
    """Measure this machine, and predict the run by the performance model."""
    # Prepare the DataModule as the Trainer would.
    strategy = trainer.strategy
    assert isinstance(strategy, HyScaleStrategy)
    datamodule.prepare_data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    check_training(loader, module)
    # Each node of the cluster trains on an equal part of a mini-batch.
    total = seeds_of_iteration(loader) // trainer.num_nodes
    if total < 1:
        raise ValueError(
            f"the plan needs mini-batches of a known size, with a seed for each of {trainer.num_nodes} nodes"
        )
    # Measure the workload, the sampling of an accelerator and the platform.
    options, trainers = strategy.options, strategy.trainers
    wanted = wanted_sampling(options.accelerator_sampling, options.drm)
    sampling = find_sampling(wanted, loader, trainers)
    model = model_of(trainers, loader, module, total, sampling, options.transfer_dtype)
    if model is None:
        raise ValueError("the plan needs a loader with known fanouts, and node features data.x as one tensor")
    model.platform = replace(model.platform, num_nodes=trainer.num_nodes)
    # Search for the best mapping of the number of threads that the run would use.
    num_workers = num_workers_of(loader)
    threads = options.first_threads(default_threads(num_workers, trainers, allowed_drm(options.drm) is not False))
    best = model.best_mapping(trainers.num_cpu, max(sum(threads), 2 + trainers.num_cpu))
    return HybridForecast(model, best, _initial_mapping(strategy, model.platform, best, threads, wanted))


def _initial_mapping(
    strategy: HyScaleStrategy,
    platform: Platform,
    best: TaskMapping,
    threads: tuple[int, int, int],
    sampling: str | float,
) -> TaskMapping:
    """Return the mapping that the strategy starts with: the one its options give, or the best one."""
    options, trainers = strategy.options, strategy.trainers
    if replays(options.drm):
        return read_decisions(read_text(options.drm, LARGEST_JSON).splitlines())[0].mapping
    weights = options.first_weights(trainers)
    if options.automatic and measurements_decide() and trainers.num_cpu and trainers.num_accelerators:
        weights, threads = list(best.shares), options.first_threads(best.threads)
    seeds = tuple(stop - start for start, stop in split_seeds(best.total, weights))
    rate = platform.accelerator_sampling * platform.num_accelerators
    if isinstance(sampling, str):  # "auto": CPU and accelerators finish at the same time
        sampling = rate / (rate + platform.sampling * threads[0]) if rate else 0.0
    return TaskMapping(seeds, trainers.num_cpu, threads, sampling if rate else 0.0)


def stages(model: PerformanceModel, mapping: TaskMapping) -> list[tuple[str, float, str]]:
    """Return name, seconds and limiting resource of each stage that the mapping uses."""
    platform, times = model.platform, model.stage_times(mapping)
    sampler, loader, trainer = mapping.threads
    reading = platform.read_bandwidth(loader)
    memory = "CPU memory" if reading >= platform.cpu.memory_bandwidth else _threads(loader)
    dtype = f", features as {model.workload.transfer_dtype}" if model.workload.transfer_dtype else ""
    found: list[tuple[str, float | None, str]] = [
        ("Sampling, CPU", times.sample_cpu, f"{_threads(sampler)}, {_rate(platform.sampling * sampler, 'edges/s')}"),
        ("Sampling, accelerators", times.sample_accelerator, _rate(platform.accelerator_sampling, "edges/s") + " each"),
        ("Feature Loading", times.load, f"{memory}, {_rate(reading, 'B/s')}"),
        ("Data Transfer", times.transfer, f"PCIe, {_rate(platform.pcie_bandwidth, 'B/s')}{dtype}"),
    ]
    # Propagation takes as long as its slowest CPU or accelerator trainer.
    cpu = model.cpu_trainer(trainer, mapping.cpu_trainers)
    groups = [("Propagation, CPU", times.train_cpu, cpu, mapping.seeds[: mapping.cpu_trainers])]
    if platform.accelerator is not None:
        seeds = mapping.seeds[mapping.cpu_trainers :]
        groups.append(("Propagation, accelerators", times.train_accelerator, platform.accelerator, seeds))
    for name, seconds, processor, seeds in groups:
        slowest = max((s or 0.0 for s in seconds), default=0.0)
        found.append((name, slowest or None, _propagation_bound(model, processor, max(seeds, default=0))))
    # Synchronization and shared cores add to the stages above; unused stages have no time.
    found.append(("Synchronization", model.sync_time() or None, "PCIe"))
    turns = f"{_threads(sum(mapping.threads))} take turns on {platform.cores}"
    found.append(("CPU cores", model.turns_time(mapping) or None, turns))
    return [(name, seconds, bound) for name, seconds, bound in found if seconds is not None]


def _propagation_bound(model: PerformanceModel, processor: Processor, seeds: float) -> str:
    """Describe whether memory (aggregation) or arithmetic (update) limits a trainer."""
    layers = range(1, model.workload.num_layers + 1)
    aggregate = sum(2 * model.aggregate_time(layer, seeds, processor) for layer in layers)
    update = sum((2 if layer == 1 else 3) * model.update_time(layer, seeds, processor.flops) for layer in layers)
    fraction = max(aggregate, update) / (aggregate + update) if aggregate + update else 0.0
    if aggregate >= update:
        return f"aggregation ({fraction:.0%}), memory at {_rate(processor.memory_bandwidth, 'B/s')}"
    return f"update ({fraction:.0%}), {_rate(processor.flops, 'FLOP/s')}"


def print_forecast(found: HybridForecast, console: Console) -> None:
    """Print platform, best mapping, stages and initial mapping."""
    model, work = found.model, found.model.workload
    table = _table("Machine, as measured", ["", ""])
    for name, value in numbers_of(model.platform).items():
        table.add_row(name, _format(name, value))
    console.print(table)

    # Print the size of an iteration, which puts the times below into proportion.
    size = work.sizes(found.best.total)
    kind = "as measured" if work.measured is not None else "as expected"
    console.print(
        f"An iteration of a node: {found.best.total:,} seeds, {size.vertices[0]:,.0f} vertices and "
        f"{size.edges[0]:,.0f} edges, {kind}; widths {'-'.join(map(str, work.widths))}",
        highlight=False,
    )
    # Print the stages; those that bound the iteration are in bold.
    rows = stages(model, found.best)
    iteration = model.iteration_time(found.best)
    table = _table(f"Best mapping: {found.best}", ["stage", "ms", "of the iteration", "bound by"])
    for name, seconds, bound in rows:
        row = (name, f"{1e3 * seconds:.4g}", f"{seconds / iteration:.0%}", bound)
        own = seconds + model.sync_time() if name.startswith("Propagation") else seconds
        table.add_row(*row, style="bold" if own > 0.999 * iteration else None)
    table.add_section()
    table.add_row("Iteration", f"{1e3 * iteration:.4g}", "", "the slowest stage; trainers, then their synchronization")
    table.add_row("Epoch", f"{1e3 * model.epoch_time(found.best):.4g}", "", f"{work.num_train:,} seeds")
    table.add_row("MTEPS", f"{model.mteps(found.best):.4g}", "", "million edges trained on per second")
    console.print(table)
    # The options of a run may give another initial mapping.
    if found.begin == found.best:
        console.print("The run starts with this mapping.", highlight=False)
    else:
        console.print(
            f"The run starts with {found.begin}: an iteration of {1e3 * model.iteration_time(found.begin):.4g} ms, "
            f"{model.mteps(found.begin):.4g} MTEPS.",
            highlight=False,
        )


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if not index or name == "bound by" else "right")
    table.columns[0].style = "cyan"
    return table


def _format(name: str, value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return _rate(value, "FLOP/s" if name.endswith("flops") else "B/s" if name.endswith("bandwidth") else "edges/s")


def _rate(value: float, unit: str) -> str:
    if value == inf:
        return "no limit"
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}" if unit != "edges/s" else f"{value / 1e6:.3g} M edges/s"
    return f"{value:.3g} {unit}"


def _threads(number: int) -> str:
    return f"{number} thread" + ("s" if number != 1 else "")


def numbers_of(platform: Platform) -> dict[str, float]:
    """Return a platform's numbers by dotted name, without zeros, unlimited ones and those of missing processors."""
    state = asdict(platform)
    nested = {name: state.pop(name) or {} for name in ("cpu", "accelerator")}
    flat = {f"{owner}.{name}": value for owner, numbers in nested.items() for name, value in numbers.items()}
    return {name: value for name, value in {**flat, **state}.items() if value and value != inf}
