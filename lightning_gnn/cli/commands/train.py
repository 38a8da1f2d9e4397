"""``lgnn``: compose, build, fit and report one run."""

import re
import shlex
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from torch import Tensor

from lightning_gnn.callbacks import LearningCurves, StopOnSignal, Throughput
from lightning_gnn.cli import sweep_jobs
from lightning_gnn.cli.assemble import build_data, build_task, build_trainer, check_config, memory_options
from lightning_gnn.cli.choose import choose
from lightning_gnn.cli.command_line import UserError, absolute, full_errors, raise_user_errors, start
from lightning_gnn.cli.predictions import as_rows, node_names, write_npy, write_parquet
from lightning_gnn.cli.versions import environment
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.gpu_sampling.placement import Placement
from lightning_gnn.graph.csc import count_edges
from lightning_gnn.planning.advice import advice
from lightning_gnn.report import collect_metrics, print_table, reporting, write_metrics
from lightning_gnn.report.console import be_quiet, console, describe, say, warn
from lightning_gnn.report.pages import write_run_page
from lightning_gnn.report.runs import write_curves
from lightning_gnn.runtime.files import disk_full_cause
from lightning_gnn.runtime.lightning import ModelCheckpoint, WeightAveraging, pl
from lightning_gnn.runtime.urls import cached_path

CallbackType = TypeVar("CallbackType", bound=pl.Callback)
_CHECKPOINT_PATHS = ("best_model_path", "last_model_path")  # attributes of a checkpoint callback


def main() -> None:
    """Run ``lgnn``; exit codes: 2 for a wrong configuration, 130 and 143 for an interrupted run."""
    start(_run_one, "train", interrupted="Interrupted before training began.")


def _run_one(cfg: DictConfig) -> float | None:
    """Run once and return the score that a sweep optimizes; a failing run does not end its sweep."""
    score = f"val_{cfg.task.metric}"
    if (metrics := sweep_jobs.metrics_if_done()) is not None:
        return metrics.get(score)
    try:
        metrics = run(cfg)
        sweep_jobs.finish(metrics)
        return metrics.get(score)
    except (KeyboardInterrupt, SystemExit):
        sweep_jobs.print_jobs_left()
        raise
    except Exception as error:
        if HydraConfig.get().mode != RunMode.MULTIRUN or full_errors():
            raise
        if isinstance(error, UserError):
            say(f"error: {error}", "red")
            return _record_failure(cfg, str(error))
        traceback.print_exc()
        return _record_failure(cfg, f"{type(error).__name__}: {error}")


def run(cfg: DictConfig) -> dict[str, Any]:
    """Train and test, test or predict, as ``cfg.mode`` says; return the metrics."""
    # Build all objects of the run; mistakes in the configuration are reported without a traceback.
    begin, started = time.perf_counter(), datetime.now().astimezone()
    be_quiet()
    options = memory_options(cfg)
    with raise_user_errors(memory_options=options):
        check_config(cfg)
        if cfg.torch_threads is not None:
            torch.set_num_threads(cfg.torch_threads)
        pl.seed_everything(cfg.seed, workers=True, verbose=False)
        data = build_data(cfg)
        choose(cfg, data)
        datamodule, module = build_task(cfg, data)
        trainer = build_trainer(cfg)
    # Print the heading before the first slow step.
    title = describe(cfg, datamodule, module)
    if trainer.is_global_zero:
        with reporting("the heading", warn):
            size = f"{data.num_nodes:,} nodes, {count_edges(data):,} edges"
            console().print(title, size, sep=" · ", style="bold", highlight=False)
        if (summary := getattr(datamodule, "summary", None)) is not None:
            console().print(summary, highlight=False, soft_wrap=True)

    # Train or predict while a lock keeps other runs out of the output folder.
    ckpt_path = None if cfg.ckpt_path is None else str(cached_path(absolute(cfg.ckpt_path)))
    with _lock_folder(cfg.output_dir, trainer), _handle_interruption(trainer), raise_user_errors(True, options):
        if cfg.mode == "predict":
            scores = _predict(cfg, trainer, module, datamodule, ckpt_path)
        else:
            scores = _fit_and_test(cfg, trainer, module, datamodule, ckpt_path)

    # Collect the metrics from the scores and the callbacks.
    throughput = _callback(trainer, Throughput)
    curves = _callback(trainer, LearningCurves)
    metrics = collect_metrics(
        scores,
        throughput.summary() if throughput else None,
        len(throughput.epochs) if throughput else trainer.current_epoch,
        task=cfg.task.name,
        mode=cfg.mode,
        seed=cfg.seed,
        title=title,
        started=started.isoformat(timespec="seconds"),
        environment=environment(trainer),
        plan=_describe_plan(trainer, datamodule),
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        checkpoint=ckpt_path if cfg.mode != "train" else getattr(trainer.checkpoint_callback, "best_model_path", None),
        total_time_s=time.perf_counter() - begin,
        advice=_advice(throughput, trainer),
    )
    # Only rank 0 writes the report.
    if trainer.is_global_zero:
        _report(metrics, curves.epochs if curves is not None else [], title, cfg)
    return metrics


