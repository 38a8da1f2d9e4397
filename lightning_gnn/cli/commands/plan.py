"""``lgnn plan``: forecast how a run would use the machine without completing it.

On a CPU it times the first mini-batches and steps (``plan_cpu.py``). For ``datamodule=collective`` it profiles a short
training run and discards the weights. For ``datamodule=persistent`` it plans the GPU memory.
"""

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf

from lightning_gnn.cli.assemble import build_data, build_quiet_trainer, build_task, check_config, memory_options
from lightning_gnn.cli.choose import choose, select_datamodule
from lightning_gnn.cli.command_line import raise_user_errors, start
from lightning_gnn.cli.commands.plan_cpu import plan_cpu
from lightning_gnn.cli.commands.plan_machines import MACHINES, check_machine_options, plan_machines
from lightning_gnn.cli.targets import is_a
from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.collective.plan import PREPARATION_STAGES, CollectivePlan
from lightning_gnn.collective.prefetcher import CollectiveBatching
from lightning_gnn.datamodules.base import MiniBatchDataModule
from lightning_gnn.gpu_sampling.datamodule import PlacedOnGPU
from lightning_gnn.graph.csc import count_edges
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.planning.choice import AutoDataModule
from lightning_gnn.planning.hyscale import forecast, print_forecast
from lightning_gnn.planning.machine import read_machine
from lightning_gnn.report.console import be_quiet, console, describe
from lightning_gnn.runtime.devices import num_cores
from lightning_gnn.runtime.files import write_whole
from lightning_gnn.runtime.lightning import CombinedLoader, pl


def main() -> None:
    """Run ``lgnn plan ...``; exit codes: 2 for a wrong configuration, 130 for Ctrl-C."""
    del sys.argv[1]
    start(run, "plan", interrupted="Interrupted before the plan was complete.")


def run(cfg: DictConfig) -> None:
    """Plan the run of a composed configuration; print the plan and save it in ``output_dir``."""
    be_quiet()
    options = memory_options(cfg)
    with raise_user_errors(memory_options=options):
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            raise ValueError("lgnn plan makes one plan at a time: leave out -m, and run it once per choice")
        planner = select_planner(cfg)
        if cfg.plan.network is not None:
            if planner != "cpu":
                raise ValueError(f"plan.network={cfg.plan.network} is for plain runs on a CPU; leave it out")
            check_machine_options(cfg)
        elif planner == "cpu" and HydraConfig.initialized():
            typed = [item.lstrip("+").partition("=")[0] for item in HydraConfig.get().overrides.task]
            if unused := [item for item in typed if item in MACHINES]:
                raise ValueError(f"{unused[0]} plans several machines: give their network too, plan.network=10Gbit/s")
        check_config(cfg)
        if cfg.torch_threads is not None:
            torch.set_num_threads(cfg.torch_threads)
        pl.seed_everything(cfg.seed, workers=True, verbose=False)
        machine = None if cfg.plan.machine is None else read_machine(to_absolute_path(cfg.plan.machine))
        data = build_data(cfg)
        if (choice := choose(cfg, data, machine)) is not None:
            planner = "cpu" if choice.forecast is None else "hybrid"
        measured, gpu_buffer_size = _without_gpu_route(cfg, machine is not None) if planner == "hybrid" else (cfg, None)
        datamodule, module = build_task(measured, data)
        size = f"{data.num_nodes:,} nodes, {count_edges(data):,} edges"
        console().print(describe(cfg, datamodule, module), size, sep=" · ", style="bold", highlight=False)
        if planner == "hybrid":
            if choice is not None and choice.forecast is not None:
                hybrid = choice.forecast()
            else:
                hybrid = forecast(datamodule, module, build_quiet_trainer(cfg), machine, gpu_buffer_size)
            print_forecast(hybrid, console())
            hybrid.save(cfg.output_dir)
    with raise_user_errors(True, options), _restore_signal_handlers(), warnings.catch_warnings():
        if isinstance(datamodule, MiniBatchDataModule) and datamodule.disk_options("train"):
            _say(str(datamodule.disk))
        if planner == "cpu":
            warnings.filterwarnings("ignore", "No GPU for the persistent sampler")  # each DataModule would repeat it
            make_trainer = partial(partial, build_quiet_trainer)
            cpu_forecast = plan_cpu(cfg, data, datamodule, module, make_trainer, console())
            if isinstance(datamodule, PlacedOnGPU):
                _say("This plan is for a CPU; datamodule.device_memory=80GB plans the memory of a GPU.")
            if cfg.plan.network is not None:
                plan_machines(cfg, data, cpu_forecast, datamodule, module, console())
        if planner == "placement":
            assert isinstance(datamodule, PlacedOnGPU)
            datamodule.prepare_data()
            datamodule.setup("fit")
            placement = datamodule.plan_placement()
            _say(str(placement))
            write_whole(Path(cfg.output_dir) / "plan.yaml", yaml.safe_dump(placement.to_dict(), sort_keys=False))
        if planner == "collective":
            assert isinstance(datamodule, CollectiveDataModule)
            plan, device = profile(datamodule, module, partial(build_quiet_trainer, cfg), cfg.plan.max_batches)
            plan = datamodule.plan_with_cache(plan)
            _say(str(plan))
            if device.type == "cpu":
                _say("The CPU simulated the GPU: this shows how the schedule works, not how fast a GPU is.")
            plan.save(path := Path(cfg.output_dir) / "plan.yaml")
            schedule = " datamodule.schedule=paper" if plan.schedule == "paper" else ""
            _say(f"Run with this plan by datamodule.plan={path}{schedule}")
    _say(f"files in {cfg.output_dir}")


