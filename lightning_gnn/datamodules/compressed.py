"""A compressed graph from the user's data: made once, kept on disk where that takes long."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from rich.console import Console
from rich.progress import Progress

from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.redundancy import Redundancy
from lightning_gnn.graph.user_cache import cache_folder, checksum

_FORMAT = 1
KEPT_FROM = 1_000_000
"""Graphs with so many edges or more are kept on disk."""
_PATIENCE = 2.0
"""Seconds before a progress bar appears."""


def compressed_graph(
    graph: CSCGraph,
    num_chunks: int | str = "auto",
    order: str = "locality",
    cache_dir: str | Path | None = None,
) -> tuple[CompressedGraph, Redundancy]:
    """Compress a graph, or read it from the cache directory if it was compressed before.

    Args:
        graph: The graph.
        num_chunks: Number of chunks, or ``"auto"``.
        order: ``"locality"`` or ``"natural"``.
        cache_dir: Where large graphs are kept; by default the user's cache directory.

    Returns:
        The compressed graph, and how many rows it loads.

    Raises:
        ValueError: As for :meth:`CompressedGraph.from_graph`.
    """
    settings: dict[str, Any] = {"num_chunks": num_chunks, "order": order}
    if graph.num_edges < KEPT_FROM:
        return _compress(graph, settings)
    key = checksum(_FORMAT, graph.indptr, graph.indices, graph.edge_ids, sorted(settings.items()))
    folder = cache_folder("graphs", cache_dir) / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):  # of several processes one compresses
            if (found := _load(folder)) is not None:
                return found
            return _keep(*_compress(graph, settings), folder)
    except OSError as error:
        rank_zero_warn(f"the compressed graph cannot be kept in {folder.parent} ({error}); it is made anew each time")
        return _compress(graph, settings)


def summary(redundancy: Redundancy) -> str:
    """Say in one line what the order of the vertices saves."""
    rows = redundancy.rows_loaded
    natural, random = (
        rows / max(1, other) for other in (redundancy.natural_rows_loaded, redundancy.random_rows_loaded)
    )
    return (
        f"compressed graph: {redundancy.num_chunks:,} chunks in {redundancy.order} order, {rows:,} rows loaded per "
        f"aggregation ({natural:.2f} of the natural order's, {random:.2f} of a random one's)"
    )


def _compress(graph: CSCGraph, settings: dict[str, Any]) -> tuple[CompressedGraph, Redundancy]:
    with _progress_bar() as show:
        compressed = CompressedGraph.from_graph(graph, progress=show, **settings)
        return compressed, compressed.redundancy()


@contextmanager
def _progress_bar() -> Iterator[Any]:
    """Yield what shows a step and its fraction, once it has taken some seconds."""
    start = time.monotonic()
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, Any] = {}

    def show(step: str, fraction: float) -> None:
        if time.monotonic() - start < _PATIENCE:
            return
        if step not in tasks:
            bar.start()
            tasks[step] = bar.add_task(f"compressing the graph: {step}", total=1.0)
        bar.update(tasks[step], completed=fraction)

    try:
        yield show
    finally:
        if tasks:
            bar.stop()


def _load(folder: Path) -> tuple[CompressedGraph, Redundancy] | None:
    if not folder.is_dir():
        return None
    try:
        redundancy = Redundancy(**json.loads((folder / "redundancy.json").read_text()))
        graph = CompressedGraph.load(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        rank_zero_warn(f"{folder} is damaged ({error}); the graph is compressed again")
        shutil.rmtree(folder, ignore_errors=True)
        return None
    rank_zero_info(f"Compressed graph read from {folder}")
    return graph, redundancy


def _keep(graph: CompressedGraph, redundancy: Redundancy, folder: Path) -> tuple[CompressedGraph, Redundancy]:
    part = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    try:
        graph.save(part)
        (part / "redundancy.json").write_text(json.dumps(asdict(redundancy)))
        os.replace(part, folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        rank_zero_warn(f"the compressed graph cannot be kept in {folder.parent} ({error}); it is made anew each time")
    return graph, redundancy
