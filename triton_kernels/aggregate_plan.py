"""What the aggregation kernels run over, built once per graph: parts of rows, dense tiles, and what is added up after.

A row of a sparse matrix is read in parts of bounded length, one program each, so that a hub does not keep one program
busy while the others wait. In a chunk that is dense enough, windows of ``HEIGHT`` rows are condensed instead: the
distinct columns of a window lie side by side, ``TILE_COLUMNS`` to a tile, and tensor cores multiply the dense tile with
the rows of its columns, each read once per window instead of once per entry. A vertex that only one part or window
writes goes straight to the output; parts of others go to slots of a scratch table, which are added up in order. So no
atomic is needed, and the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_ENTRIES = 512  # of one part: a program reads them one block after the other
HEIGHT = 32  # rows of a tile
TILE_COLUMNS = 32
MAX_TILES = 128  # of one window: what is wider is cut, as long rows are
NOWHERE = -(2**31)  # place of a row that pads a window
_BATCH = 2**25  # entries that are sorted at once
# Bytes per second of reading rows at random, between what L2 and the memory of recent GPUs give, and half of the peak
# rates of their units: what decides is their ratio, and it is much the same over A100 and H100.
_BANDWIDTH = 2.5e12
_FLOPS = {"half": 3e14, "tf32": 1.5e14, "ieee": 2.5e13}
_MARGIN = 1.25  # tiles must promise that much: the estimate counts neither the latency of a dot nor its set-up


class Matrix(NamedTuple):
    """The tensors of a ``Chunks``: a sparse matrix cut into chunks of rows.

    Fields: rows int32 ``[R]``, row_ptr int64 ``[K + 1]``, indptr int64 ``[R + 1]``, local int32 ``[E]``, columns int32
    ``[L]``, column_ptr int64 ``[K + 1]``, num_rows, num_columns.
    """

    rows: Tensor
    row_ptr: Tensor
    indptr: Tensor
    local: Tensor
    columns: Tensor
    column_ptr: Tensor
    num_rows: int
    num_columns: int


@dataclass(frozen=True, eq=False)
class Parts:
    """Runs of entries, each of one row and for one program.

    Args:
        starts: First entry, int64 ``[P]``.
        stops: Last entry, exclusive, int64 ``[P]``.
        vertices: Vertex of the row, int32 ``[P]``.
        places: Where the sum goes: the vertex, or ``-1 - slot`` of the scratch table, int32 ``[P]``.
        shared: The parts that go to slots, int32.
    """

    starts: Tensor
    stops: Tensor
    vertices: Tensor
    places: Tensor
    shared: Tensor


@dataclass(frozen=True, eq=False)
class Slots:
    """The scratch table: which of its rows add up to which vertex.

    Args:
        ptr: First slot of each vertex, int64 ``[S + 1]``.
        vertices: int32 ``[S]``.
        covered: Every vertex is written by some part; otherwise the output must begin with zeros.
    """

    ptr: Tensor
    vertices: Tensor
    count: int
    covered: bool


@dataclass(frozen=True, eq=False)
class Tiles:
    """Dense tiles of the chunks that are dense enough, window by window.

    Args:
        ptr: First tile of each window, int64 ``[W + 1]``.
        columns: Vertex of each column of each tile, -1 for padding, int32 ``[T * TILE_COLUMNS]``.
        places: Where the sum of each row goes: its vertex, ``-1 - slot``, or ``NOWHERE``, int32 ``[W * HEIGHT]``.
        cells: Cell ``(tile * HEIGHT + row) * TILE_COLUMNS + column`` of each entry, duplicates once, int64 ``[U]``.
        cell_ptr: First of the entries of each cell, int64 ``[U + 1]``.
        entries: Entries in the order of their cells, int32 or int64 ``[n]``.
    """

    ptr: Tensor
    columns: Tensor
    places: Tensor
    cells: Tensor
    cell_ptr: Tensor
    entries: Tensor

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return self.ptr.numel() - 1

    @property
    def num_tiles(self) -> int:
        """Number of tiles."""
        return self.columns.numel() // TILE_COLUMNS


@dataclass(frozen=True, eq=False)
class Plan:
    """How one sparse matrix is multiplied.

    Args:
        parts: Rows of the chunks that are not ``dense``.
        tiles: Windows of those that are, or None.
        slots: What parts and windows share.
        dense: Chunks that go through tiles, bool ``[K]``, on the host.
    """

    parts: Parts
    tiles: Tiles | None
    slots: Slots
    dense: Tensor


class Base(NamedTuple):
    """What all plans of a matrix share.

    Fields: column of each entry, int32 ``[E]``; entries of each vertex on the row side, int32 ``[num_rows]``.
    """

    indices: Tensor
    degrees: Tensor


def density_threshold(dtype: torch.dtype, num_channels: int, tf32: bool = False) -> float:
    """Estimate the density from which tiles are faster than rows.

    For each column of a window, tiles read a row of the features and a column of the tile (written before, and read
    once per block of feature columns) and compute ``2 * HEIGHT`` operations per value; rows read one row per entry. So
    tiles win where the entries per column exceed ``1 + HEIGHT * (1 / block + 2 / num_channels) + 2 * HEIGHT * bandwidth
    / (bytes * rate)``, and the density is that over ``HEIGHT``.

    Args:
        dtype: float32, float16 or bfloat16.
        num_channels: Feature columns of one head.
        tf32: float32 may be rounded to TF32 on its way into the tensor cores.

    Returns:
        Entries per cell; above 1 where tiles cannot win.
    """
    rate = _FLOPS["half" if dtype.itemsize == 2 else "tf32" if tf32 else "ieee"]
    reads = HEIGHT * (1 / min(max(num_channels, 1), 128) + 2 / max(num_channels, 1))
    work = 2 * HEIGHT * _BANDWIDTH / (dtype.itemsize * rate)
    return _MARGIN * (1 + reads + work) / HEIGHT


def build_base(matrix: Matrix) -> Base:
    """Resolve the columns of the entries, and count them per row."""
    counts = matrix.indptr.diff()
    degrees = torch.zeros(matrix.num_rows, dtype=torch.int64, device=matrix.rows.device)
    degrees.index_add_(0, matrix.rows.long(), counts)
    indices = torch.empty_like(matrix.local, dtype=torch.int32)
    for first, last in _batches(matrix):
        start, stop = matrix.indptr[matrix.row_ptr[[first, last]]].tolist()
        row_ptr = matrix.row_ptr[first : last + 1]
        of_row = torch.repeat_interleave(row_ptr.diff()) + first
        chunk = torch.repeat_interleave(of_row, counts[row_ptr[0] : row_ptr[-1]])
        indices[start:stop] = matrix.columns[matrix.column_ptr[chunk] + matrix.local[start:stop]]
    return Base(indices, degrees.int())


def densities(matrix: Matrix, base: Base) -> Tensor:
    """Measure how full the tiles of each chunk would be: entries per cell, float64 ``[K]``, on the host."""
    found = []
    for first, last in _batches(matrix):
        windows = _windows(matrix, base, first, last, None)
        padded = _ceil(windows.widths, TILE_COLUMNS) * TILE_COLUMNS * HEIGHT
        cells = torch.zeros(last - first, dtype=torch.int64, device=padded.device)
        cells.index_add_(0, windows.chunks - first, padded)
        entries = matrix.indptr[matrix.row_ptr[first : last + 1]].diff()
        found.append((entries.double() / cells.clamp(min=1)).cpu())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def build_plan(matrix: Matrix, base: Base, dense: Tensor | None = None) -> Plan:
    """Cut a matrix into parts and tiles.

    Args:
        base: Its columns.
        dense: Chunks that go through tiles, bool ``[K]``; by default none.
    """
    device = matrix.rows.device
    dense = torch.zeros(matrix.row_ptr.numel() - 1, dtype=torch.bool) if dense is None else dense.cpu()
    chosen = dense.to(device).repeat_interleave(matrix.row_ptr.diff())
    row = torch.nonzero(~chosen).flatten()
    starts, stops, row = _cut(matrix.indptr[row], matrix.indptr[row + 1], row)
    vertices = matrix.rows[row]
    tiles = _build_tiles(matrix, base, dense) if bool(dense.any()) else None
    if tiles is None:
        places, slots = _place(vertices, matrix.num_rows)
    else:
        at = torch.nonzero(tiles.places != NOWHERE).flatten()
        places, slots = _place(torch.cat([vertices, tiles.places[at]]), matrix.num_rows)
        tiles.places[at] = places[vertices.numel() :]
        places = places[: vertices.numel()].contiguous()
    return Plan(Parts(starts, stops, vertices, places, torch.nonzero(places < 0).flatten().int()), tiles, slots, dense)


def _cut(start: Tensor, stop: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut rows into parts of at most ``MAX_ENTRIES`` entries, at least one each."""
    pieces = _ceil(stop - start, MAX_ENTRIES).clamp(min=1)
    first = pieces.cumsum(0) - pieces
    which = torch.repeat_interleave(pieces)
    begin = start[which] + (torch.arange(which.numel(), device=start.device) - first[which]) * MAX_ENTRIES
    return begin, torch.minimum(begin + MAX_ENTRIES, stop[which]), row[which]


