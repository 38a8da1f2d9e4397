"""Atomic file writes, and readers of small text, YAML and JSON files."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
import yaml

from lightning_gnn.runtime.messages import causes_of

LARGEST = 1 << 17  # maximum size of a YAML document in bytes, which takes about a second to parse; ours have 2,000
LARGEST_JSON = 1 << 26  # maximum size of a JSON document in bytes
DISK_ADVICE = "free disk space, or write elsewhere"
"""End of each message about a full disk."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """Read a UTF-8 file; raise a ValueError if it is not a regular file or has more than ``largest`` bytes."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    if (size := path.stat().st_size) > largest:
        raise ValueError(f"{path} has {size} bytes, but such a file has at most {largest}")
    return path.read_text(encoding="utf-8")


def read_yaml(text: str) -> Any:
    """Parse a YAML document of plain values; raise a ValueError if it is invalid."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from None


def read_json(text: str) -> Any:
    """Parse a JSON document; raise a ValueError if it is invalid."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def check_writable(folder: str | Path, name: str) -> None:
    """Raise a ValueError if no file of 64 kB can be created in a folder, which need not exist yet.

    The message names the folder ``name=folder``, as it was given.
    """
    existing = Path(folder).absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        # Permissions say nothing about read-only file systems and superusers.
        with tempfile.TemporaryDirectory(dir=existing) as temporary:
            Path(temporary, "file").write_bytes(bytes(1 << 16))
    except OSError as error:
        reason = f"{existing} is a file" if existing.is_file() else f"cannot write to {existing}: {error.strerror}"
        raise ValueError(f"{name}={folder} cannot be used: {reason}; give another folder") from None


def disk_full_cause(error: BaseException | None) -> OSError | None:
    """Return the error about a full disk, quota or file size that caused ``error``; None if it had another cause."""
    # torch's writer of ZIP files replaces the system's error by one of its own when it closes the file.
    full = (each for each in causes_of(error) if isinstance(each, OSError) and each.errno in _DISK_FULL)
    return next(full, None)


def disk_full_error(path: Path, error: OSError, size: int | None = None) -> OSError:
    """Create the error for a file of ``size`` bytes (None: unknown) that a full disk cannot store."""
    reason = (error.strerror or str(error)).rstrip(".")
    needs = "" if size is None else f"needs {size} bytes and "
    free = shutil.disk_usage(path.parent).free
    message = f"{path} {needs}cannot be written ({reason}): its disk has {free} bytes left; {DISK_ADVICE}"
    return OSError(error.errno or errno.ENOSPC, message)


@contextmanager
def whole_file(path: Path, size: int | None = None) -> Iterator[IO[bytes]]:
    """Yield a temporary file next to ``path`` that is flushed and renamed to it on exit, or removed after an error.

    Also removes the temporary files that killed processes of this machine left there. The error of a full disk names
    ``path``, the bytes left, and ``size``, the bytes needed, if known.
    """
    prefix = f".{path.name}.{platform.node()}-"
    with suppress(OSError):  # a folder that cannot be listed
        for leftover in path.parent.iterdir():
            match = re.fullmatch(rf"{re.escape(prefix)}(\d{{1,9}})-[0-9a-f]{{8}}\.part", leftover.name)
            if match and not psutil.pid_exists(int(match[1])):
                leftover.unlink()
    temporary = path.with_name(f"{prefix}{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    try:
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink()
    except Exception as error:
        full = disk_full_cause(error)
        if full is None or DISK_ADVICE in str(full):
            raise
        raise disk_full_error(path, full, size) from error


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a file atomically (:func:`whole_file`), text as UTF-8; create its parent folders and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def flush(path: Path) -> None:
    """Flush a file to disk, or the names in a folder if its file system supports that."""
    if os.name != "posix":  # Windows flushes only files opened for writing
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)
