"""``lgnn cache``: what is kept on this machine, and how to be rid of it."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_gnn.runtime.manifest import load
from lightning_gnn.runtime.messages import shown
from lightning_gnn.runtime.store import KINDS, cache_root, discard, entries, is_held, sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """List or clear; returns 1 where something could not be removed."""
    parser = argparse.ArgumentParser(
        "lgnn cache",
        description="What is kept in LIGHTNING_GNN_CACHE, by default the user's cache folder. All of it can be made "
        "again: damaged files are noticed when they are read, and then made again.",
        epilog="kinds: " + "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items()),
    )
    parser.add_argument(
        "--clear",
        nargs="?",
        const="all",
        choices=["all", *KINDS],
        metavar="KIND",
        help="remove everything, or one kind, without asking; what a running process uses is left alone",
    )
    chosen = parser.parse_args(arguments)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    # Remove the temporary files that interrupted runs have left, before anything is listed or cleared.
    root = cache_root()
    if root is None:
        return 1
    for kind in KINDS:
        sweep(root, kind)
    if chosen.clear:
        return _clear(root, list(KINDS) if chosen.clear == "all" else [chosen.clear], console)
    return _list(root, console)


def _list(root: Path, console: Console) -> int:
    table = Table("kind", "for", "size", "made", box=None, pad_edge=False)
    total = 0
    for kind in KINDS:
        for path in entries(root, kind):
            total += (size := _size(path))
            title, made = _about(path)
            table.add_row(kind, title, shown(size), time.strftime("%Y-%m-%d %H:%M", time.localtime(made)))
    if table.row_count:
        console.print(table)
    console.print(f"{_entries(table.row_count)}, {shown(total)} in {root}")
    return 0


def _clear(root: Path, kinds: Sequence[str], console: Console) -> int:
    failed = False
    for kind in kinds:
        gone, size = 0, 0
        for path in entries(root, kind):
            if is_held(root, kind, path.name):
                console.print(f"{kind}: {path} is in use and stays")
                continue
            taken = _size(path)
            discard(path)
            if path.exists():
                console.print(f"{path} cannot be removed", style="red")
                failed = True
            else:
                gone, size = gone + 1, size + taken
        if gone:
            console.print(f"{kind}: {_entries(gone)} removed, {shown(size)}")
    if not failed and not any(entries(root, kind) for kind in kinds):
        console.print(f"{root} holds nothing of {', '.join(kinds)} any more")
    return int(failed)


def _entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"


def _about(path: Path) -> tuple[str, float]:
    """Return what an entry is for, and when it was made."""
    try:
        manifest = load(path)
        return manifest["title"], manifest["made"]
    except ValueError:
        return "unknown: damaged, or of another release", path.lstat().st_mtime


def _size(path: Path) -> int:
    """Return the bytes on the disk."""
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in found if not file.is_dir())
