"""Computes the tiling tables of the Ascend C kernels from chunks and a plan, by calling csrc/host_tiling.cpp.

The NPU's binding links the same C++. csrc/tiling.h defines the layouts of tables and structs.
"""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gnn.ascend_ops.build import CSRC, build_tiling

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]
Ranges = Sequence[tuple[int, int]]

CUBE_EDGE = 16  # rows and columns of a fractal (tile) of the cube unit
MAX_PANEL = 512  # maximum number of columns that aggregate_max handles at once


@dataclass(frozen=True, eq=False)
class CubeTables:
    """Inputs of aggregate_cube for one direction of a graph and one plan."""

    tiling: Words  # AggregateTiling, uint32
    plan: npt.NDArray[np.int32]
    row_blocks: npt.NDArray[np.int32]  # int32 [numRowBlocks, 8]
    tiles: npt.NDArray[np.int32]  # int32 [numTiles, 8]
    columns: npt.NDArray[np.int32]
    positions: npt.NDArray[np.uint16]  # uint16 [num_values]
    slots: npt.NDArray[np.int32]  # int32 [num_edges], index of each weight among the values
    runs: npt.NDArray[np.int32]  # int32 [.., 4]
    splits: npt.NDArray[np.int32]  # int32 [.., 4], for combine_parts: vertices with rows in several parts
    num_parts: int  # number of rows of float32 partial sums
    num_blocks: int
    workspace_bytes: int

    def values(self, weights: Array | None, heads: int = 1) -> npt.NDArray[np.float16]:
        """Return weights ``[num_edges]`` or ``[num_edges, heads]`` in the kernel's order, parallel edges summed."""
        per_edge = np.ones((self.slots.size, heads), np.float32) if weights is None else np.asarray(weights, np.float32)
        per_edge = per_edge.reshape(self.slots.size, heads)
        stride = self.positions.size
        summed = np.zeros((heads, stride), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for head in range(heads):
                np.add.at(summed[head], self.slots, per_edge[:, head])
            return summed.astype(np.float16)


@dataclass(frozen=True, eq=False)
class RowTables:
    """Inputs of the vertex-by-vertex kernels."""

    plan: npt.NDArray[np.int32]
    vertices: npt.NDArray[np.int32]  # int32 [num_vertices, 4]
    columns: npt.NDArray[np.int32]  # int32 [num_edges], column vertex of each entry
    range_offset: int  # offset of the ranges in the plan
    panel_offset: int  # offset of the panels in the plan
    num_groups: int
    num_members: int
    panel_columns: int


def cube_tables(
    chunks: Sequence[Array],
    chunk_ranges: Ranges,
    num_groups: int,
    num_columns: int,
    *,
    heads: int = 1,
    tile_rows: int = 128,
    tile_columns: int = 128,
    panel: int = 256,
) -> CubeTables:
    """Compute the inputs of aggregate_cube from a plan and the arrays of :class:`~lightning_gnn.compressed.Chunks`."""
    numbers = (num_groups, num_columns, heads, tile_rows, tile_columns, panel)
    arrays = _compute_arrays("cube tables", numbers, _CUBE_NAMES, chunks, chunk_ranges)
    num_parts, num_blocks, workspace_bytes = arrays.pop("sizes").tolist()
    tables = {name: a.reshape(-1, _ROW_WIDTHS[name]) if name in _ROW_WIDTHS else a for name, a in arrays.items()}
    return CubeTables(**tables, num_parts=num_parts, num_blocks=num_blocks, workspace_bytes=workspace_bytes)


def row_tables(
    chunks: Sequence[Array],
    *,
    chunk_ranges: Ranges | None = None,
    num_members: int = 1,
    num_groups: int = 1,
    num_columns: int = 1,
    heads: int = 1,
    max_panel: int = 2048,
) -> RowTables:
    """Compute the inputs of the vertex-by-vertex kernels."""
    numbers = (num_members, num_groups, num_columns, heads, max_panel)
    names = ("plan", "vertices", "columns", "sizes")
    arrays = _compute_arrays("row tables", numbers, names, chunks, chunk_ranges)
    return RowTables(arrays["plan"], arrays["vertices"].reshape(-1, 4), arrays["columns"], *arrays["sizes"].tolist())


def aggregate_vector_tiling(tables: RowTables, stride: int, weighted: bool) -> Words:
    """Return ``RowsTiling`` for aggregate_vector; ``stride`` is the row stride of x and y in elements."""
    layout = (tables.range_offset, tables.panel_offset, tables.num_groups, tables.num_members, tables.panel_columns)
    return _compute_tiling("aggregate_vector", *layout, stride, tables.columns.size, weighted)


def cut_panels(num_columns: int, num_groups: int, heads: int, max_panel: int) -> tuple[Array, Array, int]:
    """Return each group's first panel, each panel's (first column, columns, head, 0), and the largest panel width."""
    arrays = _compute_arrays("panels", (heads, num_columns, num_groups, max_panel), ("first", "panels", "sizes"))
    return arrays["first"], arrays["panels"], int(arrays["sizes"][0])


def max_tiling(
    range_offset: int,
    panel_offset: int,
    num_groups: int,
    num_members: int,
    panel_columns: int,  # width of the widest panel, at most MAX_PANEL
    stride: int,  # row stride of features and results, in elements
    num_edges: int,
    weighted: bool,
) -> Words:
    """Return ``RowsTiling`` for aggregate_max and aggregate_max_backward."""
    layout = (range_offset, panel_offset, num_groups, num_members, panel_columns)
    return _compute_tiling("aggregate_max", *layout, stride, num_edges, weighted)


def softmax_tiling(tables: RowTables, heads: int, slope: float = 0.0) -> Words:
    """Return ``RowsTiling`` for edge_softmax, its backward and edge_sum; ``slope`` is that of the leaky ReLU."""
    bits = int(np.float32(slope).view(np.uint32))
    return _compute_tiling("edge_softmax", tables.num_members, tables.range_offset, heads, bits)


def products_tiling(tables: RowTables, heads: int, num_columns: int) -> Words:
    """Return ``RowsTiling`` for edge_products."""
    return _compute_tiling("edge_products", tables.num_members, tables.range_offset, heads, num_columns)


def combine_tiling(num_vertices: int, num_columns: int, *, parts_per_row: int = 0, float_out: bool = False) -> Words:
    """Return ``CombineTiling``; ``num_columns`` is also the stride, and a multiple of 16."""
    return _compute_tiling("combine_parts", num_vertices, num_columns, parts_per_row, float_out)


def gather_tiling(num_rows: int, row_bytes: int, table_rows: int) -> Words:
    """Return ``GatherTiling`` for a contiguous table."""
    return _compute_tiling("gather_rows", num_rows, row_bytes, row_bytes, table_rows)


def gather_missing(row_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the bytes that gather_rows copies for each piece of a missing row: all bits are 1."""
    return np.full(fields("GatherTiling", gather_tiling(1, row_bytes, 1))["piece"], 0xFF, np.uint8)


def update_tiling(
    m: int,
    k: int,
    n: int,  # columns of the result; y is padded to a multiple of 16 columns
    lda: int,  # row stride of a as stored, in elements; a multiple of 16 (the padding is 0)
    ldb: int,
    *,
    transpose_a: bool = False,  # whether a is stored [k, m]
    transpose_b: bool = False,  # whether b is stored [n, k]
    bias: bool = False,
    relu: bool = False,  # apply a ReLU to the result
    float_out: bool = False,  # whether y is float32; always with split_k > 1
    split_k: int = 1,  # maximum number of parts that k is split into; a part has at least 128
) -> Words:
    """Return ``UpdateTiling``: y ``[m, n]`` = a ``[m, k]`` times b ``[k, n]``."""
    return _compute_tiling("update", m, k, n, lda, ldb, transpose_a, transpose_b, bias, relu, float_out, split_k)


def aggregate_update_tiling(
    rows: int,
    k: int,  # columns of the features; their row stride is k rounded up to a multiple of 16
    n: int,  # columns of the result; 0 computes the sums only
    ldb: int,  # row stride of b as stored, in elements; a multiple of 16 (the padding is 0)
    *,
    own_rows: int = 0,
    own_offset: int = 0,
    weighted: bool = False,
    mean: bool = False,
    transpose_b: bool = False,  # whether b is stored [n, k]
) -> Words:
    """Return ``AggregateUpdateTiling``."""
    numbers = (rows, k, n, up(k), ldb, own_rows, own_offset, weighted, mean, transpose_b)
    return _compute_tiling("aggregate_update", *numbers)


def update_constants() -> npt.NDArray[np.float16]:
    """Return the constants of update: 16 x 128 zeros, then 128 x 16 values with ones in columns 0 and 1."""
    ones = np.zeros((128, 16), np.float16)
    ones[:, :2] = 1
    return np.concatenate([np.zeros(16 * 128, np.float16), ones.reshape(-1)])


def up(value: int, unit: int = CUBE_EDGE) -> int:
    """Round up to a multiple of ``unit``."""
    return -(-value // unit) * unit


def fields(struct: str, words: Words) -> dict[str, int]:
    """Return a tiling struct's words by their field names in csrc/tiling.h."""
    return dict(zip(_field_names()[struct], words.tolist(), strict=True))


@cache
def _field_names() -> dict[str, list[str]]:
    structs = re.findall(r"^struct (\w+) \{\n(.*?)^\};", (CSRC / "tiling.h").read_text(), re.MULTILINE | re.DOTALL)
    return {name: re.findall(r"^    uint32_t (\w+);", body, re.MULTILINE) for name, body in structs}


class _ChunksView(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "row_ptr", "indptr", "local", "columns", "column_ptr")),
        ("num_chunks", ctypes.c_int64),
    ]


