"""A compressed graph from the user's data: made once, kept on disk where that takes long."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities import rank_zero_info
from rich.console import Console
from rich.progress import Progress

from lightning_gnn.graph.build import Redundancy
from lightning_gnn.graph.compress import CompressedGraph, read_compressed
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.runtime.documents import read_json, read_text
from lightning_gnn.runtime.store import checksum, kept

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
    made: list[tuple[CompressedGraph, Redundancy]] = []

    def make(folder: Path) -> None:
        made.append(_compress(graph, settings))
        compressed, redundancy = made[0]
        compressed.save(folder)
        (folder / "redundancy.json").write_text(json.dumps(asdict(redundancy)))

    found = kept(
        "graphs",
        checksum(_FORMAT, graph.indptr, graph.indices, graph.edge_ids, sorted(settings.items())),
        make,
        _read,
        title=f"compressed graph of {graph.num_nodes:,} nodes and {graph.num_edges:,} edges, num_chunks={num_chunks}, "
        f"order={order}",
        given=cache_dir,
    )
    if made:
        return made[0]
    if found is None:
        return _compress(graph, settings)
    rank_zero_info("Compressed graph read from the cache")
    return found


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


def _read(folder: Path, check: bool) -> tuple[CompressedGraph, Redundancy]:
    graph = read_compressed(folder, check=check)
    return graph, Redundancy(**read_json(read_text(folder / "redundancy.json")))
