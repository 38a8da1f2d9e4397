"""Disk cache: folders ``<root>/<kind>/<key>`` with a manifest, written atomically and recreated when damaged.

If the folder cannot be used or the disk is full, a warning says so and nothing is cached: a cache never ends a run.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock
from platformdirs import user_cache_path
from torch import Tensor

from lightning_gnn.runtime.files import flush
from lightning_gnn.runtime.lightning import rank_zero_warn
from lightning_gnn.runtime.manifest import hashes_of, identity, seal, verify

KINDS = {
    "topology": "sorted edges of data folders",
    "plans": "plans of collective batching",
    "limits": "peak rates of this machine",
    "inference": "layer outputs of inference",
    "checks": "files whose ids were checked",
    "remote": "copies of files at URLs",
    "twin": "the compiled CPU twin of the Ascend kernels",
    "npu": "the compiled NPU kernels",
}
"""Descriptions of the kinds of cache entries; each kind has its own folder."""

_KEY = re.compile(r"[0-9a-f]{32}")
_BYTES_PER_BLOCK = 1 << 24
_said: set[str] = set()

T = TypeVar("T")


def cache_root() -> Path | None:
    """Return the cache folder, ``$LIGHTNING_GNN_CACHE`` or the user's; warn and return None if it is unusable.

    A folder that other users own or may write to is never used: they could plant the files that are loaded.
    """
    default = user_cache_path("lightning-gnn", appauthor=False)
    for chosen in (os.environ.get("LIGHTNING_GNN_CACHE") or default, default):
        try:
            folder = Path(chosen).expanduser().absolute()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
        except (OSError, RuntimeError) as error:  # expanduser raises a RuntimeError
            say_once(f"files cannot be cached in {chosen} ({error}); they are made again each time")
            return None
        if not hasattr(os, "geteuid") or (state.st_uid == os.geteuid() and not state.st_mode & 0o022):
            return folder
        say_once(f"files are not cached in {folder}, which others own or may write to; chmod 700 or change it")
    return None


def is_writable(folder: Path) -> bool:
    """Return whether a folder, or its nearest existing parent, has write permission, even for a superuser."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def say_once(message: str, about: str = "") -> None:
    """Warn on rank 0, once per ``about``, or per message if that is empty."""
    if (about or message) not in _said:
        _said.add(about or message)
        rank_zero_warn(message)


