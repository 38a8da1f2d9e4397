"""Everything cached: folders ``<root>/<kind>/<key>`` with a manifest, written at once and made again when damaged.

Where a folder cannot be used or the disk is full, a warning says so and nothing is kept: no cache may end a run.
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
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lightning_gnn.runtime.files import flush
from lightning_gnn.runtime.manifest import hashes_of, identity, seal, verify

KINDS = {
    "topology": "sorted edges of data folders",
    "graphs": "compressed graphs of earlier releases",
    "plans": "plans of collective batching",
    "limits": "what this machine can do at the most",
    "inference": "layer outputs of inference",
    "checks": "files whose ids were checked",
    "twin": "the compiled CPU twin of the Ascend kernels",
    "npu": "the compiled NPU kernels",
    **dict.fromkeys(("first_layer", "datasets"), "of an earlier release, which nothing reads"),
}
"""What the store keeps, each kind in a folder of its own."""

_KEY = re.compile(r"[0-9a-f]{32}")
_BLOCK = 1 << 24
_said: set[str] = set()

T = TypeVar("T")


def cache_root(given: str | Path | None = None) -> Path | None:
    """Return the cache folder: ``given``, ``$LIGHTNING_GNN_CACHE`` or the user's; None, with a warning, without one.

    A folder that others own or may write to is never used, since they could plant what is loaded.
    """
    default = user_cache_path("lightning-gnn", appauthor=False)
    for chosen in (given or os.environ.get("LIGHTNING_GNN_CACHE") or default, default):
        try:
            folder = Path(chosen).expanduser().absolute()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
        except (OSError, RuntimeError) as error:  # expanduser raises a RuntimeError
            say_once(f"cached files cannot be kept in {chosen} ({error}); what is cached is made again each time")
            return None
        if not hasattr(os, "geteuid") or (found.st_uid == os.geteuid() and not found.st_mode & 0o022):
            return folder
        say_once(f"cached files are not kept in {folder}, which others own or may write to; chmod 700 or change it")
    return None


def is_writable(folder: Path) -> bool:
    """Return whether a folder, or the nearest one above it that exists, is set writable, also for a superuser."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def say_once(message: str, about: str = "") -> None:
    """Warn, in the first process of a run, once about a thing, by default once with these words."""
    if (about or message) not in _said:
        _said.add(about or message)
        rank_zero_warn(message)


def checksum(*parts: object) -> str:
    """Return 32 hexadecimal digits of the content of tensors, read block by block, and the ``repr`` of other parts."""
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
    make: Callable[[Path], Any] | None,
    read: Callable[[Path], T],
    *,
    title: str = "",
    sources: Sequence[Path] = (),
    given: str | Path | None = None,
    replace: bool = False,
) -> T | None:
    """Return what ``read`` finds in an entry, which ``make`` fills first if it is missing or damaged; None: no folder.

    One of several processes makes it, again when a file of ``sources`` changes, or to ``replace`` it. ``key`` is a
    :func:`checksum`, ``title`` names the content for the user, ``given`` is the user's folder.
    """
    if (root := cache_root(given)) is None:
        return None
    folder = root / kind / key
    with locked(root, kind, key) as alone:
        if not replace and (found := _find(folder, read, sources)) is not None:
            return found
        if make is None:
            return None
        part = folder.with_name(f"{key}.part")
        try:
            if not alone:
                raise PermissionError("it is read-only, or has no file locks")
            sweep(root, kind)
            discard(part)
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            part.mkdir(mode=0o700)
            hashes = hashes_of({str(path): path for path in sources})  # before: they could change meanwhile
            make(part)
            seal(part, title, hashes)
            discard(folder)
            part.rename(folder)
            flush(folder.parent)
            return read(folder)
        except OSError as error:
            say_once(f"{title}: cannot be kept in {root} ({error}); it is made again each time", str(folder))
            return None
        finally:
            if alone:
                discard(part)


def find(kind: str, key: str, read: Callable[[Path], T]) -> T | None:
    """Return what an entry holds, or None where there is none that is whole; arguments as for :func:`kept`."""
    return kept(kind, key, None, read)


def keep(kind: str, key: str, make: Callable[[Path], Any], *, title: str) -> bool:
    """Write an entry, replacing what is there; arguments as for :func:`kept`. Returns whether that was possible."""
    return bool(kept(kind, key, make, lambda folder: True, title=title, replace=True))


def kept_folder(kind: str, key: str, make: Callable[[Path], Any], title: str) -> Path:
    """Return the folder of an entry, or, where nothing can be kept, one that lasts as long as this process."""
    found = kept(kind, key, make, lambda folder: folder, title=title)
    if found is None:
        found = Path(tempfile.mkdtemp(prefix="lightning_gnn-"))
        atexit.register(shutil.rmtree, found, ignore_errors=True)
        make(found)
    return found


def checked_once(files: Sequence[Path], check: Callable[[], Any]) -> None:
    """Run a check of files that passes for good, unless it passed before and none of them changed since."""
    found = [(str(path.resolve()), identity(path)) for path in files]
    key, title = checksum("checked", found), str(files[0].parent)
    if all(seen for _, seen in found) and kept("checks", key, lambda _: check(), lambda _: True, title=title):
        return
    check()


@contextmanager
def scratch(kind: str) -> Iterator[Path | None]:
    """Yield an empty folder that is removed on the way out, or by others if this process dies; None: no room."""
    root, key = cache_root(), uuid.uuid4().hex
    if root is None or not is_writable(root):
        yield None
        return
    part = root / kind / f"{key}.part"
    with locked(root, kind, key) as alone, ExitStack() as stack:
        stack.callback(discard, root / "locks" / f"{kind}-{key}.lock")
        try:
            if alone:
                sweep(root, kind)
            part.mkdir(mode=0o700, parents=True)
            stack.callback(discard, part)
        except OSError as error:
            say_once(f"nothing can be kept in {root} ({error})")
        yield part if part.is_dir() else None


@contextmanager
def locked(root: Path, kind: str, key: str, timeout: float = -1) -> Iterator[bool]:
    """Keep other processes and threads out; yields False where no locks can be kept, and so nothing may be written."""
    with ExitStack() as stack:
        alone = False
        with suppress(OSError, NotImplementedError):  # a Timeout is an OSError
            if is_writable(root):
                (root / "locks").mkdir(mode=0o700, exist_ok=True)
                path = root / "locks" / f"{kind}-{key}.lock"
                stack.enter_context(FileLock(path, timeout, thread_local=False))
                alone = True
        yield alone


def is_held(root: Path, kind: str, key: str) -> bool:
    """Return whether another process or thread uses an entry, or could where there are no locks."""
    with locked(root, kind, key, timeout=0) as alone:
        return not alone


def sweep(root: Path, kind: str) -> None:
    """Remove what writers left behind that died."""
    for path in (root / kind).glob("*.part"):
        if (found := _KEY.search(path.name)) and not is_held(root, kind, found[0]):
            discard(path)


def entries(root: Path, kind: str) -> list[Path]:
    """Return the folders of a kind; what is not named as the store names its own is left alone."""
    return sorted(path for path in (root / kind).glob("*") if _KEY.fullmatch(path.name))


def discard(path: Path) -> None:
    """Remove the file or folder that is there, if that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def _find(folder: Path, read: Callable[[Path], T], sources: Sequence[Path]) -> T | None:
    if not os.path.lexists(folder):
        return None
    try:
        verify(folder, sources)
        return read(folder)
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        rank_zero_warn(f"{folder} is damaged or out of date ({error}); it is made again")
        return None
