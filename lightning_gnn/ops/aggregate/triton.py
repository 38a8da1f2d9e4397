"""Aggregation and attention on a GPU, by Triton; long rows are split into parts, cached for the graph's lifetime."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.ops.aggregate.matrix import Match, Matrix, Scores
from lightning_gnn.ops.library import runs_triton

if TYPE_CHECKING:
    from lightning_gnn.triton_kernels.row_parts import RowParts

_row_parts: MutableMapping[Tensor, RowParts] = WeakIdKeyDictionary()
_lock = threading.Lock()


def prepare(matrix: Matrix) -> RowParts:
    """Return the row parts of a matrix, built once and cached for the lifetime of its ``indices``."""
    with _lock:
        parts = _row_parts.get(matrix.indices)
        if parts is None:
            from lightning_gnn.triton_kernels.row_parts import build_parts

            with torch.inference_mode(False):
                # Detached, because a cached reference to its own weak key would keep the entry alive.
                parts = _row_parts[matrix.indices] = build_parts(matrix.indptr, matrix.indices.detach())
        return parts


@contextlib.contextmanager
def _launching(tensor: Tensor) -> Iterator[tuple[Any, Any]]:
    """Check that kernels run on a device, make it the current one, and yield the kernels of sums and of attention."""
    if not runs_triton(tensor.device):
        raise ValueError(
            "backend='triton' needs a CUDA device and the package triton (pip install 'lightning-gnn[gpu]'), but "
            f"the tensors are on {tensor.device}; leave the backend out"
        )
    from lightning_gnn.triton_kernels import aggregate, edge_softmax

    with _current_device(tensor.device):
        yield aggregate, edge_softmax


def aggregate(matrix: Matrix, x: Tensor, weight: Tensor | None, reduce: str) -> tuple[Tensor, Tensor]:
    """Reduce the weighted rows of ``x`` over the entries of each row, as ``reference.py`` defines."""
    with _launching(x) as (kernels, _):
        shape = (matrix.num_rows, *x.shape[1:])
        # Without weights all columns form a single head.
        x = _pack_rows(x if weight is not None else x.reshape(x.size(0), 1, -1))
        weight = None if weight is None else weight.contiguous()
        out = x.new_empty((matrix.num_rows, *x.shape[1:]))
        if reduce == "max":
            ties = torch.empty_like(out)
            kernels.aggregate_max(x, weight, prepare(matrix), out, ties)
            return out.view(shape), ties.view(shape)
        kernels.aggregate_sum(x, weight, prepare(matrix), reduce == "mean", out)
        return out.view(shape), x.new_empty(0)


def aggregate_max_backward(matrix: Matrix, grad: Tensor, best: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    """Return the gradient of ``x``: that of each maximum, for the rows that attain it."""
    with _launching(x) as (kernels, _):
        out, match = x.new_empty(x.shape), (x.contiguous(), best.contiguous())
        weight = None if weight is None else weight.contiguous()
        kernels.aggregate_sum(_pack_rows(grad), weight, prepare(matrix), False, out, match)
        return out


def edge_products(matrix: Matrix, row_side: Tensor, column_side: Tensor, match: Match | None = None) -> Tensor:
    """Compute the dot product of both ends of each entry, per head; ``match`` restricts it to attained maxima."""
    with _launching(row_side) as (_, kernels):
        match = None if match is None else (match[0].contiguous(), match[1].contiguous())
        out = column_side.new_empty((matrix.num_edges, row_side.size(1)))
        kernels.edge_products(_pack_rows(row_side), _pack_rows(column_side), prepare(matrix), out, match)
        return out


def edge_softmax(matrix: Matrix, scores: Scores) -> Tensor:
    """Normalize ``exp(leaky_relu(row + column))`` over the entries of each row."""
    with _launching(scores.row) as (_, kernels):
        out = scores.row.new_empty((matrix.num_edges, scores.row.size(1)))
        inputs = scores.column.contiguous(), scores.row.contiguous()
        kernels.edge_softmax(*inputs, scores.slope, prepare(matrix), out)
        return out


def edge_softmax_backward(matrix: Matrix, scores: Scores, attention: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of ``row + column`` of each entry from that of its normalized weight."""
    with _launching(scores.row) as (_, kernels):
        arrays = [tensor.contiguous() for tensor in (grad, attention, scores.column, scores.row)]
        out = torch.empty_like(arrays[1])
        kernels.edge_softmax_backward(*arrays, scores.slope, prepare(matrix), out)
        return out


def edge_sums(matrix: Matrix, edge_ids: Tensor | None, values: Tensor) -> Tensor:
    """Sum edge values over the entries of each row."""
    with _launching(values) as (kernels, _):
        out = values.new_empty((matrix.num_rows, values.size(1)))
        kernels.edge_sums(values.contiguous(), edge_ids, prepare(matrix), out)
        return out


def _pack_rows(x: Tensor) -> Tensor:
    """Return a table with contiguous rows; the stride between rows may be larger, as in a slice of the columns."""
    adjacent = (x.stride(2) == 1 or x.size(2) == 1) and (x.stride(1) == x.size(2) or x.size(1) == 1)
    return x if adjacent and x.stride(0) > 0 else x.contiguous()


def _current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a device current, because Triton launches on the current device instead of the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
