"""What the Ascend C kernels read, computed in numpy: the mirror of csrc/host_tiling.cpp.

The layouts are described once, in csrc/tiling.h; the tests compare the field names here with that file and the tables
with those that the C++ makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gnn.ascend_ops.structs import (
    CUBE_EDGE,
    ENTRY_BATCH,
    LIMITS,
    MAX_PANEL,
    VECTOR_PANEL,
    check_sizes,
    pack,
    up,
)

Array = npt.NDArray[Any]
Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class CubeTables:
    """What aggregate_cube reads, one direction of a graph and one plan (csrc/tiling.h has the layouts).

    Args:
        tiling: ``AggregateTiling``, uint32.
        plan: int32.
        row_blocks: int32 ``[numRowBlocks, 8]``.
        tiles: int32 ``[numTiles, 8]``.
        columns: int32.
        positions: uint16 ``[num_values]``.
        slots: int32 ``[num_edges]``, the place of each entry's weight among the values; parallel edges share one.
        runs: int32 ``[.., 4]``.
        splits: int32 ``[.., 4]``, for combine_parts: vertices whose rows lie apart.
        num_parts: Rows of the float parts.
        num_blocks: Blocks to launch.
        workspace_bytes: Bytes of the workspace.
    """

    tiling: npt.NDArray[np.uint32]
    plan: npt.NDArray[np.int32]
    row_blocks: npt.NDArray[np.int32]
    tiles: npt.NDArray[np.int32]
    columns: npt.NDArray[np.int32]
    positions: npt.NDArray[np.uint16]
    slots: npt.NDArray[np.int32]
    runs: npt.NDArray[np.int32]
    splits: npt.NDArray[np.int32]
    num_parts: int
    num_blocks: int
    workspace_bytes: int

    def values(self, weights: Array | None, heads: int = 1) -> npt.NDArray[np.float16]:
        """Return weights in the kernel's order, parallel edges added up in float32, fillers 0.

        Args:
            weights: ``[num_edges]`` or ``[num_edges, heads]``, in the order of the entries; None for ones.
            heads: Number of heads.
        """
        given = np.ones((self.slots.size, heads), np.float32) if weights is None else np.asarray(weights, np.float32)
        given = given.reshape(self.slots.size, heads)
        stride = self.positions.size
        summed = np.zeros((heads, stride), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for head in range(heads):
                np.add.at(summed[head], self.slots, given[:, head])
            return summed.astype(np.float16)


@dataclass(frozen=True, eq=False)
class RowTables:
    """What the vertex-by-vertex kernels read (``RowsTiling`` in csrc/tiling.h).

    Args:
        plan: int32.
        vertices: int32 ``[num_vertices, 4]``.
        columns: int32 ``[num_edges]``, the column vertex of each entry.
        range_offset: Where the ranges start in the plan.
        panel_offset: Where the panels start in the plan.
        num_groups: M.
        num_members: G.
        panel_columns: The widest panel.
    """

    plan: npt.NDArray[np.int32]
    vertices: npt.NDArray[np.int32]
    columns: npt.NDArray[np.int32]
    range_offset: int
    panel_offset: int
    num_groups: int
    num_members: int
    panel_columns: int


def cut_panels(
    heads: int, head_columns: int, num_groups: int, max_panel: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Share the columns out to groups in blocks of 16 and cut each slice into panels that no head's end crosses.

    As :func:`lightning_gnn.graph.hybrid_plan.slice_columns` does it; with fewer blocks than groups, the last groups
    have none.

    Args:
        heads: Number of heads.
        head_columns: Columns of a head, filled up to a multiple of 16.
        num_groups: M.
        max_panel: Columns of the widest panel.

    Returns:
        First panel of each group, int32 ``[M + 1]``, and the panels (first column, columns, head, 0).
    """
    blocks, per_head, widest = heads * head_columns // CUBE_EDGE, head_columns // CUBE_EDGE, max_panel // CUBE_EDGE
    share, rest = divmod(blocks, num_groups)
    bounds = [0]
    for group in range(num_groups):
        more = group >= num_groups - rest if share else group < rest
        bounds.append(bounds[-1] + share + more)
    first, panels = [0], []
    for start, stop in pairwise(bounds):
        while start < stop:
            head = start // per_head
            end = min(stop, (head + 1) * per_head)
            pieces = -(-(end - start) // widest)
            width, wider = divmod(end - start, pieces)
            for piece in range(pieces):
                step = width + (piece < wider)
                panels.append((start * CUBE_EDGE, step * CUBE_EDGE, head, 0))
                start += step
        first.append(len(panels))
    return np.array(first, np.int32), np.array(panels, np.int32).reshape(-1, 4)


def _starts(counts: Array) -> npt.NDArray[np.int64]:
    """Return where each of consecutive pieces starts, and the end."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _check_ranges(chunk_ranges: Ranges, num_chunks: int) -> None:
    at = 0
    for start, stop in chunk_ranges:
        if start != at or stop < start:
            raise ValueError(f"chunk ranges must follow each other from 0 to {num_chunks}, but are {chunk_ranges}")
        at = stop
    if at != num_chunks or not chunk_ranges:
        raise ValueError(f"chunk ranges must follow each other from 0 to {num_chunks}, but are {chunk_ranges}")


def cube_tables(
    rows: Array,
    row_ptr: Array,
    indptr: Array,
    local: Array,
    columns: Array,
    column_ptr: Array,
    chunk_ranges: Ranges,
    num_groups: int,
    num_columns: int,
    *,
    heads: int = 1,
    tile_rows: int = 128,
    tile_columns: int = 128,
    panel: int = MAX_PANEL,
    arch: str = "dav-c220",
) -> CubeTables:
    """Make what aggregate_cube reads from one direction of a graph and a plan.

    Args:
        rows: Vertex of each row, int32 ``[R]``, as in :class:`lightning_gnn.graph.chunks.Chunks`, like the next five.
        row_ptr: int64 ``[num_chunks + 1]``.
        indptr: int64 ``[R + 1]``.
        local: int32 ``[num_edges]``.
        columns: int32 ``[L]``.
        column_ptr: int64 ``[num_chunks + 1]``.
        chunk_ranges: Chunks of each of the G members of a group, ``HybridPlan.chunk_ranges``.
        num_groups: M.
        num_columns: D, columns of the features (of one head); the kernel sees them filled up to a multiple of 16.
        heads: Number of heads, side by side in the features, each filled up by itself.
        tile_rows: Rows of a dense tile.
        tile_columns: Columns of a dense tile.
        panel: Columns of the features handled at once.
        arch: A key of :data:`LIMITS`.

    Raises:
        ValueError: A tile size does not fit, ranges do not cover the chunks, or there is no column.
    """
    check_sizes(tile_rows, tile_columns, panel, arch)
    _check_ranges(chunk_ranges, row_ptr.size - 1)
    if num_columns < 1 or heads < 1 or num_groups < 1:
        raise ValueError(f"num_columns={num_columns}, heads={heads} and num_groups={num_groups} must be at least 1")
    head_columns = up(num_columns)
    group_panel, panels = cut_panels(heads, head_columns, num_groups, panel)

    # Row blocks: the rows with entries, chunk by chunk.
    degree = np.diff(indptr)
    kept = np.flatnonzero(degree > 0)
    chunk = np.repeat(np.arange(row_ptr.size - 1), np.diff(row_ptr))[kept]
    per_chunk = np.bincount(chunk, minlength=row_ptr.size - 1)
    block_start = _starts(-(-per_chunk // tile_rows))
    place = np.arange(kept.size) - _starts(per_chunk)[chunk]
    block, row = block_start[chunk] + place // tile_rows, place % tile_rows
    num_blocks = int(block_start[-1])
    block_rows = np.bincount(block, minlength=num_blocks)

    # Tiles: the distinct columns of a row block, ascending.
    entry_row = np.repeat(np.arange(kept.size), degree[kept])
    vertex = columns[column_ptr[:-1][chunk[entry_row]] + local].astype(np.int64)
    bound = int(vertex.max()) + 1 if vertex.size else 1
    pairs, pair_of = np.unique(block[entry_row] * bound + vertex, return_inverse=True)
    pair_block = pairs // bound
    pair_count = np.bincount(pair_block, minlength=num_blocks)
    block_tile = _starts(-(-pair_count // tile_columns))
    rank = np.arange(pairs.size) - _starts(pair_count)[pair_block]
    pair_tile, pair_column = block_tile[pair_block] + rank // tile_columns, rank % tile_columns
    num_tiles = int(block_tile[-1])
    tile_width = np.bincount(pair_tile, minlength=num_tiles)
    k = -(-tile_width // CUBE_EDGE) * CUBE_EDGE
    column_start = _starts(k)
    tile_vertices = np.full(column_start[-1], -1, np.int32)
    tile_vertices[column_start[pair_tile] + pair_column] = pairs % bound

    # Entries: by tile, half and place in it; parallel edges share a place.
    half_rows = np.repeat(-(-block_rows // CUBE_EDGE) * (CUBE_EDGE // 2), np.diff(block_tile))
    cells = tile_rows // 2 * tile_columns
    tile = pair_tile[pair_of]
    half = row[entry_row] >= half_rows[tile]
    cell = (row[entry_row] - half * half_rows[tile]) * k[tile] + pair_column[pair_of]
    keys, key_of = np.unique((2 * tile + half) * cells + cell, return_inverse=True)
    key_half = keys // cells
    counts = np.bincount(key_half, minlength=2 * num_tiles)
    padded = -(-counts // CUBE_EDGE) * CUBE_EDGE
    entry_start = _starts(padded)
    if entry_start[-1] >= 2**31:
        raise ValueError(f"{entry_start[-1]} entries are too many for 32-bit tables; use more devices")
    where = entry_start[key_half] + np.arange(keys.size) - _starts(counts)[key_half]
    positions = np.repeat(np.repeat(half_rows * k, 2), padded).astype(np.uint16)
    positions[where] = keys % cells

    tiles = np.zeros((num_tiles, 8), np.int32)
    tiles[:, 0], tiles[:, 1] = column_start[:-1], tile_width
    tiles[:, 2:6] = np.stack([entry_start[:-1], padded], axis=1).reshape(num_tiles, 4)
    target, splits, num_parts = _destinations(rows[kept].astype(np.int64))
    run_start, run_table = _runs(block, row, target, num_blocks)
    row_blocks = np.zeros((num_blocks, 8), np.int32)
    row_blocks[:, 0], row_blocks[:, 1], row_blocks[:, 2] = block_tile[:-1], block_tile[1:], block_rows
    row_blocks[:, 3], row_blocks[:, 4] = run_start[:-1], run_start[1:]

    ranges = block_start[np.array([start for start, _ in chunk_ranges] + [chunk_ranges[-1][1]])]
    plan, range_offset, panel_offset = _plan(group_panel, ranges, panels)
    widest = int(panels[:, 1].max())
    slot = tile_rows * tile_columns + tile_columns * widest
    members = len(chunk_ranges)
    tiling = pack(
        "AggregateTiling",
        groups=num_groups,
        members=members,
        tileRows=tile_rows,
        tileColumns=tile_columns,
        panelColumns=widest,
        accumulators=2 if 8 * tile_rows * widest <= LIMITS[arch]["L0C"] else 1,
        entryBatch=ENTRY_BATCH,
        ldx=heads * head_columns,
        ldy=heads * head_columns,
        ldParts=heads * head_columns,
        valueStride=positions.size,
        slotHalves=slot,
        rangeOffset=range_offset,
        panelOffset=panel_offset,
    )
    return CubeTables(
        tiling=tiling,
        plan=plan,
        row_blocks=row_blocks,
        tiles=tiles,
        columns=tile_vertices,
        positions=positions,
        slots=where[key_of].astype(np.int32),
        runs=run_table,
        splits=splits,
        num_parts=num_parts,
        num_blocks=num_groups * members,
        workspace_bytes=num_groups * members * 2 * slot * 2,
    )


def _plan(group_panel: Array, ranges: Array, panels: Array) -> tuple[npt.NDArray[np.int32], int, int]:
    parts = [group_panel, ranges, panels.reshape(-1)]
    return np.concatenate(parts).astype(np.int32), group_panel.size, group_panel.size + ranges.size


def _destinations(vertex: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], int]:
    """Where each row's result goes: to y, or to the float parts where a vertex has several rows."""
    order = np.argsort(vertex, kind="stable")
    split_vertices, first, count = np.unique(vertex[order], return_index=True, return_counts=True)
    chosen = count > 1
    split_count = count[chosen]
    starts = _starts(split_count)
    num_parts = int(starts[-1])
    # the rows of split vertices, in the order of vertices, rows of one vertex in their own order
    members = order[np.repeat(first[chosen], split_count) + np.arange(num_parts) - np.repeat(starts[:-1], split_count)]
    target = vertex.copy()
    target[members] = -1 - np.arange(num_parts)
    splits = np.zeros((split_count.size, 4), np.int32)
    splits[:, 0], splits[:, 1], splits[:, 2] = split_vertices[chosen], starts[:-1], starts[1:]
    return target, splits, num_parts


def _runs(block: Array, row: Array, target: Array, num_blocks: int) -> tuple[Array, npt.NDArray[np.int32]]:
    """Cut the rows of each block into runs whose destinations follow each other."""
    if target.size == 0:
        return np.zeros(num_blocks + 1, np.int64), np.zeros((0, 4), np.int32)
    step = np.diff(target)
    same = (np.diff(block) == 0) & np.where(target[:-1] >= 0, step == 1, (step == -1) & (target[1:] < 0))
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    runs = np.zeros((starts.size, 4), np.int32)
    runs[:, 0], runs[:, 2] = row[starts], target[starts]
    runs[:, 1] = np.diff(np.concatenate([starts, [target.size]]))
    return _starts(np.bincount(block[starts], minlength=num_blocks)), runs


def row_tables(
    rows: Array,
    row_ptr: Array,
    indptr: Array,
    local: Array,
    columns: Array,
    column_ptr: Array,
    *,
    chunk_ranges: Ranges | None = None,
    num_members: int | None = None,
    num_groups: int = 1,
    num_columns: int = 1,
    heads: int = 1,
    max_panel: int = VECTOR_PANEL,
) -> RowTables:
    """Make what the vertex-by-vertex kernels read; the first six arguments are those of :func:`cube_tables`.

    Args:
        rows: Vertex of each row.
        row_ptr: First row of each chunk.
        indptr: First entry of each row.
        local: Column of each entry.
        columns: Vertex of each column.
        column_ptr: First column of each chunk.
        chunk_ranges: Chunks of each member; a split vertex belongs to the chunk of its first part.
        num_members: Without ranges: into how many shares of about as many entries the vertices are cut.
        num_groups: M.
        num_columns: Columns of one head.
        heads: Number of heads.
        max_panel: Columns of the features handled at once.

    Raises:
        ValueError: Parts of a vertex lie apart, or ranges do not cover the chunks.
    """
    degree = np.diff(indptr)
    kept = np.flatnonzero(degree > 0)
    vertex = rows[kept].astype(np.int64)
    chunk = np.repeat(np.arange(row_ptr.size - 1), np.diff(row_ptr))
    first = np.flatnonzero(np.concatenate([[True], np.diff(vertex) != 0])) if kept.size else kept
    if np.unique(vertex).size != first.size:
        raise ValueError("the rows of a vertex must lie side by side")
    table = np.zeros((first.size, 4), np.int32)
    table[:, 0] = vertex[first]
    table[:, 1] = indptr[kept[first]]
    table[:, 2] = np.concatenate([table[1:, 1], indptr[-1:]]) if first.size else 0
    group_panel, panels = cut_panels(heads, up(num_columns), num_groups, max_panel)
    if chunk_ranges is not None:
        _check_ranges(chunk_ranges, row_ptr.size - 1)
        wanted = [start for start, _ in chunk_ranges] + [chunk_ranges[-1][1]]
        ranges = np.searchsorted(chunk[kept[first]], wanted)
    else:
        shares = num_members or 1
        wanted = [int(indptr[-1]) * share // shares for share in range(shares)]
        ranges = np.concatenate([np.searchsorted(table[:, 1], wanted), [first.size]])
    plan, range_offset, panel_offset = _plan(group_panel, ranges, panels)
    return RowTables(
        plan=plan,
        vertices=table,
        columns=columns[column_ptr[:-1][np.repeat(chunk, degree)] + local].astype(np.int32),
        range_offset=range_offset,
        panel_offset=panel_offset,
        num_groups=num_groups,
        num_members=ranges.size - 1,
        panel_columns=int(panels[:, 1].max()),
    )
