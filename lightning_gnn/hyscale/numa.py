"""NUMA nodes of this machine: how many there are, and a process kept on the cores of one."""

from __future__ import annotations

import os
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def numa_cores(nodes: Path = _NODES) -> list[set[int]]:
    """Return the cores of each NUMA node that this process may use; one node of all of them where it cannot be told."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    found = []
    for folder in sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        try:
            cores = _listed((folder / "cpulist").read_text()) & allowed
        except (OSError, ValueError):
            continue
        if cores:
            found.append(cores)
    return found or [set(allowed)]


def pin_to_numa_node(trainer: int, num_cpu: int) -> None:
    """Keep a CPU trainer, with the threads that it starts from now on, on the cores of its NUMA node."""
    nodes = numa_cores()
    if trainer < num_cpu and len(nodes) > 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, nodes[trainer * len(nodes) // num_cpu])


def _listed(text: str) -> set[int]:
    """Return the numbers in a list such as ``0-3,8``."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