def checksum(*parts: object) -> str:
    """Hash the content of tensors, block by block, and the ``repr`` of other parts to 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if not isinstance(part, Tensor):
            digest.update(f"{part!r};".encode())
            continue
        digest.update(f"{part.dtype} {list(part.shape)};".encode())
        values = part.detach().reshape(-1)
        step = max(1, _BYTES_PER_BLOCK // values.element_size())
        for start in range(0, values.numel(), step):
            digest.update(values[start : start + step].cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def get_or_create(
    kind: str,
    key: str,
    make: Callable[[Path], Any] | None,
    read: Callable[[Path], T],
    *,
    title: str = "",
    sources: Sequence[Path] = (),
    replace: bool = False,
) -> T | None:
    """Return ``read`` of an entry, created first by ``make`` if it is missing or damaged; None if it cannot be cached.

    One process creates the entry while others wait. It is created again if a file of ``sources`` changed, or to
    ``replace`` it. ``key`` is a :func:`checksum`, ``title`` names the content for the user.
    """
    if (root := cache_root()) is None:
        return None
    folder = root / kind / key
    with locked(root, kind, key) as has_lock:
        if not replace and (cached := _read_valid(folder, read, sources)) is not None:
            return cached
        if make is None:
            return None
        temporary = folder.with_name(f"{key}.part")
        try:
            if not has_lock:
                raise PermissionError("it is read-only, or has no file locks")
            sweep(root, kind)
            discard(temporary)
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            temporary.mkdir(mode=0o700)
            hashes = hashes_of({str(path): path for path in sources})  # before make: they could change meanwhile
            make(temporary)
            seal(temporary, title, hashes)
            discard(folder)
            temporary.rename(folder)
            flush(folder.parent)
            return read(folder)
        except OSError as error:
            say_once(f"{title}: cannot be cached in {root} ({error}); it is made again each time", str(folder))
            return None
        finally:
            if has_lock:
                discard(temporary)


def find(kind: str, key: str, read: Callable[[Path], T]) -> T | None:
    """Return ``read`` of an entry, or None if it is missing or damaged; arguments as for :func:`get_or_create`."""
    return get_or_create(kind, key, None, read)


def keep(kind: str, key: str, make: Callable[[Path], Any], *, title: str) -> bool:
    """Write or replace an entry; arguments as for :func:`get_or_create`. Return whether it succeeded."""
    return bool(get_or_create(kind, key, make, lambda folder: True, title=title, replace=True))


def kept_folder(kind: str, key: str, make: Callable[[Path], Any], title: str) -> Path:
    """Return the folder of an entry; if it cannot be cached, a temporary folder that is removed at exit."""
    folder = get_or_create(kind, key, make, lambda folder: folder, title=title)
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="lightning_gnn-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        make(folder)
    return folder


def checked_once(files: Sequence[Path], check: Callable[[], Any]) -> None:
    """Run a check of files, unless it has passed before and none of them has changed since."""
    states = [(str(path.resolve()), identity(path)) for path in files]
    key, title = checksum("checked", states), str(files[0].parent)
    settled = all(state for _, state in states)
    if settled and get_or_create("checks", key, lambda _: check(), lambda _: True, title=title):
        return
    check()


@contextmanager
def scratch(kind: str) -> Iterator[Path | None]:
    """Yield an empty folder, removed on exit or by another process if this one dies; None if it cannot be created."""
    root, key = cache_root(), uuid.uuid4().hex
    if root is None or not is_writable(root):
        yield None
        return
    folder = root / kind / f"{key}.part"
    with locked(root, kind, key) as has_lock, ExitStack() as stack:
        stack.callback(discard, root / "locks" / f"{kind}-{key}.lock")
        try:
            if has_lock:
                sweep(root, kind)
            folder.mkdir(mode=0o700, parents=True)
            stack.callback(discard, folder)
        except OSError as error:
            say_once(f"nothing can be stored in {root} ({error})")
        yield folder if folder.is_dir() else None


@contextmanager
def locked(root: Path, kind: str, key: str, timeout: float = -1) -> Iterator[bool]:
    """Lock an entry against other processes and threads; yield False if files cannot be locked, nor thus written."""
    with ExitStack() as stack:
        has_lock = False
        with suppress(OSError, NotImplementedError):  # a Timeout is an OSError
            if is_writable(root):
                (root / "locks").mkdir(mode=0o700, exist_ok=True)
                path = root / "locks" / f"{kind}-{key}.lock"
                stack.enter_context(FileLock(path, timeout, thread_local=False))
                has_lock = True
        yield has_lock


def is_held(root: Path, kind: str, key: str) -> bool:
    """Return whether another process or thread uses an entry; True if files cannot be locked."""
    with locked(root, kind, key, timeout=0) as has_lock:
        return not has_lock


def sweep(root: Path, kind: str) -> None:
    """Remove the incomplete entries of processes that died."""
    for path in (root / kind).glob("*.part"):
        if (match := _KEY.search(path.name)) and not is_held(root, kind, match[0]):
            discard(path)


def entries(root: Path, kind: str) -> list[Path]:
    """Return the entries of a kind, sorted; other files in its folder are ignored."""
    return sorted(path for path in (root / kind).glob("*") if _KEY.fullmatch(path.name))


def discard(path: Path) -> None:
    """Remove a file or folder if it exists; ignore errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def _read_valid(folder: Path, read: Callable[[Path], T], sources: Sequence[Path]) -> T | None:
    if not os.path.lexists(folder):
        return None
    try:
        verify(folder, sources)
        return read(folder)
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        rank_zero_warn(f"{folder} is damaged or out of date ({error}); it is made again")
        return None
