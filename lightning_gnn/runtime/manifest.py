"""Manifest of a folder with one hash per file; verification rereads only files that may have changed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_gnn.runtime.files import flush, write_whole

NAME = "manifest.json"
_SETTLED_NS = 2_000_000_000
"""Minimum age of a file whose time stamps can be trusted: file system clocks are too coarse for younger ones."""


def seal(folder: Path, title: str, sources: Mapping[str, Any] | None = None) -> None:
    """Flush a folder's files to disk and write its manifest: their hashes, and ``sources`` from :func:`hashes_of`."""
    for path in (files := _list_files(folder)).values():
        flush(path)
    content = {"title": title, "made": time.time(), "files": {**(sources or {}), **hashes_of(files)}}
    write_whole(folder / NAME, json.dumps(content))


def verify(folder: Path, sources: Iterable[Path] = ()) -> None:
    """Raise a ValueError that names the difference if a folder's files or sources do not match the manifest."""
    found, manifest, changed = _list_files(folder) | {str(path): path for path in sources}, load(folder), False
    for name in sorted(found.keys() ^ manifest["files"]):
        raise ValueError(f"{name} {'does not belong there' if name in found else 'is missing'}")
    for name, path in found.items():
        recorded, digest = manifest["files"][name]
        if (current := identity(path)) is None or current != recorded:
            if _hash(path) != digest:
                raise ValueError(f"{name} has changed since it was written")
            manifest["files"][name], changed = (current, digest), changed or current != recorded
    if changed:
        with suppress(OSError):  # read-only: the next verification hashes the file again
            write_whole(folder / NAME, json.dumps(manifest))


def load(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder: title, time and hashes. Raise a ValueError if it is missing or damaged."""
    try:
        state = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return {"title": str(state["title"]), "made": float(state["made"]), "files": dict(state["files"])}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{NAME} is missing or damaged ({error})") from None


def hashes_of(files: Mapping[str, Path]) -> dict[str, Any]:
    """Return the identity and the content hash of each file."""
    return {name: (identity(path), _hash(path)) for name, path in files.items()}


def identity(path: Path) -> list[int] | None:
    """Return numbers that change with a file's content, even if its time is restored; None if it changed just now."""
    state = path.stat()
    if time.time_ns() - max(state.st_mtime_ns, state.st_ctime_ns) <= _SETTLED_NS:
        return None
    return [state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _list_files(folder: Path) -> dict[str, Path]:
    """Return a folder's files by relative path, without manifests and NFS's placeholders of open files."""
    paths = (path for path in sorted(folder.rglob("*")) if not path.name.startswith((NAME, f".{NAME}.", ".nfs")))
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
