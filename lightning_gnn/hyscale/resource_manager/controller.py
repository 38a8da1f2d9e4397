"""The resource manager at work on every rank of a node: seeds of each iteration, times back, decisions into force."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

from lightning_gnn.hyscale.options import TrainerSet, balances, replays
from lightning_gnn.hyscale.performance_model.calibrate import InitialMapping
from lightning_gnn.hyscale.resource_manager.decisions import Decision, ReplayedDecisions, read_decisions
from lightning_gnn.hyscale.resource_manager.mapping import IterationTimes, TaskMapping
from lightning_gnn.hyscale.resource_manager.published import PublishedResourceManager
from lightning_gnn.hyscale.resource_manager.resources import LEAST_SHARE, DynamicResourceManager
from lightning_gnn.hyscale.sharded_loader import split_seeds
from lightning_gnn.hyscale.staged_prefetcher import BatchShare
from lightning_gnn.runtime.files import LARGEST_JSON, read_text
from lightning_gnn.runtime.timeline import StepTimer

STEP_FIELDS = ("seeds", "sampled_there", "sample", "sample_accelerator", "load", "transfer", "train")
"""What a rank sends of its last iteration: seeds, whether its accelerator sampled, then thread-seconds."""


def stage_row(share: BatchShare | None, train: float = 0.0) -> list[float]:
    """Return what a rank sends of its last iteration, in the order of :data:`STEP_FIELDS`; -1 for what is missing."""
    if share is None:
        return [-1.0] * len(STEP_FIELDS)
    there = -1.0 if share.sampled_there is None else float(share.sampled_there)
    stages = [share.seconds.get(name, -1.0) for name in STEP_FIELDS[2:6]]
    return [float(share.seeds), there, *stages, train]


class StageClock:
    """Takes the times of one rank's iterations, without what it waits for others."""

    def __init__(self, device: torch.device) -> None:
        self._timer = None if device.type == "cpu" else StepTimer(device)
        self._share: BatchShare | None = None
        self._seconds = 0.0
        self.row = stage_row(None)
        """What this rank sends about the last iteration."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count what runs within as this rank's step."""
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
        """End an iteration, and begin one with this share."""
        self.row = stage_row(self._share, self._seconds if self._timer is None else self._timer.read(self._seconds))
        self._share, self._seconds = share, 0.0


