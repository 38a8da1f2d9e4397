"""Runs the kernels of ascend_ops/csrc on the CPU twin with numpy arrays; padding and tables as the host makes them."""

import numpy as np
import torch

from lightning_gnn.ascend_ops import tiling
from lightning_gnn.ascend_ops.twin import ReadOnly, Scratch, default_twin

LOG = []
"""Results of all launches, newest last."""


def launch(kernel, args, blocks, **options):
    twin = options.pop("twin", None) or default_twin()
    result = twin.launch(kernel, args, max(blocks, 1), **options)
    LOG.append(result)
    return result


def launch_tensors(kernel, blocks, inputs, outputs, tiling, **options):
    """Launch on CPU tensors; outputs are filled with NaN first."""
    arrays = [np.full(tuple(output.shape), np.nan, np.float32) for output in outputs]
    args = [*(wrap(tensor.numpy()) for tensor in inputs), *map(Scratch, arrays), wrap(tiling)]
    launch(kernel, args, blocks, **options)
    for output, array in zip(outputs, arrays, strict=True):
        output.copy_(torch.from_numpy(array))


def wrap(array):
    """Return an input array; an empty one still needs an address."""
    return ReadOnly(np.ascontiguousarray(array) if array.size else np.zeros(32, array.dtype))


def pad(x, heads=1):
    """Convert [n, heads * C] to float16 [n, heads * Up16(C)], padded with zeros."""
    x = np.asarray(x)
    count, columns = x.shape[0], x.shape[1] // heads
    out = np.zeros((count, heads, tiling.up(columns)), np.float16)
    out[:, :, :columns] = x.reshape(count, heads, columns)
    return out.reshape(count, -1)


def unpad(y, columns, heads=1):
    y = y.reshape(y.shape[0], heads, -1)
    return y[:, :, :columns].reshape(y.shape[0], heads * columns).astype(np.float64)


