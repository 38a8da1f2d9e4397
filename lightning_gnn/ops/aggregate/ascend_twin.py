"""Aggregation and attention by the Ascend C kernels, simulated on the CPU with the checks of an NPU.

``backend="ascend_twin"`` uses the tables, float16 features and plan of a real NPU, one block per worker of the plan.
Maxima are computed in float32 and equal those of torch. Every instruction is simulated, which is slow.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.ascend_ops.tiling import (
    CubeTables,
    RowTables,
    aggregate_vector_tiling,
    combine_tiling,
    cube_tables,
    products_tiling,
    row_tables,
    softmax_tiling,
    up,
)
from lightning_gnn.ascend_ops.twin import LaunchResult, ReadOnly, Scratch, default_twin

HALF_EXPONENT = 15  # 2^15 is the largest power of two in float16
PRODUCT_EXPONENT = 14  # both factors may use the range of float16, because products are float32
MAX_EXPONENT = 60  # keeps two factors and their product finite in float32

Array = np.ndarray[Any, Any]
T = TypeVar("T")
_tables = WeakIdKeyDictionary()
_lock = threading.RLock()
_recorded: list[list[LaunchResult]] = []


class _Degrees(NamedTuple):
    """Number of terms in the sums of a graph."""

    degrees: Tensor  # entries of each vertex, at least 1, float32 [num_rows]
    exponent: int  # smallest k such that all degrees are at most 2^k


@contextmanager
def record_launches() -> Iterator[list[LaunchResult]]:
    """Collect the counters (cycles, bytes by path) of all launches, in any thread, while the context is open."""
    results: list[LaunchResult] = []
    _recorded.append(results)
    try:
        yield results
    finally:
        _recorded[:] = [other for other in _recorded if other is not results]


def aggregate_chunks(
    chunks: list[Tensor],
    num_rows: int,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    slices: list[int],
    chunk_ranges: list[int],
) -> tuple[Tensor, Tensor]:
    """Compute sums or means on the cube cores: scaled float16 inputs, float32 accumulation."""
    if chunks[3].numel() == 0 or x.numel() == 0:
        return x.new_zeros((num_rows, *x.shape[1:])), x.new_empty(0)
    if weight is None and x.size(1) > 1:
        raise ValueError(
            f"the dense-tile kernel requires weights [E, {x.size(1)}] for x {list(x.shape)}, but weight is None; "
            f"without weights, pass x as a single head: x.reshape({x.size(0)}, 1, {x.size(1) * x.size(2)})"
        )
    counts, tables, ones = _get_cube_tables(chunks, num_rows, x.size(1), x.size(2), len(slices) - 1, chunk_ranges)
    rows, values, exponent = _scale_inputs(counts, x, weight, reduce == "mean")
    wide = rows.shape[1]
    y = np.zeros((num_rows, wide), np.float16)
    # NaN makes combine_parts fail visibly if a partial sum was not written.
    parts = np.full((max(tables.num_parts, 1), wide), np.nan, np.float32)
    workspace = np.zeros(tables.workspace_bytes // 2, np.float16)
    inputs = [rows, tables.plan, tables.row_blocks, tables.tiles, tables.columns, tables.positions]
    inputs += ones if values is None else tables.values(values.numpy(), x.size(1)), tables.runs
    _launch("aggregate_cube", tables.num_blocks, inputs, [y], [parts, workspace], [tables.tiling])
    if len(tables.splits):
        blocks = min(2 * tables.num_blocks, len(tables.splits))
        combine = combine_tiling(len(tables.splits), wide)
        _launch("combine_parts", blocks, [parts, tables.splits], [y], [], [combine])
    return _to_result(y, x, exponent, counts.degrees if reduce == "mean" else None), x.new_empty(0)


def aggregate_vector(
    chunks: list[Tensor],
    num_rows: int,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    slices: list[int],
    chunk_ranges: list[int],
) -> tuple[Tensor, Tensor]:
    """Compute sums or means vertex by vertex, on the vector cores only; weights stay float32."""
    heads, columns, mean = x.size(1), x.size(2), reduce == "mean"
    if chunks[3].numel() == 0 or x.numel() == 0:
        return x.new_zeros((num_rows, heads, columns)), x.new_empty(0)
    counts, tables = _get_vector_tables(chunks, num_rows, heads, columns, len(slices) - 1, chunk_ranges)
    rows, values, exponent = _scale_inputs(counts, x, weight, mean)
    y = np.zeros((num_rows, rows.shape[1]), np.float16)
    # Weights are stored by head.
    weights = np.zeros(1, np.float32) if values is None else values.t().contiguous().numpy()
    inputs = [rows, tables.vertices, tables.columns, weights, tables.plan]
    tiling = aggregate_vector_tiling(tables, rows.shape[1], weight is not None)
    _launch("aggregate_vector", tables.num_groups * tables.num_members, inputs, [y], [], [tiling])
    return _to_result(y, x, exponent, counts.degrees if mean else None), x.new_empty(0)


def _scale_inputs(counts: _Degrees, x: Tensor, weight: Tensor | None, mean: bool) -> tuple[Array, Tensor | None, int]:
    """Scale features and weights such that no sum overflows float16; return both, and the total exponent."""
    available = HALF_EXPONENT - counts.exponent
    for_weight = 0 if weight is None else available // 2 if available >= 0 else available
    rows, exponent = _to_half(x, available - for_weight, mean)
    values, weight_exponent = (None, 0) if weight is None else _scale(weight, for_weight, mean)
    return rows, values, exponent + weight_exponent


def _to_result(y: Array, x: Tensor, exponent: int, degrees: Tensor | None) -> Tensor:
    """Remove the padding, undo the scaling and divide means by the degrees."""
    out = torch.from_numpy(y).view(len(y), x.size(1), -1)[:, :, : x.size(2)]
    return _unscale(out, exponent, degrees).to(x.device, x.dtype).contiguous()


def edge_products(chunks: list[Tensor], row_side: Tensor, column_side: Tensor, chunk_ranges: list[int]) -> Tensor:
    """Compute the dot product of both ends of each entry, per head."""
    num_edges, heads, columns = chunks[3].numel(), row_side.size(1), row_side.size(2)
    if num_edges == 0 or columns == 0:
        return column_side.new_zeros((num_edges, heads))
    tables = _get_row_tables(chunks, chunk_ranges)
    (left, left_power), (right, right_power) = (_to_half(side, PRODUCT_EXPONENT) for side in (row_side, column_side))
    tiling = products_tiling(tables, heads, columns)
    out = np.zeros((num_edges, heads), np.float32)
    inputs = [left, right, tables.vertices, tables.columns, tables.plan]
    _launch("edge_products", tables.num_members, inputs, [out], [], [tiling])
    result = _unscale(torch.from_numpy(out), left_power + right_power, None)
    return result.to(column_side.device, column_side.dtype)


def edge_softmax(
    chunks: list[Tensor], row_scores: Tensor, column_scores: Tensor, negative_slope: float, chunk_ranges: list[int]
) -> Tensor:
    """Normalize ``exp(leaky_relu(row + column))`` over the entries of each vertex, in float32."""
    outputs = [np.zeros((chunks[3].numel(), row_scores.size(1)), np.float32)]
    return _run_softmax("edge_softmax", chunks, row_scores, column_scores, negative_slope, chunk_ranges, [], outputs)


def edge_softmax_backward(
    chunks: list[Tensor],
    row_scores: Tensor,
    column_scores: Tensor,
    negative_slope: float,
    attention: Tensor,
    grad: Tensor,
    chunk_ranges: list[int],
) -> Tensor:
    """Return the gradient of ``row + column`` of each entry from that of its normalized weight."""
    # The kernel also sums the gradient by row; that output is ignored, because edge_sums computes it when required.
    outputs = [np.zeros(tuple(tensor.shape), np.float32) for tensor in (attention, row_scores)]
    scores, edge_inputs = (row_scores, column_scores, negative_slope), [_to_float32(attention), _to_float32(grad)]
    return _run_softmax("edge_softmax_backward", chunks, *scores, chunk_ranges, edge_inputs, outputs)


def _run_softmax(
    kernel: str,
    chunks: list[Tensor],
    rows: Tensor,
    columns: Tensor,
    slope: float,
    chunk_ranges: list[int],
    edge_inputs: list[Array],
    outputs: list[Array],
) -> Tensor:
    if outputs[0].size:
        tables = _get_row_tables(chunks, chunk_ranges)
        inputs = [_to_float32(columns), _to_float32(rows), tables.vertices, tables.columns, tables.plan, *edge_inputs]
        tiling = softmax_tiling(tables, outputs[0].shape[1], slope)
        _launch(kernel, tables.num_members, inputs, outputs, [], [tiling])
    return torch.from_numpy(outputs[0]).to(rows.device, rows.dtype)


def edge_sums(
    chunks: list[Tensor], num_rows: int, edge_ids: Tensor | None, values: Tensor, chunk_ranges: list[int]
) -> Tensor:
    """Sum the values of the entries of each vertex, in float32."""
    out = np.zeros((num_rows, values.size(1)), np.float32)
    if values.numel():
        tables = _get_row_tables(chunks, chunk_ranges)
        edges = np.arange(values.size(0), dtype=np.int32) if edge_ids is None else _to_numpy(edge_ids).astype(np.int32)
        inputs = [_to_float32(values), tables.vertices, edges, tables.plan]
        tiling = softmax_tiling(tables, out.shape[1], 0.0)
        _launch("edge_sum", tables.num_members, inputs, [out], [], [tiling])
    return torch.from_numpy(out).to(values.device, values.dtype)


def _launch(
    kernel: str, blocks: int, inputs: list[Array], outputs: list[Array], scratch: list[Array], tiling: list[Array]
) -> None:
    read = [ReadOnly(np.ascontiguousarray(array) if array.size else np.zeros(32, array.dtype)) for array in inputs]
    arguments = [*read, *outputs, *map(Scratch, scratch), *map(ReadOnly, tiling)]
    result = default_twin().launch(kernel, arguments, max(blocks, 1))
    for results in _recorded:
        results.append(result)


def launch(kernel: str, blocks: int, inputs: list[Tensor], outputs: list[Tensor], tiling: Array) -> None:
    """Launch a kernel on tensors of any device; output elements that it does not write are NaN (0 for integers)."""
    dtypes = [_to_numpy(output[:0]).dtype for output in outputs]
    arrays = [
        np.full(tuple(output.shape), np.nan if dtype.kind == "f" else 0, dtype)
        for output, dtype in zip(outputs, dtypes, strict=True)
    ]
    _launch(kernel, blocks, [*map(_to_numpy, inputs)], [], arrays, [tiling])
    for output, array in zip(outputs, arrays, strict=True):
        output.copy_(torch.from_numpy(array))


def _get_cube_tables(
    chunks: list[Tensor], num_rows: int, heads: int, columns: int, num_groups: int, chunk_ranges: list[int]
) -> tuple[_Degrees, CubeTables, Array]:
    """Return the degrees, the tables of dense tiles, and the tiles' values for unweighted sums."""

    def make() -> tuple[_Degrees, CubeTables, Array]:
        arrays, pairs = [_to_numpy(tensor) for tensor in chunks], list(pairwise(chunk_ranges))
        tables = cube_tables(arrays, pairs, num_groups, columns, heads=heads)
        return _Degrees(*_count_degrees(arrays, num_rows)), tables, tables.values(None)

    return _get_or_create(chunks, ("cube", num_rows, heads, columns, num_groups, *chunk_ranges), make)


