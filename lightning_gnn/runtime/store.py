"""The one store for everything cached: entries that are written at once, verified once, and made anew when damaged.

An entry is a folder ``<root>/<kind>/<key>`` with the files of one thing and a manifest. Every function falls back to no
cache, with one warning, where the folder cannot be used or the disk is full: nothing cached may end a run.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout
from platformdirs import user_cache_path
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lightning_gnn.runtime.files import flush
from lightning_gnn.runtime.manifest import DamagedEntry, Manifest, StaleEntry, identity, is_settled

KINDS = {
    "topology": "sorted edges of data folders",
    "graphs": "compressed graphs",
    "first_layer": "aggregated features of an earlier release, which nothing reads",
    "plans": "plans of collective batching",
    "limits": "what this machine can do at the most",
    "inference": "layer outputs of inference",
    "datasets": "data sets of an earlier release, which nothing reads",
    "checks": "files whose ids were checked",
    "twin": "the compiled CPU twin of the Ascend kernels",
    "npu": "the compiled NPU kernels",
}
"""What the store keeps, each kind in a folder of its own."""

_KEY = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"\.([0-9a-f]{32})\.[0-9a-f]{32}\.part")
_BLOCK = 1 << 24
_PATIENCE = 20.0
"""Seconds after which it is said that another process is waited for."""
_DAMAGE = (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, RecursionError)

_said: set[str] = set()

T = TypeVar("T")
Read = Callable[[Path, bool], T]
"""Reads an entry; where the second argument is true, its content must be checked, because it is not known yet."""


def cache_root(given: str | Path | None = None) -> Path | None:
    """Return the folder below which everything cached lies, or None where there can be none, which is said once.

    A folder of another user, or one that others may write to, is never read: whoever writes there could plant what is
    loaded. Then a private one is used, which is said once.

    Args:
        given: What the user chose instead of ``$LIGHTNING_GNN_CACHE``, which stands before the user's cache folder
            (``$XDG_CACHE_HOME/lightning-gnn``, by default ``~/.cache/lightning-gnn``).
    """
    default = user_cache_path("lightning-gnn", appauthor=False)
    chosen = given or os.environ.get("LIGHTNING_GNN_CACHE") or default
    try:
        wanted = Path(chosen).expanduser().absolute()
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(wanted):
            return wanted
    except (OSError, RuntimeError) as error:  # expanduser raises a RuntimeError
        say_once(f"cached files cannot be kept in {chosen} ({error}); what is cached is made anew each time")
        return None
    number = os.geteuid()
    others = [default if default != wanted else default.with_name(f"{default.name}-{number}")]
    if wanted.stat().st_mode & stat.S_ISVTX:  # there nobody can move the folder of another
        others.insert(0, wanted / f"private-{number}")
    why = "belongs to another user" if wanted.stat().st_uid != number else "can be written to by others"
    for folder in others:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_private(folder):
                say_once(f"{wanted} {why}, so cached files are kept in {folder}; chmod 700 it or choose another folder")
                return folder
        except OSError:
            continue
    say_once(f"cached files cannot be kept in {wanted}: it {why}; set LIGHTNING_GNN_CACHE to a folder of your own")
    return None


def is_private(folder: Path) -> bool:
    """Tell whether a folder belongs to this user, and nobody else may write to it."""
    if not hasattr(os, "getuid"):  # Windows: the user's folders are the user's
        return folder.is_dir()
    found = folder.stat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def is_writable(folder: Path) -> bool:
    """Tell whether files may be made in a folder, or in the nearest one above it that exists.

    Permissions count even for a superuser, who could override them: data that was set read-only stays as it is.
    """
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def say_once(message: str, about: str = "") -> None:
    """Warn, in the first process of a run, once about a thing, by default once with these words."""
    if (about or message) not in _said:
        _said.add(about or message)
        rank_zero_warn(message)


def checksum(*parts: Any) -> str:
    """Return 32 hexadecimal digits that change with the content of any part.

    Args:
        *parts: Tensors, which are read block by block, so that a memory-mapped one never comes in whole; None; or
            anything else, by its ``repr``.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if not isinstance(part, Tensor):
            digest.update(f"{part!r};".encode())
            continue
        digest.update(f"{part.dtype} {list(part.shape)};".encode())
        values = part.detach().reshape(-1)
        step = max(1, _BLOCK // values.element_size())
        for start in range(0, values.numel(), step):
            digest.update(values[start : start + step].cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def kept(
    kind: str,
    key: str,
    make: Callable[[Path], Any],
    read: Read[T],
    *,
    title: str,
    sources: Sequence[Path] = (),
    given: str | Path | None = None,
) -> T | None:
    """Return what an entry holds; it is made first where there is none, or none that is whole.

    Of several processes one makes it, and the others wait.

    Args:
        key: 32 hexadecimal digits, such as :func:`checksum` returns.
        read: Reads them; never returns None. What it raises for wrong content counts as damage.
        given: The folder that the user chose to keep cached files in, or None.

    Returns:
        What ``read`` returns, or None where nothing can be kept.
    """
    root = cache_root(given)
    if root is None:
        return None
    with locked(root, kind, key) as alone:
        found = _find(root / kind / key, read, sources)
        if found is None and _write(root, kind, key, make, title, sources, alone):
            found = _find(root / kind / key, read, sources)
        return found


def find(kind: str, key: str, read: Read[T]) -> T | None:
    """Return what an entry holds, or None where there is none that is whole; arguments as for :func:`kept`."""
    root = cache_root()
    if root is None or not (root / kind / key).exists():
        return None
    with locked(root, kind, key):
        return _find(root / kind / key, read, ())


def keep(kind: str, key: str, make: Callable[[Path], Any], *, title: str) -> bool:
    """Write an entry, replacing what is there; arguments as for :func:`kept`. Returns whether that was possible."""
    root = cache_root()
    if root is None:
        return False
    with locked(root, kind, key) as alone:
        return _write(root, kind, key, make, title, (), alone)


def kept_folder(kind: str, key: str, make: Callable[[Path], Any], title: str) -> Path:
    """Return the folder of an entry, or, where nothing can be kept, one that lasts as long as this process."""
    found = kept(kind, key, make, lambda folder, check: folder, title=title)
    if found is None:
        found = Path(tempfile.mkdtemp(prefix="lightning_gnn-"))
        atexit.register(shutil.rmtree, found, ignore_errors=True)
        make(found)
    return found


def checked_once(files: Sequence[Path], check: Callable[[], Any]) -> None:
    """Run a check of files that passes for good, unless it passed before and none of them changed since."""
    key = checksum("checked", *(str(path.resolve()) for path in files))
    before = [path.stat() for path in files]
    settled, now = all(map(is_settled, before)), list(map(identity, before))
    if find("checks", key, lambda folder, fresh: (folder / "identity").read_text()) == repr(now):
        return
    check()
    if settled and now == [identity(path.stat()) for path in files]:
        keep("checks", key, lambda folder: (folder / "identity").write_text(repr(now)), title=str(files[0].parent))


@contextmanager
def scratch(kind: str) -> Iterator[Path | None]:
    """Yield an empty folder that is removed on the way out, also by others if this process dies; None: no room."""
    root = cache_root()
    if root is None or not is_writable(root):
        yield None
        return
    key = uuid.uuid4().hex
    part = _part(root / kind / key)
    try:
        with locked(root, kind, key) as alone:
            try:
                if alone:
                    sweep(root, kind)
                part.mkdir(mode=0o700, parents=True)
            except OSError as error:
                say_once(f"nothing can be kept in {root} ({error})")
                yield None
                return
            try:
                yield part
            finally:
                discard(part)
    finally:
        with suppress(OSError):
            _lock_path(root, kind, key).unlink()


@contextmanager
def locked(root: Path, kind: str, key: str) -> Iterator[bool]:
    """Keep other processes and threads out; yields False where there is no place for locks: better than not at all."""
    lock = None
    try:
        if is_writable(root):
            path = _lock_path(root, kind, key)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            lock = FileLock(path, thread_local=False)
            try:
                lock.acquire(timeout=_PATIENCE)
            except Timeout:
                rank_zero_warn(f"waiting for another process that makes {root / kind / key}")
                lock.acquire()
    except (OSError, NotImplementedError):
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def is_held(root: Path, kind: str, key: str) -> bool:
    """Tell whether another process or thread holds the lock of an entry."""
    path = _lock_path(root, kind, key)
    if not path.exists():
        return False
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except (OSError, NotImplementedError):  # a Timeout is one; where locks do not work, nobody can tell
        return True
    lock.release()
    return False


def sweep(root: Path, kind: str, own: str = "") -> list[Path]:
    """Remove what writers left behind that died; returns what went."""
    gone = []
    for path in (root / kind).glob(".*.part") if (root / kind).is_dir() else ():
        found = _PART.fullmatch(path.name)
        if found and (found[1] == own or not is_held(root, kind, found[1])):
            discard(path)
            gone.append(path)
    return gone


def entries(root: Path, kind: str) -> list[Path]:
    """Return the folders of a kind; what is not named as the store names its own is left alone."""
    folder = root / kind
    return sorted(path for path in folder.iterdir() if _KEY.fullmatch(path.name)) if folder.is_dir() else []


def remove(path: Path) -> None:
    """Remove an entry: at once out of sight, then its files."""
    away = _part(path)
    path.rename(away)
    discard(away)


def discard(path: Path) -> None:
    """Remove whatever is there, if that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _find(folder: Path, read: Read[T], sources: Sequence[Path]) -> T | None:
    if not os.path.lexists(folder):
        return None
    try:
        manifest = Manifest.load(folder)
        fresh = manifest.verify(folder, sources)
        found = read(folder, fresh)
    except StaleEntry:
        return None
    except _DAMAGE as error:
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise
        rank_zero_warn(f"{folder} is damaged ({error}); it is made anew")
        return None
    if fresh:
        with suppress(OSError):  # a read-only store is verified each time
            manifest.save(folder)
    return found


def _write(
    root: Path, kind: str, key: str, make: Callable[[Path], Any], title: str, sources: Sequence[Path], alone: bool
) -> bool:
    folder = root / kind / key
    part = _part(folder)
    if not is_writable(root):
        say_once(f"{title}: cannot be kept, {root} is read-only; it is made anew each time", str(folder))
        return False
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        if alone:
            sweep(root, kind, key)
        part.mkdir(mode=0o700)
        manifest = Manifest(title, time.time())
        manifest.add_sources(sources)
        make(part)
        manifest.add_files(part)
        manifest.save(part)
        if os.path.lexists(folder):
            remove(folder)
        part.rename(folder)
        flush(folder.parent)
        return True
    except (OSError, DamagedEntry) as error:
        say_once(f"{title}: cannot be kept in {root} ({error}); it is made anew each time", str(folder))
        return False
    finally:
        discard(part)


def _part(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")


def _lock_path(root: Path, kind: str, key: str) -> Path:
    return root / "locks" / f"{kind}-{key}.lock"
