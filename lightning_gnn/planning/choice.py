"""Choose the DataModule and the strategy of a run by their predicted iterations: ``datamodule=auto``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from lightning_gnn.hyscale.analytic import Platform
from lightning_gnn.hyscale.options import TrainerSet, measurements_decide
from lightning_gnn.hyscale.plan import NodePlan
from lightning_gnn.planning.forecast import MIN_GAIN
from lightning_gnn.planning.hyscale import HybridForecast, measure_node, options_of
from lightning_gnn.runtime.lightning import pl

_NO_ACCELERATOR = "without an accelerator, the CPU prepares and trains"
_NOISE = 0.02  # differences at which the simpler DataModule is preferred


class AutoDataModule(pl.LightningDataModule):
    """Stands for the DataModule that ``lgnn`` chooses before it builds a run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("datamodule=auto is for `lgnn` and `lgnn plan`; give neighbor, persistent or collective")


class Option(NamedTuple):
    """A DataModule with a strategy, by the names of the command line."""

    strategy: str
    datamodule: str
    cpu_trainers: int = 0

    @property
    def name(self) -> str:
        """Short name."""
        cpu = f" ({self.cpu_trainers} on the CPU)" if self.cpu_trainers else ""
        return f"{self.strategy}{cpu} + {self.datamodule}"

    def __str__(self) -> str:
        """Return the overrides that select it."""
        more = f" trainer.strategy.cpu_trainers={self.cpu_trainers}" if self.strategy == "hyscale" else ""
        return f"strategy={self.strategy} datamodule={self.datamodule}{more}"


@dataclass(frozen=True)
class Choice:
    """The chosen option, why, and what to set besides it."""

    option: Option
    reason: str
    overrides: dict[str, int] = field(default_factory=dict)
    forecast: Callable[[], HybridForecast] | None = None  # of the node; None without an accelerator

    def __str__(self) -> str:
        """Return three lines: what was chosen, why, and how to write it."""
        explicit = " ".join([str(self.option), *(f"{key}={value}" for key, value in self.overrides.items())])
        return f"Chosen: {self.option}\nWhy: {self.reason}\nTo write it yourself: {explicit}"


def choose(plans: Mapping[int, NodePlan], strategy: str) -> tuple[Option, dict[Option, float]]:
    """Return the fastest option, and the seconds of an iteration of each.

    Args:
        plans: Plans by number of CPU trainers; without ``strategy="hyscale"``, also that of 0.
        strategy: ``"hyscale"``: only options with it; ``"auto"``: it must gain 5 %; others: only options without it.
    """
    plain: dict[Option, float] = {}
    if strategy != "hyscale":
        names = {"neighbor": "CPU prepares all", "persistent": "accelerators prepare all"}
        names |= {"collective": "collective batching"}
        alone = plans[0].alone
        plain = {Option(strategy, each): alone[name][1] for each, name in names.items() if name in alone}
        # Accelerators that cannot prepare mini-batches leave all of it to the CPU.
        plain = plain or {Option(strategy, "neighbor"): alone["hybrid training"][1]}
    hybrid: dict[Option, float] = {}
    for cpu_trainers, plan in plans.items() if strategy in ("auto", "hyscale") else ():
        hybrid[Option("hyscale", "neighbor", cpu_trainers)] = plan.alone["hybrid training"][1]
        if plan.mapping.buffers is not None:
            hybrid[Option("hyscale", "collective", cpu_trainers)] = plan.seconds
    best = _simplest(plain or hybrid)
    if plain and hybrid and min(hybrid.values()) <= (1 - MIN_GAIN) * min(plain.values()):
        best = _simplest(hybrid)
    return best, plain | hybrid


def choose_run(
    datamodule: pl.LightningDataModule,
    module: pl.LightningModule,
    trainer: pl.Trainer,
    strategy: str,
    machine: Platform | None = None,
) -> Choice:
    """Measure a run, or its workload for a described machine, and choose; see :func:`choose` for ``strategy``."""
    trainers = options_of(trainer)[1]
    if machine is None and (reason := _obstacle(trainer, trainers)):
        return Choice(Option(strategy, "neighbor", trainers.num_cpu), reason)
    gathers = any(device.type != "cpu" for device in trainers.accelerators)
    node = measure_node(datamodule, module, trainer, machine, gathers)
    count = node.model.platform.num_accelerators
    if not count:
        return Choice(Option(strategy, "neighbor", node.trainers.num_cpu), _NO_ACCELERATOR)
    numbers = {"auto": [0, 1], "hyscale": [node.trainers.num_cpu]}.get(strategy, [0])
    plans = {number: node.plan(number) for number in numbers}
    option, seconds = choose(plans, strategy)
    times = [f"{each.name} {1e3 * value:.4g} ms" for each, value in seconds.items() if each != option]
    reason = (
        f"{1e3 * seconds[option]:.4g} ms an iteration (predicted); {', '.join(times) or 'nothing else is possible'}"
    )
    # Threads are per process, and so are seeds without hyscale.
    is_shared = option[:2] == ("hyscale", "neighbor")
    workers = node.model.platform.cores - 1 if machine is not None else sum(node.threads[:2])
    overrides = {"datamodule.num_workers": max(1, workers if is_shared else workers // count)}
    if option.datamodule == "persistent":
        overrides = {}
    if option.strategy == "hyscale" != strategy and count > 1:
        overrides["datamodule.batch_size"] = node.model.workload.batch_size
    number = option.cpu_trainers
    return Choice(
        option, reason, overrides, partial(node.forecast, number, plans[number], option.strategy == "hyscale")
    )


def _obstacle(trainer: pl.Trainer, trainers: TrainerSet) -> str | None:
    """Return why nothing is measured."""
    if not trainers.num_accelerators:
        return _NO_ACCELERATOR
    if not measurements_decide():
        return "deterministic=True excludes choices by measurements"
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.world_size > 1 and environment is not None and environment.creates_processes_externally:
        raise ValueError("datamodule=auto measures in one process; run lgnn plan with it, and give what it chooses")
    return None


def _simplest(seconds: Mapping[Option, float]) -> Option:
    """Return the first option that is about as fast as the fastest."""
    return next(option for option, value in seconds.items() if value <= (1 + _NOISE) * min(seconds.values()))
