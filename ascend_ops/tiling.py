"""What the Ascend C kernels read, from chunks and a plan: csrc/host_tiling.cpp, called from Python.

The NPU's binding links the same C++. The layouts of the tables and structs are in csrc/tiling.h.
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

CUBE_EDGE = 16  # rows and columns of a fractal of the cube unit
MAX_PANEL = 512  # columns that aggregate_max handles at once at most


@dataclass(frozen=True, eq=False)
class CubeTables:
    """What aggregate_cube reads, one direction of a graph and one plan."""

    tiling: Words  # AggregateTiling, uint32
    plan: npt.NDArray[np.int32]
    row_blocks: npt.NDArray[np.int32]  # int32 [numRowBlocks, 8]
    tiles: npt.NDArray[np.int32]  # int32 [numTiles, 8]
    columns: npt.NDArray[np.int32]
    positions: npt.NDArray[np.uint16]  # uint16 [num_values]
    slots: npt.NDArray[np.int32]  # int32 [num_edges], the place of each weight among the values
    runs: npt.NDArray[np.int32]  # int32 [.., 4]
    splits: npt.NDArray[np.int32]  # int32 [.., 4], for combine_parts: vertices whose rows lie apart
    num_parts: int  # rows of the float parts
    num_blocks: int
    workspace_bytes: int  # bytes of the workspace

    def values(self, weights: Array | None, heads: int = 1) -> npt.NDArray[np.float16]:
        """Return weights ``[num_edges]`` or ``[num_edges, heads]`` in the kernel's order, parallel edges summed."""
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
    """What the vertex-by-vertex kernels read."""

    plan: npt.NDArray[np.int32]
    vertices: npt.NDArray[np.int32]  # int32 [num_vertices, 4]
    columns: npt.NDArray[np.int32]  # int32 [num_edges], the column vertex of each entry
    range_offset: int  # where the ranges start in the plan
    panel_offset: int  # where the panels start in the plan
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
    """Make what aggregate_cube reads from a plan and the arrays of :class:`~lightning_gnn.compressed.Chunks`."""
    numbers = (num_groups, num_columns, heads, tile_rows, tile_columns, panel)
    made = _make("cube tables", numbers, _CUBE_NAMES, chunks, chunk_ranges)
    num_parts, num_blocks, workspace_bytes = made.pop("sizes").tolist()
    shaped = {name: array.reshape(-1, _WIDTHS[name]) if name in _WIDTHS else array for name, array in made.items()}
    return CubeTables(**shaped, num_parts=num_parts, num_blocks=num_blocks, workspace_bytes=workspace_bytes)


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
    """Make what the vertex-by-vertex kernels read."""
    numbers = (num_members, num_groups, num_columns, heads, max_panel)
    made = _make("row tables", numbers, ("plan", "vertices", "columns", "sizes"), chunks, chunk_ranges)
    return RowTables(made["plan"], made["vertices"].reshape(-1, 4), made["columns"], *made["sizes"].tolist())


def aggregate_vector_tiling(tables: RowTables, stride: int, weighted: bool) -> Words:
    """Return ``RowsTiling`` for aggregate_vector; ``stride``: elements from row to row of x and y."""
    of_tables = (tables.range_offset, tables.panel_offset, tables.num_groups, tables.num_members, tables.panel_columns)
    return _words("aggregate_vector", *of_tables, stride, tables.columns.size, weighted)


def cut_panels(num_columns: int, num_groups: int, heads: int, max_panel: int) -> tuple[Array, Array, int]:
    """Return each group's first panel, of each panel first column, columns, head and 0, and the widest's columns."""
    made = _make("panels", (heads, num_columns, num_groups, max_panel), ("first", "panels", "sizes"))
    return made["first"], made["panels"], int(made["sizes"][0])


def max_tiling(
    range_offset: int,
    panel_offset: int,
    num_groups: int,
    num_members: int,
    panel_columns: int,  # the widest panel, MAX_PANEL at most
    stride: int,  # elements from row to row of features and results
    num_edges: int,
    weighted: bool,
) -> Words:
    """Return ``RowsTiling`` for aggregate_max and aggregate_max_backward."""
    of_tables = (range_offset, panel_offset, num_groups, num_members, panel_columns)
    return _words("aggregate_max", *of_tables, stride, num_edges, weighted)


def softmax_tiling(tables: RowTables, heads: int, slope: float = 0.0) -> Words:
    """Return ``RowsTiling`` for edge_softmax, edge_softmax_backward and edge_sum; ``slope`` of the leaky ReLU."""
    bits = int(np.float32(slope).view(np.uint32))
    return _words("edge_softmax", tables.num_members, tables.range_offset, heads, bits)


def products_tiling(tables: RowTables, heads: int, num_columns: int) -> Words:
    """Return ``RowsTiling`` for edge_products."""
    return _words("edge_products", tables.num_members, tables.range_offset, heads, num_columns)


def combine_tiling(num_vertices: int, num_columns: int, *, parts_per_row: int = 0, float_out: bool = False) -> Words:
    """Return ``CombineTiling``; ``num_columns``, also the strides, is a multiple of 16."""
    return _words("combine_parts", num_vertices, num_columns, parts_per_row, float_out)


