"""What lies in an entry of the store: sizes and hashes of its files, and which of them were looked at already."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_gnn.runtime.files import flush, write_whole

NAME = "manifest.json"
_FORMAT = 1
_BLOCK = 1 << 24
_LARGEST = 1 << 22
_SETTLED_NS = 2_000_000_000
"""A file that was changed less than so long ago could be changed again without a new time: clocks of file systems tick
every few milliseconds, the coarsest every 2 seconds."""

Identity = list[int]
"""Inode, size and the times of the last change of content and of anything, in nanoseconds; the latter also tells a file
whose old time was restored (``cp -p``, ``tar``, ``rsync -t``)."""


class DamagedEntry(ValueError):
    """An entry does not hold what was written; the message says what differs."""


class StaleEntry(Exception):
    """An entry was made from another content of its sources."""


@dataclass
class Manifest:
    """The content of an entry.

    Args:
        title: What it was made for.
        made: When, in seconds since 1970.
        files: Size and hash of each file.
        sources: Hash of each file that it was made from.
        seen: Files and sources with the identity that they had when their content was found right.
    """

    title: str
    made: float
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    seen: dict[str, Identity] = field(default_factory=dict)

    def add_sources(self, paths: Iterable[Path]) -> None:
        """Take in the files that the entry is made from; they are read through."""
        for path in paths:
            self.sources[str(path)] = self._hash(path, str(path))

    def add_files(self, folder: Path) -> None:
        """Take in all files of a folder, and bring them to the disk."""
        for name in listing(folder):
            flush(folder / name)
            self.files[name] = ((folder / name).stat().st_size, self._hash(folder / name, name))

    def verify(self, folder: Path, sources: Iterable[Path] = (), everything: bool = False) -> bool:
        """Look whether files and sources are what they were; those that did not change since are not read again.

        Returns:
            Whether anything was read: then the content may be checked further, and the manifest saved.
        """
        read = False
        for path in sources:
            if str(path) not in self.sources:
                raise StaleEntry(f"was not made from {path}")
            if everything or self.seen.get(str(path)) != identity(path.stat()):
                read = True
                if self._hash(path, str(path)) != self.sources[str(path)]:
                    raise StaleEntry(f"was made from another content of {path}")
        if odd := set(found := listing(folder)) ^ set(self.files):
            missing = odd - set(found)
            raise DamagedEntry(f"{', '.join(sorted(odd))} {'is missing' if missing else 'does not belong there'}")
        for name, (size, digest) in self.files.items():
            now = os.lstat(folder / name)
            if now.st_size != size:
                raise DamagedEntry(f"{name} has {now.st_size} bytes, but {size} were written")
            if everything or self.seen.get(name) != identity(now):
                read = True
                if self._hash(folder / name, name) != digest:
                    raise DamagedEntry(f"{name} holds something else than was written")
        return read

    def save(self, folder: Path) -> None:
        """Write it, at once or not at all."""
        body = json.dumps({"format": _FORMAT, **asdict(self)})
        write_whole(folder / NAME, f"{hashlib.blake2b(body.encode(), digest_size=16).hexdigest()}\n{body}\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read it."""
        path = folder / NAME
        if not path.is_file() or path.is_symlink() or path.stat().st_size > _LARGEST:
            raise DamagedEntry(f"{NAME} is missing")
        try:
            digest, body, rest = path.read_text(encoding="utf-8").split("\n")
            if hashlib.blake2b(body.encode(), digest_size=16).hexdigest() != digest or rest:
                raise ValueError("it is not as it was written")
            state: dict[str, Any] = json.loads(body)
            if state.pop("format") != _FORMAT:
                raise ValueError("it is of another release")
            return cls(**state)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedEntry(f"{NAME} cannot be used ({error})") from None

    def _hash(self, path: Path, name: str) -> str:
        """Return the hash of a file, and remember the file if nobody could change it unseen since."""
        self.seen.pop(name, None)
        before = path.stat()
        settled = is_settled(before)
        digest = hash_file(path)
        if settled and identity(path.stat()) == identity(before):
            self.seen[name] = identity(before)
        return digest


def identity(found: os.stat_result) -> Identity:
    """Return what changes whenever a file is written or replaced."""
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def is_settled(found: os.stat_result) -> bool:
    """Tell whether a change from now on would give the file another identity."""
    changed = found.st_ctime_ns if os.name == "posix" else found.st_mtime_ns
    return time.time_ns() - changed > _SETTLED_NS


def hash_file(path: Path) -> str:
    """Return a hash of a regular file, block by block."""
    digest, block = hashlib.blake2b(digest_size=32), bytearray(_BLOCK)
    view = memoryview(block)
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is no regular file")
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(view[:count])
    return digest.hexdigest()


def listing(folder: Path) -> list[str]:
    """Return the files of an entry but its manifest, subfolders as ``a/b``."""
    names = []
    for path in sorted(folder.rglob("*")):
        if path.parent == folder and (path.name == NAME or path.name.startswith((f".{NAME}.", ".nfs"))):
            continue  # one that another process writes, or that NFS keeps for one that reads; it may be gone by now
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode):
            names.append(path.relative_to(folder).as_posix())
        elif not stat.S_ISDIR(mode):
            raise DamagedEntry(f"{path.name} is no regular file")
    return names