def _place(vertices: Tensor, num_rows: int) -> tuple[Tensor, Slots]:
    """Give the parts of a vertex that has several neighbouring slots, in the order of the list."""
    counts = torch.bincount(vertices, minlength=num_rows)
    # A stable sort keeps the parts of a vertex in the order in which they are to be added up.
    order = torch.argsort(vertices, stable=True)
    shared = order[(counts > 1)[vertices[order].long()]]
    places = vertices.clone()
    places[shared] = -1 - torch.arange(shared.numel(), dtype=torch.int32, device=vertices.device)
    split = torch.nonzero(counts > 1).flatten()
    slots = Slots(_pointers(counts[split]), split.int(), shared.numel(), bool((counts > 0).all()))
    return places, slots


def _build_tiles(matrix: Matrix, base: Base, dense: Tensor) -> Tiles:
    columns, places, cells, cell_counts, entries, window_tiles = [], [], [], [], [], []
    num_tiles = 0
    for first, last in _batches(matrix):
        chosen = dense[first:last].to(matrix.rows.device)
        if not bool(chosen.any()):
            continue
        windows = _windows(matrix, base, first, last, chosen)
        # The distinct columns of a window, numbered by rank, lie TILE_COLUMNS to a tile; the last tile is padded.
        tiles = _ceil(windows.widths, TILE_COLUMNS)
        tile_of = num_tiles + tiles.cumsum(0) - tiles
        window = torch.repeat_interleave(windows.widths)  # of each distinct column
        rank = torch.arange(window.numel(), device=window.device) - (windows.widths.cumsum(0) - windows.widths)[window]
        tile, column = tile_of[window] + rank // TILE_COLUMNS, rank % TILE_COLUMNS
        width = int(tiles.sum())
        padded = torch.full((width * TILE_COLUMNS,), -1, dtype=torch.int32, device=window.device)
        padded[(tile - num_tiles) * TILE_COLUMNS + column] = windows.columns
        columns.append(padded)
        # The cell of each entry, sorted: edges given twice share a cell, where their weights are added up.
        cell = (tile[windows.inverse] * HEIGHT + windows.row_in_window) * TILE_COLUMNS + column[windows.inverse]
        cell, order = torch.sort(cell, stable=True)
        cell, count = torch.unique_consecutive(cell, return_counts=True)
        cells.append(cell)
        cell_counts.append(count)
        entries.append(windows.entries[order].to(torch.int32 if matrix.local.numel() < 2**31 else torch.int64))
        window_tiles.append(tiles)
        places.append(windows.vertices)
        num_tiles += width
    # Windows wider than MAX_TILES are cut into pieces, which go to slots as the parts of a long row do.
    tiles, vertices = torch.cat(window_tiles), torch.cat(places)
    starts, pieces = tiles.cumsum(0) - tiles, _ceil(tiles, MAX_TILES).clamp(min=1)
    which = torch.repeat_interleave(pieces)
    piece = torch.arange(which.numel(), device=which.device) - (pieces.cumsum(0) - pieces)[which]
    ends = torch.full((1,), num_tiles, dtype=torch.int64, device=which.device)
    return Tiles(
        ptr=torch.cat([starts[which] + piece * MAX_TILES, ends]),
        columns=torch.cat(columns),
        places=vertices[which].flatten(),
        cells=torch.cat(cells),
        cell_ptr=_pointers(torch.cat(cell_counts)),
        entries=torch.cat(entries),
    )