def gather_tiling(num_rows: int, row_bytes: int, table_rows: int, table_stride: int | None = None) -> Words:
    """Return ``GatherTiling``; ``table_stride``: bytes from row to row of the table, by default those of a row."""
    stride = row_bytes if table_stride is None else table_stride
    return _words("gather_rows", num_rows, row_bytes, stride, table_rows)


def gather_missing(row_bytes: int) -> npt.NDArray[np.uint8]:
    """Return what gather_rows copies in place of a piece of a row that the table does not have: all bits ones."""
    return np.full(fields("GatherTiling", gather_tiling(1, row_bytes, 1))["piece"], 0xFF, np.uint8)


def update_tiling(
    m: int,
    k: int,
    n: int,  # columns of the result; y has them filled up to a multiple of 16
    lda: int,  # elements from row to row of a as stored, a multiple of 16 (the fillers are 0)
    ldb: int,
    *,
    transpose_a: bool = False,  # whether a is stored [k, m]
    transpose_b: bool = False,  # whether b is stored [n, k]
    bias: bool = False,
    relu: bool = False,  # whether negative results become 0
    float_out: bool = False,  # whether y is float32; with split_k > 1 it always is
    split_k: int = 1,  # into how many parts k is cut at most; a part has at least 128
) -> Words:
    """Return ``UpdateTiling``: y ``[m, n]`` = a ``[m, k]`` times b ``[k, n]``."""
    return _words("update", m, k, n, lda, ldb, transpose_a, transpose_b, bias, relu, float_out, split_k)


def aggregate_update_tiling(
    rows: int,
    k: int,  # columns of the features, whose rows lie k filled up to a multiple of 16 apart
    n: int,  # columns of the result; 0 for sums alone
    ldb: int,  # elements from row to row of b as stored, a multiple of 16 (the fillers are 0)
    *,
    own_rows: int = 0,
    own_offset: int = 0,
    weighted: bool = False,
    mean: bool = False,
    transpose_b: bool = False,  # whether b is stored [n, k]
) -> Words:
    """Return ``AggregateUpdateTiling``."""
    return _words("aggregate_update", rows, k, n, up(k), ldb, own_rows, own_offset, weighted, mean, transpose_b)


def update_constants() -> npt.NDArray[np.float16]:
    """Return the constants that update reads: 16 x 128 zeros, then 128 x 16 with ones in the columns 0 and 1."""
    ones = np.zeros((128, 16), np.float16)
    ones[:, :2] = 1
    return np.concatenate([np.zeros(16 * 128, np.float16), ones.reshape(-1)])


def up(value: int, unit: int = CUBE_EDGE) -> int:
    """Return the least multiple of ``unit`` that is not less."""
    return -(-value // unit) * unit


def fields(struct: str, words: Words) -> dict[str, int]:
    """Return a tiling struct's words by the names that csrc/tiling.h gives them."""
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
_WIDTHS = {"row_blocks": 8, "tiles": 8, "runs": 4, "splits": 4}


_CHUNK_DTYPES = (np.int32, np.int64, np.int64, np.int32, np.int32, np.int64)
_DTYPES = {"tiling": np.uint32, "positions": np.uint16, "sizes": np.uint64}


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_tiling()))
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    library.lgnn_tiling.restype = library.lgnn_array.restype = pointer
    library.lgnn_tiling.argtypes = [ctypes.c_char_p, pointer, pointer, ctypes.c_int64, pointer, ctypes.c_char_p, size]
    library.lgnn_array.argtypes = [pointer, ctypes.c_char_p, pointer]
    library.lgnn_free.argtypes = [pointer]
    return library


def _words(what: str, *numbers: int) -> Words:
    return _make(what, numbers, ("tiling",))["tiling"]


def _make(
    what: str,
    numbers: Sequence[int],
    names: Sequence[str],
    chunks: Sequence[Array] = (),
    ranges: Ranges | None = None,
) -> dict[str, Array]:
    """Call the C++, and copy the arrays of these names."""
    if not all(0 <= number < 2**32 for number in numbers):
        raise ValueError(f"the numbers of {what} must be from 0 to 2^32 - 1, but are {tuple(map(int, numbers))}")
    words = np.array(numbers, np.uint32)
    # These must live as long as the call.
    arrays = [np.ascontiguousarray(array, dtype) for array, dtype in zip(chunks, _CHUNK_DTYPES, strict=bool(chunks))]
    view = _ChunksView(*(array.ctypes.data for array in arrays), arrays[1].size - 1) if arrays else None
    pairs = None if ranges is None else np.array(ranges, np.int64).reshape(-1, 2)
    library, error = _library(), ctypes.create_string_buffer(1024)
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
    made: dict[str, Array] = {}
    try:
        for name in names:
            size = ctypes.c_uint64()
            address = library.lgnn_array(handle, name.encode(), ctypes.byref(size))
            dtype = np.dtype(_DTYPES.get(name, np.int32))
            made[name] = np.empty(size.value // dtype.itemsize, dtype)
            ctypes.memmove(made[name].ctypes.data, address, size.value)
    finally:
        library.lgnn_free(handle)
    return made
