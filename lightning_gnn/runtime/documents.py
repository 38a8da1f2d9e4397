"""Small documents that a user or a cache gives: bounded in size and depth, so that none can hang or exhaust a run."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml

LARGEST = 1 << 17
"""Bytes of a YAML document, which takes about a second to read; ours have 2,000."""
LARGEST_JSON = 1 << 26
_DEEPEST = 32


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """Read a text file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no regular file, too large or not UTF-8.
    """
    path = Path(path)
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no regular file")
    if found.st_size > largest:
        raise ValueError(f"{path} has {found.st_size} bytes, but such a file has at most {largest}")
    return path.read_text(encoding="utf-8")


def read_yaml(text: str) -> Any:
    """Read a YAML document of plain values; see :func:`check_yaml`.

    Raises:
        ValueError: It is no YAML, or too large, too deep, or has aliases.
    """
    check_yaml(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from None


def check_yaml(text: str) -> None:
    """Refuse a document that would grow while it is read: aliases can stand for billions of values.

    Raises:
        ValueError: It is no YAML, too large, nested too deeply, or has aliases.
    """
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
    """Read a JSON document.

    Raises:
        ValueError: It is no JSON, too large or nested too deeply.
    """
    if len(text) > LARGEST_JSON:
        raise ValueError(f"{len(text)} characters of JSON, but at most {LARGEST_JSON} are read")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file beside its place, bring it to the disk and move it there; a failure leaves what was there before."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(part)
        return part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    if os.name != "posix":  # Windows flushes only what was opened for writing
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
