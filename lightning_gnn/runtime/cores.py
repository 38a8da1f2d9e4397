"""Number of cores available to this process, and their load."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_busy() -> bool:
    """Return whether the load average of the last minute is at least half of the cores."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] >= max(1.0, 0.5 * num_cores())
