"""Dynamic resource management of hybrid training (HyScale-GNN, section IV-A): algorithm 1, made to stand noise.

The paper's lines 1 to 32 are :func:`find_remedy`. It leaves open how far to move, and what measured times are: here
``balance_work`` goes all the way to where the measurements since the last change of speed (``hyscale/estimates.py``)
say that both sides take equally long, and threads move together with the work that they are for. What else is added
was worth it in closed loops with noise and disturbances (``benchmarks/resource_manager.py``): one move at a time, by
a few measurements made after the last; a dead band that narrows as they become more; the other remedy where the
paper's gains nothing; moved threads that bring nothing go back; CPU trainers that do not pay are taken out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median
from typing import Any, Literal, NamedTuple

from lightning_gnn.hyscale.decisions import STAGE_NAMES, Decision, difference, milliseconds, read_decisions
from lightning_gnn.hyscale.estimates import Estimate, Measurements
from lightning_gnn.hyscale.mapping import CPU_TASKS, STAGES, IterationTimes, Stage, TaskMapping, split_evenly

TAKES_OVER: Mapping[Stage, Stage] = {"accelerator": "train_cpu", "sample_accelerator": "sample_cpu"}
"""The CPU task that takes work from a stage of the accelerators if it gets threads."""
LEAST_SHARE = 0.01
"""Of the sampling, on either side, while it may move."""
SURE, LEAST_GAIN = 0.08, 0.01
"""The dead band: part of the slowest stage's time that a gain by one measurement must exceed; by n, sqrt(n) less, but
never less than the second."""
SLOWER = 0.1
"""Moved threads go back if the slowest stage takes longer by more than this part; noise alone moves no threads."""
LOOK = 8
"""Where n measurements showed nothing to gain, one looks again n / 8 later, at the most 8: it saves computing."""


class Remedy(NamedTuple):
    """What algorithm 1 calls for.

    Args:
        kind: ``balance_work`` shares work out anew between the processors of the two stages; ``balance_thread`` takes
            threads from the first for the second; ``none`` where there is no other CPU task to take them from.
        first: The first argument in the paper.
        second: The second.
    """

    kind: Literal["balance_work", "balance_thread", "none"]
    first: Stage
    second: Stage
    bottleneck: Stage


def find_remedy(times: Mapping[Stage, float]) -> Remedy:
    """Return what algorithm 1 does about the slowest stage.

    Stages that do not exist are left out of the sort. In lines 23 and 31 the paper takes threads from the fastest of
    all stages, which may be one of an accelerator: there it is the fastest CPU task. Of two equal times, the one that
    line 2 names first counts as the slower.

    Args:
        times: Seconds of each stage that exists, as returned by
            :meth:`~lightning_gnn.hyscale.mapping.IterationTimes.stages`, which does line 1.
    """
    if not times:
        raise ValueError("there is no stage time to find a bottleneck in")
    by_time = sorted((stage for stage in STAGES if stage in times), key=lambda stage: -times[stage])  # line 2
    bottleneck, fastest = by_time[0], by_time[-1]
    second = by_time[-2] if len(by_time) > 1 else fastest
    samplers: tuple[Stage, Stage] = ("sample_cpu", "sample_accelerator")
    trainers: tuple[Stage, Stage] = ("train_cpu", "accelerator")

    if bottleneck == "sample_accelerator":  # lines 11 and 12
        return Remedy("balance_work", *samplers, bottleneck)
    if bottleneck == "accelerator":  # lines 13 and 14
        return Remedy("balance_work", *trainers, bottleneck)
    if bottleneck == "sample_cpu" and _leads("sample_accelerator", "accelerator", fastest, second):  # lines 18 to 21
        return Remedy("balance_work", *samplers, bottleneck)
    if bottleneck == "train_cpu" and _leads("accelerator", "sample_accelerator", fastest, second):  # lines 26 to 29
        return Remedy("balance_work", *trainers, bottleneck)
    fastest_cpu_task = [stage for stage in by_time if stage in CPU_TASKS][-1]  # lines 7 and 8
    kind: Literal["balance_thread", "none"] = "none" if fastest_cpu_task == bottleneck else "balance_thread"
    return Remedy(kind, fastest_cpu_task, bottleneck, bottleneck)  # lines 16, 23, 31


def _leads(partner: Stage, other: Stage, fastest: Stage, second: Stage) -> bool:
    """Whether the accelerator's stage of the same kind is the fastest, or follows the accelerator's other one."""
    return fastest == partner or (fastest == other and second == partner)


def gain(now: Estimate, mapping: TaskMapping) -> float:
    """Return by what part another mapping would shorten the slowest of the stages that it changes.

    Not the slowest of all: of two stages that are equally slow, one must be eased first. If the slowest of all takes
    longer for it, the gain is none.
    """
    before, after = now.stages, now.under(mapping).stages
    changed = [stage for stage in {*before, *after} if before.get(stage) != after.get(stage)]
    old = max((before.get(stage, 0.0) for stage in changed), default=0.0)
    new = max((after.get(stage, 0.0) for stage in changed), default=0.0)
    if not old or max(after.values()) > max(before.values()):
        return 0.0
    return 1 - new / old


def balance_work(now: Estimate, trainers: range | None = None) -> TaskMapping:
    """Share the seeds out anew, so that all trainers that get some are done at the same time.

    Args:
        trainers: Who gets the seeds that these have; by default all. None of the others' seeds move.
    """
    mapping, present = now.mapping, range(len(now.mapping.seeds)) if trainers is None else trainers
    costs = [cost if index in present else None for index, cost in enumerate(now.costs)]
    if sum(cost is not None for cost in costs) < 2:
        return mapping
    total = sum(seeds for seeds, cost in zip(mapping.seeds, costs, strict=True) if cost is not None)
    found = split_evenly(total, costs, range(mapping.cpu_trainers, len(costs)), now.transfer_per_seed)
    seeds = [old if cost is None else new for old, new, cost in zip(mapping.seeds, found, costs, strict=True)]
    return replace(mapping, seeds=tuple(seeds))


def accelerators_alone(now: Estimate) -> TaskMapping:
    """Give all seeds to the accelerators, so that all are done at the same time."""
    mapping, cpu = now.mapping, now.mapping.cpu_trainers
    costs = [None if index < cpu else cost for index, cost in enumerate(now.costs)]
    return replace(mapping, seeds=split_evenly(mapping.total, costs, range(cpu, len(costs)), now.transfer_per_seed))


def balance_sampling(now: Estimate) -> TaskMapping:
    """Share the sampling out anew between the CPU and the accelerators."""
    mapping, times = now.mapping, now.times
    share = mapping.accelerator_sampling
    if not times.sample_cpu or not times.sample_accelerator:
        return mapping
    on_cpu, there = (1 - share) / times.sample_cpu, share / times.sample_accelerator
    target = there / (there + on_cpu)
    return replace(mapping, accelerator_sampling=min(max(target, LEAST_SHARE), 1 - LEAST_SHARE))


def balance_thread(now: Estimate, donor: Stage, receiver: Stage) -> Iterator[TaskMapping]:
    """Yield mappings with 1, 2, 4, ... threads of a CPU task moved to another, the work shared out anew for them.

    Every task keeps one thread, and each CPU trainer with seeds.
    """
    mapping, source, to = now.mapping, CPU_TASKS.index(donor), CPU_TASKS.index(receiver)
    least = 1
    if donor == "train_cpu":
        least = mapping.cpu_trainers if mapping.cpu_seeds else min(1, mapping.cpu_trainers)
    spare, count = mapping.threads[source] - least, 1
    while count <= spare:
        threads = list(mapping.threads)
        threads[source] -= count
        threads[to] += count
        moved = now.under(replace(mapping, threads=(threads[0], threads[1], threads[2])))
        yield replace(balance_work(moved), accelerator_sampling=balance_sampling(moved).accelerator_sampling)
        count = spare if count < spare < 2 * count else 2 * count


@dataclass(frozen=True)
class Damping:
    """What keeps noise from making the mapping swing.

    Args:
        lag: Depth of the pipeline: observations until a new mapping shows in the times.
        window: Fewest measurements of each trainer and stage to act on.
        history: Measurements that count, at the most.
        worth: The CPU trainers are kept if they shorten an iteration by more than this.
        doubtful: If by less than this, accelerators alone are tried for ``trial`` iterations (only where
            :attr:`IterationTimes.iteration` is known: what the trainers cost one another shows in no stage).
        trial: Measurements of a trial, and before one.
        patience: Observations until CPU trainers that were taken out, or kept, are tried again; doubles each time.
    """

    lag: int = 2
    window: int = 3
    history: int = 100
    worth: float = 0.01
    doubtful: float = 1.0
    trial: int = 10
    patience: int = 200

    def __post_init__(self) -> None:
        if self.lag < 0 or not 1 <= self.window <= self.history or not 1 <= self.trial <= self.history:
            raise ValueError(f"lag must be >= 0, 1 <= window <= history, 1 <= trial <= history: {self}")
        if not (0 <= self.worth < 1 and self.doubtful >= 0 and self.patience >= 1):
            raise ValueError(f"worth must be in [0, 1), doubtful >= 0, patience >= 1: {self}")


@dataclass
class _Move:
    """A move that is judged by what is measured after it.

    Args:
        seconds: Of an iteration before, or of the slowest stage.
    """

    back: TaskMapping
    seconds: float
    stage: Stage

    def state(self) -> list[Any]:
        """Return it as plain lists and numbers."""
        return [self.back.to_dict(), self.seconds, self.stage]

    @classmethod
    def from_state(cls, state: Sequence[Any] | None) -> _Move | None:
        """Take back what :meth:`state` returned."""
        return None if state is None else cls(TaskMapping.from_dict(state[0]), float(state[1]), state[2])


class DynamicResourceManager:
    """Ease the slowest stage after each iteration (algorithm 1), the batch and the number of threads constant.

    A pure state machine: the same times lead to the same decisions.

    Args:
        mapping: The mapping to begin with.
        num_threads: CPU threads of all tasks; by default those of the mapping.
        damping: How carefully it acts.

    Raises:
        ValueError: The mapping's threads are not ``num_threads`` together.
    """

    def __init__(self, mapping: TaskMapping, num_threads: int | None = None, damping: Damping | None = None) -> None:
        if num_threads is not None and sum(mapping.threads) != num_threads:
            raise ValueError(f"the mapping has {sum(mapping.threads)} threads, but num_threads={num_threads}")
        self.mapping = mapping
        self.damping = damping or Damping()
        self.log: list[Decision] = [Decision(mapping, f"start with {mapping}", "start", 0, True)]
        """The decisions that changed the mapping, the start first."""
        self._number = 0
        self._in_flight: deque[TaskMapping] = deque([mapping], maxlen=self.damping.lag + 1)
        self._measured = Measurements(self.damping.history)
        self._iterations: deque[float] = deque(maxlen=self.damping.history)
        self._act_from = 0
        self._look_from = 0
        self._finding = ""
        self._moved: _Move | None = None
        self._blocked: set[Stage] = set()
        self._trial: _Move | None = None
        self._next_trial = 4 * (self.damping.lag + self.damping.window)
        self._patience = self.damping.patience
        self._hybrid = mapping

    def observe(self, times: IterationTimes) -> Decision:
        """Take in the times of one iteration and decide what to do from now on.

        Args:
            times: The iteration's times. Iterations with less than half the seeds do not count.

        Raises:
            ValueError: The times are not for these trainers.
        """
        self._number += 1
        old = self._in_flight[0]
        self._in_flight.append(self.mapping)
        reason = self._remember(times, old)
        decision = self._hold(reason) if isinstance(reason, str) else self._decide(reason)
        if decision.changed:
            self.mapping = self._in_flight[-1] = decision.mapping
            self._act_from = self._number + self.damping.lag + 1
            self._look_from = 0
            self._iterations.clear()
            self.log.append(decision)
        return decision

    def _remember(self, times: IterationTimes, mapping: TaskMapping) -> str | IterationTimes:
        """Add a measurement; return it, or why it does not count."""
        mapping.check(times)
        if times.seeds is not None and times.seeds != mapping.seeds:
            whole, part = mapping.total, sum(times.seeds)
            if part < whole / 2:
                return f"only {part} of {whole} seeds: does not count"
            seeds = tuple(max(1, round(n * whole / part)) if n else 0 for n in times.seeds)
            mapping, times = replace(mapping, seeds=seeds), times.scaled(whole / part)
        for index, (seconds, seeds_there) in enumerate(zip(times.trainers, mapping.seeds, strict=True)):
            if seeds_there and not seconds:
                return f"no time of trainer {index}, which has seeds: does not count"
        if self._number >= self._act_from and times.iteration is not None:
            self._iterations.append(times.iteration)
        changed = self._measured.add(mapping, times)
        if changed is not None:
            self._finding, self._look_from = f"{changed} runs at another speed", 0
            self._patience = self.damping.patience
            self._blocked.clear()
            if not self.mapping.cpu_seeds:
                self._next_trial = self._number
        return times

    def _decide(self, last: IterationTimes) -> Decision:
        damping, mapping = self.damping, self.mapping
        if self._number < self._act_from:
            return self._hold(f"wait {self._act_from - self._number} more for the last change to show")
        tried = self._number - self._act_from
        if self._trial is not None and tried < damping.trial:
            return self._hold(f"trial: {tried} of {damping.trial} measurements")
        measured = self._measured.fewest(mapping, last)
        if measured < damping.window:
            return self._hold(f"{measured} of {damping.window} measurements of this mapping")
        if self._number < self._look_from:
            return self._hold(self._finding)
        now = self._measured.estimate(mapping, last)
        if self._trial is not None:
            return self._judge(self._trial, now)
        undone = self._undo(now)
        if undone is not None:
            return undone
        remedy = find_remedy(now.stages)
        cause = f"{STAGE_NAMES[remedy.bottleneck]} is the slowest stage, {milliseconds(now.bottleneck)}"
        threshold = max(LEAST_GAIN, SURE / sqrt(measured))
        for action, target in self._remedies(now, remedy):
            if gain(now, target) > threshold:
                self._moved = _Move(mapping, now.bottleneck, remedy.bottleneck) if action == "balance_thread" else None
                return self._change(now, target, action, cause)
        trial = self._try_out(now, remedy.bottleneck)
        if trial is not None:
            return trial
        self._finding = f"{cause}; nothing would shorten it by {threshold:.1%}"
        self._look_from = self._number + min(max(measured // LOOK, 1), LOOK)
        return self._hold(self._finding)

    def _remedies(self, now: Estimate, remedy: Remedy) -> Iterator[tuple[str, TaskMapping]]:
        """Yield what to try against the slowest stage, the paper's remedy first.

        Where that gains nothing (no thread is left to move, say) the paper's algorithm would stand still: then the
        other one is next, with threads of whichever task gains most by it. Before they ask others for threads, CPU
        trainers are balanced among themselves.
        """
        mapping, slowest = now.mapping, remedy.bottleneck
        share = balance_sampling(now) if slowest.startswith("sample") else balance_work(now)
        if share.cpu_seeds and share.accelerator_seeds and slowest == "train_cpu":
            alone = accelerators_alone(now)
            together, single = now.under(share).times.propagation, now.under(alone).times.propagation
            if single <= together * (1 + self.damping.worth):
                yield "take_out", alone
        if slowest == "train_cpu":
            yield "balance_cpu_trainers", balance_work(now, range(mapping.cpu_trainers))
        if remedy.kind == "balance_work":
            yield "balance_work", share
        receiver = TAKES_OVER.get(slowest, slowest)
        if receiver not in self._blocked and (receiver != "train_cpu" or mapping.cpu_seeds):
            donors = [task for task in CPU_TASKS if task != receiver]
            moves = [target for donor in donors for target in balance_thread(now, donor, receiver)]
            if moves:
                yield "balance_thread", max(moves, key=lambda target: gain(now, target))
        if remedy.kind != "balance_work" and slowest != "load":
            yield "balance_work", share

    def _undo(self, now: Estimate) -> Decision | None:
        """Move threads back if they brought nothing, and none to that task until a speed changes."""
        moved, self._moved = self._moved, None
        if moved is None:
            return None
        seconds = now.stages.get(moved.stage, 0.0)
        if seconds < moved.seconds and now.bottleneck <= moved.seconds * (1 + SLOWER):
            return None
        changes = [after - before for before, after in zip(moved.back.threads, now.mapping.threads, strict=True)]
        self._blocked.add(CPU_TASKS[changes.index(max(changes))])
        cause = f"{STAGE_NAMES[moved.stage]} takes {milliseconds(seconds)}, before {milliseconds(moved.seconds)}"
        if seconds < moved.seconds:
            cause = f"{cause}, but the slowest stage {milliseconds(now.bottleneck)}"
        return self._change(now, moved.back, "undo", cause)

    def _try_out(self, now: Estimate, slowest: Stage) -> Decision | None:
        """Begin a trial: accelerators alone, or CPU trainers that are out."""
        mapping = self.mapping
        if self._number < self._next_trial or not mapping.cpu_trainers or not mapping.accelerator_seeds:
            return None
        seconds = median(self._iterations) if self._iterations else now.bottleneck
        if not mapping.cpu_seeds:
            if slowest != "accelerator" or not self._hybrid.cpu_seeds:
                return None
            self._trial = _Move(mapping, seconds, slowest)
            self._measured.forget_hybrid()
            cause = f"the CPU trainers on probation, against {milliseconds(seconds)} without them"
            return self._change(now, self._hybrid, "bring_back", cause)
        alone = accelerators_alone(now)
        lost = now.under(alone).bottleneck / now.bottleneck - 1
        if len(self._iterations) < self.damping.trial or lost >= self.damping.doubtful:
            return None
        self._trial = _Move(mapping, seconds, slowest)
        return self._change(
            now, alone, "take_out", f"a trial without the CPU trainers, against {milliseconds(seconds)} with them"
        )

    def _judge(self, trial: _Move, now: Estimate) -> Decision:
        """End a trial: all stays as it is tried out if that is better."""
        self._trial = None
        seconds = median(self._iterations) if self._iterations else now.bottleneck
        hybrid = self.mapping.cpu_seeds > 0
        if hybrid:  # its split may be out of date: what counts is what the best one promises
            seconds += min(0.0, now.under(balance_work(now)).bottleneck - now.bottleneck)
        with_cpu, without = (seconds, trial.seconds) if hybrid else (trial.seconds, seconds)
        helps = with_cpu < without * (1 - self.damping.worth)
        cause = f"{milliseconds(with_cpu)} with the CPU trainers, {milliseconds(without)} without"
        self._put_off()
        if helps == hybrid:
            return self._hold(f"{cause}: it stays so")
        return self._change(now, trial.back, "bring_back" if helps else "take_out", cause)

    def _put_off(self) -> None:
        self._next_trial = self._number + self._patience
        self._patience *= 2

    def _change(self, now: Estimate, mapping: TaskMapping, action: str, cause: str) -> Decision:
        text = f"{cause}; {difference(now.mapping, mapping)}"
        if action.startswith("balance"):
            text = f"{text}, predicted {milliseconds(now.under(mapping).bottleneck)}"
        if action == "take_out" and now.mapping.cpu_seeds:
            self._hybrid = now.mapping
            self._put_off()
        return Decision(mapping, text, action, self._number, True)

    def _hold(self, explanation: str) -> Decision:
        return Decision(self.mapping, explanation, "hold", self._number)

    def state_dict(self) -> dict[str, Any]:
        """Return all that its next decisions depend on, as plain lists, dicts and numbers."""
        return {
            "mapping": self.mapping.to_dict(),
            "hybrid": self._hybrid.to_dict(),
            "in_flight": [mapping.to_dict() for mapping in self._in_flight],
            "history": self._measured.state(),
            "iterations": list(self._iterations),
            "log": [decision.to_json() for decision in self.log],
            "number": self._number,
            "act_from": self._act_from,
            "look_from": self._look_from,
            "finding": self._finding,
            "next_trial": self._next_trial,
            "patience": self._patience,
            "moved": None if self._moved is None else self._moved.state(),
            "blocked": sorted(self._blocked),
            "trial": None if self._trial is None else self._trial.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: It belongs to other trainers or another batch size.
        """
        mapping = TaskMapping.from_dict(state["mapping"])
        self.mapping.check_same_work(mapping)
        self.mapping, self._hybrid = mapping, TaskMapping.from_dict(state["hybrid"])
        self._in_flight.clear()
        self._in_flight.extend(map(TaskMapping.from_dict, state["in_flight"]))
        self._measured.load_state(state["history"])
        self._iterations.clear()
        self._iterations.extend(state["iterations"])
        self.log = read_decisions(state["log"])
        self._number, self._act_from = state["number"], state["act_from"]
        self._finding, self._look_from = state["finding"], state["look_from"]
        self._next_trial, self._patience = state["next_trial"], state["patience"]
        self._moved, self._trial = _Move.from_state(state["moved"]), _Move.from_state(state["trial"])
        self._blocked = set(state["blocked"])
