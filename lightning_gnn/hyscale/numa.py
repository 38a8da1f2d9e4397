"""Cores of this machine: its NUMA nodes, and which cores each rank keeps to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_TASKS = Path("/proc/self/task")


def allowed_cores() -> set[int]:
    """Return the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def numa_cores(nodes: Path = _NODES) -> list[set[int]]:
    """Return the cores of each NUMA node that this process may use; one node of all of them where it cannot be told.

    Args:
        nodes: Where Linux lists them.
    """
    allowed = allowed_cores()
    found = []
    for folder in sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        try:
            cores = _listed((folder / "cpulist").read_text()) & allowed
        except (OSError, ValueError):
            continue
        if cores:
            found.append(cores)
    return found or [set(allowed)]


def divided(cores: Sequence[int], wanted: Sequence[float]) -> list[list[int]]:
    """Divide cores among ranks, at least one each, in the order that they have.

    Args:
        cores: In an order in which those of a NUMA node lie together; at least as many as ranks.
        wanted: Cores that each rank has work for, in proportion.
    """
    counts = [1] * len(wanted)
    for _ in range(len(cores) - len(wanted)):  # each core goes where most work is left for one
        counts[max(range(len(wanted)), key=lambda rank: wanted[rank] / counts[rank])] += 1
    stops = [sum(counts[: rank + 1]) for rank in range(len(counts))]
    return [list(cores[stop - count : stop]) for stop, count in zip(stops, counts, strict=True)]


def keep_to(cores: Sequence[int]) -> None:
    """Keep this process, with all threads that it has, on some cores, as far as the system has such a thing."""
    if not hasattr(os, "sched_setaffinity"):
        return
    for task in sorted(_TASKS.iterdir()) if _TASKS.is_dir() else [Path("0")]:
        with suppress(OSError, ValueError):  # a thread that has ended
            os.sched_setaffinity(int(task.name), cores)


def _listed(text: str) -> set[int]:
    """Return the numbers in a list such as ``0-3,8``."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
