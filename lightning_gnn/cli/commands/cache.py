"""``lgnn cache``: list or clear the files cached on this machine."""

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
    """List or clear the cache; return 1 if an entry could not be removed."""
    parser = argparse.ArgumentParser(
        "lgnn cache",
        description="List or clear the files cached in LIGHTNING_GNN_CACHE, by default the user's cache folder. All of "
        "them can be made again: damaged files are detected when they are read, and then made again.",
        epilog="kinds: " + "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items()),
    )
    parser.add_argument(
        "--clear",
        nargs="?",
        const="all",
        choices=["all", *KINDS],
        metavar="KIND",
        help="remove everything, or one kind, without asking; entries in use by a running process stay",
    )
    chosen = parser.parse_args(arguments)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    # Remove the temporary files of interrupted runs before anything is listed or cleared.
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
            total += (size := _bytes_on_disk(path))
            title, created = _read_title(path)
            table.add_row(kind, title, shown(size), time.strftime("%Y-%m-%d %H:%M", time.localtime(created)))
    if table.row_count:
        console.print(table)
    console.print(f"{_format_count(table.row_count)}, {shown(total)} in {root}")
    return 0


def _clear(root: Path, kinds: Sequence[str], console: Console) -> int:
    failed = False
    for kind in kinds:
        num_removed, size = 0, 0
        for path in entries(root, kind):
            if is_held(root, kind, path.name):
                console.print(f"{kind}: {path} is in use and stays")
                continue
            entry_size = _bytes_on_disk(path)
            discard(path)
            if path.exists():
                console.print(f"{path} cannot be removed", style="red")
                failed = True
            else:
                num_removed, size = num_removed + 1, size + entry_size
        if num_removed:
            console.print(f"{kind}: {_format_count(num_removed)} removed, {shown(size)}")
    if not failed and not any(entries(root, kind) for kind in kinds):
        console.print(f"{root} has no entries left of {', '.join(kinds)}")
    return int(failed)


def _format_count(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"


def _read_title(path: Path) -> tuple[str, float]:
    """Return the title of an entry, and its time of creation."""
    try:
        manifest = load(path)
        return manifest["title"], manifest["made"]
    except ValueError:
        return "unknown: damaged, or of another release", path.lstat().st_mtime


def _bytes_on_disk(path: Path) -> int:
    paths = [path, *path.rglob("*")] if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in paths if not file.is_dir())
