"""Which processor prepares how many mini-batches, and how far ahead (MorphGL, section 4.2.2)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil, exp, inf, isfinite, sqrt
from random import Random
from statistics import fmean, pstdev

from lightning_gnn.collective.plan import STAGES, CollectivePlan, Mode, StageTimes
from lightning_gnn.collective.simulate import Durations, drawn_durations, makespan, simulate_dual_buffer

SIMULATED_BATCHES = 400
"""Of a longer epoch only so many are simulated: the others would go on like them."""
ROUNDS = 200
"""So many plans are tried near the best ones, beside a few to begin with."""
LEADERS = 6
"""So many of the best plans are tried to improve on."""
STEP = 0.25
"""Standard deviation of the logarithm by which a size is changed."""
CHANGED = 0.2
"""Probability that a backup is taken away or added."""
HOPELESS = 0.01
"""A plan that takes so much longer than the leaders in one epoch, or half as much in two, is not tried in others."""
CANDIDATES, FINALISTS = 12, 6
"""So many of the best plans are compared on new epochs at last, and so many of those on more of them."""
DRAWN, DRAWN_AGAIN, DRAWN_AT_LAST = 4, 4, 32
"""Epochs that each plan is tried on while looking for one, and others for the candidates and for the finalists."""
HOST_PER_WORKER = 4
"""The host holds at most so many mini-batches for each worker, or twice as many as the device, if that is more: what
more could gain is little, and all of it is page-locked."""
LEAST_GAIN = 0.003
"""A plan for both processors must promise so much over the better one alone, and twice the standard error of that."""

WORTH_CHANGING = 0.05
"""A plan must promise so much over the one in force, measured anew, to take its place."""


def relaxed_time(x: float, times: StageTimes) -> float:
    """Return C'(x) / n, seconds per mini-batch with unlimited buffers and divisible work.

    Equation 6 with the terms that the scan lost: of x mini-batches of the GPU and one of the CPU, the longest of what
    PCIe, the GPU and the CPU have to do.

    Args:
        x: Mini-batches of the GPU for every one of the CPU; infinite: the GPU prepares all.
    """
    if not x >= 0:
        raise ValueError(f"x must be at least 0, but is {x}")
    on_gpu = 1.0 if x == inf else x / (1 + x)
    on_cpu = 0.0 if x == inf else 1 / (1 + x)
    pcie = on_gpu * times.gpu + on_cpu * times.dma.mean
    gpu = on_gpu * times.gpu + times.model.mean
    return max(pcie, gpu, on_cpu * times.cpu)


def initial_ratio(times: StageTimes) -> float:
    """Return the x that minimises :func:`relaxed_time`, the smallest of several.

    Each of its three terms rises or falls throughout, so the minimum is at 0 or where two of them cross.
    """
    cpu, gpu, dma, model = times.cpu, times.gpu, times.dma.mean, times.model.mean
    candidates = [0.0, (cpu - model) / (gpu + model), dma / model - 1]
    if gpu > 0:
        candidates.append((cpu - dma) / gpu)
    possible = sorted(x for x in candidates if x >= 0 and isfinite(x))
    return min(possible, key=lambda x: relaxed_time(x, times))


class Dispatcher:
    """Looks for the plan with the shortest simulated epoch.

    Equation 6 tells the best that any schedule could reach, and with it how long a CPU worker takes in mini-batches
    trained: so far ahead the CPU has to begin, and a little more where durations vary. From there it goes on to plans
    nearby, with other buffers and another lead, from the best so far, on epochs whose durations are drawn with the
    measured spreads, the same for all plans. The best few and each processor alone are compared on further draws, for
    of many plans one is best by luck; one for both processors must win by more than such luck explains. What is tried
    is drawn, but the same each time.

    Args:
        times: What the stages take.
        gpu_buffer_size: The most mini-batches that the GPU may prepare in a row (``gbs``).
        num_batches: Mini-batches of an epoch; of more than :data:`SIMULATED_BATCHES` that many are simulated, and the
            predicted seconds are scaled.

    Raises:
        ValueError: There is no mini-batch, or no place in device memory.
    """

    def __init__(self, times: StageTimes, gpu_buffer_size: int = 10, *, num_batches: int) -> None:
        if num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, but is {num_batches}: there is nothing to plan for")
        if gpu_buffer_size < 1:
            raise ValueError(f"gpu_buffer_size must be at least 1, but is {gpu_buffer_size}")
        self.times = times
        self.gpu_buffer_size = gpu_buffer_size
        self.num_batches = num_batches
        self._simulated = min(num_batches, SIMULATED_BATCHES)
        self._varies = any(getattr(times, stage).spread for stage in STAGES)
        self._seen: dict[CollectivePlan, float] = {}
        self._drawn: dict[int, Durations] = {}
        self._makespans_of: dict[tuple[CollectivePlan, int], float] = {}

    def plan(self, kept: CollectivePlan | None = None) -> CollectivePlan:
        """Return the plan with the shortest predicted epoch.

        Args:
            kept: The plan in force, which stays, with new predictions, unless another one is clearly better.
        """
        self._seen = {}
        ratio = initial_ratio(self.times)
        alone = {"cpu": self._plan("cpu", self._depth), "gpu": self._plan("gpu", 0)}
        for plan in alone.values():
            self._try(plan)
        if self.num_batches > 1:
            self._search(ratio)
        again = {plan: fmean(self._makespans(plan, 1 + DRAWN, DRAWN_AGAIN)) for plan in self._best(CANDIDATES)}
        candidates = [*sorted(again, key=lambda plan: again[plan])[:FINALISTS], *alone.values()]
        if kept is not None:
            kept = replace(kept.decisions, times=self.times)
            candidates.append(kept)
        tried = {plan: self._makespans(plan, 1 + DRAWN, DRAWN_AT_LAST) for plan in candidates}
        means = {plan: fmean(makespans) for plan, makespans in tried.items()}
        simple = min(alone.values(), key=lambda plan: means[plan])
        chosen = min(means, key=lambda plan: means[plan])
        gains = [one - other for one, other in zip(tried[simple], tried[chosen], strict=True)]
        if means[simple] - means[chosen] <= max(LEAST_GAIN * means[simple], 2 * pstdev(gains) / sqrt(len(gains))):
            chosen = simple
        if kept is not None and means[kept] <= (1 + WORTH_CHANGING) * means[chosen]:
            chosen = kept
        scale = self.num_batches / self._simulated
        return replace(
            chosen,
            gpu_buffer_size=chosen.gpu_buffer_size if chosen.mode == "collective" else self.gpu_buffer_size,
            cpu_part=self._cpu_part(chosen),
            num_batches=self.num_batches,
            ratio=ratio,
            epoch_s={
                "collective": means[chosen] * scale,
                **{mode: means[plan] * scale for mode, plan in alone.items()},
            },
            rounds=len(self._seen),
        )

    def _cpu_part(self, plan: CollectivePlan) -> float:
        simulation = simulate_dual_buffer(self.times, plan, self._simulated, durations=self._durations(0))
        return simulation.on_cpu / self._simulated

    @property
    def _depth(self) -> int:
        return max(self.gpu_buffer_size, 2 * self.times.cpu_workers)

    def _search(self, ratio: float) -> None:
        """Try beginnings, and then plans near the best so far, by chance but the same each time."""
        source = Random(0)
        for plan in self._beginnings(ratio):
            self._try(plan)
        for _ in range(ROUNDS):
            self._try(self._near(source.choice(self._best(LEADERS)), source))

    def _beginnings(self, ratio: float) -> list[CollectivePlan]:
        """Where to begin: by how long a worker takes, and, where the CPU must not prepare all it could, by shares."""
        limit, workers = self.gpu_buffer_size, self.times.cpu_workers
        working = self.times.cpu_batching
        taken = (working.mean + 2 * working.spread) / relaxed_time(ratio, self.times)  # in mini-batches trained
        plans = [
            self._plan("collective", 2 + workers // 4, min(limit, 2), 2 + taken),
            self._plan("collective", 1 + workers, limit, 2 + taken),
        ]
        share = 1 / (1 + ratio)
        lead = max(limit / max(1e-3, 1 - share), workers / share)
        plans.append(self._plan("collective", lead * share - workers + 1, limit, lead))
        # In turns: the CPU begins where the GPU alone will be once the first workers are ready.
        alone = (working.mean + working.spread) / (self.times.gpu + self.times.model.mean)
        # The CPU prepares all but the first: the GPU helps until then, and where a worker is late.
        for begin, backup in product((alone, 0.7 * alone), (True, False)):
            plans.append(self._plan("collective", self._depth, limit, 1, begin=begin, backup=backup))
        for on_gpu in {limit, -(-limit // 2)}:
            row = on_gpu * share / max(1e-3, 1 - share)
            for lead in (alone, taken):
                plans += [self._plan("collective", row, on_gpu, 2 + lead, row, begin) for begin in (0, 1.5 * lead)]
        return plans + self._with_stocks(share, taken)

    def _with_stocks(self, share: float, taken: float) -> list[CollectivePlan]:
        """Where to begin with room on the host for what the workers finish while the GPU alone comes forward."""
        limit, workers, model = self.gpu_buffer_size, self.times.cpu_workers, self.times.model.mean
        plans = []
        for on_gpu in {limit, -(-limit // 2)}:
            row = on_gpu * share / max(1e-3, 1 - share)
            plans.append(self._plan("collective", max(2 * workers, row), on_gpu, taken, row, 1.1 * taken))
        behind = self.times.cpu - model
        if behind > 0 and self._simulated == self.num_batches:
            # The epoch as one turn: the GPU begins, and what the CPU has prepared by then, and later, is trained last.
            first = self.num_batches * behind / (behind + self.times.gpu + model)
            rest = self.num_batches - first
            plans += [self._plan("collective", rest, limit, taken, rest, part * first) for part in (0.9, 1.1)]
        return plans

    def _near(self, plan: CollectivePlan, source: Random) -> CollectivePlan:
        """Return a plan some of whose sizes differ."""

        def near(size: float) -> float:
            return size if source.random() < 0.5 else size * exp(source.gauss(0, STEP)) + source.choice((-1, 0, 1))

        begin = max(plan.begin, plan.ahead)
        sizes = plan.cpu_buffer_size, plan.gpu_buffer_size, plan.ahead, plan.row, begin
        cover = plan.cover + source.choice((-1, 0, 0, 1)) if self._cover > 1 else 1
        backup = plan.backup != (source.random() < CHANGED)
        return self._plan("collective", *(near(size) if size else 0 for size in sizes), cover=cover, backup=backup)

    @property
    def _cover(self) -> int:
        """Trainings that a transfer takes, and one where they are of one length: no transfer is longer than that."""
        return ceil(self.times.dma.mean / self.times.model.mean - 1e-9) or 1

    def _plan(
        self,
        mode: Mode,
        on_cpu: float,
        on_gpu: float = 1,
        lead: float = 0,
        row: float = 0,
        begin: float = 0,
        *,
        cover: int | None = None,
        backup: bool = True,
    ) -> CollectivePlan:
        def whole(size: float, most: int = self._simulated) -> int:
            return int(max(1, min(most, round(size))))

        if mode != "collective":
            return CollectivePlan(mode, whole(on_gpu), int(on_cpu), times=self.times)
        ahead, first = whole(lead), whole(begin)
        most_on_host = max(2 * self.gpu_buffer_size, HOST_PER_WORKER * self.times.cpu_workers)
        return CollectivePlan(
            mode,
            whole(on_gpu, self.gpu_buffer_size),
            whole(on_cpu, min(self._simulated, most_on_host)),
            lead=ahead,
            row=whole(row) if row else 0,
            cover=max(1, self._cover if cover is None else cover),
            backup=backup,
            begin=first if first > ahead else 0,
            times=self.times,
        )

    def _try(self, plan: CollectivePlan) -> None:
        if plan in self._seen:
            return
        leaders = self._best(LEADERS)
        took = to_beat = 0.0
        for number, seed in enumerate(self._seeds(1, DRAWN), 1):
            took += self._makespan(plan, seed)
            if len(leaders) == LEADERS:
                to_beat += self._makespan(leaders[-1], seed)
                if took > (1 + HOPELESS / number) * to_beat:
                    self._seen[plan] = inf
                    return
        self._seen[plan] = took / number

    def _best(self, count: int) -> list[CollectivePlan]:
        """Return the best plans; of those that come to the same epochs the one with the smallest host buffer."""
        best: dict[float, CollectivePlan] = {}
        for plan in sorted(self._seen, key=lambda plan: (self._seen[plan], plan.cpu_buffer_size)):
            best.setdefault(self._seen[plan], plan)
            if len(best) == count:
                break
        return list(best.values())

    def _makespans(self, plan: CollectivePlan, first: int, count: int) -> list[float]:
        return [self._makespan(plan, seed) for seed in self._seeds(first, count)]

    def _seeds(self, first: int, count: int) -> range:
        return range(first, first + (count if self._varies else 1))

    def _makespan(self, plan: CollectivePlan, seed: int) -> float:
        if (plan, seed) not in self._makespans_of:
            seconds = makespan(self.times, plan, self._simulated, self._durations(seed))
            self._makespans_of[plan, seed] = seconds
        return self._makespans_of[plan, seed]

    def _durations(self, seed: int) -> Durations:
        if seed not in self._drawn:
            self._drawn[seed] = drawn_durations(self.times, self._simulated, seed)
        return self._drawn[seed]
