"""What one rank has of a mini-batch that the ranks share."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class BatchShare:
    """What this rank has of a mini-batch.

    Args:
        number: Position of the mini-batch in the epoch.
        seeds: Of this rank; with 0 there is a mini-batch of one seed that must not count.
        total: Of all ranks.
        seconds: Thread-seconds that each stage has spent on it.
        sampled_there: Whether an accelerator has sampled it; None where none does.
    """

    number: int
    seeds: int
    total: int
    seconds: dict[str, float] = field(default_factory=dict)
    sampled_there: bool | None = None