def _advice(throughput: Throughput | None, trainer: pl.Trainer) -> str | None:
    epoch = throughput.summary() if throughput else None
    with reporting("the advice", warn):
        return None if epoch is None else advice(epoch, trainer)
    return None


def _describe_plan(trainer: pl.Trainer, datamodule: pl.LightningDataModule) -> dict[str, Any] | None:
    """Return the text of the plans of work and GPU memory, and the predicted epoch time; None without a plan."""
    plan, balance = getattr(datamodule, "plan", None), getattr(trainer.strategy, "balance", None)
    mapping, placement = getattr(balance, "mapping", None), getattr(datamodule, "placement", None)
    epoch = (plan.epoch_s or {}).get(plan.mode) if isinstance(plan, CollectivePlan) else None
    lines = [str(plan)] if isinstance(plan, CollectivePlan) else [f"hyscale: {mapping}"] if mapping is not None else []
    lines += [str(placement)] if isinstance(placement, Placement) else []
    return {"text": "\n".join(lines), "epoch_s": epoch} if lines else None


def _report(metrics: dict[str, Any], epochs: list[dict[str, float]], title: str, cfg: DictConfig) -> None:
    """Print and write the results; a step that fails is reported and does not affect the others."""
    directory = Path(cfg.output_dir)
    if cfg.mode != "predict":
        with reporting("the table of results", warn):
            print_table(metrics, title, console())
    with reporting(directory / "metrics.json", warn):
        write_metrics(metrics, directory)
    if epochs:
        with reporting(directory / "curves.csv", warn):
            write_curves(epochs, directory)
        with reporting(directory / "report.png", warn):
            from lightning_gnn.report.charts import save_figure  # importing matplotlib is slow

            save_figure(metrics, epochs, cfg.task.metric, title, directory / "report.png")
    with reporting(directory / "report.html", warn):
        write_run_page(directory)
    with reporting("the end of the report", warn):
        summary = f"{metrics['total_time_s']:.0f} s in total; files in {directory}"
        console().print(summary, soft_wrap=True, highlight=False)


def _fit_and_test(
    cfg: DictConfig,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    datamodule: pl.LightningDataModule,
    ckpt_path: str | None,
) -> dict[str, float]:
    metric, scores = cfg.task.metric, {}
    if cfg.mode == "train":
        trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=True)
        val = trainer.callback_metrics.get(f"val_{metric}")
        best = trainer.checkpoint_callback
        ckpt_path = None
        if isinstance(best, ModelCheckpoint) and best.best_model_path:
            ckpt_path = best.best_model_path
            val = val if best.best_model_score is None else best.best_model_score
        if val is not None:
            scores[f"val_{metric}"] = float(val)
        # WeightAveraging would swap the loaded averages for the last training weights.
        trainer.callbacks = [item for item in trainer.callbacks if not isinstance(item, WeightAveraging)]  # type: ignore[attr-defined]
    if getattr(datamodule, "test_dataloader", None) is not None:
        tested = trainer.test(module, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=True, verbose=False)
        scores = {name: value for name, value in tested[0].items() if name.startswith("test_")} | scores
        scores = {f"test_{metric}": scores.pop(f"test_{metric}"), **scores} if f"test_{metric}" in scores else scores
    return scores


