"""Costs and task mappings of a node: one form for predicted, measured and simulated nodes.

A :class:`TaskMapping` divides an iteration's work. :class:`NodeCosts` holds what each stage costs, whether from the
performance model, from :class:`Measurements` or from a profile. :func:`stages` and :func:`iteration` combine both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import compress, pairwise
from math import inf
from statistics import median
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

Stage = Literal["sample_cpu", "sample_accelerator", "load", "train_cpu", "accelerator"]
"""Stages that algorithm 1 of HyScale-GNN sorts; ``accelerator`` combines Data Transfer and accelerator training."""

STAGES: tuple[Stage, ...] = ("sample_cpu", "sample_accelerator", "load", "train_cpu", "accelerator")
"""All stages, in the order of line 2 of algorithm 1."""

CPU_TASKS: tuple[Stage, ...] = ("sample_cpu", "load", "train_cpu")
"""Stages that run on CPU threads, in the order of :attr:`TaskMapping.threads`."""

STAGE_NAMES: dict[Stage, str] = {
    "sample_cpu": "Sampling on the CPU",
    "sample_accelerator": "Sampling on accelerators",
    "load": "Feature Loading",
    "train_cpu": "training on the CPU",
    "accelerator": "transfer to and training on accelerators",
}
"""Names of the stages in messages."""

Threads = tuple[int, int, int]
"""CPU threads of Sampling, Feature Loading and all CPU trainers."""

_GOLDEN_RATIO = (5**0.5 - 1) / 2
HISTORY = 40
"""Measurements used per task."""
CHANGE = 1.3
"""Ratio of three times in a row to the earlier ones of the same work, from which a task's speed has changed."""
_RUN = 3
RIDGE = 0.1
"""Weight of the prior that a task has no overhead, in measurements: (relative noise 0.1 / expected overhead 1/3)^2."""
MIN_SLOPE_FRACTION = 0.25
"""Minimum fraction of a task's time that is assumed to grow with its work, whatever noisy fits indicate."""


