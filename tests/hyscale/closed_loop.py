"""A simulated node that trains under a resource manager; measured times lag by the depth of the pipeline."""

import random
from collections import deque
from dataclasses import dataclass, field

from lightning_gnn.hyscale.costs import IterationTimes


@dataclass
class Node:
    """Trainer i takes ``overhead[i] + seeds / speed[i]`` seconds; CPU stages scale inversely with their threads."""

    speeds: list[float]
    cpu_trainers: int = 1
    overheads: list[float] | None = None
    sampling: float = 0.0
    loading: float = 0.0
    transfer: float = 0.0
    sampling_threads: float = 1.0
    """Exponent by which CPU sampling gets faster with its threads; -1 if each thread slows it down."""
    sampling_there: float | None = None
    reference_threads: int | None = None
    """Number of threads for which the speeds of CPU trainers hold; None if threads do not matter."""
    drag: float = 1.0
    """Factor on the time of an iteration in which CPU trainers have seeds."""
    noise: float = 0.0
    outliers: float = 0.0
    """Probability that the measured time of a trainer is ``outlier`` times the real one."""
    outlier: float = 4.0
    warm_up: int = 0
    """Number of first iterations in which trainers take six times as long."""
    known: bool = True
    source: random.Random = field(default_factory=lambda: random.Random(0))

    def train(self, index, seeds, mapping):
        overhead = self.overheads[index] if self.overheads else 0.0
        factor = 1.0
        if index < self.cpu_trainers and self.reference_threads:
            factor = self.reference_threads / mapping.threads[2]
        return (overhead + seeds / self.speeds[index]) * factor if seeds else None

    def ideal(self, mapping):
        """Return stage times without noise."""
        trained = [self.train(index, seeds, mapping) for index, seeds in enumerate(mapping.seeds)]
        share = mapping.accelerator_sampling
        times = IterationTimes(
            self.sampling * (1 - share) / mapping.threads[0] ** self.sampling_threads,
            self.loading / mapping.threads[1],
            tuple(trained[: self.cpu_trainers]),
            tuple(trained[self.cpu_trainers :]),
            self.transfer * mapping.accelerator_seeds if self.transfer else None,
            self.sampling_there * share if self.sampling_there else None,
        )
        return times

    def seconds(self, mapping):
        """Return the time of a pipelined iteration."""
        return self.ideal(mapping).bottleneck * (self.drag if mapping.cpu_seeds else 1.0)

    def measured(self, mapping):
        def noisy(seconds):
            return None if seconds is None else seconds * max(0.05, self.source.gauss(1, self.noise))

        def disturbed(seconds):
            if seconds is None:
                return None
            factor = self.outlier if self.outliers and self.source.random() < self.outliers else 1.0
            return noisy(seconds) * factor * (6.0 if self.warm_up >= 0 else 1.0)

        ideal = self.ideal(mapping)
        self.warm_up -= 1
        return IterationTimes(
            noisy(ideal.sample_cpu),
            noisy(ideal.load),
            tuple(map(disturbed, ideal.train_cpu)),
            tuple(map(disturbed, ideal.train_accelerator)),
            noisy(ideal.transfer),
            noisy(ideal.sample_accelerator),
            seeds=mapping.seeds if self.known else None,
            iteration=noisy(self.seconds(mapping)),
        )


def run(manager, node, iterations, lag=2, in_flight=None):
    """Train some iterations; return the mapping of each, and the mappings that are still in the pipeline."""
    in_flight = in_flight if in_flight is not None else deque([manager.mapping] * (lag + 1))
    made = []
    for _ in range(iterations):
        mapping = in_flight.popleft()
        made.append(mapping)
        decision = manager.observe(node.measured(mapping))
        assert decision.mapping == manager.mapping
        assert "\n" not in str(decision)
        assert sum(decision.mapping.seeds) == mapping.total
        assert min(decision.mapping.seeds) >= 0
        assert sum(decision.mapping.threads) == sum(mapping.threads)
        assert min(decision.mapping.threads[: 3 if mapping.cpu_trainers else 2]) >= 1
        in_flight.append(decision.mapping)
    return made, in_flight
