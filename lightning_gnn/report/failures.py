"""Reports that fail without harm to what they report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def reporting(what: str | Path, tell: Callable[[str], None] = warnings.warn) -> Iterator[None]:
    """Turn an error into one line, for steps without which the run is as good.

    Args:
        what: Names what is missing then, such as a file.
        tell: Takes the line; by default it becomes a Python warning.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        tell(f"{what} could not be made: {type(error).__name__}{reason and f': {reason}'}")
