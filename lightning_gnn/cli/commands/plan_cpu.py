"""``lgnn plan`` on a CPU: predict the epoch time, and try settings that could shorten it."""

import inspect
from collections.abc import Callable
from pathlib import Path

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch_geometric.data import Data

from lightning_gnn.cli.assemble import build_task
from lightning_gnn.planning import CPUForecast, machine_limits, measure_run
from lightning_gnn.planning.report import Option, print_forecast, save_forecast
from lightning_gnn.runtime.lightning import pl

MakeTrainer = Callable[..., pl.Trainer]
_OTHER_RESULT = {
    "trainer.precision": "rounds to 8 bits: check the accuracy",
    "datamodule.num_neighbors": "other mini-batches: check the accuracy",
}
"""Effects of a setting other than on the time."""


def plan_cpu(
    cfg: DictConfig,
    data: Data,
    datamodule: pl.LightningDataModule,
    module: pl.LightningModule,
    make_trainer: Callable[[DictConfig], MakeTrainer],
    console: Console,
) -> CPUForecast:
    """Measure the configured run and its options, print the forecast and save it as ``plan.yaml``."""
    forecast = measure_run(datamodule, module, make_trainer(cfg))
    options = [thread_option(forecast)] if forecast.preparation.known else []
    for change in suggest_overrides(cfg):
        options.append(_measure_option(cfg, data, change, forecast, make_trainer))
    limits = machine_limits()
    bf16 = "bf16" in str(cfg.trainer.get("precision"))
    shown = [option for option in options if option is not None]
    print_forecast(forecast, shown, limits, bf16, console)
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    save_forecast(forecast, shown, limits, folder / "plan.yaml")
    return forecast


def thread_option(forecast: CPUForecast) -> Option | None:
    """Return the fastest number of workers and of torch threads; None if the run uses it already."""
    workers, threads, seconds = forecast.better_threads()
    if (workers, threads) == (forecast.preparation.workers, forecast.threads):
        return None
    return Option(f"datamodule.num_workers={workers} torch_threads={threads}", seconds)


def suggest_overrides(cfg: DictConfig) -> list[str]:
    """Return overrides that could shorten an epoch and that the configuration does not have yet."""
    options = inspect.signature(get_class(cfg.datamodule._target_)).parameters
    found = []
    fanouts = cfg.datamodule.get("num_neighbors")
    if str(cfg.trainer.get("precision", "32-true")) in ("32-true", "32"):
        narrow = "feature_dtype" in options and not cfg.datamodule.get("feature_dtype")
        found.append("trainer.precision=bf16-mixed" + " datamodule.feature_dtype=bfloat16" * narrow)
    if fanouts is not None:
        halves = [fanout if fanout < 2 else (fanout + 1) // 2 for fanout in fanouts]
        if halves != list(fanouts):
            found.append(f"datamodule.num_neighbors=[{','.join(map(str, halves))}]")
    return found


def _measure_option(
    cfg: DictConfig, data: Data, change: str, forecast: CPUForecast, make_trainer: Callable[[DictConfig], MakeTrainer]
) -> Option:
    """Measure a run with other settings; the option holds the error if the run refuses them."""
    other = cfg.copy()
    for override in change.split():
        key, _, value = override.partition("=")
        OmegaConf.update(other, key, OmegaConf.create(f"value: {value}").value, force_add=True)
    try:
        datamodule, module = build_task(other, data)
        measured = measure_run(datamodule, module, make_trainer(other), forecast.threads, alternatives=False)
    except (ValueError, TypeError, NotImplementedError) as error:
        return Option(change, None, " ".join(str(error).split()))
    return Option(change, measured.epoch_s, _OTHER_RESULT[change.partition("=")[0]])
