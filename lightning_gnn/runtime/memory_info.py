"""Total and free memory of a device, or of the host within the limits of its control groups (cgroups)."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_gnn.runtime.messages import causes_of, shown

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_REFUSALS = re.compile("can't allocate memory|not enough memory|can't start new thread|bad_alloc")
"""What torch, C++ and Python say when the system refuses memory."""
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


def out_of_memory_cause(error: BaseException | None) -> BaseException | None:
    """Return the error about host memory that caused ``error``; None if it had another cause."""
    for each in causes_of(error):
        if isinstance(each, MemoryError) or (isinstance(each, OSError) and each.errno == errno.ENOMEM):
            return each
        if isinstance(each, RuntimeError) and _REFUSALS.search(str(each)):
            return each
    return None


def free_memory() -> str:
    """Describe the free host memory, and the address space left to this process if that is limited."""
    text = f"{shown(available_bytes() or 0)} of memory are free"
    if resource is not None and (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        left = max(0, limit - psutil.Process().memory_info().vms)
        text += f", and {shown(left)} of the {shown(limit)} of address space (ulimit -v)"
    return text


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
