"""Files that get their names once all of their content is on the disk."""

from __future__ import annotations

import os
import platform
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file beside ``path`` to write to; on the way out it gets the name, or is removed.

    What processes of this machine left there that were killed meanwhile goes too.

    Raises:
        OSError: The folder or the disk refuses; what was there before still is.
    """
    begin = f".{path.name}.{platform.node()}-"
    with suppress(OSError):  # a folder that cannot be listed
        for left in path.parent.iterdir():
            found = re.fullmatch(rf"{re.escape(begin)}(\d{{1,9}})-[0-9a-f]{{8}}\.part", left.name)
            if found and not psutil.pid_exists(int(found[1])):
                left.unlink()
    part = path.with_name(f"{begin}{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink()


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a file, text as UTF-8, and the folders above it; see :func:`whole_file`. Returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder where its file system can, to the disk."""
    if os.name != "posix":  # Windows flushes only what was opened for writing
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        if not path.is_dir():
            raise
