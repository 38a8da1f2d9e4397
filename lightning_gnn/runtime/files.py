"""Files that get their names once their content is on the disk, and small documents."""

from __future__ import annotations

import json
import os
import platform
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
import yaml

LARGEST = 1 << 17
"""Bytes of a YAML document, which takes about a second to read; ours have 2,000."""
LARGEST_JSON = 1 << 26


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """Read a regular file of bounded size as UTF-8; raise a ValueError that names one of another kind."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file")
    if (size := path.stat().st_size) > largest:
        raise ValueError(f"{path} has {size} bytes, but such a file has at most {largest}")
    return path.read_text(encoding="utf-8")


def read_yaml(text: str) -> Any:
    """Read a YAML document of plain values; raise a ValueError if it is none."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from None


def read_json(text: str) -> Any:
    """Read a JSON document; raise a ValueError if it is none."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file beside ``path``, which gets that name on the way out, or after an error is removed.

    What processes of this machine left there that were killed meanwhile goes too.
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
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)
