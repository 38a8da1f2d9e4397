"""Which processor prepares how many mini-batches, and how far ahead (MorphGL, section 4.2.2)."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf, isfinite, sqrt
from statistics import fmean, pstdev

from lightning_gnn.collective.plan import STAGES, CollectivePlan, Mode, StageTimes
from lightning_gnn.collective.simulate import Durations, Simulation, drawn_durations, simulate_dual_buffer

SIMULATED_BATCHES = 400
"""Of a longer epoch only so many are simulated: the others would go on like them."""
ROUNDS = 64
"""At most so many plans are tried."""
DRAWN, DRAWN_AGAIN = 2, 6
"""Epochs that each plan is tried on while looking for one, and others on which the best ones are compared."""
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
        times: What the stages take.

    Raises:
        ValueError: ``x`` is negative.
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
    nearby, with other buffers and another lead, as long as one is better, on epochs whose durations are drawn with the
    measured spreads, the same for all plans. The best few and each processor alone are compared on further draws, for
    of many plans one is best by luck; one for both processors must win by more than such luck explains.

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
        candidates = [*self._best(3), *alone.values()]
        if kept is not None:
            kept = CollectivePlan(
                kept.mode, kept.gpu_buffer_size, kept.cpu_buffer_size, lead=kept.lead, times=self.times
            )
            candidates.append(kept)
        tried = {plan: self._makespans(plan, 1 + DRAWN, DRAWN_AGAIN) for plan in candidates}
        means = {plan: fmean(makespans) for plan, makespans in tried.items()}
        simple = min(alone.values(), key=lambda plan: means[plan])
        chosen = min(means, key=lambda plan: means[plan])
        gains = [one - other for one, other in zip(tried[simple], tried[chosen], strict=True)]
        if means[simple] - means[chosen] <= max(LEAST_GAIN * means[simple], 2 * pstdev(gains) / sqrt(len(gains))):
            chosen = simple
        if kept is not None and means[kept] <= (1 + WORTH_CHANGING) * means[chosen]:
            chosen = kept
        scale = self.num_batches / self._simulated
        on_gpu, on_cpu = chosen.gpu_buffer_size, chosen.cpu_buffer_size
        return CollectivePlan(
            chosen.mode,
            on_gpu if chosen.mode == "collective" else self.gpu_buffer_size,
            on_cpu,
            lead=chosen.lead,
            cpu_part=self._simulate(chosen, 0).on_cpu / self._simulated,
            num_batches=self.num_batches,
            ratio=ratio,
            times=self.times,
            epoch_s={
                "collective": means[chosen] * scale,
                **{mode: means[plan] * scale for mode, plan in alone.items()},
            },
            rounds=len(self._seen),
        )

    @property
    def _depth(self) -> int:
        return max(self.gpu_buffer_size, 2 * self.times.cpu_workers)

    def _search(self, ratio: float) -> None:
        for best in sorted(self._beginnings(ratio), key=self._try):
            while best != (best := next((plan for plan in self._near(best) if self._better(plan, best)), best)):
                pass

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
        return [*plans, self._plan("collective", lead * share - workers + 1, limit, lead)]

    def _near(self, plan: CollectivePlan) -> Iterator[CollectivePlan]:
        on_gpu, on_cpu, lead = plan.gpu_buffer_size, plan.cpu_buffer_size, plan.ahead
        for more in (1.3 * lead + 1, lead / 1.3 - 1, lead + 1, lead - 1):
            yield self._plan("collective", on_cpu, on_gpu, more)
        for factor in (2, 0.5):
            yield self._plan("collective", factor * on_cpu, on_gpu, lead)
            yield self._plan("collective", on_cpu, int(factor * on_gpu), lead)
            yield self._plan("collective", factor * on_cpu, on_gpu, lead * (1.5 if factor > 1 else 1 / 1.5))

    def _plan(self, mode: Mode, on_cpu: float, on_gpu: int = 1, lead: float = 0.0) -> CollectivePlan:
        most = self._simulated
        if mode != "collective":
            return CollectivePlan(mode, on_gpu, int(on_cpu), times=self.times)
        on_gpu = max(1, min(self.gpu_buffer_size, on_gpu))
        on_cpu, lead = (int(max(1, min(most, ceil(size)))) for size in (on_cpu, lead))
        return CollectivePlan(mode, on_gpu, on_cpu, lead=lead, times=self.times)

    def _better(self, plan: CollectivePlan, than: CollectivePlan) -> bool:
        if plan in self._seen or len(self._seen) >= ROUNDS:
            return False
        return self._try(plan) < self._seen[than] * (1 - 1e-4)

    def _try(self, plan: CollectivePlan) -> float:
        if plan not in self._seen:
            self._seen[plan] = fmean(self._makespans(plan, 1, DRAWN))
        return self._seen[plan]

    def _best(self, count: int) -> list[CollectivePlan]:
        return sorted(self._seen, key=lambda plan: self._seen[plan])[:count]

    def _makespans(self, plan: CollectivePlan, first: int, count: int) -> list[float]:
        return [self._simulate(plan, seed).makespan for seed in range(first, first + (count if self._varies else 1))]

    def _simulate(self, plan: CollectivePlan, seed: int) -> Simulation:
        if self._varies and seed not in self._drawn:
            self._drawn[seed] = drawn_durations(self.times, self._simulated, seed)
        durations = self._drawn[seed] if self._varies else None
        return simulate_dual_buffer(self.times, plan, self._simulated, durations=durations)
