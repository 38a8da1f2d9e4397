"""The resource manager at work: seeds of each iteration, times back, decisions into force and into the log."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

from lightning_gnn.hyscale.decisions import Decision, ReplayedDecisions, read_decisions
from lightning_gnn.hyscale.first_mapping import FirstMapping
from lightning_gnn.hyscale.mapping import IterationTimes, TaskMapping
from lightning_gnn.hyscale.options import Trainers
from lightning_gnn.hyscale.pipeline import HybridBatch, split_seeds
from lightning_gnn.hyscale.resources import Damping, DynamicResourceManager
from lightning_gnn.runtime.files import LARGEST_JSON, read_text

_LEAST_SHARE = 0.01
"""Of the sampling, on either side, while it may move."""


class WorkBalance:
    """Shares out the seeds and threads of one node, and changes that as its manager decides.

    Args:
        trainers: Who trains.
        weights: Shares of the trainers to begin with.
        threads: CPU threads of sampling, feature loading and CPU trainers to begin with.
        total: Seeds of this node in a full iteration.
        drm: True: algorithm 1; False: nothing changes; a path: replay the decisions recorded there.
        apply: Called with the threads whenever they change.
        record: Where to write the decisions, one JSON line each, for a replay.
        lag: Iterations under way in the pipeline.
        sampling: Share of the sampling that accelerators do, to begin with; 0 where they cannot.

    Raises:
        ValueError: The recorded decisions are for other trainers or another batch size.
        FileNotFoundError: There is no such record.
    """

    def __init__(
        self,
        trainers: Trainers,
        weights: Sequence[float],
        threads: tuple[int, int, int],
        total: int,
        drm: bool | str | Path,
        apply: Callable[[tuple[int, int, int]], None],
        record: str | Path | None = None,
        lag: int = 2,
        sampling: float = 0.0,
    ) -> None:
        self.trainers = trainers
        self.weights = list(weights)
        self.threads = threads
        self.total = total
        """Seeds of this node in a full iteration, for which work is shared out."""
        self.accelerator_sampling = sampling
        """Share of the sampling that accelerators do in the iteration that was split last."""
        self.first = FirstMapping(tuple(weights), trainers.num_cpu, total, threads, sampling)
        """What the run began with."""
        self.history: deque[tuple[IterationTimes, Decision | None]] = deque(maxlen=10_000)
        """Times of the last iterations, and what was decided after each: the timeline of the run."""
        self.manager: DynamicResourceManager | ReplayedDecisions | None = None
        self._apply = apply
        self._record = None if record is None else Path(record)
        self._issued: deque[TaskMapping | None] = deque()
        self._resumed: deque[TaskMapping | None] = deque()
        self._mark: float | None = None
        # What the manager takes a measurement to be of: the mapping of so many observations ago.
        self._shares: deque[float] = deque([sampling], maxlen=max(lag, 1) + 1)
        if drm is False or (drm is True and len(trainers.devices) == 1 and max(threads) == 1 and not sampling):
            return  # nothing to decide, or nobody who may
        if drm is True:
            seeds = tuple(stop - start for start, stop in split_seeds(total, weights))
            if sampling:  # both kinds of sampling must be seen for work to move from one to the other
                sampling = min(max(sampling, _LEAST_SHARE), 1 - _LEAST_SHARE)
            begin = TaskMapping(seeds, trainers.num_cpu, threads, sampling)
            self.manager = DynamicResourceManager(begin, damping=Damping(lag=max(lag, 1)))
        else:
            self.manager = ReplayedDecisions(read_decisions(read_text(drm, LARGEST_JSON).splitlines()))
            begin = self.manager.mapping
            found = (len(begin.seeds), begin.cpu_trainers, begin.total)
            if found != (len(trainers.devices), trainers.num_cpu, total):
                raise ValueError(
                    f"{drm} was recorded with {found[0]} trainers, {found[1]} on the CPU, and {found[2]} seeds, "
                    f"but here are {len(trainers.devices)}, {trainers.num_cpu} and {total}"
                )
            self.first = FirstMapping(begin.shares, trainers.num_cpu, total, begin.threads, begin.accelerator_sampling)
        self._shares[0] = begin.accelerator_sampling
        self._tell(self.manager.log[0])
        self._use(begin)

    @property
    def mapping(self) -> TaskMapping | None:
        """The manager's mapping, None without a manager."""
        return None if self.manager is None else self.manager.mapping

    def split(self, num_seeds: int) -> list[tuple[int, int]]:
        """Cut the seeds of the next iteration."""
        mapping = self._resumed.popleft() if self._resumed else self.mapping
        self._issued.append(mapping)
        if mapping is not None:
            self.accelerator_sampling = mapping.accelerator_sampling
        return split_seeds(num_seeds, self.weights if mapping is None else mapping.seeds)

    def restart(self) -> None:
        """The pipeline begins anew: what was under way is gone."""
        self._issued.clear()
        self._mark = None

    def pause(self) -> None:
        """Something else than training comes between two iterations."""
        self._mark = None

    def observe(self, batch: HybridBatch, seconds: Sequence[float]) -> Decision | None:
        """An iteration is done: let the manager decide.

        Args:
            batch: What was trained on.
            seconds: Of each trainer.
        """
        if self._issued:
            self._issued.popleft()
        now = time.perf_counter()
        iteration = None if self._mark is None else now - self._mark
        self._mark = now
        times = self.times(batch, seconds, iteration)
        decision = None
        if self.manager is not None:
            decision = self.manager.observe(times)
            if decision.changed:
                self._tell(decision)
                self._use(decision.mapping)
            self._shares.append(decision.mapping.accelerator_sampling)
        self.history.append((times, decision))
        return decision

    def times(self, batch: HybridBatch, seconds: Sequence[float], iteration: float | None) -> IterationTimes:
        """Return the stage times of an iteration."""
        stages, cpu = batch.seconds, self.trainers.num_cpu
        by_trainer = [value if part is not None else None for value, part in zip(seconds, batch.parts, strict=True)]
        sample_cpu, sample_accelerator = self._sampling_times(batch)
        return IterationTimes(
            sample_cpu=sample_cpu,
            sample_accelerator=sample_accelerator,
            load=stages["load"] / self.threads[1] if "load" in stages else None,
            train_cpu=tuple(by_trainer[:cpu]),
            train_accelerator=tuple(by_trainer[cpu:]),
            transfer=stages.get("transfer"),
            seeds=tuple(batch.seeds),
            iteration=iteration,
        )

    def _sampling_times(self, batch: HybridBatch) -> tuple[float | None, float | None]:
        """Return the times of Sampling on the CPU and on accelerators; None for one that had nothing to do.

        Parts are sampled as a whole, so that an iteration's shares are not those of the mapping: the times are scaled
        to what they are in the long run.
        """
        stages, there = batch.seconds, batch.sampled_there
        cpu = stages["sample"] / self.threads[0] if "sample" in stages else None
        if there is None:
            return cpu, None
        share, whole = self._shares[0], batch.batch_size
        accelerator = stages["sample_accelerator"] / max(1, self.trainers.num_accelerators)
        on_cpu = None if cpu is None or there == whole else cpu * (1 - share) * whole / (whole - there)
        return on_cpu, accelerator * share * whole / there if there else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to share out the same way."""
        first = {"first": self.first.to_dict()}
        if self.manager is None:
            return first
        issued = [None if mapping is None else mapping.to_dict() for mapping in self._issued]
        return {**first, "manager": self.manager.state_dict(), "issued": issued, "shares": list(self._shares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: what was under way comes first, as it was shared out then."""
        if self.manager is None or "manager" not in state:
            return
        replayed = "history" not in state["manager"]
        if replayed != isinstance(self.manager, ReplayedDecisions):
            return  # recorded by the other kind of manager: begin anew
        loaded = copy.deepcopy(self.manager)  # not half of a state
        try:
            loaded.load_state_dict(state["manager"])
        except ValueError as error:
            rank_zero_warn(f"hyscale balances anew: {error}")
            return
        except (KeyError, TypeError) as error:
            rank_zero_warn(f"hyscale balances anew: the state is of another version ({type(error).__name__}: {error})")
            return
        self.manager = loaded
        if self._record is not None:
            self._record.write_text("".join(f"{decision.to_json()}\n" for decision in self.manager.log))
        self._resumed.extend(None if mapping is None else TaskMapping.from_dict(mapping) for mapping in state["issued"])
        self._shares.clear()
        self._shares.extend(state.get("shares", [self.manager.mapping.accelerator_sampling]))
        self._use(self.manager.mapping)

    def _use(self, mapping: TaskMapping) -> None:
        if mapping.threads != self.threads:
            self.threads = mapping.threads
            self._apply(mapping.threads)

    def _tell(self, decision: Decision) -> None:
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