@dataclass(frozen=True)
class TaskMapping:
    """Assignment of the work and the CPU threads of one node (section III-B of HyScale-GNN)."""

    # seeds of each trainer in one iteration, CPU trainers first; 0 excludes a trainer. Their sum never changes.
    seeds: tuple[int, ...]
    cpu_trainers: int = 0
    # CPU threads of Sampling, Feature Loading and all CPU trainers. Their sum never changes.
    threads: tuple[int, int, int] = (1, 1, 1)
    # fraction of the sampling done by accelerators, 0 to 1; with ``buffers``, of the whole preparation, as predicted
    accelerator_sampling: float = 0.0
    # gbs, cbs, lead and row of collective batching on each accelerator; None: HyScale-GNN's stages prepare everything
    buffers: tuple[int, int, int, int] | None = None

    def __post_init__(self) -> None:
        if not self.seeds or sum(self.seeds) < 1 or min(self.seeds) < 0:
            raise ValueError(f"seeds must be at least one number per trainer, none negative, not all 0: {self.seeds}")
        if not 0 <= self.cpu_trainers <= len(self.seeds):
            raise ValueError(f"cpu_trainers={self.cpu_trainers}, but seeds has {len(self.seeds)} entries")
        if len(self.threads) != 3 or min(self.threads[:2]) < 1 or self.threads[2] < min(1, self.cpu_trainers):
            raise ValueError(
                f"threads must be three numbers (Sampling, Feature Loading, CPU trainers), each at least 1 if the task "
                f"exists, but they are {self.threads}"
            )
        if not 0 <= self.accelerator_sampling <= 1:
            raise ValueError(f"accelerator_sampling must be between 0 and 1, but is {self.accelerator_sampling}")

    @property
    def total(self) -> int:
        """Total seeds of all trainers."""
        return sum(self.seeds)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each trainer's fraction of the seeds."""
        return tuple(seeds / self.total for seeds in self.seeds)

    @property
    def cpu_seeds(self) -> int:
        """Total seeds of the CPU trainers."""
        return sum(self.seeds[: self.cpu_trainers])

    @property
    def accelerator_seeds(self) -> int:
        """Total seeds of the accelerators."""
        return sum(self.seeds[self.cpu_trainers :])

    @property
    def accelerator_fraction(self) -> float:
        """Fraction of their own mini-batches that accelerators sample, or prepare."""
        # Only accelerators prepare on accelerators, so their fraction exceeds the share of all mini-batches.
        seeds = self.accelerator_seeds
        return min(1.0, self.accelerator_sampling * self.total / seeds) if seeds else 0.0

    @property
    def staged_sampling(self) -> float:
        """Fraction of the sampling that accelerators do in HyScale-GNN's stages; collective batching decides itself."""
        return self.accelerator_sampling if self.buffers is None else 0.0

    def sampled_fraction(self, trainer: int) -> float:
        """Return the fraction of its own mini-batches that a trainer's accelerator samples."""
        return self.accelerator_fraction if trainer >= self.cpu_trainers and self.buffers is None else 0.0

    def without_cpu(self) -> TaskMapping:
        """Return the mapping with all seeds on the accelerators."""
        accelerators = self.seeds[self.cpu_trainers :]
        ranges = split_seeds(self.total, accelerators if any(accelerators) else [1] * len(accelerators))
        seeds = (*(0,) * self.cpu_trainers, *(stop - start for start, stop in ranges))
        return replace(self, seeds=seeds)

    def rank_threads(self, trainer: int, uses_threads: Sequence[bool] | None = None) -> tuple[int, int, int]:
        """Return a trainer's threads for sampling and feature loading, in proportion to its work, and for training."""
        kept = 1.0 if self.buffers is None else 1.0 - self.accelerator_fraction
        work = [seeds * (1.0 if index < self.cpu_trainers else kept) for index, seeds in enumerate(self.seeds)]
        share = work[trainer] / (sum(compress(work, uses_threads or [True] * len(work))) or 1)
        sampling, loading, training = self.threads
        own = max(1, training // max(1, self.cpu_trainers)) if trainer < self.cpu_trainers else 1
        return max(1, round(sampling * share)), max(1, round(loading * share)), own

    def __str__(self) -> str:
        """Return one line: seeds of the CPU trainers + seeds of the accelerators, and the threads."""
        groups = {"cpu": self.seeds[: self.cpu_trainers], "accelerator": self.seeds[self.cpu_trainers :]}
        seeds = " + ".join(f"{name} {'/'.join(map(str, group))}" for name, group in groups.items() if group)
        text = f"seeds {seeds}, threads {'/'.join(map(str, self.threads))}"
        if self.buffers is not None:
            on_gpu, on_cpu, *_ = self.buffers
            sizes = {(False, True): "by the CPU", (True, False): "by accelerators"}.get((on_gpu > 0, on_cpu > 0))
            return f"{text}, prepared {sizes or f'{on_gpu} by accelerators, {on_cpu} by the CPU'}"
        share = self.accelerator_sampling
        return text + (f", {share:.0%} sampled on accelerators" if share else "")

    def check(self, times: IterationTimes) -> None:
        """Raise ValueError if the times are for other trainers."""
        if (len(times.train_cpu), len(times.trainers)) != (self.cpu_trainers, len(self.seeds)):
            raise ValueError(
                f"times of {len(times.train_cpu)} CPU trainers and {len(times.train_accelerator)} accelerators, but "
                f"the mapping has {self.cpu_trainers} and {len(self.seeds) - self.cpu_trainers}"
            )
        if times.seeds is not None and len(times.seeds) != len(self.seeds):
            raise ValueError(f"times for seeds {times.seeds}, but the mapping has {len(self.seeds)} trainers")

    def check_same_trainers(self, other: TaskMapping) -> None:
        """Raise ValueError if this saved mapping has another total or other trainers."""
        found, expected = ((len(each.seeds), each.cpu_trainers, each.total) for each in (self, other))
        if found != expected:
            raise ValueError(
                f"it is for {found[0]} trainers, {found[1]} on the CPU, and {found[2]} seeds, but this run has "
                f"{expected[0]}, {expected[1]} and {expected[2]}"
            )

    def check_same_work(self, saved: TaskMapping) -> None:
        """Raise ValueError if a saved mapping has other totals, trainers or sampling devices."""
        saved.check_same_trainers(self)
        found, expected = ((sum(each.threads), each.staged_sampling > 0) for each in (saved, self))
        if found != expected:
            raise ValueError(f"the saved state is for {saved}, which does not fit {self}")

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping as plain lists and numbers."""
        buffers = {} if self.buffers is None else {"buffers": list(self.buffers)}
        state = {name: value for name, value in vars(self).items() if name != "buffers"}
        return {**state, "seeds": list(self.seeds), "threads": list(self.threads), **buffers}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> TaskMapping:
        """Restore a mapping from :meth:`to_dict`."""
        try:
            sampler, loader, trainer = state["threads"]
            return cls(
                tuple(int(seeds) for seeds in state["seeds"]),
                int(state["cpu_trainers"]),
                (int(sampler), int(loader), int(trainer)),
                float(state["accelerator_sampling"]),
                None if state.get("buffers") is None else tuple(map(int, state["buffers"])),  # type: ignore[arg-type]
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a mapping of seeds and threads: {state!r}") from error


@dataclass(frozen=True)
class IterationTimes:
    """Seconds that each stage of one hybrid training iteration took; None for a stage that does not exist."""

    # A stage's time is the interval between iterations if it were the only stage: if its threads process different
    # mini-batches, the thread-seconds divided by the number of threads.

    sample_cpu: float | None
    load: float | None
    train_cpu: tuple[float | None, ...] = ()  # propagation of each CPU trainer; None or 0 for one without seeds
    train_accelerator: tuple[float | None, ...] = ()  # propagation of each accelerator
    transfer: float | None = None  # Data Transfer of the slowest accelerator
    sample_accelerator: float | None = None  # sampling on the slowest accelerator
    iteration: float | None = None  # from the start of this iteration to that of the next; None if an epoch ended
    # seeds of each trainer during the measurement; None: those of the mapping one pipeline depth (in observations) ago
    seeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        stages = self.sample_cpu, self.load, self.transfer, self.sample_accelerator, self.iteration
        for seconds in (*stages, *self.trainers):
            if seconds is not None and not 0 <= seconds < float("inf"):
                raise ValueError(f"stage times must be finite and not negative: {self}")

    @property
    def trainers(self) -> tuple[float | None, ...]:
        """Propagation times of all trainers, in the order of :attr:`TaskMapping.seeds`."""
        return (*self.train_cpu, *self.train_accelerator)

    def stages(self) -> dict[Stage, float]:
        """Return the times of the existing stages, in the order of :data:`STAGES`."""
        seconds_by_stage: dict[Stage, float | None] = {
            "sample_cpu": self.sample_cpu,
            "sample_accelerator": self.sample_accelerator,
            "load": self.load,
            "train_cpu": _slowest(self.train_cpu),
            "accelerator": _slowest((self.transfer, *self.train_accelerator)),
        }
        return {stage: seconds for stage, seconds in seconds_by_stage.items() if seconds is not None}

    @property
    def bottleneck(self) -> float:
        """Time of the slowest stage, which equals an iteration of an ideal pipeline (equation 6)."""
        return max(self.stages().values(), default=0.0)

    def scaled(self, factor: float) -> IterationTimes:
        """Return a copy with every time multiplied by ``factor``."""

        def scale(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * factor

        trainers = {name: tuple(map(scale, getattr(self, name))) for name in ("train_cpu", "train_accelerator")}
        stages = {name: scale(getattr(self, name)) for name in ("sample_cpu", "load", "transfer", "sample_accelerator")}
        return replace(self, **trainers, **stages)  # type: ignore[arg-type]  # by name


def _slowest(times: Sequence[float | None]) -> float | None:
    """Return the longest positive time, or None."""
    return max((seconds for seconds in times if seconds), default=None)


class Cost(NamedTuple):
    """Linear cost in seconds of n units of work: ``overhead + per_unit * n``, and 0 without work."""

    overhead: float
    per_unit: float

    def seconds(self, units: float) -> float:
        """Return the seconds for ``units`` of work."""
        return self.overhead + self.per_unit * units if units else 0.0

    def linear(self, units: float) -> Cost:
        """Return this cost, which is linear for any units."""
        return self

    def scaled(self, factor: float) -> Cost:
        """Return a copy with the time multiplied by ``factor``."""
        return Cost(self.overhead * factor, self.per_unit * factor)


class Curve:
    """Cost in seconds of n units of work that is not linear in n, such as the model's expected mini-batch sizes."""

    def __init__(self, seconds: Callable[[float], float]) -> None:
        self._seconds = seconds

    def seconds(self, units: float) -> float:
        """Return the seconds for ``units`` of work."""
        return self._seconds(units) if units else 0.0

    def linear(self, units: float) -> Cost:
        """Return the linear cost through the values at ``units`` and at half of them."""
        half, whole = self._seconds(units / 2), self._seconds(units)
        per_unit = max(whole - half, 1e-12) / (units / 2) if whole < inf else inf
        return Cost(max(0.0, whole - per_unit * units), per_unit)


FREE = Cost(0.0, 0.0)
UNMEASURED = Cost(1e6, 1.0)
"""Cost of a trainer that has not been measured: it gets no seeds."""


class _HasSeconds(Protocol):
    """A cost of any shape."""

    def seconds(self, units: float) -> float: ...


C = TypeVar("C", bound=_HasSeconds)


@dataclass(frozen=True)
class NodeCosts(Generic[C]):
    """Costs in the seeds of a mini-batch, and the resources that they occupy."""

    cores: int
    sample: C  # thread-seconds of sampling on the CPU
    load: Callable[[int], C]  # seconds of Feature Loading with a number of CPU threads
    train_cpu: Callable[[int], tuple[C, ...]]  # seconds of each CPU trainer, if all share a number of threads
    train: tuple[C, ...] = ()  # seconds of a training step on each accelerator
    transfer: C | Cost = FREE  # seconds of PCIe from the CPU to one accelerator
    sample_accelerator: C | None = None  # seconds of sampling on an accelerator; None if it cannot sample
    # Seconds in which an accelerator gathers features over PCIe, by the mini-batches that it prepares in a row: their
    # memory is not available to the cache. None if it cannot gather.
    gather_accelerator: Callable[[int], C] | None = None
    sync: float = 0.0  # seconds of the all-reduce after each iteration
    takes_turns: bool = True  # whether an accelerator cannot sample and train at the same time
    spread: float = 0.0  # standard deviation of each stage, relative to its mean

    @property
    def num_accelerators(self) -> int:
        """Number of accelerators."""
        return len(self.train)

    @property
    def can_gather(self) -> bool:
        """Whether accelerators can prepare whole mini-batches, as in collective batching."""
        return self.sample_accelerator is not None and self.gather_accelerator is not None and bool(self.train)


def linearize(costs: NodeCosts[Any], seeds: Sequence[float]) -> NodeCosts[Cost]:
    """Return costs that are linear around the given seeds of each trainer, CPU trainers first."""
    around = [max(2.0, each) for each in seeds]
    cpu = len(around) - costs.num_accelerators
    mean, on_cpu, there = sum(around) / len(around), max(around[:cpu], default=2.0), max(around[cpu:], default=2.0)
    gather, sample = costs.gather_accelerator, costs.sample_accelerator
    return replace(
        costs,
        sample=costs.sample.linear(mean),
        load=cache(lambda threads: costs.load(threads).linear(mean)),
        train_cpu=cache(lambda threads: tuple(curve.linear(on_cpu) for curve in costs.train_cpu(threads))),
        train=tuple(curve.linear(there) for curve in costs.train),
        transfer=costs.transfer.linear(there),
        sample_accelerator=None if sample is None else sample.linear(there),
        gather_accelerator=None if gather is None else cache(lambda batches: gather(batches).linear(there)),
    )


class Busy(NamedTuple):
    """Seconds for which each resource of a node is busy in an iteration."""

    sample_cpu: float  # threads of Sampling; in collective batching, all workers, which load, too
    load: float  # threads of Feature Loading; in collective batching, the memory's bandwidth
    cores: float  # all cores, if there are more threads than cores; otherwise 0
    train_cpu: tuple[float, ...]  # each CPU trainer; 0 without seeds
    train: tuple[float, ...]  # each accelerator, with the preparation that takes turns with training
    links: tuple[float, ...]  # PCIe to each accelerator
    sample_accelerator: tuple[float, ...]  # sampling beside training on each accelerator
    sync: float  # follows the training of all trainers

    def seconds(self) -> list[float]:
        """Return the seconds of all resources; the longest is an iteration of an ideal pipeline (equation 6)."""
        training = (each + self.sync if each else 0.0 for each in (*self.train_cpu, *self.train))
        return [self.sample_cpu, self.load, self.cores, *training, *self.links, *self.sample_accelerator]


def busy_seconds(
    costs: NodeCosts[Any], collective: bool, seeds: Sequence[int], threads: Threads | None, fraction: float
) -> Busy:
    """Return the seconds for which each resource is busy in an iteration.

    Args:
        collective: Whether accelerators prepare whole mini-batches; otherwise they may only sample.
        seeds: Seeds of each trainer, CPU trainers first.
        threads: CPU threads of each task; None: only the cores are limited.
        fraction: Fraction of their mini-batches that accelerators prepare or sample themselves.

    Source: HyScale-GNN, equations 6 to 13; MorphGL, equation 6.
    """
    cpu = len(seeds) - costs.num_accelerators
    on_cpu, there = seeds[:cpu], seeds[cpu:]
    kept = 1.0 if costs.sample_accelerator is None else 1.0 - fraction
    sampler, loader, trainer = threads or (costs.cores,) * 3

    def total(cost: _HasSeconds, kept: float) -> float:
        return sum(map(cost.seconds, on_cpu)) + kept * sum(map(cost.seconds, there))

    def loading(number: int) -> float:
        return total(costs.load(number), kept if collective else 1.0)

    # Accelerators: what takes turns with training adds to it.
    trained, links, beside = [], [], []
    for cost, number in zip(costs.train, there, strict=True):
        step, link = cost.seconds(number), costs.transfer.seconds(number)
        prepared = 0.0 if costs.sample_accelerator is None else fraction * costs.sample_accelerator.seconds(number)
        if collective:
            assert costs.gather_accelerator is not None
            prepared += fraction * costs.gather_accelerator(1).seconds(number)
            link = (1 - fraction) * link + prepared
        in_turn = collective or costs.takes_turns
        trained.append(step + prepared if in_turn else step)
        links.append(link)
        beside.append(0.0 if in_turn else prepared)

    # CPU threads: threads in excess of the cores share them.
    sampling, by_trainer = total(costs.sample, kept), costs.train_cpu(trainer) if cpu else ()
    on_cpu_trained = tuple(cost.seconds(number) for cost, number in zip(by_trainer, on_cpu, strict=True))
    cores = 0.0
    if threads is None:
        working = zip(costs.train_cpu(1) if cpu else (), on_cpu, strict=True)
        cores = (sampling + loading(1) + sum(cost.seconds(number) for cost, number in working)) / costs.cores
        sampled, loaded = 0.0, loading(costs.cores)
    elif collective:  # the same threads sample and load
        sampled, loaded = (sampling + loading(1)) / (sampler + loader), loading(sampler + loader)
    else:
        sampled, loaded = sampling / sampler, loading(loader)
    if threads is not None and sum(threads) > costs.cores:
        training = max(on_cpu_trained, default=0.0) * min(trainer, costs.cores)  # a trainer uses a thread per core
        cores = (sampling + loading(loader) * loader + training) / costs.cores
    parts = on_cpu_trained, tuple(trained), tuple(links), tuple(beside)
    return Busy(sampled, loaded, cores, *parts, costs.sync)


def stages(costs: NodeCosts[Any], mapping: TaskMapping) -> IterationTimes:
    """Return the time of each stage of an iteration; training excludes the synchronization (equations 7 to 12)."""
    found = busy_under(costs, mapping)
    active = any(mapping.seeds[mapping.cpu_trainers :])
    return IterationTimes(
        sample_cpu=found.sample_cpu,
        load=found.load,
        train_cpu=found.train_cpu,
        train_accelerator=found.train,
        transfer=max(found.links) if active else None,
        sample_accelerator=max(found.sample_accelerator, default=0.0) or None,
        seeds=mapping.seeds,
    )


def iteration(costs: NodeCosts[Any], mapping: TaskMapping) -> float:
    """Return the seconds of an iteration of an ideal pipeline, including the synchronization (equation 6)."""
    return max(busy_under(costs, mapping).seconds())


def busy_under(costs: NodeCosts[Any], mapping: TaskMapping) -> Busy:
    """Return the seconds for which each resource is busy under a mapping."""
    collective = mapping.buffers is not None and costs.can_gather
    return busy_seconds(costs, collective, mapping.seeds, mapping.threads, mapping.accelerator_fraction)


def split_seeds(num_seeds: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Split seeds into consecutive ``(start, stop)`` ranges with sizes proportional to the weights."""
    # Integer weights that sum to num_seeds are matched exactly. Every nonzero weight gets a seed if enough exist.
    total_weight = sum(weights)
    cuts, cumulative = [0], 0.0
    for weight in weights:
        cumulative += weight
        cuts.append(min(num_seeds, int(num_seeds * cumulative / total_weight + 0.5)))
    cuts[-1] = num_seeds
    sizes = [stop - start for start, stop in pairwise(cuts)]
    for index, weight in enumerate(weights):
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        if weight and not sizes[index] and sizes[largest] > 1:
            sizes[index], sizes[largest] = 1, sizes[largest] - 1
    stops = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def should_sample(number: int, share: float) -> bool:
    """Whether an accelerator samples mini-batch ``number``, so that it samples ``share`` of them on average."""
    # Multiples of the golden ratio modulo 1 are low-discrepancy: the chosen mini-batches are evenly spaced.
    return number * _GOLDEN_RATIO % 1.0 < share


def split_evenly(total: int, costs: Sequence[Cost]) -> tuple[int, ...]:
    """Split seeds between trainers so that the slowest finishes as early as possible."""
    if len(set(costs)) <= 1:
        share, rest = divmod(total, max(1, len(costs)))
        return tuple(share + (index < rest) for index in range(len(costs)))

    def seeds_within(seconds: float) -> list[float]:
        return [max(0.0, (seconds - cost.overhead) / cost.per_unit) for cost in costs]

    low, high = 0.0, min(cost.seconds(total) for cost in costs)
    for _ in range(32):  # bisect the time in which all seeds can be processed
        middle = (low + high) / 2
        low, high = (low, middle) if sum(seeds_within(middle)) >= total else (middle, high)
    seeds = [int(number + 1e-6) for number in seeds_within(high)]
    while sum(seeds) != total:  # the trainers that finish first take the remainder, those that finish last give it
        step = 1 if sum(seeds) < total else -1
        possible = [index for index in range(len(costs)) if seeds[index] + step >= 0]
        ends = {index: costs[index].seconds(seeds[index] + (step > 0)) for index in possible}
        seeds[(min if step > 0 else max)(ends, key=ends.__getitem__)] += step
    return tuple(seeds)


class Measurements:
    """Recent times of every task, and an outlier-resistant linear fit through them."""

    # Measurements of a CPU task with a different thread count are used only until one with the current count exists.

    def __init__(self) -> None:
        self._measured: dict[str, deque[tuple[int, float, float]]] = {}

    def add(self, mapping: TaskMapping, times: IterationTimes) -> None:
        """Add the times of one iteration under a mapping."""
        measured = times.sample_cpu, times.sample_accelerator, times.load, times.transfer, *times.trainers
        for (name, threads, units), seconds in zip(_list_tasks(mapping), measured, strict=True):
            if units and seconds:
                known = self._measured.setdefault(name, deque(maxlen=HISTORY))
                known.append((threads, units, seconds))
                if _has_changed_speed(known):
                    self._measured[name] = deque([*known][-_RUN:], HISTORY)

    def count(self, mapping: TaskMapping) -> int:
        """Return the number of measurements under a mapping of the task with the fewest."""
        counts = []
        for name, threads, units in _list_tasks(mapping):
            known = self._measured.get(name, ())
            if units and (known or name.startswith("trainer")):
                counts.append(sum(measured_with == threads for measured_with, _, _ in known))
        return min(counts, default=0)

    def costs(self, mapping: TaskMapping) -> NodeCosts[Cost]:
        """Return the costs of a node as its last iterations show them, fitted for about the work under a mapping."""
        sample, sample_accelerator, load, transfer, *trainers = (self._fit(*task) for task in _list_tasks(mapping))
        sampler, loader, trainer = mapping.threads
        cpu, total, on_accelerators = mapping.cpu_trainers, mapping.total, mapping.staged_sampling
        costs = [UNMEASURED if cost is None else cost for cost in trainers]
        by_seed = FREE if load is None else Cost(0.0, load.seconds(1.0) * loader / total)
        there = None
        if sample_accelerator is not None and on_accelerators:
            seconds = sample_accelerator.seconds(on_accelerators) * (len(mapping.seeds) - cpu)
            there = Cost(0.0, seconds / (on_accelerators * total))
        kept = 1 - on_accelerators or 1.0
        most = max((1, *mapping.seeds[cpu:]))
        return NodeCosts(
            cores=sum(mapping.threads),  # the threads are what there is to distribute
            sample=FREE if sample is None else Cost(0.0, sample.seconds(kept) * sampler / (kept * total)),
            load=lambda threads: by_seed.scaled(1 / threads),
            train_cpu=lambda threads: tuple(cost.scaled(trainer / threads) for cost in costs[:cpu]),
            train=tuple(costs[cpu:]),
            transfer=FREE if transfer is None else Cost(0.0, transfer.seconds(mapping.accelerator_seeds) / most),
            sample_accelerator=there,
            takes_turns=False,  # the measured steps of an accelerator include the time that its sampling costs them
        )

    def _fit(self, name: str, threads: int, units: float) -> Cost | None:
        """Return the cost of a task with a number of threads; None without measurements."""
        known = self._measured.get(name, ())
        same = [(work, seconds) for used, work, seconds in known if used == threads]
        scaled = same or [(work, seconds * used / threads) for used, work, seconds in known]
        return _fit_cost(scaled, units) if scaled else None

    def state(self) -> dict[str, list[list[float]]]:
        """Return all measurements as plain lists and numbers."""
        return {name: [list(one) for one in known] for name, known in self._measured.items()}

    def load_state(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Restore measurements from :meth:`state`."""
        rows = dict(state).items()
        self._measured = {name: deque(((int(t), u, s) for t, u, s in known), maxlen=HISTORY) for name, known in rows}


def _list_tasks(mapping: TaskMapping) -> list[tuple[str, int, float]]:
    """Return name, CPU threads (0 on accelerators) and work (seeds or a fraction) of each stage and trainer."""
    share, cpus = mapping.staged_sampling, mapping.cpu_trainers
    sampler, loader, trainer = mapping.threads
    return [
        ("Sampling on the CPU", sampler, 1 - share),
        ("Sampling on accelerators", 0, share),
        ("Feature Loading", loader, 1.0),
        ("Data Transfer", 0, float(mapping.accelerator_seeds)),
        *(
            (f"trainer {index}", trainer if index < cpus else 0, float(seeds))
            for index, seeds in enumerate(mapping.seeds)
        ),
    ]


def _has_changed_speed(known: Sequence[tuple[int, float, float]]) -> bool:
    """Whether the last times of the same work all differ by far, in one direction, from the earlier ones."""
    work, last = known[-1][:2], [*known][-_RUN:]
    times = [seconds for *other, seconds in known if tuple(other) == work]
    recent, earlier = times[-_RUN:], times[:-_RUN]
    if not earlier or any(each[:2] != work for each in last):
        return False
    return min(recent) > CHANGE * median(earlier) or max(recent) * CHANGE < median(earlier)


def _fit_cost(known: Sequence[tuple[float, float]], units: float) -> Cost:
    """Fit a cost to ``(work, seconds)`` pairs, for about ``units`` of work; 0 means the mean measured work."""
    # Least squares of the relative errors, with a ridge penalty on the overhead. Relative errors make slow outliers
    # harmless: their error is at most 1.
    points = [(work / time, 1 / time) for work, time in known]
    units = units or sum(work for work, _ in known) / len(points)
    work, one = sum(x for x, _ in points), sum(y for _, y in points)
    works, mixed = sum(x * x for x, _ in points), sum(x * y for x, y in points)
    ones = sum(y * y for _, y in points) + RIDGE * (one / len(points)) ** 2
    determinant = works * ones - mixed * mixed
    overhead = max(0.0, (one * works - work * mixed) / determinant)
    per_unit = (work - overhead * mixed) / works
    seconds = max(overhead + per_unit * units, MIN_SLOPE_FRACTION * work / works * units)
    per_unit = max(per_unit, MIN_SLOPE_FRACTION * seconds / units)
    return Cost(max(0.0, seconds - per_unit * units), per_unit)
