"""The whole graph as one batch, for training without sampling and for exact evaluation.

Its compressed graph is made once, and kept on disk where that takes long.
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_info
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torch_geometric.data import Data, HeteroData

from lightning_gnn.graph.build import Redundancy
from lightning_gnn.graph.compress import CompressedGraph, read_compressed
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.nn.inference import FullInference
from lightning_gnn.runtime.files import read_json, read_text
from lightning_gnn.runtime.messages import OF_NEWER_TORCH
from lightning_gnn.runtime.store import checksum, kept

_FORMAT = 1
KEPT_FROM = 1_000_000
"""Graphs with so many edges or more are kept on disk."""
_PATIENCE = 2.0
"""Seconds before a progress bar appears."""


class FullBatch(Data):  # type: ignore[misc]
    """A PyG ``Data`` whose ``edge_index`` is a compressed graph.

    Its ``inference``, if there is one, tells :class:`~lightning_gnn.nn.GNNModule` to evaluate layer by layer. Then
    features and graph stay in host memory if a device is too small for them.
    """

    is_handed_out_again = True
    """Loaders hand out the same object each time, so that it is converted and moved once."""

    @classmethod
    def from_data(cls, data: Data, graph: CompressedGraph, **more: Any) -> FullBatch:
        """Share the attributes of ``data``, except for its topology, and add others."""
        kept = {key: value for key, value in data.to_dict().items() if key not in ("graph", "adj_t", "edge_index")}
        batch: FullBatch = cls.from_dict({**kept, "edge_index": graph, **more})
        return batch

    @property
    def num_edges(self) -> int:
        """Number of edges, which PyG cannot count."""
        return int(self.edge_index.num_edges)

    def to(self, device: Any, *args: str, non_blocking: bool = False) -> FullBatch:
        """Move the batch, once and for all: loaders hand out the same batch each time."""
        device = torch.device(device)
        settings = self.get("inference")
        keys = args or tuple(self.keys())
        if settings is not None and not args and device.type != "cpu" and self.x.device.type == "cpu":
            wanted = self.x.nbytes + self.edge_index.num_bytes
            if wanted > settings.limit_on(device):
                keys = tuple(key for key in keys if key not in ("x", "edge_index", "edge_weight", "edge_attr"))
        # Moved in a validation loop, tensors would otherwise be of no use for training.
        with torch.inference_mode(False):
            super().to(device, *keys, non_blocking=non_blocking)
        return self


def typed_batch(data: HeteroData, settings: FullInference) -> HeteroData:
    """Return a graph with types as one batch, which shares the attributes of ``data``."""
    if settings.folder is not None or settings.memory_limit != "auto":
        raise ValueError("FullInference: graphs with types run in memory; leave out folder and memory_limit")
    batch = copy.copy(data)
    if missing := [kind for kind in batch.edge_types if batch[kind].get("edge_index") is None]:
        relations = HeteroCSCGraph.from_data(data).relations
        for kind in missing:
            batch[kind].edge_index = relations[kind].to_edge_index()
            batch[kind].pop("adj_t", None)
    return batch


def inference_settings(inference: str | FullInference | None) -> FullInference | None:
    """Return the settings of full inference, None for sampled batches."""
    if inference in (None, "sampled"):
        return None
    if inference == "full":
        return FullInference()
    if not isinstance(inference, FullInference):
        raise ValueError(f"inference={inference!r} is unknown; use 'sampled', 'full' or a FullInference")
    return inference


def mask_of(nodes: Tensor, num_nodes: int) -> Tensor:
    """Return a choice of nodes as a bool mask ``[num_nodes]``."""
    if nodes.dtype == torch.bool:
        return nodes
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[nodes] = True
    return mask


def only_batch(batch: Data) -> DataLoader[Data]:
    """Return a loader of one batch, which each of several processes gets."""
    warnings.filterwarnings("ignore", OF_NEWER_TORCH, FutureWarning)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*number of training batches .* is smaller than the logging interval.*")
    # A sampler of this kind is left alone by Lightning, whose own would share the one batch out.
    sampler: DistributedSampler[Data] = DistributedSampler([batch], num_replicas=1, rank=0, shuffle=False)  # type: ignore[arg-type]
    # A generator of its own: a loader draws from torch's whenever it is iterated over, which resuming does once more.
    return DataLoader([batch], batch_size=None, sampler=sampler, collate_fn=_unchanged, generator=torch.Generator())  # type: ignore[arg-type]


def _unchanged(batch: Data) -> Data:
    return batch


def compressed_graph(
    graph: CSCGraph,
    num_chunks: int | str = "auto",
    order: str = "auto",
    cache_dir: str | Path | None = None,
) -> tuple[CompressedGraph, Redundancy]:
    """Compress a graph, or read it from the cache directory if it was compressed before.

    Args:
        order: ``"locality"``, ``"natural"`` or ``"auto"``, which is ``"locality"`` where there is an accelerator, and
            else what the model of a CPU's caches says.
        cache_dir: Where large graphs are kept; by default the user's cache directory.

    Returns:
        The compressed graph, and how many rows it loads.
    """
    if order == "auto" and torch.accelerator.is_available():
        order = "locality"
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
    if found is None:
        return made[0] if made else _compress(graph, settings)
    if not made:
        rank_zero_info("Compressed graph read from the cache")
    return found  # mapped, so that all processes of a machine use one copy, whichever of them made it


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


def _read(folder: Path) -> tuple[CompressedGraph, Redundancy]:
    return read_compressed(folder, check=False), Redundancy(**read_json(read_text(folder / "redundancy.json")))