class _Windows(NamedTuple):
    chunks: Tensor  # int64 [W]: chunk of each window
    vertices: Tensor  # int32 [W, HEIGHT], NOWHERE where the chunk ends
    widths: Tensor  # int64 [W]: distinct columns
    columns: Tensor  # int32 [sum of widths]: ascending in each window
    entries: Tensor  # int64 [n]
    inverse: Tensor  # int64 [n]: place of the column of each entry
    row_in_window: Tensor  # int64 [n]


def _windows(matrix: Matrix, base: Base, first: int, last: int, chosen: Tensor | None) -> _Windows:
    """Cut chunks ``first`` to ``last`` (those ``chosen``, bool ``[last - first]``) into windows, and condense them."""
    device = matrix.rows.device
    row_ptr = matrix.row_ptr[first : last + 1]
    heights = row_ptr.diff()
    if chosen is not None:
        heights = torch.where(chosen, heights, 0)
    per_chunk = _ceil(heights, HEIGHT)
    first_window = per_chunk.cumsum(0) - per_chunk
    chunks = torch.repeat_interleave(per_chunk)
    in_chunk = torch.arange(chunks.numel(), device=device) - first_window[chunks]
    slots = (in_chunk * HEIGHT)[:, None] + torch.arange(HEIGHT, device=device)
    # The rows of each window, and their vertices; a chunk whose rows are no multiple of HEIGHT ends with NOWHERE.
    row = row_ptr[:-1][chunks][:, None] + slots
    inside = slots < heights[chunks][:, None]
    vertices = torch.full(row.shape, NOWHERE, dtype=torch.int32, device=device)
    vertices[inside] = matrix.rows[row[inside]]

    # The window of each entry.
    counts = matrix.indptr[row_ptr[0] : row_ptr[-1] + 1].diff()
    of_row = torch.repeat_interleave(row_ptr.diff())  # chunk of each row
    start = int(matrix.indptr[row_ptr[0]])
    entry_row = torch.repeat_interleave(counts)
    entries = torch.arange(start, start + entry_row.numel(), device=device)
    if chosen is not None:
        kept = chosen[of_row[entry_row]]
        entries, entry_row = entries[kept], entry_row[kept]
    chunk = of_row[entry_row]
    row_in_chunk = entry_row - (row_ptr[:-1] - row_ptr[0])[chunk]
    window = first_window[chunk] + row_in_chunk // HEIGHT
    # One sort of (window, column) in a single int64 finds the distinct columns of all windows, ascending in each.
    num_columns = max(matrix.num_columns, 1)
    keys, inverse = torch.unique(window * num_columns + base.indices[entries], return_inverse=True)
    widths = torch.bincount(keys // num_columns, minlength=chunks.numel())
    columns = (keys % num_columns).int()
    return _Windows(chunks + first, vertices, widths, columns, entries, inverse, row_in_chunk % HEIGHT)


def _batches(matrix: Matrix) -> Iterator[tuple[int, int]]:
    """Yield ranges of chunks that hold about ``_BATCH`` entries, so that memory stays bounded."""
    ends = matrix.indptr[matrix.row_ptr].cpu()
    first, num_chunks = 0, matrix.row_ptr.numel() - 1
    while first < num_chunks:
        last = int(torch.searchsorted(ends, ends[first] + _BATCH, right=True)) - 1
        last = min(max(last, first + 1), num_chunks)
        yield first, last
        first = last


def _pointers(counts: Tensor) -> Tensor:
    pointers = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=pointers[1:])
    return pointers


def _ceil(values: Tensor, step: int) -> Tensor:
    return (values + step - 1) // step