def _get_vector_tables(
    chunks: list[Tensor], num_rows: int, heads: int, columns: int, num_groups: int, chunk_ranges: list[int]
) -> tuple[_Degrees, RowTables]:
    def make() -> tuple[_Degrees, RowTables]:
        arrays, pairs = [_to_numpy(tensor) for tensor in chunks], list(pairwise(chunk_ranges))
        tables = row_tables(arrays, chunk_ranges=pairs, num_groups=num_groups, num_columns=columns, heads=heads)
        return _Degrees(*_count_degrees(arrays, num_rows)), tables

    return _get_or_create(chunks, ("vector", num_rows, heads, columns, num_groups, *chunk_ranges), make)


def _count_degrees(arrays: list[Array], num_rows: int) -> tuple[Tensor, int]:
    """Return the degree of each vertex, at least 1, and the smallest k such that all are at most ``2^k``."""
    degrees = np.zeros(num_rows, np.int64)
    np.add.at(degrees, arrays[0], np.diff(arrays[2]))
    most = max(int(degrees.max(initial=1)), 1)
    return torch.from_numpy(degrees.clip(min=1).astype(np.float32)), math.ceil(math.log2(most))


def _get_row_tables(chunks: list[Tensor], chunk_ranges: list[int]) -> RowTables:
    """Return tables with two members per worker of the plan: every worker has two vector cores."""
    members = 2 * (len(chunk_ranges) - 1)

    def make() -> RowTables:
        return row_tables([_to_numpy(tensor) for tensor in chunks], num_members=members)

    return _get_or_create(chunks, ("rows", members), make)


