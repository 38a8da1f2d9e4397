"""Dynamic resource management exactly as published in HyScale-GNN: algorithm 1 after each iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

from lightning_gnn.hyscale.costs import CPU_TASKS, STAGE_NAMES, STAGES, IterationTimes, Stage, TaskMapping
from lightning_gnn.hyscale.resource_manager.decisions import Decision, Recorder, describe_change, format_ms
from lightning_gnn.hyscale.resource_manager.resources import MIN_SAMPLING_SHARE

STEP_FRACTION = 1 / 32
"""Fraction of an iteration's seeds, or of the sampling, that one ``balance_work`` moves."""


class Remedy(NamedTuple):
    """Action that algorithm 1 selects."""

    # ``balance_work`` redistributes work between the processors of both stages; ``balance_thread`` moves threads from
    # the first to the second stage; ``none`` if no other CPU task can donate threads
    kind: Literal["balance_work", "balance_thread", "none"]
    first: Stage
    second: Stage
    bottleneck: Stage


def find_remedy(times: Mapping[Stage, float]) -> Remedy:
    """Return the remedy of algorithm 1 for the slowest stage."""
    # Lines 23 and 31 of the paper take threads from the fastest stage, which may run on an accelerator: here they take
    # them from the fastest CPU task. Of two equal times, the stage listed first in line 2 counts as slower.
    if not times:
        raise ValueError("no stage times to find a bottleneck in")
    by_time = sorted((stage for stage in STAGES if stage in times), key=lambda stage: -times[stage])  # line 2
    bottleneck, fastest = by_time[0], by_time[-1]
    second = by_time[-2] if len(by_time) > 1 else fastest
    samplers: tuple[Stage, Stage] = ("sample_cpu", "sample_accelerator")
    trainers: tuple[Stage, Stage] = ("train_cpu", "accelerator")

    if bottleneck == "sample_accelerator":  # lines 11 and 12
        return Remedy("balance_work", *samplers, bottleneck)
    if bottleneck == "accelerator":  # lines 13 and 14
        return Remedy("balance_work", *trainers, bottleneck)
    if bottleneck == "sample_cpu" and _is_ahead("sample_accelerator", "accelerator", fastest, second):  # lines 18 to 21
        return Remedy("balance_work", *samplers, bottleneck)
    if bottleneck == "train_cpu" and _is_ahead("accelerator", "sample_accelerator", fastest, second):  # lines 26 to 29
        return Remedy("balance_work", *trainers, bottleneck)
    fastest_cpu_task = [stage for stage in by_time if stage in CPU_TASKS][-1]  # lines 7 and 8
    kind: Literal["balance_thread", "none"] = "none" if fastest_cpu_task == bottleneck else "balance_thread"
    return Remedy(kind, fastest_cpu_task, bottleneck, bottleneck)  # lines 16, 23, 31


def _is_ahead(partner: Stage, other: Stage, fastest: Stage, second: Stage) -> bool:
    """Whether the accelerator's counterpart is the fastest stage, or second to the accelerator's other stage."""
    return fastest == partner or (fastest == other and second == partner)


class PublishedResourceManager(Recorder):
    """Relieve the slowest stage of the last iteration by one step: exactly algorithm 1, lines 1 to 32."""

    # Interpretation of points that the paper leaves open. Step size (section IV-A): 1/32 of the iteration's seeds or of
    # the sampling, or one thread, without a dead band. Frequency: after every iteration, using only its times. Trainers
    # (lines 14, 27, 29): the slowest one of the bottleneck's type gives seeds to the fastest one of the other type, and
    # retains at least one. Donor of threads (lines 23, 31): the fastest CPU task, as in line 16; each task and each CPU
    # trainer retains one thread. A remedy without anything to move leaves the mapping unchanged.

    def observe(self, times: IterationTimes) -> Decision:
        """Process the times of one iteration and return a decision."""
        self._number += 1
        self.mapping.check(times)
        stages = times.stages()
        if not stages:
            return self._hold("no times")
        remedy = find_remedy(stages)
        target = self.mapping
        if remedy.kind == "balance_thread":
            target = self._balance_thread(remedy.first, remedy.second)
        elif remedy.kind == "balance_work" and remedy.first == "sample_cpu":
            target = self._balance_sampling(remedy.bottleneck)
        elif remedy.kind == "balance_work":
            target = self._balance_work(times, remedy.bottleneck)
        cause = f"{STAGE_NAMES[remedy.bottleneck]} is the slowest stage, {format_ms(stages[remedy.bottleneck])}"
        if target == self.mapping:
            return self._hold(f"{cause}; nothing can be moved")
        return self._change(target, remedy.kind, f"{cause}; {describe_change(self.mapping, target)}")

    def _balance_work(self, times: IterationTimes, bottleneck: Stage) -> TaskMapping:
        """Move seeds from the slowest trainer of the bottleneck's type to the fastest of the other type."""
        mapping, cpu = self.mapping, self.mapping.cpu_trainers
        groups = [range(cpu), range(cpu, len(mapping.seeds))]
        slow_group, fast_group = groups if bottleneck == "train_cpu" else reversed(groups)
        seconds = [time or 0.0 for time in times.trainers]
        donors = [index for index in slow_group if mapping.seeds[index] > 1]
        if not donors or not fast_group:
            return mapping
        donor, receiver = max(donors, key=seconds.__getitem__), min(fast_group, key=seconds.__getitem__)
        seeds = list(mapping.seeds)
        moved = min(max(1, round(STEP_FRACTION * mapping.total)), seeds[donor] - 1)
        seeds[donor] -= moved
        seeds[receiver] += moved
        return replace(mapping, seeds=tuple(seeds))

    def _balance_sampling(self, bottleneck: Stage) -> TaskMapping:
        """Move a step of the sampling away from the bottleneck."""
        share = self.mapping.accelerator_sampling
        if not share:
            return self.mapping
        share += STEP_FRACTION if bottleneck == "sample_cpu" else -STEP_FRACTION
        return replace(self.mapping, accelerator_sampling=min(max(share, MIN_SAMPLING_SHARE), 1 - MIN_SAMPLING_SHARE))

    def _balance_thread(self, donor: Stage, receiver: Stage) -> TaskMapping:
        """Move one thread if the donor has a spare one."""
        mapping = self.mapping
        threads = list(mapping.threads)
        least = max(1, mapping.cpu_trainers) if donor == "train_cpu" else 1
        if threads[CPU_TASKS.index(donor)] <= least:
            return mapping
        threads[CPU_TASKS.index(donor)] -= 1
        threads[CPU_TASKS.index(receiver)] += 1
        return replace(mapping, threads=(threads[0], threads[1], threads[2]))
