"""Numbers of bytes, as people write them."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def memory_bytes(value: Any, name: str) -> int:
    """Return a number of bytes, given as such or with a unit: ``"80GB"``, ``"512 MiB"``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?\s*", value.upper()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"{name} must be a number of bytes, such as 4000000000, '4GB' or '512MiB', but is {value!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def shown(nbytes: float) -> str:
    """Return a number of bytes to read: ``"39.0 GB"``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
