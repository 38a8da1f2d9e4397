"""Total and free memory of a device, or of the host within the limits of its control groups (cgroups)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROCESS_CGROUPS = Path("/proc/self/cgroup")


def total_bytes() -> int:
    """Return the host memory that this process may use, in bytes: the machine's or its container's, if smaller."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_limits())])


def available_bytes(device: torch.device | None = None, ranks: int = 1) -> int | None:
    """Return the free bytes of a device, or of the host divided by ``ranks``; None if the device does not report it."""
    if device is not None and device.type != "cpu":
        module: Any = getattr(torch, device.type, None)
        return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else None
    unused = [max(0, limit - used) for limit, used in _cgroup_limits()]
    return min([int(psutil.virtual_memory().available), *unused]) // ranks


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use, without reclaimable page cache, of each control group that contains this process."""
    try:
        lines = _PROCESS_CGROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUP_ROOT, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = _CGROUP_ROOT / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # A limit also applies to all groups below it. In a container, the path may start outside of the mounted tree.
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):
            try:
                limit, used = (int((root / group / name).read_text()) for name in names)
                cached = _page_cache((root / group / "memory.stat").read_text())
            except (OSError, ValueError):  # no such group, or unlimited ("max")
                continue
            yield limit, max(0, used - cached)


def _page_cache(statistics: str) -> int:
    """Return the bytes of reclaimable page cache in the ``memory.stat`` of a control group."""
    fields = dict(line.split() for line in statistics.splitlines())
    # Version 1 counts the nested groups in separate "total_" fields.
    return sum(int(fields.get(f"total_{name}", fields.get(name, 0))) for name in ("inactive_file", "active_file"))