def _get_or_create(chunks: list[Tensor], key: tuple[object, ...], make: Callable[[], T]) -> T:
    with _lock:
        by_key: dict[Any, Any] = _tables.setdefault(chunks[3], {})  # type: ignore[no-untyped-call]
        if key not in by_key:
            by_key[key] = make()
        tables: T = by_key[key]
        return tables


def _to_half(x: Tensor, exponent: int, rescale: bool = False) -> tuple[Array, int]:
    """Return float16 ``[N, H * C]``, heads padded with zeros to a multiple of 16 columns, and the power of scaling."""
    scaled, factor = _scale(x, exponent, rescale)
    out = torch.zeros((x.size(0), x.size(1), up(x.size(2))), dtype=torch.float16)
    out[:, :, : x.size(2)] = scaled
    return out.flatten(1).numpy(), factor


def _scale(x: Tensor, exponent: int, rescale: bool) -> tuple[Tensor, int]:
    """Scale to float32 of at most ``2^exponent`` and return the power of two; float16 is scaled only if ``rescale``."""
    x = x.detach().cpu()
    if x.dtype == torch.float16 and not rescale:
        return x.float(), 0
    if x.dtype != torch.float16:
        warn_converted(x.dtype)
    largest = float(x.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if x.numel() else 0.0
    if largest == 0:
        return x.float(), 0
    power = min(max(exponent - math.ceil(math.log2(largest)), -MAX_EXPONENT), MAX_EXPONENT)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return (wide * 2.0**power).float(), power


def _unscale(out: Tensor, exponent: int, divisors: Tensor | None) -> Tensor:
    if exponent == 0 and divisors is None:
        return out
    out = out.float() * 2.0**-exponent
    return out if divisors is None else out / divisors.view(-1, 1, 1)


@cache
def warn_converted(dtype: torch.dtype) -> None:
    """Warn, once per dtype, that the kernels convert it to float16."""
    warnings.warn(
        f"the Ascend C kernels compute in float16 with float32 sums; {dtype} is scaled by a power of two per tensor "
        "and converted",
        stacklevel=2,
    )


def _to_float32(x: Tensor) -> Array:
    return _to_numpy(x.detach().to(torch.float32))


def _to_numpy(x: Tensor) -> Array:
    return x.detach().cpu().contiguous().numpy()
