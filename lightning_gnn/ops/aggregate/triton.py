"""Aggregation and attention on a GPU, by Triton; parts of rows, several of a hub, are kept as long as the graph."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.ops.aggregate.matrix import Match, Matrix, Scores
from lightning_gnn.ops.sample.triton import runs_on

if TYPE_CHECKING:
    from lightning_gnn.triton_kernels.row_parts import RowParts

_prepared: MutableMapping[Tensor, RowParts] = WeakIdKeyDictionary()
_lock = threading.Lock()


def prepare(matrix: Matrix) -> RowParts:
    """Return the parts of a matrix; made once, and kept as long as its ``indices``."""
    with _lock:
        found = _prepared.get(matrix.indices)
        if found is None:
            from lightning_gnn.triton_kernels.row_parts import build_parts

            with torch.inference_mode(False):
                # Detached: what is kept must not hold the tensor object by which it is known.
                found = _prepared[matrix.indices] = build_parts(matrix.indptr, matrix.indices.detach())
        return found


@contextlib.contextmanager
def _launching(tensor: Tensor) -> Iterator[None]:
    """Check that kernels run where a tensor is, and let them."""
    if not runs_on(tensor.device):
        raise ValueError(
            "backend='triton' needs a CUDA device and the package triton (pip install 'lightning-gnn[gpu]'), but the "
            f"tensors are on {tensor.device}; leave the backend out"
        )
    with _on(tensor.device):
        yield


def aggregate(matrix: Matrix, x: Tensor, weight: Tensor | None, reduce: str) -> tuple[Tensor, Tensor]:
    """Reduce the weighted rows of ``x`` over the entries of each row; ``reference.py`` defines it."""
    with _launching(x):
        from lightning_gnn.triton_kernels import aggregate as kernels

        shape = (matrix.num_rows, *x.shape[1:])
        # Without weights heads do not differ.
        x = _rows(x if weight is not None else x.reshape(x.size(0), 1, -1))
        weight = None if weight is None else weight.contiguous()
        out = x.new_empty((matrix.num_rows, *x.shape[1:]))
        if reduce == "max":
            ties = torch.empty_like(out)
            kernels.aggregate_max(x, weight, prepare(matrix), out, ties)
            return out.view(shape), ties.view(shape)
        kernels.aggregate_sum(x, weight, prepare(matrix), reduce == "mean", out)
        return out.view(shape), x.new_empty(0)


def aggregate_max_backward(matrix: Matrix, grad: Tensor, best: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    """Send the gradient of a maximum to the rows of ``x`` that attain it."""
    with _launching(x):
        from lightning_gnn.triton_kernels import aggregate as kernels

        out, match = x.new_empty(x.shape), (x.contiguous(), best.contiguous())
        weight = None if weight is None else weight.contiguous()
        kernels.aggregate_sum(_rows(grad), weight, prepare(matrix), False, out, match)
        return out


def edge_products(matrix: Matrix, row_side: Tensor, column_side: Tensor, match: Match | None = None) -> Tensor:
    """Take the dot product of both ends of each entry, per head; with ``match`` only over what attains it."""
    with _launching(row_side):
        from lightning_gnn.triton_kernels import edge_softmax as kernels

        match = None if match is None else (match[0].contiguous(), match[1].contiguous())
        out = column_side.new_empty((matrix.num_edges, row_side.size(1)))
        kernels.edge_products(_rows(row_side), _rows(column_side), prepare(matrix), out, match)
        return out


def edge_softmax(matrix: Matrix, scores: Scores) -> Tensor:
    """Normalize ``exp(leaky_relu(row + column))`` over the entries of each row."""
    with _launching(scores.row):
        from lightning_gnn.triton_kernels import edge_softmax as kernels

        out = scores.row.new_empty((matrix.num_edges, scores.row.size(1)))
        given = scores.column.contiguous(), scores.row.contiguous()
        kernels.edge_softmax(*given, scores.slope, prepare(matrix), out)
        return out


def edge_softmax_backward(matrix: Matrix, scores: Scores, attention: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of ``row + column`` of each entry from that of its normalized weight."""
    with _launching(scores.row):
        from lightning_gnn.triton_kernels import edge_softmax as kernels

        arrays = [tensor.contiguous() for tensor in (grad, attention, scores.column, scores.row)]
        out = torch.empty_like(arrays[1])
        kernels.edge_softmax_backward(*arrays, scores.slope, prepare(matrix), out)
        return out


def edge_sums(matrix: Matrix, edge_ids: Tensor | None, values: Tensor) -> Tensor:
    """Add up numbers of the edges over the entries of each row."""
    with _launching(values):
        from lightning_gnn.triton_kernels import aggregate as kernels

        out = values.new_empty((matrix.num_rows, values.size(1)))
        kernels.edge_sums(values.contiguous(), edge_ids, prepare(matrix), out)
        return out


def _rows(x: Tensor) -> Tensor:
    """Return a table whose rows lie together; they may be far apart, as those of a feature slice are."""
    adjacent = (x.stride(2) == 1 or x.size(2) == 1) and (x.stride(1) == x.size(2) or x.size(1) == 1)
    return x if adjacent and x.stride(0) > 0 else x.contiguous()


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
