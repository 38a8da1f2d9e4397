"""Aggregation and attention on a GPU: the CUDA implementation of the operators, and which chunks go through tiles.

Everything that the kernels derive from a graph is made on the first call and kept as long as the graph: the column of
every entry, parts of rows, and the tiles of dense chunks. After that no call waits for the device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.ops.aggregate import reference as aggregate_reference  # noqa: F401  defines the operators
from lightning_gnn.ops.edge_softmax import reference as softmax_reference  # noqa: F401  defines the operators
from lightning_gnn.ops.library import library, references, triton_installed
from lightning_gnn.ops.sample.triton import runs_on

if TYPE_CHECKING:
    from lightning_gnn.triton_kernels.aggregate_plan import Base, Matrix, Plan

TileMode = Literal["auto", "always", "never"]
_TILED = (torch.float32, torch.float16, torch.bfloat16)


class _Choice(NamedTuple):
    mode: TileMode
    threshold: float | None


_choice = _Choice("auto", None)


@contextlib.contextmanager
def use_tiles(mode: TileMode = "auto", threshold: float | None = None) -> Iterator[None]:
    """Choose which chunks of a graph are multiplied as dense tiles, for all threads, while the context is open.

    Tiles serve sums and means of float16, bfloat16 and float32. float32 is multiplied exactly (``ieee``, without tensor
    cores, which seldom pays) unless torch may use TF32 (``torch.backends.cuda.matmul.allow_tf32``). In tiles, weights
    are rounded to the dtype of the features, and an infinite or NaN feature spreads to the rows of its window.

    Args:
        mode: ``"auto"``: chunks whose tiles are fuller than the threshold; ``"always"``: all; ``"never"``: none.
        threshold: Entries per cell of a tile from which it is worth it, by default estimated
            (``triton_kernels.aggregate_plan.density_threshold``).
    """
    global _choice
    if mode not in ("auto", "always", "never"):
        raise ValueError(f"tiles={mode!r} is unknown; use 'auto', 'always' or 'never'")
    previous, _choice = _choice, _Choice(mode, threshold)
    try:
        yield
    finally:
        _choice = previous


@dataclass(eq=False)
class Prepared:
    """What is kept of one direction of a graph, on its device.

    Args:
        base: Columns of the entries and degrees.
        rows: The plan without tiles.
        densities: Entries per cell of each chunk, float64 ``[num_chunks]``, on the host; measured when first asked for.
        plans: Plans by the number of dense chunks: the threshold and the densities decide which they are.
        by_threshold: The same plans by threshold.
    """

    base: Base
    rows: Plan
    densities: Tensor | None = None
    plans: dict[int, Plan] = field(default_factory=dict)
    by_threshold: dict[float, Plan] = field(default_factory=dict)


_prepared: MutableMapping[Tensor, Prepared] = WeakIdKeyDictionary()
_lock = threading.Lock()


def prepare(chunks: list[Tensor], num_rows: int) -> Prepared:
    """Return what is kept of a direction of a graph; made once.

    Args:
        num_rows: Vertices on the row side.
    """
    with _lock:
        found = _prepared.get(chunks[3])
        if found is None:
            from lightning_gnn.triton_kernels import aggregate_plan as plans

            with torch.inference_mode(False):
                matrix = _matrix(chunks, num_rows)
                base = plans.build_base(matrix)
                found = _prepared[chunks[3]] = Prepared(base, plans.build_plan(matrix, base))
        return found


def plan_for(chunks: list[Tensor], num_rows: int, num_channels: int, dtype: torch.dtype) -> Plan:
    """Return the parts and tiles for a sum, as :func:`use_tiles` chooses; made once.

    Args:
        num_rows: Vertices on the row side.
        num_channels: Feature columns of one head.
    """
    prepared, choice = prepare(chunks, num_rows), _choice
    # Triton's interpreter multiplies the bits of bfloat16 as integers.
    interpreted = dtype == torch.bfloat16 and chunks[3].device.type == "cpu"
    if choice.mode == "never" or dtype not in _TILED or interpreted:
        return prepared.rows
    from lightning_gnn.triton_kernels import aggregate_plan as plans

    threshold = plans.density_threshold(dtype, num_channels, _tf32()) if choice.threshold is None else choice.threshold
    threshold = 0.0 if choice.mode == "always" else threshold
    plan = prepared.by_threshold.get(threshold)
    if plan is not None:
        return plan
    with _lock, torch.inference_mode(False):
        matrix = _matrix(chunks, num_rows)
        if prepared.densities is None:
            prepared.densities = plans.densities(matrix, prepared.base)
        dense = prepared.densities >= threshold
        count = int(dense.sum())
        if count not in prepared.plans:
            prepared.plans[count] = plans.build_plan(matrix, prepared.base, dense) if count else prepared.rows
        plan = prepared.by_threshold[threshold] = prepared.plans[count]
    return plan


def aggregate_chunks(
    chunks: list[Tensor],
    num_rows: int,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    slices: list[int],
    chunk_ranges: list[int],
) -> tuple[Tensor, Tensor]:
    """Reduce the weighted rows of ``x`` over the entries of each vertex; ``reference.py`` defines it."""
    _check(x)
    from lightning_gnn.triton_kernels import aggregate, aggregate_tiles

    shape = (num_rows, *x.shape[1:])
    # Without weights nothing tells the heads apart.
    x = _rows(x if weight is not None else x.reshape(x.size(0), 1, -1))
    weight = None if weight is None else weight.contiguous()
    with _on(x.device):
        prepared = prepare(chunks, num_rows)
        base, covered = prepared.base, prepared.rows.slots.covered
        out = _empty((num_rows, *x.shape[1:]), x, covered)
        if reduce == "max":
            ties = _empty((num_rows, *x.shape[1:]), x, covered)
            aggregate.aggregate_max(x, weight, base, prepared.rows, out, ties)
            return out.view(shape), ties.view(shape)
        mean = reduce == "mean"
        plan = plan_for(chunks, num_rows, x.size(2), x.dtype)
        scratch = _scratch(plan, x)
        aggregate.aggregate_sum(x, weight, base, plan, mean, out, scratch)
        if plan.tiles is not None:
            aggregate_tiles.multiply_tiles(x, weight, base, plan.tiles, mean, _tf32(), out, scratch)
        aggregate.combine_sum(base, plan.slots, mean, out, scratch)
    return out.view(shape), x.new_empty(0)


def aggregate_max_backward(
    chunks: list[Tensor],
    num_rows: int,
    grad: Tensor,
    best: Tensor,
    x: Tensor,
    weight: Tensor | None,
    slices: list[int],
    chunk_ranges: list[int],
) -> Tensor:
    """Send the gradient of a maximum to the rows of ``x`` that attain it."""
    _check(x)
    from lightning_gnn.triton_kernels import aggregate

    weight = None if weight is None else weight.contiguous()
    with _on(x.device):
        prepared = prepare(chunks, num_rows)
        plan, match = prepared.rows, (x.contiguous(), best.contiguous())
        out, scratch = _empty(x.shape, x, plan.slots.covered), _scratch(plan, x)
        aggregate.aggregate_sum(_rows(grad), weight, prepared.base, plan, False, out, scratch, match)
        aggregate.combine_sum(prepared.base, plan.slots, False, out, scratch)
    return out


def edge_products(
    chunks: list[Tensor],
    row_side: Tensor,
    column_side: Tensor,
    best: Tensor | None,
    weight: Tensor | None,
    slices: list[int],
    chunk_ranges: list[int],
) -> Tensor:
    """Take the dot product of both ends of each entry, per head; with ``best`` only over what attains the maximum."""
    _check(row_side)
    from lightning_gnn.triton_kernels import edge_softmax as kernels

    match = None if best is None or weight is None else (best.contiguous(), weight.contiguous())
    out = column_side.new_empty((chunks[3].numel(), row_side.size(1)))
    with _on(out.device):
        prepared = prepare(chunks, row_side.size(0))
        kernels.edge_products(_rows(row_side), _rows(column_side), prepared.base, prepared.rows.parts, out, match)
    return out


def edge_softmax(
    chunks: list[Tensor],
    row_scores: Tensor,
    column_scores: Tensor,
    negative_slope: float,
    chunk_ranges: list[int],
) -> Tensor:
    """Normalise ``exp(leaky_relu(row + column))`` over the entries of each vertex."""
    _check(row_scores)
    from lightning_gnn.triton_kernels import edge_softmax as kernels

    row_scores, column_scores = row_scores.contiguous(), column_scores.contiguous()
    out = row_scores.new_empty((chunks[3].numel(), row_scores.size(1)))
    with _on(out.device):
        prepared = prepare(chunks, row_scores.size(0))
        kernels.edge_softmax(column_scores, row_scores, negative_slope, prepared.base, prepared.rows, out)
    return out


def edge_softmax_backward(
    chunks: list[Tensor],
    row_scores: Tensor,
    column_scores: Tensor,
    negative_slope: float,
    attention: Tensor,
    grad: Tensor,
    chunk_ranges: list[int],
) -> Tensor:
    """Return the gradient of ``row + column`` of each entry from that of its normalised weight."""
    _check(row_scores)
    from lightning_gnn.triton_kernels import edge_softmax as kernels

    arrays = [tensor.contiguous() for tensor in (grad, attention, column_scores, row_scores)]
    out = torch.empty_like(arrays[1])
    with _on(out.device):
        prepared = prepare(chunks, row_scores.size(0))
        kernels.edge_softmax_backward(*arrays, negative_slope, prepared.base, prepared.rows, out)
    return out


def edge_sums(
    chunks: list[Tensor], num_rows: int, edge_ids: Tensor | None, values: Tensor, chunk_ranges: list[int]
) -> Tensor:
    """Add up numbers of the edges over the entries of each vertex."""
    _check(values)
    from lightning_gnn.triton_kernels import aggregate

    with _on(values.device):
        prepared = prepare(chunks, num_rows)
        plan = prepared.rows
        out = _empty((num_rows, values.size(1)), values, plan.slots.covered)
        scratch = _scratch(plan, values.unsqueeze(1)).squeeze(1)
        aggregate.edge_sums(values.contiguous(), edge_ids, prepared.base, plan, out, scratch)
    return out


def _register(ours: Callable[..., Any]) -> None:
    torchs = getattr(references, ours.__name__)

    def on_cuda(*arguments: Any) -> Any:
        return (ours if triton_installed() else torchs)(*arguments)

    library.impl(ours.__name__, on_cuda, "CUDA")  # type: ignore[no-untyped-call]


for _function in (
    aggregate_chunks,
    aggregate_max_backward,
    edge_products,
    edge_softmax,
    edge_softmax_backward,
    edge_sums,
):
    _register(_function)


def _check(tensor: Tensor) -> None:
    if not runs_on(tensor.device):
        raise ValueError(
            "backend='triton' needs a CUDA device and the package triton (pip install 'lightning-gnn[gpu]'), but the "
            f"tensors are on {tensor.device}; leave the backend out"
        )


def _matrix(chunks: list[Tensor], num_rows: int) -> Matrix:
    from lightning_gnn.triton_kernels.aggregate_plan import Matrix

    columns = chunks[4]
    return Matrix(*chunks, num_rows, int(columns.max()) + 1 if columns.numel() else 0)


def _rows(x: Tensor) -> Tensor:
    """Return a table whose rows lie together; they may be far apart, as those of a feature slice are."""
    adjacent = (x.stride(2) == 1 or x.size(2) == 1) and (x.stride(1) == x.size(2) or x.size(1) == 1)
    return x if adjacent and x.stride(0) > 0 else x.contiguous()


def _empty(shape: tuple[int, ...] | torch.Size, like: Tensor, covered: bool) -> Tensor:
    return (torch.empty if covered else torch.zeros)(shape, dtype=like.dtype, device=like.device)


def _scratch(plan: Plan, x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty((plan.slots.count, *x.shape[1:]), dtype=dtype, device=x.device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _tf32() -> bool:
    """Tell whether the user lets torch round float32 to TF32 in matrix products."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # reading the older name fails where the newer was written
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
