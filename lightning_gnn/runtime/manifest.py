"""One hash per file of a folder; a file is read again only where it could have changed since its hash was taken."""

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
"""A file changed less than so long ago could change again without a new time: clocks of file systems tick so slowly."""


def seal(folder: Path, title: str, sources: Mapping[str, Any] | None = None) -> None:
    """Write the hashes of a folder's files, which are brought to the disk, and those of its sources."""
    for path in (files := _listing(folder)).values():
        flush(path)
    content = {"title": title, "made": time.time(), "files": {**(sources or {}), **hashes_of(files)}}
    write_whole(folder / NAME, json.dumps(content))


def verify(folder: Path, sources: Iterable[Path] = ()) -> None:
    """Raise a ValueError that says what differs unless a folder's files and sources are what they were."""
    found, manifest, changed = _listing(folder) | {str(path): path for path in sources}, load(folder), False
    for name in sorted(found.keys() ^ manifest["files"]):
        raise ValueError(f"{name} {'does not belong there' if name in found else 'is missing'}")
    for name, path in found.items():
        seen, digest = manifest["files"][name]
        if (now := identity(path)) is None or now != seen:
            if _hash(path) != digest:
                raise ValueError(f"{name} holds something else than when it was written")
            manifest["files"][name], changed = (now, digest), changed or now != seen
    if changed:
        with suppress(OSError):  # read-only: it is read through again next time
            write_whole(folder / NAME, json.dumps(manifest))


def load(folder: Path) -> dict[str, Any]:
    """Return title, time and hashes of a folder; a ValueError says if there are none."""
    try:
        state = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return {"title": str(state["title"]), "made": float(state["made"]), "files": dict(state["files"])}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{NAME} is missing or cannot be used ({error})") from None


def hashes_of(files: Mapping[str, Path]) -> dict[str, Any]:
    """Return of each file the identity that it has, and the hash of its content."""
    return {name: (identity(path), _hash(path)) for name, path in files.items()}


def identity(path: Path) -> list[int] | None:
    """Return what changes with the content of a file, also where its old time is restored; None: it may not yet."""
    found = path.stat()
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) <= _SETTLED_NS:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _listing(folder: Path) -> dict[str, Path]:
    """Return the files of a folder but its manifest, one that is being written, and what NFS keeps for readers."""
    found = (path for path in sorted(folder.rglob("*")) if not path.name.startswith((NAME, f".{NAME}.", ".nfs")))
    return {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}