_CUBE_NAMES = ("tiling", "plan", "row_blocks", "tiles", "columns", "positions", "slots", "runs", "splits", "sizes")
_ROW_WIDTHS = {"row_blocks": 8, "tiles": 8, "runs": 4, "splits": 4}
_CHUNK_DTYPES = (np.int32, np.int64, np.int64, np.int32, np.int32, np.int64)
_ARRAY_DTYPES = {"tiling": np.uint32, "positions": np.uint16, "sizes": np.uint64}  # all others are int32


@cache
def _load_library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_tiling()))
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    library.lgnn_tiling.restype = library.lgnn_array.restype = pointer
    library.lgnn_tiling.argtypes = [ctypes.c_char_p, pointer, pointer, ctypes.c_int64, pointer, ctypes.c_char_p, size]
    library.lgnn_array.argtypes = [pointer, ctypes.c_char_p, pointer]
    library.lgnn_free.argtypes = [pointer]
    return library


def _compute_tiling(what: str, *numbers: int) -> Words:
    return _compute_arrays(what, numbers, ("tiling",))["tiling"]


def _compute_arrays(
    what: str,
    numbers: Sequence[int],
    names: Sequence[str],
    chunks: Sequence[Array] = (),
    ranges: Ranges | None = None,
) -> dict[str, Array]:
    """Call the C++ tiling function, and copy the named arrays of its result."""
    if not all(0 <= number < 2**32 for number in numbers):
        raise ValueError(f"the numbers of {what} must be from 0 to 2^32 - 1, but are {tuple(map(int, numbers))}")
    words = np.array(numbers, np.uint32)
    # The call only gets addresses, so keep references to the arrays.
    arrays = [np.ascontiguousarray(array, dtype) for array, dtype in zip(chunks, _CHUNK_DTYPES, strict=bool(chunks))]
    view = _ChunksView(*(array.ctypes.data for array in arrays), arrays[1].size - 1) if arrays else None
    pairs = None if ranges is None else np.array(ranges, np.int64).reshape(-1, 2)
    library, error = _load_library(), ctypes.create_string_buffer(1024)
    handle = library.lgnn_tiling(
        what.encode(),
        None if view is None else ctypes.byref(view),
        None if pairs is None else pairs.ctypes.data,
        0 if pairs is None else len(pairs),
        words.ctypes.data,
        error,
        len(error),
    )
    if not handle:
        raise ValueError(error.value.decode())
    out: dict[str, Array] = {}
    try:
        for name in names:
            size = ctypes.c_uint64()
            address = library.lgnn_array(handle, name.encode(), ctypes.byref(size))
            dtype = np.dtype(_ARRAY_DTYPES.get(name, np.int32))
            out[name] = np.empty(size.value // dtype.itemsize, dtype)
            ctypes.memmove(out[name].ctypes.data, address, size.value)
    finally:
        library.lgnn_free(handle)
    return out