def _predict(
    cfg: DictConfig,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    datamodule: pl.LightningDataModule,
    ckpt_path: str | None,
) -> dict[str, float]:
    """Write the outputs of all nodes in the format ``cfg.predictions``."""
    batches = trainer.predict(module, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=True)
    rows, path = as_rows(cast(list[Tensor], batches or [])), Path(cfg.output_dir) / f"predictions.{cfg.predictions}"
    if cfg.predictions == "parquet":
        names = node_names(cfg, getattr(module, "target", None), len(rows))
        summary = write_parquet(rows, path, cfg.task.name, names)
    else:
        summary = write_npy(rows, path)
    console().print(summary, highlight=False)
    return {}


@contextmanager
def _lock_folder(directory: str, trainer: pl.Trainer) -> Iterator[None]:
    """Lock an output folder against other runs, which would overwrite its checkpoints and tables."""
    lock = FileLock(Path(directory) / ".running", timeout=0, thread_local=False)
    with ExitStack() as stack:
        if trainer.is_global_zero:
            try:
                Path(directory).mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock)
            except Timeout:
                raise UserError(
                    f"another run is writing to {directory}: wait until it ends, or give hydra.run.dir=FOLDER"
                ) from None
            except (NotImplementedError, OSError):
                pass  # a file system without locks
        yield


@contextmanager
def _handle_interruption(trainer: pl.Trainer) -> Iterator[None]:
    """After an interruption, print how to resume and exit with the signal's exit code; name it after a full disk."""
    try:
        yield
    except UserError as error:
        last = _last_checkpoint(trainer) if disk_full_cause(error) is not None else None
        if last is None or trainer.state.fn != "fit":
            raise
        raise UserError(f"{error}\nThe last checkpoint can be resumed:\n  {_resume_command(last)}") from error
    except (KeyboardInterrupt, SystemExit) as exit_:
        stop = _callback(trainer, StopOnSignal)
        if not trainer.interrupted and (stop is None or stop.signal is None):
            raise
        saved = stop.checkpoint if stop is not None else None
        if trainer.is_global_zero:
            with reporting("the command that resumes", warn):
                _print_how_to_resume(trainer, saved)
        code = getattr(exit_, "code", 1)
        raise SystemExit(128 + signal.SIGINT if code == 1 else code) from None  # Lightning's code after Ctrl-C is 1


def _print_how_to_resume(trainer: pl.Trainer, saved: str | None) -> None:
    checkpoint = Path(saved) if saved else _last_checkpoint(trainer)
    if checkpoint is None:
        say("Interrupted; no checkpoint was saved to resume from.", "yellow")
        return
    resumable = "The run can be resumed where it stopped:" if saved else "The last checkpoint can be resumed:"
    say(f"Interrupted. {resumable}\n  {_resume_command(checkpoint)}", "yellow")


def _last_checkpoint(trainer: pl.Trainer) -> Path | None:
    paths = {getattr(item, name, "") for item in trainer.checkpoint_callbacks for name in _CHECKPOINT_PATHS}
    files = [Path(path) for path in paths if path and Path(path).is_file()]
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def _resume_command(checkpoint: Path) -> str:
    words = ["lgnn"]
    if HydraConfig.initialized():
        typed = HydraConfig.get()
        folders = [item.path for item in typed.runtime.config_sources if item.provider == "command-line"]
        words += [f"--config-dir={path}" for path in folders]
        words += [item for item in typed.overrides.task if not item.startswith("ckpt_path=")]
    path = str(checkpoint.resolve())
    if re.search(r"[^\w./-]", path):
        path = "'" + path.replace("'", "\\'") + "'"  # quotes for Hydra, inside those for the shell
    return shlex.join([*words, f"ckpt_path={path}"])


def _record_failure(cfg: DictConfig, message: str) -> float:
    """Write the error of a failed run of a sweep to ``metrics.json``; return NaN, a failure to optimizing sweepers."""
    figures = {"error": re.sub(r"\s+", " ", message), "task": cfg.task.name, "mode": cfg.mode, "seed": cfg.seed}
    with reporting(Path(cfg.output_dir) / "metrics.json", warn):
        write_metrics(figures, cfg.output_dir)
    return float("nan")


def _callback(trainer: pl.Trainer, cls: type[CallbackType]) -> CallbackType | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, cls)), None)  # type: ignore[attr-defined]
