"""The sampling kernel's time by phase: differences between launches that end one phase apart.

The kernel takes its range of phases with each launch, so the kernel that samples is also the one that stops early, and
nothing is added to it. A phase includes the grid barrier before it, and the first one the start of the programs.

*Pick and bid* draws in-edges, reads their sources at random and bids for them; *number* finds the edges that won, and
gives their sources local ids and offsets. The queue first *discovers* all nodes without barriers, then orders them: its
hops *read* these samples instead of picking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks.device_clock import failure

if TYPE_CHECKING:
    from benchmarks.gpu.one_graph import OneGraph


def measure(graph: OneGraph) -> dict[str, list[float] | str]:
    """Return the us of each phase in each round, or the error of a sampler."""
    from lightning_gnn.triton_kernels.sample_bulk import joined

    there = graph.host.to(graph.device)
    fused, queue = graph.sampler(there), graph.sampler(there, mode="persistent")
    number = min(8, max(graph.bulks))

    def one(sampler: Any, turn: int) -> Any:
        return sampler.batch(graph.seeds_there[turn % number][: graph.batch_size], graph.fanouts, turn)

    def bulk(turn: int) -> Any:
        seeds, keys = graph.seeds_there[:number], [*range(turn, turn + number)]
        sizes = [own.numel() for own in seeds]
        return joined(fused, torch.cat(seeds), sizes, graph.fanouts, keys, False)

    made: dict[str, Callable[[int], Any]] = {
        "fused": lambda turn: one(fused, turn),
        f"bulk of {number}": bulk,
        "queue": lambda turn: one(queue, turn),
    }
    found: dict[str, list[float] | str] = {}
    for kind, make in made.items():
        try:
            finish(make(0))  # scratch memory grows
            for turn in range(graph.runs + 1):
                ends = [0.0, *(until(graph, make(turn), end) for end in range(1, make(turn).phases + 1))]
                for name, before, after in zip(names(make(turn)), ends, ends[1:], strict=False):
                    found.setdefault(f"{kind}, {name}", []).append(after - before)
        except Exception as error:
            found[kind] = failure(error)
    return found


def until(graph: OneGraph, batch: Any, end: int) -> float:
    """Return the us of a launch of the phases up to ``end``; the batch is not finished."""
    with batch.sampler.exclusive():
        with mock.patch.object(batch, "launch"):
            batch.start()
        return graph.clock.device(lambda: batch.launch(0, end))


def finish(batch: Any) -> Any:
    """Return the samples of a batch."""
    with batch.sampler.exclusive():
        batch.start()
        return batch.finish()


def names(batch: Any) -> list[str]:
    """Return the names of a batch's phases, in order."""
    first, again = (["discover", "find the samples"], "read and bid") if batch.queued else ([], "pick and bid")
    hops = [f"hop {hop}: {what}" for hop in range(1, batch.num_hops + 1) for what in (again, "number")]
    return [*first, "seeds: place", "seeds: number", *hops, *["split"] * (batch.parts > 1)]
