"""Files of a report, whole or not at all; and reports that fail without harm to what they report."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_whole(path: str | Path, content: bytes) -> Path:
    """Write a file under another name, and move it into place; a failure leaves what was there before.

    Raises:
        OSError: The folder cannot be made or written to, or the disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        with suppress(OSError):
            fresh.unlink()
    return path


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
