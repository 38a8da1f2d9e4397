"""Runs the resource manager on every rank of a node: splits seeds, collects times and applies decisions."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_gnn.collective.plan import PREPARATION_STAGES, StageTimes
from lightning_gnn.hyscale.costs import IterationTimes, TaskMapping
from lightning_gnn.hyscale.options import TrainerSet, is_adaptive, replays, validate_shares
from lightning_gnn.hyscale.plan import NodePlanner
from lightning_gnn.hyscale.resource_manager.decisions import Decision, ReplayedDecisions, read_decisions
from lightning_gnn.hyscale.resource_manager.published import PublishedResourceManager
from lightning_gnn.hyscale.resource_manager.resources import MIN_SAMPLING_SHARE, DynamicResourceManager
from lightning_gnn.hyscale.sharded_loader import split_seeds
from lightning_gnn.hyscale.staged_prefetcher import BatchShare
from lightning_gnn.runtime.files import LARGEST_JSON, read_text
from lightning_gnn.runtime.lightning import rank_zero_info, rank_zero_warn
from lightning_gnn.runtime.timeline import StepTimer
from lightning_gnn.runtime.urls import cached_path, local_path

_NOMINAL_SEEDS = 1 << 16
_MEASURED = ("sample", "sample_accelerator", "load", "transfer")
_COLLECTIVE = PREPARATION_STAGES[:4]
STEP_FIELDS = ("seeds", "sampled_on_accelerator", *_MEASURED, "train", "iteration", *_COLLECTIVE)
"""Fields that a rank sends about its last iteration: seeds, whether its accelerator sampled, thread-seconds of the
pipeline's stages and of training, seconds until the next iteration, and seconds of the stages of collective batching,
each for one mini-batch."""


def stage_row(share: BatchShare | None, train: float = 0.0, iteration: float = -1.0) -> list[float]:
    """Return a rank's values of :data:`STEP_FIELDS` for its last iteration; -1 for missing values."""
    if share is None:
        return [-1.0] * len(STEP_FIELDS)
    on_accelerator = -1.0 if share.sampled_on_accelerator is None else float(share.sampled_on_accelerator)
    stages, collective = ([share.seconds.get(name, -1.0) for name in names] for names in (_MEASURED, _COLLECTIVE))
    # A training thread that prepares the mini-batches on its GPU cannot train meanwhile.
    train += sum(share.seconds.get(name, 0.0) for name in ("prepare", "gpu_batching", "uva"))
    return [float(share.seeds), on_accelerator, *stages, train, iteration, *collective]


@dataclass(frozen=True)
class InitialMapping:
    """Initial mapping of a run, saved in checkpoints; a resumed run reuses it instead of measuring again."""

    shares: tuple[float, ...]  # per trainer, CPU trainers first; unlike a TaskMapping's, not rounded to seeds
    cpu_trainers: int
    total: int  # seeds of the node in a full iteration
    threads: tuple[int, int, int]  # CPU threads of Sampling, Feature Loading and the CPU trainers
    accelerator_sampling: float = 0.0  # fraction of the sampling done by accelerators; 0 if unsupported

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping as plain lists and numbers."""
        return {**asdict(self), "shares": list(self.shares), "threads": list(self.threads)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], trainers: TrainerSet, total: int) -> InitialMapping:
        """Restore a mapping from :meth:`to_dict`; raise ValueError if it is for other trainers or seeds."""
        sampling, loading, training = map(int, state["threads"])
        shares = validate_shares(state["shares"])
        saved = (len(shares), int(state["cpu_trainers"]), int(state["total"]))
        if saved != (len(trainers.devices), trainers.num_cpu, total):
            raise ValueError(
                f"it is for {saved[0]} trainers, {saved[1]} on the CPU, and {saved[2]} seeds, but this run has "
                f"{len(trainers.devices)}, {trainers.num_cpu} and {total}"
            )
        share = float(state["accelerator_sampling"])
        return cls(tuple(shares), saved[1], total, (sampling, loading, training), share)

    def threads_of(self, threads: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the saved threads, or ``threads`` if the totals differ because machine or loader changed."""
        least = 2 + self.cpu_trainers
        return self.threads if max(sum(self.threads), least) == max(sum(threads), least) else threads


