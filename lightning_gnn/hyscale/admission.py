"""Decides whether to train on the CPU, too, before any process starts.

With the rates r_a of the accelerators and r_c of the CPU trainers on the cores that each has in the hybrid, hybrid
training pays only if x = r_c / (r_a + r_c) exceeds 1 - e / k: e is the fraction of both rates that the hybrid reaches,
and k is how much faster the accelerators are if they also get the CPU trainers' cores. The performance model predicts
both sides: an iteration with CPU trainers, and one without.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from typing_extensions import override

from lightning_gnn.datamodules.base import MiniBatchDataModule
from lightning_gnn.hyscale.analytic import PerformanceModel, Platform, cached_platform, describe_workload
from lightning_gnn.hyscale.options import (
    ADMITTED,
    HyScaleOptions,
    PyGLoader,
    TrainerSet,
    default_threads,
    seeds_of_iteration,
)
from lightning_gnn.loading.loaders import num_workers_of
from lightning_gnn.runtime.lightning import TrainerFn, _SubprocessScriptLauncher, pl, rank_zero_info

MIN_CPU_SHARE = 0.05
"""Share of the node's rates below which CPU trainers are not modeled: they could not gain more than this."""
MARGIN, SHARED_CORES_MARGIN = 0.05, 0.15
"""Predicted relative gain of an iteration from which CPU trainers are started, and where threads outnumber cores.

The model's error: on two cores, hybrids with predicted gains of 22, 11 and 5 % measure 12, -12 and -16 %.
"""


class Admission(NamedTuple):
    """Decision on the CPU trainers of a run."""

    cpu_trainers: int
    reason: str

    def __str__(self) -> str:
        number, other = ("no CPU trainer", 1) if not self.cpu_trainers else (f"{self.cpu_trainers} CPU trainer", 0)
        return f"hyscale: {number}, since {self.reason}; cpu_trainers={other} decides otherwise"


def cpu_share_bound(platform: Platform) -> float:
    """Return the largest share of a node's arithmetic or memory bandwidth that its CPU has."""
    assert platform.accelerator is not None
    number, there, here = platform.num_accelerators, platform.accelerator, platform.cpu
    pairs = ((here.flops, there.flops), (here.memory_bandwidth, there.memory_bandwidth))
    return max(own / (own + number * other) for own, other in pairs)


def admit_cpu_trainers(trainers: TrainerSet, loader: object, module: nn.Module, options: HyScaleOptions) -> Admission:
    """Decide on the CPU trainers of a node by the predicted seconds of an iteration with and without them.

    Args:
        trainers: The trainers with CPU trainers.
        loader: The training loader. Of loaders other than PyG's, only the rates of the machine decide.
    """
    total, workload, sampled_per_s = 0, None, 0.0
    if isinstance(loader, PyGLoader):
        total = seeds_of_iteration(loader)
        workload, sampled_per_s = describe_workload(loader, module, total, options.transfer_dtype)
    platform = cached_platform(trainers, sampled_per_s or 1.0)
    bound = cpu_share_bound(platform)
    if bound < MIN_CPU_SHARE:
        return Admission(0, f"the CPU has {bound:.1%} of this machine's arithmetic or bandwidth")
    if not isinstance(loader, PyGLoader) or workload is None or not total:
        return Admission(trainers.num_cpu, f"the CPU has {bound:.0%} of this machine's arithmetic or bandwidth")
    return compare_trainers(PerformanceModel(platform, workload), trainers, options, num_workers_of(loader))


def compare_trainers(
    model: PerformanceModel, trainers: TrainerSet, options: HyScaleOptions, num_workers: int
) -> Admission:
    """Decide on the CPU trainers of a node by its predicted iterations with and without them."""
    seconds, most_threads = [], 0
    for chosen in (trainers, TrainerSet.of(0, trainers.accelerators)):
        threads = options.first_threads(default_threads(num_workers, chosen, options.drm is not False))
        mapping = model.best_mapping(chosen.num_cpu, max(sum(threads), 2 + chosen.num_cpu))
        seconds.append(model.iteration_time(mapping))
        most_threads = max(most_threads, sum(mapping.threads))
    both, alone = seconds
    margin = SHARED_CORES_MARGIN if most_threads > model.platform.cores else MARGIN
    figures = f"an iteration takes {1e3 * both:.3g} ms with the CPU and {1e3 * alone:.3g} ms without (predicted)"
    return Admission(trainers.num_cpu if both < (1 - margin) * alone else 0, figures)


class AdmittingLauncher(_SubprocessScriptLauncher):
    """Decides on CPU trainers with the arguments of ``Trainer.fit``, then starts the processes, if any."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        assert trainer is not None
        strategy: Any = trainer.strategy
        # Processes that a call before has started stay: they would wait for this one.
        if not self.cluster_environment.creates_processes_externally:
            if trainer.state.fn == TrainerFn.FITTING:
                strategy.admit(self._decide(trainer, **signature(function).bind(*args, **kwargs).arguments))
                self.num_processes = strategy.num_processes
            if self.num_processes == 1:
                return function(*args, **kwargs)
            os.environ[ADMITTED] = str(strategy.trainers.num_cpu)  # for the other processes, which decide nothing
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _decide(self, trainer: pl.Trainer, **fit: Any) -> int:
        """Return the number of CPU trainers: the checkpoint's in a resumed run, else the predicted one."""
        strategy: Any = trainer.strategy
        trainers: TrainerSet = strategy.trainers
        if not trainers.num_cpu:
            return 0  # decided by an earlier call
        if (path := fit.get("ckpt_path")) is not None:
            if not Path(path).is_file():
                return trainers.num_cpu  # such as "last", which is looked for later
            checkpoint = strategy.checkpoint_io.load_checkpoint(path, weights_only=fit.get("weights_only"))
            saved = checkpoint.get(strategy.strategy_name, {})
            if "cpu_trainers" in saved:
                return int(saved["cpu_trainers"])
        data = fit.get("datamodule") or fit.get("train_dataloaders")
        if isinstance(data, MiniBatchDataModule):  # prepared as the Trainer will do
            data.trainer = trainer
            data.prepare_data()
            data.setup("fit")
            data = data.train_dataloader()
        admission = admit_cpu_trainers(trainers, data, fit["model"], strategy.options)
        rank_zero_info(str(admission))
        return admission.cpu_trainers
