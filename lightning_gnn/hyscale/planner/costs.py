"""Costs of the stages of one node, per seed: the profile that the planner of hybrid training works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from lightning_gnn.hyscale.resource_manager.mapping import Cost

FREE = Cost(0.0, 0.0)


@dataclass(frozen=True)
class NodeCosts:
    """Affine costs in the seeds of a mini-batch, and the resources that they occupy."""

    cores: int
    sample: Cost  # thread-seconds of sampling on the CPU
    load: Callable[[int], Cost]  # seconds of Feature Loading with a number of CPU threads
    train_cpu: Callable[[int], tuple[Cost, ...]]  # seconds of each CPU trainer, if all share a number of threads
    train: tuple[Cost, ...] = ()  # seconds of a training step on each accelerator
    transfer: Cost = FREE  # seconds of PCIe from the CPU to one accelerator
    sample_accelerator: Cost | None = None  # seconds of sampling on an accelerator; None if it cannot sample
    # Seconds in which an accelerator gathers features over PCIe, by the mini-batches that it prepares in a row: their
    # memory is not available to the cache. None if it cannot gather.
    gather_accelerator: Callable[[int], Cost] | None = None
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

    def prepare_accelerator(self, gpu_buffer_size: int) -> Cost:
        """Return the seconds in which an accelerator samples and gathers, ``T_G``."""
        assert self.sample_accelerator is not None
        assert self.gather_accelerator is not None
        gather = self.gather_accelerator(gpu_buffer_size)
        return Cost(
            self.sample_accelerator.overhead + gather.overhead, self.sample_accelerator.per_unit + gather.per_unit
        )


def linear_cost(seconds: Callable[[float], float], seeds: float) -> Cost:
    """Return the affine cost through a function's values at ``seeds`` and at half of them."""
    half, whole = seconds(seeds / 2), seconds(seeds)
    per_unit = max(whole - half, 1e-12) / (seeds / 2) if whole < inf else inf
    return Cost(max(0.0, whole - per_unit * seeds), per_unit)