def restore_mapping(
    state: dict[str, Any], trainers: TrainerSet, total: int
) -> tuple[InitialMapping | None, dict[str, Any]]:
    """Return a checkpoint's initial mapping, None if missing or not applicable, and the still applicable state."""
    if "first" not in state:
        return None, state
    try:
        return InitialMapping.from_dict(state["first"], trainers, total), state
    except (KeyError, TypeError, ValueError) as error:
        rank_zero_warn(f"hyscale rebalances: the saved mapping does not fit ({type(error).__name__}: {error})")
        return None, {}


class StageClock:
    """Measures one rank's time per iteration, excluding the time it waits for other ranks."""

    def __init__(self, device: torch.device) -> None:
        self._timer = None if device.type == "cpu" else StepTimer(device)
        self._share: BatchShare | None = None
        self._seconds = self._start = 0.0
        self.row = stage_row(None)
        """This rank's values of :data:`STEP_FIELDS` for the last iteration."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Add the duration of the ``with`` block to this rank's step time."""
        start = time.perf_counter()
        if self._timer is not None:
            self._timer.start()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start
            if self._timer is not None:
                self._timer.stop()

    def next_iteration(self, share: BatchShare) -> None:
        """Finish the current iteration and start one with this share."""
        start, iteration = time.perf_counter(), -1.0
        if self._share is not None and share.number > self._share.number:  # otherwise an epoch has ended
            iteration = start - self._start
        train = self._seconds if self._timer is None else self._timer.read(self._seconds)
        self.row = stage_row(self._share, train, iteration)
        self._share, self._seconds, self._start = share, 0.0, start


