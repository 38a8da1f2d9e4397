"""Dynamic resource management as HyScale-GNN publishes it: algorithm 1 to the letter, after each iteration."""

from __future__ import annotations

from dataclasses import replace

from lightning_gnn.hyscale.resource_manager.decisions import STAGE_NAMES, Decision, Recorder, difference, milliseconds
from lightning_gnn.hyscale.resource_manager.mapping import CPU_TASKS, IterationTimes, Stage, TaskMapping
from lightning_gnn.hyscale.resource_manager.resources import LEAST_SHARE, find_remedy

STEP = 1 / 32
"""Part of an iteration's seeds, or of the sampling, that one ``balance_work`` moves."""


class PublishedResourceManager(Recorder):
    """Ease the slowest stage of the last iteration by one step: algorithm 1, lines 1 to 32, and nothing besides."""

    # What the paper leaves open is read so. How far (section IV-A): a 32nd of the iteration's seeds or of the sampling,
    # and one thread; no dead band. When: after every iteration, by its times alone. Who, of several: the slowest of the
    # bottleneck's kind gives seeds to the fastest of the other kind, and keeps one (lines 14, 27, 29). From whom (lines
    # 23, 31): from the fastest CPU task, as in line 16; each task and each CPU trainer keeps a thread. A remedy that
    # finds nothing to move changes nothing.

    def observe(self, times: IterationTimes) -> Decision:
        """Take in the times of one iteration and decide what to do from now on."""
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
        cause = f"{STAGE_NAMES[remedy.bottleneck]} is the slowest stage, {milliseconds(stages[remedy.bottleneck])}"
        if target == self.mapping:
            return self._hold(f"{cause}; there is nothing to move")
        return self._change(target, remedy.kind, f"{cause}; {difference(self.mapping, target)}")

    def _balance_work(self, times: IterationTimes, bottleneck: Stage) -> TaskMapping:
        """Move seeds from the slowest trainer of the bottleneck's kind to the fastest of the other kind."""
        mapping, cpu = self.mapping, self.mapping.cpu_trainers
        kinds = [range(cpu), range(cpu, len(mapping.seeds))]
        giving, taking = kinds if bottleneck == "train_cpu" else reversed(kinds)
        seconds = [time or 0.0 for time in times.trainers]
        givers = [index for index in giving if mapping.seeds[index] > 1]
        if not givers or not taking:
            return mapping
        source, to = max(givers, key=seconds.__getitem__), min(taking, key=seconds.__getitem__)
        seeds = list(mapping.seeds)
        moved = min(max(1, round(STEP * mapping.total)), seeds[source] - 1)
        seeds[source] -= moved
        seeds[to] += moved
        return replace(mapping, seeds=tuple(seeds))

    def _balance_sampling(self, bottleneck: Stage) -> TaskMapping:
        """Move a part of the sampling away from where it takes longer."""
        share = self.mapping.accelerator_sampling
        if not share:
            return self.mapping
        share += STEP if bottleneck == "sample_cpu" else -STEP
        return replace(self.mapping, accelerator_sampling=min(max(share, LEAST_SHARE), 1 - LEAST_SHARE))

    def _balance_thread(self, donor: Stage, receiver: Stage) -> TaskMapping:
        """Move a thread, if the donor has one to spare."""
        mapping = self.mapping
        threads = list(mapping.threads)
        least = max(1, mapping.cpu_trainers) if donor == "train_cpu" else 1
        if threads[CPU_TASKS.index(donor)] <= least:
            return mapping
        threads[CPU_TASKS.index(donor)] -= 1
        threads[CPU_TASKS.index(receiver)] += 1
        return replace(mapping, threads=(threads[0], threads[1], threads[2]))
