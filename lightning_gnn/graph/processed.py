"""Data sets of PyG whose raw files lie where nothing can be written: what is made of them is kept in the cache."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch_geometric
from torch_geometric.data import Data, InMemoryDataset

from lightning_gnn.runtime.store import checksum, kept


def processed_elsewhere(make: Callable[[str], InMemoryDataset], base: Path, folder: str, raw: Sequence[Path]) -> Data:
    """Make a PyG dataset from raw files in a read-only folder.

    Args:
        make: Makes the dataset in a root.
        base: The folder, with ``raw``.
        folder: What PyG calls it below the root.
        raw: The raw files.
    """

    def process(target: Path) -> None:
        with _mirror(folder, raw, target) as root:
            make(root)

    def read(source: Path, fresh: bool) -> Data:
        with _mirror(folder, raw, source) as root:
            return make(root)[0]

    found = kept(
        "datasets",
        checksum("processed 1", str(base.resolve()), folder, torch_geometric.__version__),
        process,
        read,
        title=str(base),
        sources=[path.resolve() for path in raw],
    )
    if found is None:
        with tempfile.TemporaryDirectory(prefix="lightning_gnn-") as target:
            process(Path(target))
            found = read(Path(target), True)
    return found


@contextmanager
def _mirror(folder: str, raw: Sequence[Path], processed: Path) -> Iterator[str]:
    """Yield a root in which PyG finds raw files, and a folder for what it makes of them, that lie elsewhere."""
    with tempfile.TemporaryDirectory(prefix="lightning_gnn-") as root:
        base = Path(root) / folder
        base.mkdir(exist_ok=True)
        try:
            (base / "raw").symlink_to(raw[0].parent.resolve(), target_is_directory=True)
            (base / "processed").symlink_to(processed, target_is_directory=True)
            yield root
            return
        except OSError:
            if (base / "processed").exists():  # then it is the caller's
                raise
        # Windows lets not every user make links.
        (base / "raw").mkdir(exist_ok=True)
        for path in raw:
            shutil.copyfile(path, base / "raw" / path.name)
        shutil.copytree(processed, base / "processed")
        yield root
        if not any(processed.iterdir()):
            shutil.copytree(base / "processed", processed, dirs_exist_ok=True)