class BalanceController:
    """Splits the seeds and threads of one node, and applies the decisions of its resource manager."""

    # Every rank of the node has a controller, which makes the same decisions from the same times. A decision takes
    # effect on all ranks at the first iteration that no rank can have started to prepare.

    def __init__(
        self,
        trainers: TrainerSet,
        weights: Sequence[float],
        threads: tuple[int, int, int],
        total: int,  # seeds of this node in a full iteration
        drm: bool | str | Path,
        record: str | Path | None = None,
        ahead: int = 6,  # maximum number of iterations that a rank prefetches
        sampling: float = 0.0,  # initial fraction of the sampling done by accelerators; 0 if unsupported
        is_logging_rank: bool = True,
        on_stream: Sequence[bool] = (),  # per trainer: whether its GPU prepares its mini-batches, without CPU threads
    ) -> None:
        self.trainers = trainers
        self.weights = list(weights)
        self.threads = threads
        self.total = total
        self.accelerator_sampling = sampling
        """Fraction of the sampling done by accelerators."""
        self.ahead = ahead
        self.first = InitialMapping(tuple(weights), trainers.num_cpu, total, threads, sampling)
        """The initial mapping of the run."""
        self.history: deque[tuple[IterationTimes, Decision | None]] = deque(maxlen=10_000)
        """Times of the last iterations with the decision after each: the timeline of the run."""
        self.manager: DynamicResourceManager | PublishedResourceManager | ReplayedDecisions | None = None
        self.iteration = 0
        """Number of iterations started."""
        self.planner: NodePlanner | None = None
        """Plans seeds, threads and collective batching from the first iterations; None if there is nothing to plan."""
        self.buffers: tuple[int, int, int, int] | None = None
        """Planned sizes of collective batching on each accelerator; None before planning."""
        self.stage_times: StageTimes | None = None
        """The profile that collective batching was planned from."""
        self._log_path = None if record is None or not is_logging_rank else local_path(record)
        self._is_logging_rank = is_logging_rank
        self._uses_threads = [not each for each in on_stream] or [True] * len(trainers.devices)
        self._planned: deque[tuple[int, TaskMapping]] = deque()
        # The mapping of a run without a manager; for mini-batches of unknown sizes, with seeds in proportion.
        seeds = tuple(stop - start for start, stop in split_seeds(total or _NOMINAL_SEEDS, weights))
        self._fixed = TaskMapping(seeds, trainers.num_cpu, threads, sampling)
        self._current: TaskMapping | None = None
        self._previous: TaskMapping | None = None
        if drm is False:
            return
        if is_adaptive(drm):
            if sampling:  # both sides must sample a little, since a side without measurements cannot be balanced
                sampling = min(max(sampling, MIN_SAMPLING_SHARE), 1 - MIN_SAMPLING_SHARE)
            begin = replace(self._fixed, accelerator_sampling=sampling)
            if drm == "paper":
                self.manager = PublishedResourceManager(begin)
            else:
                self.manager = DynamicResourceManager(begin, lag=ahead + 1)
        else:
            assert replays(drm)
            self.manager = ReplayedDecisions(read_decisions(read_text(cached_path(drm), LARGEST_JSON).splitlines()))
            begin = self.manager.mapping
            recorded = (len(begin.seeds), begin.cpu_trainers, begin.total)
            if recorded != (len(trainers.devices), trainers.num_cpu, total):
                raise ValueError(
                    f"{drm} was recorded with {recorded[0]} trainers, {recorded[1]} on the CPU, and {recorded[2]} "
                    f"seeds, but this run has {len(trainers.devices)}, {trainers.num_cpu} and {total}"
                )
            self.first = InitialMapping(
                begin.shares, trainers.num_cpu, total, begin.threads, begin.accelerator_sampling
            )
        self._planned.append((0, begin))
        self._current = self._previous = begin
        self._apply(begin)
        self._log_decision(self.manager.log[0])

    @property
    def mapping(self) -> TaskMapping | None:
        """The manager's current mapping; None without a manager."""
        return None if self.manager is None else self.manager.mapping

    @property
    def only_accelerators(self) -> bool:
        """Whether the node has CPU trainers without any seeds in the current iteration."""
        mapping = self._current or self._fixed
        return mapping.cpu_trainers > 0 and not mapping.cpu_seeds

    @property
    def leaves_out_cpu(self) -> bool:
        """Whether the CPU trainers get no seeds for the rest of the run."""
        manager = self.manager
        return self.planner is None and isinstance(manager, DynamicResourceManager) and manager.leaves_out_cpu

    @property
    def shares(self) -> Sequence[float]:
        """The shares of the trainers in the current iteration."""
        return self.weights if self._current is None else self._current.seeds

    def split(self, num_seeds: int, iteration: int) -> list[tuple[int, int]]:
        """Return each trainer's range of an iteration's seeds; iterations must not decrease between calls."""
        if not self._planned:
            return split_seeds(num_seeds, self.weights)
        current = [mapping for begin, mapping in tuple(self._planned) if begin <= iteration][-1]
        return split_seeds(num_seeds, current.seeds)

    def begin(self) -> None:
        """Start an iteration and apply the mapping planned for it."""
        while len(self._planned) > 1 and self._planned[1][0] <= self.iteration:
            self._planned.popleft()
        if self._planned:
            self._previous, self._current = self._current, self._planned[0][1]
            self._apply(self._current)
        if self.planner is not None and (mapping := self.planner.take(self.iteration)) is not None:
            self.stage_times, self.planner = self.planner.times, None
            if isinstance(self.manager, DynamicResourceManager):
                self._plan_change(self.manager.adopt(mapping))
            else:
                self.buffers = mapping.buffers
        self.iteration += 1

    def observe(self, rows: Sequence[Sequence[float]]) -> Decision | None:
        """Pass the ranks' rows about the previous iteration to the manager, and return its decision."""
        is_measured = all(row[0] >= 0 for row in rows)
        if not is_measured and self.iteration <= 1:
            return None  # no iteration has been measured yet
        times = self._compute_times(rows) if is_measured else self._missing_times
        decision = None
        if self.manager is not None:
            decision = self.manager.observe(times)
            if decision.changed:
                self._plan_change(decision)
        if is_measured:
            self.history.append((times, decision))
            self._observe_plan(rows)
        return decision

    def _plan_change(self, decision: Decision) -> None:
        """Apply a decision at the first iteration that no rank can have started to prepare."""
        self._planned.append((self.iteration + self.ahead, decision.mapping))
        self._log_decision(decision)

    def _observe_plan(self, rows: Sequence[Sequence[float]]) -> None:
        if self.planner is None:
            return
        mapping, costs = self._current, None
        if isinstance(self.manager, DynamicResourceManager):
            costs = self.manager.costs()
        mapping = mapping or self._fixed
        named = (dict(zip(STEP_FIELDS, row, strict=True)) for row in rows[self.trainers.num_cpu :])
        self.planner.observe([row for row in named if row["seeds"] > 0], mapping, costs, self.iteration)

    @property
    def _missing_times(self) -> IterationTimes:
        """Empty times of an unmeasured iteration before a resume; observing them keeps a replay aligned."""
        cpu = self.trainers.num_cpu
        missing = (None,) * len(self.trainers.devices)
        return IterationTimes(None, None, missing[:cpu], missing[cpu:])

    def rank_threads(self, trainer: int, mapping: TaskMapping | None = None) -> tuple[int, int, int]:
        """Return one rank's threads for sampling and feature loading, in proportion to its work, and for training."""
        mapping = mapping or self._current or self._fixed
        return mapping.rank_threads(trainer, self._uses_threads)

    def accelerator_fraction(self, trainer: int, mapping: TaskMapping | None = None) -> float:
        """Return the fraction of its own mini-batches that a trainer's accelerator samples."""
        mapping = mapping or self._current or self._fixed
        if trainer < self.trainers.num_cpu or mapping.buffers is not None:
            return 0.0
        return mapping.accelerator_fraction

    def _compute_times(self, rows: Sequence[Sequence[float]]) -> IterationTimes:
        """Return the stage times of an iteration: for each stage, the longest of all ranks."""
        cpu = self.trainers.num_cpu
        named = [dict(zip(STEP_FIELDS, row, strict=True)) for row in rows]
        train = tuple(row["train"] if row["seeds"] > 0 else None for row in named)
        seeds = tuple(int(row["seeds"]) for row in named)
        sample, load = [], []
        on_accelerator = []
        for trainer, row in enumerate(named):
            if row["seeds"] <= 0:
                continue
            threads = self.rank_threads(trainer, self._previous)
            fraction = self.accelerator_fraction(trainer, self._previous)
            # Either device samples a whole mini-batch: scale by its fraction to get the average per iteration.
            if row["sampled_on_accelerator"] > 0 and fraction:
                on_accelerator.append(row["sample_accelerator"] * fraction)
            elif row["sample"] >= 0:
                sample.append(row["sample"] / threads[0] * (1 - fraction))
            if row["load"] >= 0:
                load.append(row["load"] / threads[1])
        transfer = [row["transfer"] for row in named[cpu:] if row["transfer"] >= 0 and row["seeds"] > 0]
        return IterationTimes(
            sample_cpu=max(sample, default=None),
            sample_accelerator=max(on_accelerator, default=None),
            load=max(load, default=None),
            train_cpu=train[:cpu],
            train_accelerator=train[cpu:],
            transfer=max(transfer, default=None),
            seeds=seeds,
            iteration=named[-1]["iteration"] if named[-1]["iteration"] > 0 else None,  # of an accelerator, if any
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue with the same shares."""
        state = {"first": self.first.to_dict(), "iteration": self.iteration}
        if self.manager is None:
            return state
        planned = [[begin, mapping.to_dict()] for begin, mapping in self._planned]
        kind = type(self.manager).__name__
        return {**state, "kind": kind, "manager": self.manager.state_dict(), "planned": planned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; planned mappings take effect at their original iterations."""
        if self.manager is None:
            self.iteration = int(state.get("iteration", 0))
        if self.manager is None or "manager" not in state:
            return
        if state.get("kind") != type(self.manager).__name__:
            return  # saved by another type of manager: start over
        loaded = copy.deepcopy(self.manager)  # a failure below must not leave a partially loaded state
        try:
            loaded.load_state_dict(state["manager"])
            planned = [(int(begin), TaskMapping.from_dict(mapping)) for begin, mapping in state["planned"]]
            iteration = int(state["iteration"])
        except (KeyError, TypeError, ValueError) as error:
            rank_zero_warn(f"hyscale rebalances: the saved state does not fit ({type(error).__name__}: {error})")
            return
        self.manager, self.iteration = loaded, iteration
        if self._log_path is not None:
            self._log_path.write_text("".join(f"{decision.to_json()}\n" for decision in self.manager.log))
        self._planned = deque(planned)
        self._current = self._previous = planned[0][1]
        self._apply(planned[0][1])

    def _apply(self, mapping: TaskMapping) -> None:
        self.threads = mapping.threads
        self.accelerator_sampling = 0.0 if mapping.buffers is not None else mapping.accelerator_sampling
        self.buffers = mapping.buffers

    def _log_decision(self, decision: Decision) -> None:
        if not self._is_logging_rank:
            return
        rank_zero_info(f"hyscale: {decision}")
        if self._log_path is not None:
            try:
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                with self._log_path.open("w" if decision.observation == 0 else "a") as file:
                    file.write(decision.to_json() + "\n")
            except OSError as error:
                if decision.observation == 0:
                    raise  # training has not started yet
                rank_zero_warn(
                    f"{self._log_path} is incomplete from observation {decision.observation} on, so a replay would "
                    f"differ: {error}"
                )
                self._log_path = None
