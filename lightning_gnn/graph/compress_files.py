"""A compressed graph as a folder of ``.npy`` files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.graph.arrays import load_array, save_arrays
from lightning_gnn.graph.build import Limits
from lightning_gnn.graph.chunks import ARRAYS, Chunks
from lightning_gnn.graph.grouping import PlanSettings
from lightning_gnn.runtime.documents import read_json, read_text
from lightning_gnn.runtime.whole_files import write_whole

_FORMAT = "lightning_gnn compressed graph 1"
_META = "graph.json"
_DTYPES = {
    "rows": torch.int32,
    "row_ptr": torch.int64,
    "indptr": torch.int64,
    "local": torch.int32,
    "columns": torch.int32,
    "column_ptr": torch.int64,
}


def save_compressed(graph: Any, folder: str | Path) -> Path:
    """Write what :meth:`CompressedGraph.save` says."""
    folder = Path(folder)
    if (folder / _META).exists():
        # The arrays may be mapped by someone, who would see them change.
        raise FileExistsError(f"{folder} holds a compressed graph already; choose another folder")
    tensors: dict[str, Tensor | None] = {"edge_ids": graph.edge_ids}
    tensors |= {f"forward_{name}": tensor for name, tensor in graph.forward.tensors().items()}
    tensors |= {f"backward_{name}": tensor for name, tensor in graph.backward.tensors().items()}
    if graph.shares_chunks:
        tensors = {n: t for n, t in tensors.items() if not n.startswith("backward_") or n == "backward_edge_ids"}
    tensors["weight_ids"] = graph.cache.get("weight_ids")
    save_arrays(folder, tensors)
    meta = {
        "format": _FORMAT,
        "num_sources": graph.num_sources,
        "num_targets": graph.num_targets,
        "num_user_edges": graph.num_user_edges,
        "order": graph.order,
        "backward_order": graph.backward_order,
        "settings": asdict(graph.settings),
        "limits": None if graph.limits is None else asdict(graph.limits),
        "arrays": sorted(name for name, tensor in tensors.items() if tensor is not None),
    }
    # Last: without it an interrupted save is no graph.
    write_whole(folder / _META, json.dumps(meta, indent=1))
    return folder


def load_compressed(folder: str | Path, mmap: bool = True, check: bool = True) -> dict[str, Any]:
    """Read the arguments of a :class:`CompressedGraph`; see :meth:`CompressedGraph.load`.

    Args:
        folder: The folder.
        mmap: Leave the arrays on disk.
        check: Look at the content of every array, not only at types and lengths; without it, it must be known.
    """
    folder = Path(folder)
    path = folder / _META
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {folder} holds no compressed graph")
    try:
        meta = read_json(read_text(path))
        if meta["format"] != _FORMAT:
            raise ValueError(f"its format is {meta['format']!r}, not {_FORMAT!r}")
        sizes = [int(meta[name]) for name in ("num_sources", "num_targets", "num_user_edges")]
        settings = PlanSettings(**meta["settings"])
        limits = None if meta["limits"] is None else Limits(**meta["limits"])
        names = list(meta["arrays"])
        orders = [meta["order"], meta["backward_order"]]
        if not set(orders) <= {"locality", "natural"}:
            raise ValueError(f"its orders are {orders}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not describe a compressed graph ({error}); compress the graph again") from error
    arrays = {name: load_array(folder / f"{name}.npy", mmap) for name in names}
    num_sources, num_targets, num_user_edges = sizes
    try:
        forward = _chunks(arrays, "forward", num_targets, num_sources, check)
        if "backward_local" in arrays:
            backward = _chunks(arrays, "backward", num_sources, num_targets, check)
        else:
            backward = Chunks(**{**forward.__dict__, "edge_ids": arrays.get("backward_edge_ids")})
        num_edges = forward.num_edges
        _check(backward.num_edges == num_edges, "the directions have different numbers of edges")
        _check(backward.edge_ids is not None, "backward_edge_ids is missing")
        if check:
            _check_ids(backward.edge_ids, num_edges, 0, num_edges, "backward_edge_ids")
            _check_ids(arrays.get("edge_ids"), num_edges, -1, num_user_edges, "edge_ids")
            _check_ids(arrays.get("weight_ids"), num_edges, -1, num_user_edges, "weight_ids")
    except (ValueError, KeyError) as error:
        raise ValueError(f"{folder} does not hold a compressed graph: {error}; compress the graph again") from error
    return {
        "forward": forward,
        "backward": backward,
        "edge_ids": arrays.get("edge_ids"),
        "settings": settings,
        "order": orders[0],
        "backward_order": orders[1],
        "limits": limits,
        "num_user_edges": num_user_edges,
        "cache": {"weight_ids": arrays["weight_ids"]} if "weight_ids" in arrays else {},
    }


def _chunks(arrays: dict[str, Tensor], direction: str, num_rows: int, num_columns: int, check: bool) -> Chunks:
    found: dict[str, Any] = {name: arrays.get(f"{direction}_{name}") for name in ARRAYS}
    for name, dtype in _DTYPES.items():
        array = found[name]
        valid = array is not None and array.dtype == dtype and array.dim() == 1
        _check(valid, f"{direction}_{name} is missing or not {dtype} [n]")
    chunks = Chunks(**found, num_rows=num_rows, num_columns=num_columns)
    if not check:
        return chunks
    for name, of in (("row_ptr", "rows"), ("column_ptr", "columns"), ("indptr", "local")):
        _check_offsets(getattr(chunks, name), getattr(chunks, of).numel(), f"{direction}_{name}")
    _check(chunks.row_ptr.numel() == chunks.column_ptr.numel(), f"{direction}_row_ptr and _column_ptr differ in length")
    _check(chunks.indptr.numel() == chunks.rows.numel() + 1, f"{direction}_indptr has not one offset per row")
    _check_ids(chunks.rows, chunks.rows.numel(), 0, num_rows, f"{direction}_rows")
    _check_ids(chunks.columns, chunks.columns.numel(), 0, num_columns, f"{direction}_columns")
    widths = torch.repeat_interleave(chunks.column_ptr.diff(), chunks.loads)
    _check(bool(((chunks.local >= 0) & (chunks.local < widths)).all()), f"{direction}_local exceeds a chunk's columns")
    _check(int(chunks.rows.unique().numel()) == num_rows, f"{direction}_rows does not name every vertex")
    return chunks


def _check(valid: bool, message: str) -> None:
    if not valid:
        raise ValueError(message)


def _check_offsets(offsets: Tensor, end: int, name: str) -> None:
    valid = offsets.numel() > 0 and int(offsets[0]) == 0 and int(offsets[-1]) == end
    _check(valid and not bool((offsets.diff() < 0).any()), f"{name} does not ascend from 0 to {end}")


def _check_ids(ids: Tensor | None, count: int, low: int, high: int, name: str) -> None:
    if ids is None:
        return
    _check(ids.dtype in (torch.int32, torch.int64) and list(ids.shape) == [count], f"{name} is not integer [{count}]")
    if count:
        least, most = (int(value) for value in torch.aminmax(ids))
        _check(least >= low and most < high, f"{name} holds {least if least < low else most}, outside [{low}, {high})")
