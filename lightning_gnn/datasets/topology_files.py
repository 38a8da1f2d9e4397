"""Reads and writes the topology of a folder: memory-mapped CSC arrays, or an edge list that is sorted and cached."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.features.arrays import check_room, create_array, load_array, save_arrays
from lightning_gnn.graph.csc import CSCGraph, check_edge_index, check_ids, check_integers, index_dtype, sort_by_target
from lightning_gnn.graph.prefetch_lists import expect_list_reads
from lightning_gnn.runtime.store import checked_once, checksum, get_or_create

TOPOLOGY = ("indptr", "indices", "edge_ids")
MIN_CACHED_EDGES = 1_000_000  # minimum number of edges for which the sorted edge list is cached
MIN_REMEMBERED_BYTES = 1 << 26  # minimum topology size in bytes for which a passed check is remembered


def write_csc(edge_index: Tensor, num_nodes: int, folder: str | Path, num_sources: int | None = None) -> None:
    """Sort a memory-mapped edge list by target into the files of a folder, with ``16 * N`` bytes of memory."""
    folder = Path(folder)
    check_edge_index(edge_index)
    num_sources = num_nodes if num_sources is None else num_sources
    for side, count in enumerate((num_sources, num_nodes)):
        check_ids(edge_index[side], count, f"edge_index[{side}]")
    row, col = edge_index[0].numpy(), edge_index[1].numpy()
    dtypes = {"indices": index_dtype(num_sources), "edge_ids": index_dtype(row.size)}
    needed = 8 * num_nodes + sum(row.size * np.dtype(dtype).itemsize for dtype in dtypes.values())
    folder.mkdir(parents=True, exist_ok=True)
    check_room(folder, needed + (1 << 20))
    indices, order = (
        np.asarray(create_array(folder / f"{name}.npy", dtype, (row.size,))) for name, dtype in dtypes.items()
    )
    indptr = sort_by_target(row, col, num_nodes, indices, order)
    del indices, order  # Windows cannot remove a mapped file
    save_arrays(folder, {"indptr": indptr})
    block = 1 << 24
    in_order = all(
        bool((col[start + 1 : start + 1 + block] >= col[start : start + block][: col.size - 1 - start]).all())
        for start in range(0, col.size, block)
    )
    if in_order:
        (folder / "edge_ids.npy").unlink()


def is_sorted(folder: Path) -> bool:
    """Return whether a folder holds a topology in CSC order, complete or not."""
    return any(os.path.lexists(folder / f"{name}.npy") for name in TOPOLOGY[:2])


def is_cached_sorted(edge_index: Tensor | None) -> bool:
    """Return whether an edge list is long enough to cache its sorted form."""
    return edge_index is not None and edge_index.dim() == 2 and edge_index.size(1) >= MIN_CACHED_EDGES


def load_topology(
    folder: Path, num_nodes: int, mmap: bool, check: bool, size_note: str, num_sources: int | None = None
) -> CSCGraph:
    """Read ``indptr.npy``, ``indices.npy`` and optionally ``edge_ids.npy``, or sort ``edge_index.npy``."""
    edge_index = folder / "edge_index.npy"
    if os.path.lexists(edge_index):
        present = [name for name in TOPOLOGY[:2] if os.path.lexists(folder / f"{name}.npy")]
        if present:
            raise ValueError(f"{edge_index} and {present[0]}.npy both give the topology; remove one of them")
        return _load_sorted_edges(edge_index, num_nodes, mmap, size_note, num_sources)
    for name in TOPOLOGY[:2]:
        if not os.path.lexists(folder / f"{name}.npy"):
            raise FileNotFoundError(
                f"{folder / name}.npy does not exist; expected indptr.npy and indices.npy, or edge_index.npy"
            )
    graph = _load_csc(folder, mmap, check, num_sources)
    if graph.num_nodes != num_nodes:
        entries = f"has {graph.num_nodes + 1} entries, but {size_note}, and so it needs {num_nodes + 1}"
        raise ValueError(f"{folder / 'indptr.npy'} {entries}; write both for the same nodes")
    return graph


def _load_csc(folder: Path, mmap: bool, check: bool, num_sources: int | None) -> CSCGraph:
    """Load CSC arrays; errors name the files. Without ``check``, the arrays are not scanned."""
    paths = [folder / f"{name}.npy" for name in TOPOLOGY]
    arrays = [load_array(path, mmap) if os.path.lexists(path) else None for path in paths]
    indptr, indices, edge_ids = arrays
    try:
        if indptr is None or indices is None:
            raise ValueError("indptr or indices is missing")
        build = partial(CSCGraph.from_csc, indptr, indices, edge_ids, num_sources)
        if check and sum(array.nbytes for array in arrays if array is not None) < MIN_REMEMBERED_BYTES:
            return build()
        if check:
            checked_once([path for path in paths if path.exists()], build)
        for name, array in zip(TOPOLOGY, arrays, strict=True):
            if array is not None:
                check_integers(array, name)
                if array.dim() != 1 or (array is edge_ids and array.numel() != indices.numel()):
                    raise ValueError(f"{name} must hold one entry per edge, but has the shape {list(array.shape)}")
        if not indptr.numel() or int(indptr[-1]) != indices.numel():
            raise ValueError(f"indptr must end at the number of edges, {indices.numel()}")
        lists = expect_list_reads(indices) if mmap else indices
        return CSCGraph(indptr.to(torch.int64).contiguous(), lists.contiguous(), edge_ids, source_count=num_sources)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the topology in {folder} ({', '.join(path.name for path in paths)}): {error}") from None


def _load_sorted_edges(path: Path, num_nodes: int, mmap: bool, size_note: str, num_sources: int | None) -> CSCGraph:
    edge_index = load_array(path, mmap)
    try:
        check_edge_index(edge_index)
        if not is_cached_sorted(edge_index):
            return CSCGraph.from_edge_index(edge_index, num_nodes, num_sources)
        path = path.resolve()

        def read(folder: Path) -> CSCGraph:
            graph = _load_csc(folder / "csc", mmap, False, num_sources)
            if (graph.num_nodes, graph.num_edges) != (num_nodes, edge_index.size(1)):
                raise ValueError(f"it has {graph.num_nodes} nodes and {graph.num_edges} edges")
            return graph

        graph = get_or_create(
            "topology",
            checksum("sorted edges 1", str(path), num_nodes, *(() if num_sources is None else (num_sources,))),
            lambda folder: write_csc(edge_index, num_nodes, folder / "csc", num_sources=num_sources),
            read,
            title=f"{path}, {num_nodes} nodes",
            sources=[path],
        )
        return CSCGraph.from_edge_index(edge_index, num_nodes, num_sources) if graph is None else graph
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}; {size_note}") from None
