"""Predict a run by the performance model: the stages of ``strategy=hyscale``, and the joint plan of a node."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from lightning_gnn.hyscale.accelerator_sampling import find_sampling
from lightning_gnn.hyscale.admission import Admission, compare_trainers
from lightning_gnn.hyscale.analytic import PerformanceModel, Platform, Processor, describe_workload, model_of
from lightning_gnn.hyscale.checks import check_training
from lightning_gnn.hyscale.costs import TaskMapping
from lightning_gnn.hyscale.drm import read_decision_log, wanted_sampling
from lightning_gnn.hyscale.options import (
    HyScaleOptions,
    TrainerSet,
    allowed_drm,
    default_threads,
    replays,
    seeds_of_iteration,
)
from lightning_gnn.hyscale.plan import NodePlan, plan
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.loading.loaders import num_workers_of
from lightning_gnn.planning.forecast import MIN_GAIN
from lightning_gnn.report.tables import make_table
from lightning_gnn.runtime.files import write_whole
from lightning_gnn.runtime.lightning import pl


@dataclass(frozen=True)
class HybridForecast:
    """Predictions of the performance model for a run."""

    model: PerformanceModel
    best: TaskMapping  # the fastest mapping of HyScale-GNN's stages according to the model
    begin: TaskMapping | None  # the mapping that the run starts with; None without strategy=hyscale
    plan: NodePlan | None = None  # the plan of the whole node; None if accelerators cannot prepare mini-batches
    float16_s: float | None = None  # seconds of an iteration with transfer_dtype=float16, if it is shorter
    origin: str = "measured"  # of the platform: measured or described
    admission: Admission | None = None  # whether the run trains on the CPU, if that is not set

    def save(self, directory: str | Path) -> None:
        """Write ``plan.yaml`` to a directory."""
        state: dict[str, Any] = {"platform": numbers_of(self.model.platform)}
        if self.begin is not None:
            rows = {name: {"seconds": sec, "bound_by": bound} for name, sec, bound in stages(self.model, self.best)}
            mappings = {"best": self._to_dict(self.best), "begin": self._to_dict(self.begin)}
            state = {**mappings, "stages_of_best": rows, **state}
        if self.plan is not None:
            found = self.plan
            state["node"] = {
                **found.mapping.to_dict(), "iteration_s": found.seconds, "lower_bound_s": found.bound, "gap": found.gap,
                "alone": {name: {**each.to_dict(), "iteration_s": sec} for name, (each, sec) in found.alone.items()},
                "float16_s": self.float16_s,
            }  # fmt: skip
        write_whole(Path(directory) / "plan.yaml", yaml.safe_dump(state, sort_keys=False))

    def _to_dict(self, mapping: TaskMapping) -> dict[str, object]:
        model = self.model
        times = {"iteration_s": model.iteration_time(mapping), "epoch_s": model.epoch_time(mapping)}
        return {**mapping.to_dict(), **times, "mteps": model.mteps(mapping)}


@dataclass(frozen=True)
class Node:
    """A node, measured or described, with the workload of a run."""

    model: PerformanceModel
    options: HyScaleOptions  # those of strategy=hyscale, else its defaults
    trainers: TrainerSet
    threads: tuple[int, int, int]  # that strategy=hyscale starts with
    sampling: str | float  # the accelerators' share that the options give
    origin: str

    def num_threads(self, cpu_trainers: int) -> int:
        """Return the CPU threads to distribute: those of the run, or one per core if it is not this run."""
        is_run = self.origin == "measured" and cpu_trainers == self.trainers.num_cpu
        return max(2 + cpu_trainers, sum(self.threads) if is_run else self.model.platform.cores)

    def plan(self, cpu_trainers: int, gpu_buffer_size: int = 10, dtype: str | None = None) -> NodePlan:
        """Plan seeds, threads and preparation together; features cross PCIe in ``dtype``, None: unchanged."""
        model = self.model
        if dtype is not None:
            model = PerformanceModel(model.platform, replace(model.workload, transfer_dtype=dtype))
        total, threads = model.workload.batch_size, self.num_threads(cpu_trainers)
        return plan(model.costs(cpu_trainers), total, cpu_trainers, threads, gpu_buffer_size)

    def forecast(self, cpu_trainers: int, found: NodePlan | None, is_hybrid: bool = True) -> HybridForecast:
        """Return the predictions for a number of CPU trainers."""
        model, work, half = self.model, self.model.workload, None
        best = model.best_mapping(cpu_trainers, self.num_threads(cpu_trainers))
        if found is not None and work.transfer_dtype is None and work.feature_bytes > 2:
            # It rounds values, and collective batching copies mini-batches unchanged, so it is not part of a plan.
            half = self.plan(cpu_trainers, dtype="float16").alone["hybrid training"][1]
            half = half if half <= (1 - MIN_GAIN) * found.seconds else None
        begin, admission = best if is_hybrid else None, None
        if is_hybrid and self.options.admits_cpu_trainers(self.trainers):
            admission = compare_trainers(model, self.trainers, self.options, sum(self.threads[:2]))
        if is_hybrid and self.origin == "measured":
            begin = _initial_mapping(self, best)
        return HybridForecast(model, best, begin, found, half, self.origin, admission)


def forecast(
    datamodule: pl.LightningDataModule,
    module: pl.LightningModule,
    trainer: pl.Trainer,
    machine: Platform | None = None,
    gpu_buffer_size: int | None = None,
) -> HybridForecast:
    """Predict the run on this machine, or on a described one.

    With ``gpu_buffer_size``, the most mini-batches that an accelerator prepares in a row, also plan the whole node.
    """
    node = measure_node(datamodule, module, trainer, machine, gpu_buffer_size is not None)
    found = None if gpu_buffer_size is None else node.plan(node.trainers.num_cpu, gpu_buffer_size)
    return node.forecast(node.trainers.num_cpu, found, isinstance(trainer.strategy, HyScaleStrategy))


def measure_node(
    datamodule: pl.LightningDataModule,
    module: pl.LightningModule,
    trainer: pl.Trainer,
    machine: Platform | None = None,
    gathers: bool = False,
) -> Node:
    """Measure the workload of a run and, unless it is described, this machine."""
    # Prepare the DataModule as the Trainer would.
    is_hybrid = isinstance(trainer.strategy, HyScaleStrategy)
    datamodule.prepare_data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    check_training(loader, module)
    options, trainers = options_of(trainer)
    if machine is not None:
        trainers = TrainerSet.of(options.first_cpu_trainers, [torch.device("cpu")] * machine.num_accelerators)
    # Each node of the cluster trains on an equal part of a mini-batch; without hyscale, each accelerator on its own.
    processes = 1 if is_hybrid else max(1, trainers.num_accelerators)
    total = processes * seeds_of_iteration(loader) // (trainer.num_nodes if is_hybrid else 1)
    if total < 1:
        raise ValueError(
            f"the plan needs mini-batches of a known size, with a seed for each of {trainer.num_nodes} nodes"
        )
    # Measure the workload, the sampling of an accelerator and the platform.
    wanted = wanted_sampling(options.accelerator_sampling, options.drm)
    if machine is not None:
        workload = describe_workload(loader, module, total, options.transfer_dtype)[0]
        model = None if workload is None else PerformanceModel(machine, workload)
    else:
        emulated = gathers and wanted == "auto" and all(device.type == "cpu" for device in trainers.accelerators)
        sampling = find_sampling(1.0 if emulated else wanted, loader, trainers)
        model = model_of(trainers, loader, module, total, sampling, options.transfer_dtype, gathers)
    if model is None:
        raise ValueError("the plan needs a loader with known fanouts, and node features data.x as one tensor")
    model.platform = replace(model.platform, num_nodes=trainer.num_nodes)
    # Plan for the number of threads that the run would use.
    workers = processes * num_workers_of(loader)
    threads = options.first_threads(default_threads(workers, trainers, allowed_drm(options.drm) is not False))
    return Node(model, options, trainers, threads, wanted, "measured" if machine is None else "described")


def options_of(trainer: pl.Trainer) -> tuple[HyScaleOptions, TrainerSet]:
    """Return the options and trainers of hyscale; of other strategies, its defaults and the accelerators."""
    strategy = trainer.strategy
    if isinstance(strategy, HyScaleStrategy):
        return strategy.options, strategy.trainers
    devices = getattr(strategy, "parallel_devices", None) or [strategy.root_device]
    accelerators = tuple(device for device in devices if device.type != "cpu")
    return HyScaleStrategy(cpu_trainers=0).options, TrainerSet(accelerators, 0)


def _initial_mapping(node: Node, best: TaskMapping) -> TaskMapping:
    """Return the mapping that the strategy starts with: the one its options give, or the best one."""
    options, trainers, threads, platform = node.options, node.trainers, node.threads, node.model.platform
    if replays(options.drm):
        return read_decision_log(options.drm)[0].mapping
    mapping = options.first_mapping(trainers, best.total, threads)
    rate = platform.accelerator_sampling * platform.num_accelerators
    if options.models_shares(trainers):
        mapping = replace(best, threads=options.first_threads(best.threads))
    elif rate:  # with "auto", CPU and accelerators finish at the same time
        mapping = replace(mapping, accelerator_sampling=rate / (rate + platform.sampling * threads[0]))
    if isinstance(node.sampling, str):
        return mapping
    return replace(mapping, accelerator_sampling=node.sampling if rate else 0.0)


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
    found.append(("CPU cores", model.shared_core_time(mapping) or None, turns))
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
    table = make_table(f"Machine, as {found.origin}", "", "")
    for name, value in numbers_of(model.platform).items():
        table.add_row(name, _format(name, value))
    console.print(table)

    # Print the size of an iteration, which puts the times below into proportion.
    size = work.sizes(found.best.total)
    kind = "as measured" if work.measured else "as expected"
    console.print(
        f"An iteration of a node: {found.best.total:,} seeds, {size.vertices[0]:,.0f} vertices and "
        f"{size.edges[0]:,.0f} edges, {kind}; widths {'-'.join(map(str, work.widths))}",
        highlight=False,
    )
    if found.begin is not None:
        _print_stages(found, found.begin, console)
    if found.admission is not None:
        console.print(str(found.admission), highlight=False)
    if found.plan is not None:
        _print_plan(found.plan, found.float16_s, console)


def _print_stages(found: HybridForecast, begin: TaskMapping, console: Console) -> None:
    # Print the stages; those that bound the iteration are in bold.
    model = found.model
    rows = stages(model, found.best)
    iteration = model.iteration_time(found.best)
    table = make_table(f"Best mapping: {found.best}", "stage", "ms", "of the iteration", "bound by", left=["bound by"])
    for name, seconds, bound in rows:
        row = (name, f"{1e3 * seconds:.4g}", f"{seconds / iteration:.0%}", bound)
        own = seconds + model.sync_time() if name.startswith("Propagation") else seconds
        table.add_row(*row, style="bold" if own > 0.999 * iteration else None)
    table.add_section()
    table.add_row("Iteration", f"{1e3 * iteration:.4g}", "", "the slowest stage; trainers, then their synchronization")
    table.add_row("Epoch", f"{1e3 * model.epoch_time(found.best):.4g}", "", f"{model.workload.num_train:,} seeds")
    table.add_row("MTEPS", f"{model.mteps(found.best):.4g}", "", "million edges trained on per second")
    console.print(table)
    # The options of a run may give another initial mapping.
    if begin == found.best:
        console.print("The run starts with this mapping.", highlight=False)
    else:
        console.print(
            f"The run starts with {begin}: an iteration of {1e3 * model.iteration_time(begin):.4g} ms, "
            f"{model.mteps(begin):.4g} MTEPS.",
            highlight=False,
        )


def _print_plan(found: NodePlan, float16_s: float | None, console: Console) -> None:
    table = make_table(f"Together: {found.mapping}", "system", "ms an iteration", "of the plan")
    for name, (_, seconds) in {"all together": (found.mapping, found.seconds), **found.alone}.items():
        table.add_row(name, f"{1e3 * seconds:.4g}", f"{seconds / found.seconds:.0%}")
    console.print(table)
    doing = "sample" if found.mapping.buffers is None else "prepare"
    console.print(
        f"Accelerators {doing} {found.mapping.accelerator_fraction:.0%} of their mini-batches. Predicted: "
        f"{1e3 * found.seconds:.4g} ms an iteration, lower bound {1e3 * found.bound:.4g} ms, gap {found.gap:.1%}.",
        highlight=False,
    )
    if float16_s is not None:
        console.print(
            f"Other setting: trainer.strategy.transfer_dtype=float16 rounds features, {1e3 * float16_s:.4g} ms.",
            highlight=False,
        )


def _format(name: str, value: float) -> str:
    if isinstance(value, int):
        return str(value)
    units = {"flops": "FLOP/s", "bandwidth": "B/s", "memory": "B"}
    return _rate(value, units.get(name.rpartition(".")[2].rpartition("_")[2], "edges/s"))


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
