"""``lgnn plan``: tell how a run would use the machine, without running it to the end.

A plan of a run on the CPU times its first mini-batches and steps (``cli/commands/plan_cpu.py``). A plan for
``datamodule=collective`` profiles the first mini-batches of a training that is thrown away. With
``datamodule=persistent`` it says what would lie where in a GPU's memory, or in one of a size that is given.
"""

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities import CombinedLoader
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_gnn.cli.assemble import build, build_data, build_task, check_config
from lightning_gnn.cli.command_line import explained, start
from lightning_gnn.cli.commands.plan_cpu import plan_cpu
from lightning_gnn.cli.commands.plan_machines import MACHINES, checked_options, plan_machines
from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.collective.plan import STAGES, CollectivePlan
from lightning_gnn.collective.prefetcher import CollectiveBatching
from lightning_gnn.datamodules.base import MiniBatchDataModule
from lightning_gnn.gpu_sampling.placement import PlacedOnGPU
from lightning_gnn.graph.csc import count_edges
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.planning.hyscale import forecast, print_forecast
from lightning_gnn.planning.report import sentences
from lightning_gnn.report import reporting
from lightning_gnn.report.console import be_quiet, console, describe, warn
from lightning_gnn.report.pages import write_plan_page

_WITHOUT_GPU = "This is the plan without a GPU; datamodule.device_memory=80GB plans the memory of one."


def main() -> None:
    """Run ``lgnn plan ...``; exit codes: 2 for a wrong configuration, 130 for Ctrl-C."""
    del sys.argv[1]
    start(run, "plan", interrupted="Interrupted; there is no plan.")


def run(cfg: DictConfig) -> None:
    """Plan the run that a composed configuration describes, print the plan and save it."""
    be_quiet()
    said: list[str] = []
    with explained():
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            raise ValueError("lgnn plan makes one plan at a time: leave out -m, and call it once for each choice")
        kind = what_to_plan(cfg)
        if cfg.plan.network is not None:
            if kind != "cpu":
                raise ValueError(f"plan.network={cfg.plan.network} is for plain runs on a CPU; leave it out")
            checked_options(cfg)
        elif kind == "cpu" and HydraConfig.initialized():
            typed = [item.lstrip("+").partition("=")[0] for item in HydraConfig.get().overrides.task]
            if idle := [item for item in typed if item in MACHINES]:
                raise ValueError(f"{idle[0]} counts on several machines: give plan.network=10Gbit/s or what it is, too")
        check_config(cfg)
        if cfg.torch_threads is not None:
            torch.set_num_threads(cfg.torch_threads)
        pl.seed_everything(cfg.seed, workers=True, verbose=False)
        data = build_data(cfg)
        datamodule, module = build_task(cfg, data)
        title = describe(cfg, module)
        size = f"{data.num_nodes:,} nodes, {count_edges(data):,} edges"
        console().print(title, size, sep=" · ", style="bold", highlight=False)
        if kind == "hybrid":
            hybrid = forecast(datamodule, module, _trainer(cfg))
            print_forecast(hybrid, console())
            hybrid.save(cfg.output_dir)
    with explained(only_ours=True):
        disk = datamodule.plan_disk() if isinstance(datamodule, MiniBatchDataModule) else None
    if disk is not None:
        console().print(disk, soft_wrap=True, highlight=False)
    if kind == "cpu":
        with explained(only_ours=True), _signals_kept(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No GPU for the persistent sampler")  # of each module that is timed
            found = plan_cpu(cfg, data, datamodule, module, lambda config: partial(_trainer, config), console())
            said = sentences(found)
            if isinstance(datamodule, PlacedOnGPU):
                said.append(_WITHOUT_GPU)
                console().print(_WITHOUT_GPU, soft_wrap=True, highlight=False)
            if cfg.plan.network is not None:
                said += plan_machines(cfg, data, found, datamodule, module, console())
    if kind == "placement":
        assert isinstance(datamodule, PlacedOnGPU)
        with explained(only_ours=True):
            said = place(datamodule, cfg.output_dir).splitlines()
        for line in said:
            console().print(line, soft_wrap=True, highlight=False)
    if kind == "collective":
        assert isinstance(datamodule, CollectiveDataModule)
        with explained(only_ours=True):
            bar = progress_bar(console(), cfg.trainer.get("enable_progress_bar", True))
            collective = profile(datamodule, module, partial(_trainer, cfg), cfg.plan.max_batches, bar)
        collective.print(console())
        collective.save(cfg.output_dir)
        said = collective.notes
        plan = f"The run takes this plan with datamodule.plan={Path(cfg.output_dir) / 'plan.yaml'}"
        console().print(plan, soft_wrap=True, highlight=False)
    said = said if disk is None else [disk, *said]
    with reporting(Path(cfg.output_dir) / "plan.html", warn):
        write_plan_page(cfg.output_dir, f"{title} · {size}", said)
    console().print(f"files in {cfg.output_dir}", soft_wrap=True, highlight=False)


def what_to_plan(cfg: DictConfig) -> Literal["hybrid", "collective", "placement", "cpu"]:
    """Return which of the planners a configuration asks for; that of the CPU is for what needs none of the others."""
    if cfg.mode != "train":
        raise ValueError(f"lgnn plan plans training, not mode={cfg.mode}; leave mode out")
    strategy = OmegaConf.select(cfg, "trainer.strategy")
    hybrid = strategy == "hyscale" or _is_a(strategy, HyScaleStrategy)
    collective = _is_a(cfg.datamodule, CollectiveDataModule)
    if hybrid and collective:
        raise ValueError(
            "strategy=hyscale with datamodule=collective: both plan the use of the same cores and of the same bus; "
            "choose one of them"
        )
    if hybrid or collective:
        return "hybrid" if hybrid else "collective"
    told = cfg.datamodule.get("device_memory") is not None
    on_gpu = torch.cuda.is_available() and cfg.trainer.get("accelerator") != "cpu"
    return "placement" if _is_a(cfg.datamodule, PlacedOnGPU) and (told or on_gpu) else "cpu"


def place(datamodule: PlacedOnGPU, directory: str | Path) -> str:
    """Plan what lies where in a GPU's memory, write ``plan.yaml``, and return the plan in words."""
    datamodule.prepare_data()
    datamodule.setup("fit")
    plan = datamodule.plan_placement()
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan.to_dict(), sort_keys=False))
    return str(plan)


