"""Where cached files lie, and whether they may lie there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from platformdirs import user_cache_path
from pytorch_lightning.utilities import rank_zero_warn

_said: set[str] = set()


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