class BalanceController:
    """Shares out the seeds and threads of one node, and changes that as its manager decides."""

    # Each rank of the node has one, decides the same from the same times, and puts it into force at the same iteration:
    # the first that no rank can have begun to prepare by then.

    def __init__(
        self,
        trainers: TrainerSet,
        weights: Sequence[float],
        threads: tuple[int, int, int],
        total: int,  # seeds of this node in a full iteration
        drm: bool | str | Path,
        record: str | Path | None = None,
        ahead: int = 6,  # iterations that a rank prepares before their turn, at most
        sampling: float = 0.0,  # share of the sampling that accelerators do, to begin with; 0 where they cannot
        is_logging_rank: bool = True,
    ) -> None:
        self.trainers = trainers
        self.weights = list(weights)
        self.threads = threads
        self.total = total
        """Seeds of this node in a full iteration, for which work is shared out."""
        self.accelerator_sampling = sampling
        """Share of the sampling that accelerators do."""
        self.ahead = ahead
        self.first = InitialMapping(tuple(weights), trainers.num_cpu, total, threads, sampling)
        """What the run began with."""
        self.history: deque[tuple[IterationTimes, Decision | None]] = deque(maxlen=10_000)
        """Times of the last iterations, and what was decided after each: the timeline of the run."""
        self.manager: DynamicResourceManager | PublishedResourceManager | ReplayedDecisions | None = None
        self.iteration = 0
        """Iterations that have begun."""
        self._record = None if record is None or not is_logging_rank else Path(record)
        self._is_logging_rank = is_logging_rank
        self._planned: deque[tuple[int, TaskMapping]] = deque()
        self._in_force: TaskMapping | None = None
        self._before: TaskMapping | None = None
        if drm is False:
            return
        if balances(drm):
            seeds = tuple(stop - start for start, stop in split_seeds(total, weights))
            if sampling:  # both kinds of sampling must be seen for work to move from one to the other
                sampling = min(max(sampling, LEAST_SHARE), 1 - LEAST_SHARE)
            begin = TaskMapping(seeds, trainers.num_cpu, threads, sampling)
            if drm == "paper":
                self.manager = PublishedResourceManager(begin)
            else:
                self.manager = DynamicResourceManager(begin, lag=ahead + 1)
        else:
            assert replays(drm)
            self.manager = ReplayedDecisions(read_decisions(read_text(drm, LARGEST_JSON).splitlines()))
            begin = self.manager.mapping
            found = (len(begin.seeds), begin.cpu_trainers, begin.total)
            if found != (len(trainers.devices), trainers.num_cpu, total):
                raise ValueError(
                    f"{drm} was recorded with {found[0]} trainers, {found[1]} on the CPU, and {found[2]} seeds, "
                    f"but here are {len(trainers.devices)}, {trainers.num_cpu} and {total}"
                )
            self.first = InitialMapping(
                begin.shares, trainers.num_cpu, total, begin.threads, begin.accelerator_sampling
            )
        self._planned.append((0, begin))
        self._in_force = self._before = begin
        self._apply(begin)
        self._log_decision(self.manager.log[0])

    @property
    def mapping(self) -> TaskMapping | None:
        """The manager's mapping, None without a manager."""
        return None if self.manager is None else self.manager.mapping

    @property
    def shares(self) -> Sequence[float]:
        """The shares of the trainers in the iteration that began last."""
        return self.weights if self._in_force is None else self._in_force.seeds

    def split(self, num_seeds: int, iteration: int) -> list[tuple[int, int]]:
        """Cut the seeds of an iteration; calls go from one iteration to the next."""
        if not self._planned:
            return split_seeds(num_seeds, self.weights)
        return split_seeds(
            num_seeds, [mapping for begin, mapping in tuple(self._planned) if begin <= iteration][-1].seeds
        )

    def begin(self) -> None:
        """An iteration begins: put into force what was planned for it."""
        while len(self._planned) > 1 and self._planned[1][0] <= self.iteration:
            self._planned.popleft()
        if self._planned:
            self._before, self._in_force = self._in_force, self._planned[0][1]
            self._apply(self._in_force)
        self.iteration += 1

    def observe(self, rows: Sequence[Sequence[float]]) -> Decision | None:
        """Take what the ranks sent about the iteration before the present one, and let the manager decide."""
        measured = all(row[0] >= 0 for row in rows)
        if not measured and self.iteration <= 1:
            return None  # no iteration has been measured yet
        times = self._times(rows) if measured else self._unknown
        decision = None
        if self.manager is not None:
            decision = self.manager.observe(times)
            if decision.changed:
                self._planned.append((self.iteration + self.ahead, decision.mapping))
                self._log_decision(decision)
        if measured:
            self.history.append((times, decision))
        return decision

    @property
    def _unknown(self) -> IterationTimes:
        """The times of an iteration before a resume, which counts, so that a replay does not fall behind."""
        cpu = self.trainers.num_cpu
        none = (None,) * len(self.trainers.devices)
        return IterationTimes(None, None, none[:cpu], none[cpu:])

    def rank_threads(self, trainer: int, mapping: TaskMapping | None = None) -> tuple[int, int, int]:
        """Return a rank's threads of sampling and feature loading, by its share of the seeds, and of its training."""
        sampling, loading, training = self.threads if mapping is None else mapping.threads
        shares = self.shares if mapping is None else mapping.seeds
        share = shares[trainer] / sum(shares)
        own = max(1, training // max(1, self.trainers.num_cpu)) if trainer < self.trainers.num_cpu else 1
        return max(1, round(sampling * share)), max(1, round(loading * share)), own

    def sampled_by(self, trainer: int, mapping: TaskMapping | None = None) -> float:
        """Return the part of an accelerator's own sampling that it does, to meet its share of all sampling."""
        shares = self.shares if mapping is None else mapping.seeds
        share = self.accelerator_sampling if mapping is None else mapping.accelerator_sampling
        there = sum(shares[self.trainers.num_cpu :])
        if trainer < self.trainers.num_cpu or not there:
            return 0.0
        return min(1.0, share * sum(shares) / there)

    def _times(self, rows: Sequence[Sequence[float]]) -> IterationTimes:
        """Return the stage times of an iteration: of a task that every rank has, the longest."""
        cpu = self.trainers.num_cpu
        named = [dict(zip(STEP_FIELDS, row, strict=True)) for row in rows]
        train = tuple(row["train"] if row["seeds"] > 0 else None for row in named)
        seeds = tuple(int(row["seeds"]) for row in named)
        sample, load = [], []
        on_accelerator = []
        for trainer, row in enumerate(named):
            if row["seeds"] <= 0:
                continue
            threads, part = self.rank_threads(trainer, self._before), self.sampled_by(trainer, self._before)
            if row["sampled_there"] > 0 and part:  # what it takes in the long run, with mini-batches in turn
                on_accelerator.append(row["sample_accelerator"] * part)
            elif row["sample"] >= 0:
                sample.append(row["sample"] / threads[0] * (1 - part))
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
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to share out the same way."""
        state = {"first": self.first.to_dict(), "iteration": self.iteration}
        if self.manager is None:
            return state
        planned = [[begin, mapping.to_dict()] for begin, mapping in self._planned]
        kind = type(self.manager).__name__
        return {**state, "kind": kind, "manager": self.manager.state_dict(), "planned": planned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: what was planned comes into force when it would have."""
        if self.manager is None:
            self.iteration = int(state.get("iteration", 0))
        if self.manager is None or "manager" not in state:
            return
        if state.get("kind") != type(self.manager).__name__:
            return  # recorded by another kind of manager: start over
        loaded = copy.deepcopy(self.manager)  # not half of a state
        try:
            loaded.load_state_dict(state["manager"])
            planned = [(int(begin), TaskMapping.from_dict(mapping)) for begin, mapping in state["planned"]]
            iteration = int(state["iteration"])
        except (KeyError, TypeError, ValueError) as error:
            rank_zero_warn(f"hyscale balances anew: the saved state does not fit ({type(error).__name__}: {error})")
            return
        self.manager, self.iteration = loaded, iteration
        if self._record is not None:
            self._record.write_text("".join(f"{decision.to_json()}\n" for decision in self.manager.log))
        self._planned = deque(planned)
        self._in_force = self._before = planned[0][1]
        self._apply(planned[0][1])

    def _apply(self, mapping: TaskMapping) -> None:
        self.threads = mapping.threads
        self.accelerator_sampling = mapping.accelerator_sampling

    def _log_decision(self, decision: Decision) -> None:
        if not self._is_logging_rank:
            return
        rank_zero_info(f"hyscale: {decision}")
        if self._record is not None:
            try:
                self._record.parent.mkdir(parents=True, exist_ok=True)
                with self._record.open("w" if decision.observation == 0 else "a") as file:
                    file.write(decision.to_json() + "\n")
            except OSError as error:
                if decision.observation == 0:
                    raise  # nothing has been trained yet
                rank_zero_warn(
                    f"{self._record} ends before observation {decision.observation}, which a replay would miss: {error}"
                )
                self._record = None