def aggregate_cube(chunks, x, num_rows, ranges, groups=1, weights=None, heads=1, sizes=None, **options):
    columns = x.shape[1] // heads
    tables = tiling.cube_tables(chunks.tables, ranges, groups, columns, heads=heads, **(sizes or {}))
    wide = heads * tiling.up(columns)
    y = np.zeros((num_rows, wide), np.float16)
    parts = np.full((max(tables.num_parts, 1), wide), np.nan, np.float32)
    args = [
        wrap(pad(x, heads)),
        *map(wrap, (tables.plan, tables.row_blocks, tables.tiles, tables.columns, tables.positions)),
        wrap(tables.values(weights, heads)),
        wrap(tables.runs),
        y,
        Scratch(parts),
        Scratch(np.zeros(tables.workspace_bytes // 2, np.float16)),
        wrap(tables.tiling),
    ]
    launch("aggregate_cube", args, options.pop("blocks", tables.num_blocks), **options)
    if len(tables.splits):
        combine = tiling.combine_tiling(len(tables.splits), wide)
        launch("combine_parts", [wrap(parts), wrap(tables.splits), y, wrap(combine)], 3, **options)
    return unpad(y, columns, heads)


def aggregate_vector(chunks, x, num_rows, ranges, groups=1, weights=None, heads=1, panel=2048, **options):
    columns = x.shape[1] // heads
    tables = tiling.row_tables(
        chunks.tables, chunk_ranges=ranges, num_groups=groups, num_columns=columns, heads=heads, max_panel=panel
    )
    wide = heads * tiling.up(columns)
    packed = tiling.aggregate_vector_tiling(tables, wide, weights is not None)
    values = np.zeros(1, np.float32) if weights is None else weights.reshape(-1, heads).T.astype(np.float32)
    y = np.zeros((num_rows, wide), np.float16)
    args = [*map(wrap, (pad(x, heads), tables.vertices, tables.columns, values, tables.plan)), y, wrap(packed)]
    launch("aggregate_vector", args, groups * tables.num_members, **options)
    return unpad(y, columns, heads)


def _make_row_tables(chunks, blocks):
    return tiling.row_tables(chunks.tables, num_members=blocks)


def edge_softmax(chunks, source, target, slope, blocks, **options):
    tables, heads = _make_row_tables(chunks, blocks), source.shape[1]
    packed = tiling.softmax_tiling(tables, heads, slope)
    alpha = np.zeros((chunks.source.size, heads), np.float32)
    out = alpha if alpha.size else np.zeros(8, np.float32)
    inputs = map(wrap, (source, target, tables.vertices, tables.columns, tables.plan))
    launch("edge_softmax", [*inputs, out, wrap(packed)], blocks, **options)
    return alpha


def edge_softmax_backward(chunks, source, target, slope, alpha, grad, blocks, **options):
    tables, heads = _make_row_tables(chunks, blocks), source.shape[1]
    packed = tiling.softmax_tiling(tables, heads, slope)
    score_grad = np.zeros_like(alpha)
    target_grad = np.zeros_like(target)
    inputs = map(wrap, (source, target, tables.vertices, tables.columns, tables.plan, alpha, grad))
    launch("edge_softmax_backward", [*inputs, score_grad, target_grad, wrap(packed)], blocks, **options)
    return score_grad, target_grad


def edge_sum(chunks, values, edges, num_rows, blocks, **options):
    tables, heads = _make_row_tables(chunks, blocks), values.shape[1]
    packed = tiling.softmax_tiling(tables, heads)
    out = np.zeros((num_rows, heads), np.float32)
    inputs = map(wrap, (values, tables.vertices, edges.astype(np.int32), tables.plan))
    launch("edge_sum", [*inputs, out, wrap(packed)], blocks, **options)
    return out


def edge_products(chunks, a, b, heads, blocks, **options):
    tables, columns = _make_row_tables(chunks, blocks), a.shape[1] // heads
    packed = tiling.products_tiling(tables, heads, columns)
    out = np.zeros((chunks.source.size, heads), np.float32)
    inputs = map(wrap, (pad(a, heads), pad(b, heads), tables.vertices, tables.columns, tables.plan))
    launch("edge_products", [*inputs, out if out.size else np.zeros(8, np.float32), wrap(packed)], blocks, **options)
    return out


def gather_rows(table, index, blocks, **options):
    out = np.zeros((index.size, *table.shape[1:]), table.dtype)
    row_bytes = table[0].nbytes
    packed = tiling.gather_tiling(index.size, row_bytes, len(table))
    inputs = map(wrap, (table, index.astype(np.int32), tiling.gather_missing(row_bytes)))
    launch("gather_rows", [*inputs, out, wrap(packed)], blocks, **options)
    return out


def update_bias(bias):
    """Split a float32 bias [n] into two float16 rows whose sum is nearly exact, and add fourteen rows of zeros."""
    exact = np.asarray(bias, np.float32)
    rows = np.zeros((16, tiling.up(exact.size)), np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        rows[0, : exact.size] = exact
        rest = exact - rows[0, : exact.size]
        rows[1, : exact.size] = np.where(np.isfinite(rest), rest, 0)
    return rows


def update(a, b, bias=None, *, blocks=1, relu=False, transpose_a=False, transpose_b=False, split=1, full=False, seed=0):
    """Return the product of the matrices; the flags select how they are stored for the kernel."""
    (m, k), n = a.shape, b.shape[1]
    stored_a, stored_b = pad(a.T if transpose_a else a), pad(b.T if transpose_b else b)
    packed = tiling.update_tiling(
        m,
        k,
        n,
        stored_a.shape[1],
        stored_b.shape[1],
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        bias=bias is not None,
        relu=relu,
        float_out=full,
        split_k=split,
    )
    parts = tiling.fields("UpdateTiling", packed)["splitK"]
    wide = tiling.up(n)
    bias_rows = np.zeros((16, wide), np.float16) if bias is None else update_bias(bias)
    out = np.zeros((m * parts, wide), np.float32 if full or parts > 1 else np.float16)
    inputs = map(wrap, (stored_a, stored_b, bias_rows, tiling.update_constants()))
    launch("update", [*inputs, out, wrap(packed)], blocks, seed=seed)
    if parts > 1:
        y = np.zeros((m, wide), np.float32)
        combine = tiling.combine_tiling(m, wide, parts_per_row=parts, float_out=True)
        nothing = np.zeros(4, np.int32)
        launch("combine_parts", [wrap(out), wrap(nothing), y, wrap(combine)], blocks, seed=seed)
        out = y
    return out[:, :n].astype(np.float64)


def aggregate_update(
    x, indptr, indices, b, own=None, *, own_rows=0, weights=None, mean=False, transpose_b=False, blocks=1, seed=0
):
    """Return sums and result; b and own are [k, n], and transpose_b selects how they are stored for the kernel."""
    rows, k, n = indptr.size - 1, x.shape[1], 0 if b is None else b.shape[1]
    given_b = [] if b is None else [b] if own is None else [b, own]
    stored = [pad(part.T if transpose_b else part) for part in given_b]
    stored = np.concatenate(stored, 1) if stored else np.zeros((1, 16), np.float16)
    packed = tiling.aggregate_update_tiling(
        rows,
        k,
        n,
        stored.shape[1],
        own_rows=own_rows,
        own_offset=stored.shape[1] // 2 if own is not None else 0,
        weighted=weights is not None,
        mean=mean,
        transpose_b=transpose_b,
    )
    sums = np.full((rows, tiling.up(k)), np.nan, np.float16)
    y = np.full((rows, max(tiling.up(n), 16)), np.nan, np.float32)
    values = np.zeros(1, np.float32) if weights is None else weights.astype(np.float32)
    inputs = (pad(x), indptr.astype(np.int32), indices.astype(np.int32), values, stored, tiling.update_constants())
    args = [*map(wrap, inputs), Scratch(sums), Scratch(y), wrap(packed)]
    launch("aggregate_update", args, blocks, seed=seed)
    return sums[:, :k].astype(np.float64), y[:, :n].astype(np.float64)
