"""The cores that this process may use, and whether others want them too."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_busy() -> bool:
    """Tell whether there was work for half of the cores or more in the last minute."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] >= max(1.0, 0.5 * num_cores())
