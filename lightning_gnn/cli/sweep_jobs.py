"""The jobs of a sweep: which are done, and which an interruption has left."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_gnn.report.comparison import runs_of_sweep
from lightning_gnn.report.console import say, warn
from lightning_gnn.report.metrics import Metrics, reporting

_current: SweepJobs | None = None


@dataclass
class SweepJobs:
    """The jobs of a sweep whose choices are known in advance, and the metrics of those that are done."""

    folder: Path
    jobs: list[list[str]]  # the overrides of each job
    done: dict[int, Metrics]

    @classmethod
    def read(cls, config: DictConfig) -> SweepJobs | None:
        """Return the jobs of a sweep of Hydra's own sweeper; None for another sweeper, which chooses as it goes.

        Jobs of an earlier, interrupted sweep into the same folder are done if their overrides are equal.
        """
        # Hydra imports its plugins a second time, so that the class itself differs.
        if config.hydra.sweeper._target_.rpartition(".")[2] != BasicSweeper.__name__:
            return None
        typed = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        overrides = OverridesParser.create().parse_overrides([*typed, *config.hydra.overrides.task])
        jobs = [job for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]
        folder, done = Path(config.hydra.sweep.dir), {}
        if not (folder / "comparison.csv").exists():  # written at the end of a sweep
            found: dict[Any, Any] = runs_of_sweep(folder) if folder.is_dir() else {}
            done = {
                number: found[number].metrics
                for number, job in enumerate(jobs)
                if number in found and found[number].state == "done" and found[number].overrides == job
            }
        return cls(folder, jobs, done)

    def describe(self, numbers: list[int]) -> str:
        """Return the numbers and choices of some jobs."""
        fixed = set.intersection(*map(set, self.jobs))
        texts = [" ".join(item for item in self.jobs[number] if item not in fixed) for number in numbers]
        return ", ".join(
            f"{number} ({text})" if text else str(number) for number, text in zip(numbers, texts, strict=True)
        )

    @property
    def left(self) -> list[int]:
        """Numbers of the jobs that are not done."""
        return [number for number in range(len(self.jobs)) if number not in self.done]


class AnnounceJobs(Callback):
    """Prints which jobs of an interrupted sweep are done when it goes on."""

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Called by Hydra before the first run."""
        global _current
        _current = None
        with reporting("the list of jobs", warn):
            _current = SweepJobs.read(config)
            if _current is not None and _current.done:
                done, left = _current.describe([*_current.done]), _current.describe(_current.left)
                say(f"Going on with the sweep in {_current.folder}. Done: {done}. Left: {left or 'none'}.", "yellow")


def metrics_if_done() -> Metrics | None:
    """Return the metrics of the current job if an interrupted sweep has finished it; None otherwise."""
    return None if (jobs := _of_this_sweep()) is None else jobs.done.get(HydraConfig.get().job.num)


def finish(metrics: Metrics) -> None:
    """Record that the current job has ended."""
    if (jobs := _of_this_sweep()) is not None:
        jobs.done[HydraConfig.get().job.num] = metrics


def print_jobs_left() -> None:
    """Print the jobs left after an interruption, and the command that goes on with them."""
    if (jobs := _of_this_sweep()) is None:
        return
    typed = [item for item in sys.argv[1:] if not item.startswith("hydra.sweep.dir=")]
    command = shlex.join(["lgnn", *typed, f"hydra.sweep.dir={jobs.folder}"])
    done = f"Done: {jobs.describe([*jobs.done])}. " if jobs.done else ""
    say(
        f"The sweep was interrupted. {done}Left: {jobs.describe(jobs.left)}. This goes on with them:\n  {command}",
        "yellow",
    )


def _of_this_sweep() -> SweepJobs | None:
    """Return the jobs if this process runs a sweep and knows them; a launcher may run each in another process."""
    in_sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    return _current if in_sweep else None