def _is_a(node: Any, kind: type) -> bool:
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    return isinstance(target, str) and issubclass(get_class(target), kind)


def _trainer(cfg: DictConfig, **more: Any) -> pl.Trainer:
    """Build the configured Trainer, but one that leaves nothing behind."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    arguments = {**quiet, "callbacks": None, "default_root_dir": cfg.output_dir, **more}
    kept = OmegaConf.masked_copy(cfg.trainer, [key for key in cfg.trainer if key not in arguments])
    with explained():
        trainer: pl.Trainer = build(kept, "trainer", **arguments)
    return trainer


@dataclass(frozen=True)
class CollectiveForecast:
    """A plan, and what it predicts."""

    plan: CollectivePlan
    on_cpu: bool = False

    @property
    def notes(self) -> list[str]:
        """What to know about it."""
        if not self.on_cpu:
            return []
        return ["The CPU has played the GPU's part: this shows how the schedule works, not how fast a GPU is."]

    def print(self, console: Console) -> None:
        """Print stages, buffers and predicted epochs."""
        console.print(str(self.plan), highlight=False, markup=False, soft_wrap=True)
        for note in self.notes:
            console.print(note, highlight=False, soft_wrap=True)

    def save(self, directory: str | Path) -> None:
        """Write ``plan.yaml``."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.plan.save(folder / "plan.yaml")


def profile(
    datamodule: CollectiveDataModule,
    module: pl.LightningModule,
    make_trainer: Callable[..., pl.Trainer],
    max_batches: int,
    progress: Progress,
) -> CollectiveForecast:
    """Train until the DataModule has a plan.

    Plans that are kept from earlier runs do not count: it always measures, unless the DataModule was given a plan.
    """
    if max_batches < 1:
        raise ValueError(f"plan.max_batches must be at least 1, but is {max_batches}")
    kept, datamodule.cache_plan = datamodule.cache_plan, False
    profiling = _Profiling(datamodule, max_batches, progress)
    trainer = make_trainer(
        max_epochs=-1, max_steps=-1, limit_val_batches=0, num_sanity_val_steps=0, callbacks=[profiling]
    )
    if trainer.limit_train_batches == 0:
        raise ValueError("trainer.limit_train_batches=0 leaves nothing to train, and so nothing to plan")
    if trainer.world_size > 1:
        raise ValueError(
            f"lgnn plan profiles one process, but there are {trainer.world_size}; give trainer.devices=1 strategy=auto "
            "(in the run itself every process makes a plan)"
        )
    try:
        with _signals_kept():
            trainer.fit(module, datamodule=datamodule)
    except SystemExit:
        if trainer.interrupted:
            raise KeyboardInterrupt from None  # what Lightning has made a SystemExit of
        raise
    finally:
        progress.stop()
        datamodule.cache_plan = kept
    plan = datamodule.plan
    if plan is None:
        raise ValueError("training ended before there was a plan; leave out what ends it, such as trainer.max_time")
    return CollectiveForecast(plan, on_cpu=trainer.strategy.root_device.type == "cpu")


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Put the handlers of signals back, in place of which Lightning sets its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def progress_bar(console: Console, shown: bool) -> Progress:
    """Return a bar of measurements."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not shown)


class _Profiling(pl.Callback):
    """Shows how much has been measured, and ends training when there is a plan."""

    def __init__(self, datamodule: CollectiveDataModule, max_batches: int, progress: Progress) -> None:
        self._datamodule = datamodule
        self._max_batches = max_batches
        self._progress = progress
        self._task = progress.add_task("measuring the stages", total=datamodule.profile_batches)
        self._seen = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what needs no plan, and begin."""
        loader, batching = _loader(trainer)
        if batching.route is None:
            raise ValueError(
                "there is nothing to plan: without a GPU only CPU threads prepare mini-batches; give trainer=gpu, or "
                "try it out with datamodule.gpu_route=cpu, which lets the CPU play the GPU's part"
            )
        if not loader.num_threads:
            raise ValueError(
                "there is nothing to plan: with datamodule.num_workers=0 only the GPU prepares mini-batches; give at "
                "least one worker"
            )
        self._progress.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look whether there is a plan by now."""
        self._seen += 1
        if self._datamodule.plan is not None:
            self._progress.update(self._task, completed=self._datamodule.profile_batches, description="planned")
            trainer.should_stop = True
            return
        profiler = _loader(trainer)[1].profiler
        measured = {stage: len(profiler.seconds(stage)) for stage in STAGES}
        last = min(measured, key=measured.__getitem__)
        self._progress.update(self._task, completed=min(measured[last], profiler.num_measurements))
        if self._seen >= self._max_batches:
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
