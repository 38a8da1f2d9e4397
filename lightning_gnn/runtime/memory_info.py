"""How much memory a process can count on: of a device, or of the host as far as its control groups allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def total_bytes() -> int:
    """Return the host memory that this process may use, in bytes: that of the machine, or of a smaller container."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _group_limits())])


def available_bytes(device: torch.device | None = None, ranks: int = 1) -> int | None:
    """Return the free memory in bytes of a device, or a rank's share of the host's; None where it is not reported."""
    if device is not None and device.type != "cpu":
        module: Any = getattr(torch, device.type, None)
        return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else None
    left = [max(0, limit - used) for limit, used in _group_limits()]
    return min([int(psutil.virtual_memory().available), *left]) // ranks


def _group_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group around this process and what it uses, without reclaimable page cache."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _GROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # A limit holds for all groups below. In a container the path may begin outside of what is mounted.
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):
            try:
                limit, used = (int((root / group / name).read_text()) for name in names)
                cached = _page_cache((root / group / "memory.stat").read_text())
            except (OSError, ValueError):  # no such group, or "max"
                continue
            yield limit, max(0, used - cached)


def _page_cache(statistics: str) -> int:
    """Return the bytes of files that a control group keeps in memory until it needs them for something else."""
    fields = dict(line.split() for line in statistics.splitlines())
    # The first version counts the groups below under names of their own.
    return sum(int(fields.get(f"total_{name}", fields.get(name, 0))) for name in ("inactive_file", "active_file"))
