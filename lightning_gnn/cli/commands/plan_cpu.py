"""``lgnn plan`` of a run on the CPU: predict its epoch, and try the settings that could shorten it."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch_geometric.data import Data

from lightning_gnn.cli.assemble import build_task
from lightning_gnn.planning import CPUForecast, machine_limits, measure_run
from lightning_gnn.planning.report import Option, print_forecast, save_forecast

MakeTrainer = Callable[..., pl.Trainer]
_OTHER_RESULT = {
    "trainer.precision": "rounds to 8 bits: look at the accuracy",
    "datamodule.num_neighbors": "other mini-batches: look at the accuracy",
}
"""What a setting changes beside the time."""


def plan_cpu(
    cfg: DictConfig,
    data: Data,
    datamodule: pl.LightningDataModule,
    module: pl.LightningModule,
    make_trainer: Callable[[DictConfig], MakeTrainer],
    console: Console,
) -> CPUForecast:
    """Measure, print and save."""
    found = measure_run(datamodule, module, make_trainer(cfg))
    options = [thread_option(found)] if found.preparation.known else []
    for change in changes(cfg):
        options.append(_tried(cfg, data, change, found, make_trainer))
    limits = machine_limits()
    bf16 = "bf16" in str(cfg.trainer.get("precision"))
    shown = [option for option in options if option is not None]
    print_forecast(found, shown, limits, bf16, console)
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    save_forecast(found, shown, limits, folder / "plan.yaml")
    return found


def thread_option(found: CPUForecast) -> Option | None:
    """Return the best number of workers and of torch's threads; None where the run has it already."""
    workers, threads, seconds = found.better_threads()
    if (workers, threads) == (found.preparation.workers, found.threads):
        return None
    return Option(f"datamodule.num_workers={workers} torch_threads={threads}", seconds)


def changes(cfg: DictConfig) -> list[str]:
    """Return the overrides that could shorten an epoch, of those that the configuration has not yet."""
    options = inspect.signature(get_class(cfg.datamodule._target_)).parameters
    found = []
    fanouts = cfg.datamodule.get("num_neighbors")
    # Layers on mini-batches compute in float32 whatever the precision.
    if fanouts is None and str(cfg.trainer.get("precision", "32-true")) in ("32-true", "32"):
        narrow = "feature_dtype" in options and not cfg.datamodule.get("feature_dtype")
        found.append("trainer.precision=bf16-mixed" + " datamodule.feature_dtype=bfloat16" * narrow)
    if fanouts is not None:
        halves = [fanout if fanout < 2 else (fanout + 1) // 2 for fanout in fanouts]
        if halves != list(fanouts):
            found.append(f"datamodule.num_neighbors=[{','.join(map(str, halves))}]")
    return found


def _tried(
    cfg: DictConfig, data: Data, change: str, found: CPUForecast, make_trainer: Callable[[DictConfig], MakeTrainer]
) -> Option:
    """Measure a run with another setting; what it refuses is noted."""
    other = cfg.copy()
    for override in change.split():
        key, _, value = override.partition("=")
        OmegaConf.update(other, key, OmegaConf.create(f"value: {value}").value, force_add=True)
    try:
        datamodule, module = build_task(other, data)
        measured = measure_run(datamodule, module, make_trainer(other), found.threads, alternatives=False)
    except (ValueError, TypeError, NotImplementedError) as error:
        return Option(change, None, " ".join(str(error).split()))
    return Option(change, measured.epoch_s, _OTHER_RESULT[change.partition("=")[0]])