def _say(text: str) -> None:
    console().print(text, soft_wrap=True, highlight=False, markup=False)


def select_planner(cfg: DictConfig) -> Literal["auto", "hybrid", "collective", "placement", "cpu"]:
    """Return the planner for a configuration; ``"cpu"`` plans all runs without a more specific planner."""
    if cfg.mode != "train":
        raise ValueError(f"lgnn plan plans training, not mode={cfg.mode}; leave mode out")
    if is_a(cfg.datamodule, AutoDataModule):
        return "auto"
    strategy = OmegaConf.select(cfg, "trainer.strategy")
    hybrid = strategy == "hyscale" or is_a(strategy, HyScaleStrategy)
    collective = is_a(cfg.datamodule, PlacedOnGPU) and "gpu_route" in cfg.datamodule
    if hybrid or (collective and cfg.plan.machine is not None):
        return "hybrid"
    if cfg.plan.machine is not None:
        raise ValueError(
            "plan.machine is for strategy=hyscale, datamodule=collective and datamodule=auto; leave it out"
        )
    if collective:
        return "collective"
    has_memory = cfg.datamodule.get("device_memory") is not None
    on_gpu = torch.cuda.is_available() and cfg.trainer.get("accelerator") != "cpu"
    return "placement" if is_a(cfg.datamodule, PlacedOnGPU) and (has_memory or on_gpu) else "cpu"


def _without_gpu_route(cfg: DictConfig, described: bool) -> tuple[DictConfig, int | None]:
    """Return a configuration whose mini-batches the CPU prepares, and how many a GPU would prepare in a row."""
    if "gpu_route" not in cfg.datamodule:
        return cfg, None
    node, cfg = cfg.datamodule, cfg.copy()
    select_datamodule(cfg, "link" if "neg_sampling" in node else "neighbor")
    cfg.datamodule.num_workers = max(1, num_cores() - 1) if node.num_workers is None else node.num_workers
    has_route = described or node.gpu_route == "cpu" or torch.cuda.is_available()
    return cfg, node.gpu_buffer_size if has_route else None


def profile(
    datamodule: CollectiveDataModule, module: pl.LightningModule, make_trainer: Callable[..., pl.Trainer], most: int
) -> tuple[CollectivePlan, torch.device]:
    """Train on at most ``most`` mini-batches until the plan is made; return it and the device that trains."""
    if most < 1:
        raise ValueError(f"plan.max_batches must be at least 1, but is {most}")
    options = {"max_epochs": -1, "max_steps": -1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    trainer = make_trainer(callbacks=[_Profiling(datamodule, most)], **options)
    if trainer.world_size > 1:
        raise ValueError(
            f"lgnn plan profiles one process, but there are {trainer.world_size}; give trainer.devices=1 strategy=auto "
            "(in the run itself every process makes a plan)"
        )
    try:
        trainer.fit(module, datamodule=datamodule)
    except SystemExit:
        if trainer.interrupted:
            raise KeyboardInterrupt from None  # Lightning turns it into a SystemExit
        raise
    if datamodule.plan is None:
        raise ValueError("training ended before the plan was made; leave out what ends it, such as trainer.max_time")
    return datamodule.plan, trainer.strategy.root_device


@contextmanager
def _restore_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers on exit: Lightning replaces them."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _Profiling(pl.Callback):
    """Stops training as soon as the DataModule has made its plan."""

    def __init__(self, datamodule: CollectiveDataModule, max_batches: int) -> None:
        self._datamodule = datamodule
        self._max_batches = max_batches
        self._seen = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise an error if only the CPU or only the GPU prepares mini-batches, which needs no plan."""
        loader, batching = _loader(trainer)
        if batching.route is None:
            raise ValueError(
                "there is nothing to plan: without a GPU only CPU threads prepare mini-batches; give trainer=gpu, or "
                "datamodule.gpu_route=cpu to let the CPU simulate the GPU"
            )
        if not loader.num_threads:
            raise ValueError(
                "there is nothing to plan: with datamodule.num_workers=0 only the GPU prepares mini-batches; give at "
                "least one worker"
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Stop training once the plan exists; raise an error if it does not after the most mini-batches allowed."""
        self._seen += 1
        if self._datamodule.plan is not None:
            trainer.should_stop = True
        elif self._seen >= self._max_batches:
            profiler = _loader(trainer)[1].profiler
            measured = {stage: len(profiler.seconds(stage)) for stage in PREPARATION_STAGES}
            last = min(measured, key=measured.__getitem__)
            raise ValueError(
                f"no plan after {self._seen} mini-batches: {last} was measured {measured[last]} times, but "
                f"{profiler.num_measurements} are needed; give a smaller datamodule.profile_batches, or a larger "
                "plan.max_batches"
            )


def _loader(trainer: pl.Trainer) -> tuple[PipelineLoader, CollectiveBatching]:
    for loader in CombinedLoader(trainer.train_dataloader).flattened:
        if isinstance(loader, PipelineLoader) and isinstance(loader.prefetcher, CollectiveBatching):
            return loader, loader.prefetcher
    raise ValueError("the DataModule's training loader does not batch collectively: there is nothing to plan")
