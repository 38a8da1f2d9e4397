"""Files that cannot be half there, and small documents that cannot exhaust a run.

What is written gets its name once all of its content is on the disk; what is read is bounded in size and depth.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
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
_DEEPEST = 32


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """Read a text file."""
    path = Path(path)
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no regular file")
    if found.st_size > largest:
        raise ValueError(f"{path} has {found.st_size} bytes, but such a file has at most {largest}")
    return path.read_text(encoding="utf-8")


def read_yaml(text: str) -> Any:
    """Read a YAML document of plain values; see :func:`check_yaml`."""
    check_yaml(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from None


def check_yaml(text: str) -> None:
    """Refuse a document that would grow while it is read: aliases can stand for billions of values."""
    if len(text) > LARGEST:
        raise ValueError(f"{len(text)} characters of YAML, but at most {LARGEST} are read")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}; write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError(f"line {event.start_mark.line + 1} is nested more than {_DEEPEST} levels deep")
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from None


def read_json(text: str) -> Any:
    """Read a JSON document."""
    if len(text) > LARGEST_JSON:
        raise ValueError(f"{len(text)} characters of JSON, but at most {LARGEST_JSON} are read")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file beside ``path`` to write to; on the way out it gets the name, or is removed.

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
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        if not path.is_dir():
            raise
