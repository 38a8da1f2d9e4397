"""The tiling structs of csrc/tiling.h as numpy words, what fits the local memories, and one builder per kernel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CUBE_EDGE = 16
MAX_PANEL = 256
CUBE_COLUMNS = 128
ENTRY_BATCH = 1024
VECTOR_PANEL = 2048
PRODUCTS_PANEL = 1024
HEAD_BLOCK = 64
HEAD_FLOATS = 6144

LIMITS = {"dav-c220": {"UB": 196608 - 8192, "L1": 524288, "L0A": 65536, "L0B": 65536, "L0C": 131072}}
"""Bytes of the local memories, by architecture (Atlas A2: dav-c220); Select keeps 8 KiB of UB for itself."""

STRUCTS = {
    "AggregateTiling": "groups members tileRows tileColumns panelColumns accumulators entryBatch ldx ldy ldParts "
    "valueStride slotHalves rangeOffset panelOffset reserved0 reserved1",
    "RowsTiling": "groups members rangeOffset panelOffset panelColumns ldx ldy heads headColumns batch weighted "
    "valueStride slopeBits reserved0 reserved1 reserved2",
    "CombineTiling": "numVertices partsPerRow numColumns ldParts ldy floatOut piece reserved0",
    "GatherTiling": "numRows rowBytes tableStride batch piece reserved0 reserved1 reserved2",
    "UpdateTiling": "m k n lda ldb ldy transposeA transposeB hasBias relu floatOut splitK tileM tileN tileK storedN",
}


def pack(name: str, **values: int) -> npt.NDArray[np.uint32]:
    """Return a tiling struct as the words that a kernel reads; fields not given are 0.

    Args:
        name: A struct of csrc/tiling.h.
        values: Its fields.

    Raises:
        ValueError: A field is unknown, or its value does not fit 32 bits.
    """
    fields = STRUCTS[name].split()
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"{name} has no field {unknown[0]!r}")
    for field, value in values.items():
        if not 0 <= value < 2**32:
            raise ValueError(f"{name}.{field} is {value}, which does not fit 32 bits")
    return np.array([values.get(field, 0) for field in fields], dtype=np.uint32)


def up(value: int, unit: int = CUBE_EDGE) -> int:
    """Return the least multiple of ``unit`` that is not less."""
    return -(-value // unit) * unit


def check_sizes(tile_rows: int, tile_columns: int, panel: int, arch: str = "dav-c220") -> None:
    """Check that the tiles of aggregate_cube fit the local memories.

    Raises:
        ValueError: A size is no positive multiple of 16, or does not fit; the message names the memory and its limit.
    """
    limits = LIMITS[arch]
    for name, size in (("tile_rows", tile_rows), ("tile_columns", tile_columns), ("panel", panel)):
        if size < CUBE_EDGE or size % CUBE_EDGE:
            raise ValueError(f"{name} must be a positive multiple of 16, but is {size}")
    cells, features = tile_rows // 2 * tile_columns, tile_columns // 2 * panel
    compared = up(panel, 64)
    vector = 4 * (cells + 16) + 8 * features + 3 * up(features // 8, 32) + 4 * tile_columns + 8 * ENTRY_BATCH
    vector += 2 * panel + 12 * compared + 2 * up(compared // 8, 32)
    needs = {
        "L0A": 4 * tile_rows * tile_columns,
        "L0B": 4 * tile_columns * min(panel, CUBE_COLUMNS),
        "L0C": 4 * tile_rows * panel,
        "L1": 4 * tile_rows * tile_columns + 4 * tile_columns * panel,
        "UB": vector,
    }
    for memory, need in needs.items():
        if need > limits[memory]:
            raise ValueError(
                f"tile_rows={tile_rows}, tile_columns={tile_columns}, panel={panel} need {need} bytes of {memory}, "
                f"which has {limits[memory]}; make them smaller (128, 128 and 256 fit)"
            )


def aggregate_vector_tiling(
    num_groups: int,
    num_members: int,
    range_offset: int,
    panel_offset: int,
    panel_columns: int,
    stride: int,
    *,
    num_edges: int = 0,
    weighted: bool = False,
) -> npt.NDArray[np.uint32]:
    """Return ``RowsTiling`` for aggregate_vector; the first five are the fields of the ``RowTables``.

    Args:
        num_groups: M.
        num_members: G.
        range_offset: Where the ranges start in the plan.
        panel_offset: Where the panels start in the plan.
        panel_columns: The widest panel.
        stride: Elements from row to row of x and y.
        num_edges: Entries, the weights of one head.
        weighted: Whether there are weights.
    """
    return pack(
        "RowsTiling",
        groups=num_groups,
        members=num_members,
        rangeOffset=range_offset,
        panelOffset=panel_offset,
        panelColumns=panel_columns,
        ldx=stride,
        ldy=stride,
        batch=256,
        weighted=int(weighted),
        valueStride=num_edges,
    )


def softmax_tiling(num_members: int, range_offset: int, heads: int, slope: float = 0.0) -> npt.NDArray[np.uint32]:
    """Return ``RowsTiling`` for edge_softmax, edge_softmax_backward and edge_sum.

    Args:
        num_members: Blocks.
        range_offset: Where the ranges start in the plan.
        heads: Number of heads.
        slope: Slope of the leaky ReLU below 0.
    """
    lanes = up(min(heads, HEAD_BLOCK), 8)
    return pack(
        "RowsTiling",
        groups=1,
        members=num_members,
        rangeOffset=range_offset,
        heads=heads,
        batch=min(248, HEAD_FLOATS // lanes // 8 * 8),  # 255 repeats at most, and whole blocks
        slopeBits=int(np.float32(slope).view(np.uint32)),
    )


def products_tiling(num_members: int, range_offset: int, heads: int, num_columns: int) -> npt.NDArray[np.uint32]:
    """Return ``RowsTiling`` for edge_products.

    Args:
        num_members: Blocks.
        range_offset: Where the ranges start in the plan.
        heads: Number of heads.
        num_columns: Columns of one head.
    """
    head_columns = up(num_columns)
    together = heads * head_columns <= PRODUCTS_PANEL
    panel = heads * head_columns if together else min(head_columns, PRODUCTS_PANEL)
    return pack(
        "RowsTiling",
        groups=1,
        members=num_members,
        rangeOffset=range_offset,
        panelColumns=panel,
        ldx=heads * head_columns,
        ldy=heads * head_columns,
        heads=heads,
        headColumns=head_columns,
        batch=min(128, 16384 // panel, 255 // heads if together else 255),
    )


def combine_tiling(
    num_vertices: int, num_columns: int, *, parts_per_row: int = 0, float_out: bool = False
) -> npt.NDArray[np.uint32]:
    """Return ``CombineTiling``.

    Args:
        num_vertices: Rows to make.
        num_columns: Columns, a multiple of 16, also the strides of parts and result.
        parts_per_row: Parts of each row, where there is no list.
        float_out: Whether the result is float32, not float16.
    """
    return pack(
        "CombineTiling",
        numVertices=num_vertices,
        partsPerRow=parts_per_row,
        numColumns=num_columns,
        ldParts=num_columns,
        ldy=num_columns,
        floatOut=int(float_out),
        piece=min(num_columns, VECTOR_PANEL),
    )


def gather_tiling(num_rows: int, row_bytes: int, table_stride: int | None = None) -> npt.NDArray[np.uint32]:
    """Return ``GatherTiling``.

    Args:
        num_rows: Rows to gather.
        row_bytes: Bytes of a row.
        table_stride: Bytes from row to row of the table, by default those of a row.
    """
    piece = min(up(row_bytes, 32), 16384)
    return pack(
        "GatherTiling",
        numRows=num_rows,
        rowBytes=row_bytes,
        tableStride=row_bytes if table_stride is None else table_stride,
        batch=min(1024, 65536 // piece),
        piece=piece,
    )


def update_tiling(
    m: int,
    k: int,
    n: int,
    lda: int,
    ldb: int,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: bool = False,
    relu: bool = False,
    float_out: bool = False,
    split_k: int = 1,
) -> npt.NDArray[np.uint32]:
    """Return ``UpdateTiling``: y ``[m, n]`` = a ``[m, k]`` times b ``[k, n]``.

    Args:
        m: Rows of the result.
        k: Length of the products.
        n: Columns of the result; y has them filled up to a multiple of 16.
        lda: Elements from row to row of a as stored, a multiple of 16 (the fillers are 0).
        ldb: The same of b.
        transpose_a: Whether a is stored ``[k, m]``.
        transpose_b: Whether b is stored ``[n, k]``.
        bias: Whether a bias is added.
        relu: Whether negative results become 0.
        float_out: Whether y is float32; with ``split_k > 1`` it always is.
        split_k: Into how many parts k is cut at most; a part has at least 128.

    Raises:
        ValueError: A size is 0, a stride is too small or no multiple of 16, or bias or ReLU meet a cut k.
    """
    if min(m, k, n, split_k) < 1:
        raise ValueError(f"m={m}, k={k}, n={n} and split_k={split_k} must be at least 1")
    for name, stride, width in (("lda", lda, m if transpose_a else k), ("ldb", ldb, k if transpose_b else n)):
        if stride % CUBE_EDGE or stride < width:
            raise ValueError(f"{name} must be a multiple of 16 and at least {width}, but is {stride}")
    split_k = min(split_k, -(-k // 128))
    if split_k > 1 and (bias or relu):
        raise ValueError("bias and ReLU need the whole sum: use split_k=1")
    return pack(
        "UpdateTiling",
        m=m,
        k=k,
        n=up(n),
        lda=lda,
        ldb=ldb,
        ldy=up(n),
        transposeA=int(transpose_a),
        transposeB=int(transpose_b),
        hasBias=int(bias),
        relu=int(relu),
        floatOut=int(float_out or split_k > 1),
        splitK=split_k,
        tileM=128,
        tileN=128,
        tileK=128,
        storedN=n,
    )


def update_constants() -> npt.NDArray[np.float16]:
    """Return the constants that update reads: 16 x 128 zeros, then 128 x 16 with ones in the columns 0 and 1."""
    ones = np.zeros((128, 16), np.float16)
    ones[:, :2] = 1
    return np.concatenate([np.zeros(16 * 128, np.float16), ones.reshape(-1)])


def update_bias(bias: npt.ArrayLike) -> npt.NDArray[np.float16]:
    """Return a bias as two float16 rows that add up to nearly float32, and fourteen of zeros.

    Args:
        bias: float32 ``[n]``.

    Returns:
        ``[16, n]``, n filled up to a multiple of 16.
    """
    exact = np.asarray(bias, np.float32)
    rows = np.zeros((16, up(exact.size)), np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        rows[0, : exact.size] = exact
        rest = exact - rows[0, : exact.size]
        rows[1, : exact.size] = np.where(np.isfinite(rest), rest, 0)
    return rows
