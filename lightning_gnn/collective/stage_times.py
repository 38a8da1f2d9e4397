"""How long the stages of collective batching take (MorphGL, section 4.2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class Duration:
    """Mean and spread of what was measured.

    Args:
        mean: Seconds.
        spread: Standard deviation in seconds.

    Raises:
        ValueError: One of them is negative or not finite.
    """

    mean: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.mean) and isfinite(self.spread) and self.mean >= 0 and self.spread >= 0):
            raise ValueError(f"seconds must be finite and not negative: {self}")


@dataclass(frozen=True)
class StageTimes:
    """What each stage takes for one mini-batch, measured while the other stages run.

    Args:
        cpu_batching: A CPU worker prepares a mini-batch, while all the others do (``T_CBT``).
        dma: The transfer of a mini-batch that the CPU has prepared (``T_DMA``); 0 where there is nothing to transfer.
        gpu_batching: The GPU samples a mini-batch (``T_GBT``).
        uva: The GPU gathers its features (``T_UVA``).
        model: Forward, backward and optimizer (``T_Model``).
        cpu_workers: How many workers prepare mini-batches.

    Raises:
        ValueError: There is no worker, or the model takes no time.
    """

    cpu_batching: Duration
    dma: Duration
    gpu_batching: Duration
    uva: Duration
    model: Duration
    cpu_workers: int = 1

    def __post_init__(self) -> None:
        if self.cpu_workers < 1:
            raise ValueError(f"cpu_workers must be at least 1, but is {self.cpu_workers}")
        if self.model.mean <= 0:
            raise ValueError("the model must take some time")

    @property
    def cpu(self) -> float:
        """Seconds between two mini-batches of all CPU workers together: ``T_C``."""
        return self.cpu_batching.mean / self.cpu_workers

    @property
    def gpu(self) -> float:
        """Seconds in which GPU and PCIe prepare a mini-batch: ``T_G``, sampling and gathering as one stage."""
        return self.gpu_batching.mean + self.uva.mean
