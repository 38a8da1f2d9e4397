"""The tables and structs that the C++ makes: every edge appears once, and all buffers fit into local memory."""

import itertools
import re
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.ascend_ops import build, tiling
from lightning_gnn.compressed.hybrid_plan import slice_columns
from tests.ascend_ops.chunk_arrays import draw_chunks


def count_edges(chunks, first=0, last=None):
    """Return the edges of a range of chunks as a matrix of counts, by target and source."""
    bounds = chunks.indptr[chunks.row_ptr[[first, chunks.num_chunks if last is None else last]]]
    selected = slice(*bounds)
    matrix = np.zeros((int(chunks.rows.max()) + 1,) * 2)
    np.add.at(matrix, (chunks.target[selected], chunks.source[selected]), 1)
    return matrix


def rebuild_matrix(tables, blocks, num_vertices):
    """Rebuild the matrix that row blocks describe, with unit weights, from tiles, positions, runs and splits."""
    matrix = np.zeros((num_vertices, num_vertices))
    vertex_of_part = np.full(tables.num_parts, -1)
    for vertex, first, last, _ in tables.splits:
        assert last - first > 1
        assert (vertex_of_part[first:last] == -1).all()
        vertex_of_part[first:last] = vertex
    assert (vertex_of_part >= 0).all()
    field = tiling.fields("AggregateTiling", tables.tiling)
    ones = np.zeros(tables.positions.size)
    np.add.at(ones, tables.slots, 1)
    for first, last, rows, run_first, run_last, *_ in tables.row_blocks[blocks]:
        assert 0 < rows <= field["tileRows"]
        assert first < last
        block = np.zeros((tiling.up(rows), num_vertices))
        for column_first, width, *halves in tables.tiles[first:last]:
            assert 0 < width <= field["tileColumns"]
            k = tiling.up(width)
            used = tables.columns[column_first : column_first + k]
            assert (used[width:] == -1).all()
            assert (np.diff(used[:width]) > 0).all()
            for half, (begin, count) in enumerate([halves[:2], halves[2:4]]):
                cells = tiling.up(rows) // 2 * k
                assert begin % 16 == count % 16 == 0
                place = tables.positions[begin : begin + count].astype(int)
                real = place < cells
                assert (place[~real] == cells).all()
                assert (np.diff(place[real]) > 0).all()
                row, column = np.divmod(place[real], k)
                assert (column < width).all()
                assert (ones[begin : begin + count][real] > 0).all()
                block[row + half * tiling.up(rows) // 2, used[column]] += ones[begin : begin + count][real]
        assert not block[rows:].any()
        ends = []
        for row, count, target, _ in tables.runs[run_first:run_last]:
            assert row == (ends[-1][0] if ends else 0)
            # runs are maximal: the kernel writes each in one copy
            assert not ends or target != ends[-1][1]
            ends.append((row + count, target + count if target >= 0 else target - count))
            vertices = range(target, target + count) if target >= 0 else vertex_of_part[-1 - target :][:count]
            np.add.at(matrix, list(vertices), block[row : row + count])
        assert ends[-1][0] == rows
    return matrix


def check_panels(plan, first, heads, columns, groups, widest):
    """Check that the panels of all groups cover each head's columns in order, within the limits."""
    panels, wide = plan[first:].reshape(-1, 4), tiling.up(columns)
    bounds = plan[: groups + 1]
    assert bounds[0] == 0
    assert bounds[-1] == len(panels)
    at = 0
    for start, width, head, _ in panels:
        assert start == at
        assert 0 < width <= widest
        assert width % 16 == 0
        assert head * wide <= start < start + width <= (head + 1) * wide
        at += width
    assert at == heads * wide
    shares = [panels[a:b, 1].sum() for a, b in itertools.pairwise(bounds)]
    assert max(shares) - min(shares) <= 16
    if heads == 1 and wide // 16 >= groups:
        stops = [tiling.up(stop) for _, stop in slice_columns(columns, groups)]
        assert np.cumsum(shares).tolist() == stops
    return panels[:, 1].max()


cases = st.tuples(
    st.integers(0, 2**31),
    st.integers(1, 300),
    st.sampled_from([0, 1, 40, 900]),
    st.integers(1, 9),
    st.sampled_from([None, 1, 7, 60]),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    case=cases,
    sizes=st.tuples(st.sampled_from([16, 32, 128]), st.sampled_from([16, 48, 128]), st.sampled_from([16, 128, 256])),
    groups=st.integers(1, 5),
    members=st.integers(1, 6),
    columns=st.sampled_from([1, 16, 41, 100, 602]),
    heads=st.integers(1, 3),
)
def test_cube_tables_describe_the_graph_and_share_it_out(case, sizes, groups, members, columns, heads):
    seed, num_vertices, num_edges, num_chunks, most, shuffled = case
    chunks = draw_chunks(seed, num_vertices, num_edges, num_chunks, most_entries=most, shuffled=shuffled)
    ranges = chunks.even_ranges(members)
    rows, width, panel = sizes
    tables = tiling.cube_tables(
        chunks.tables, ranges, groups, columns, heads=heads, tile_rows=rows, tile_columns=width, panel=panel
    )
    field = tiling.fields("AggregateTiling", tables.tiling)
    bounds = tables.plan[field["rangeOffset"] : field["panelOffset"]]
    assert bounds.size == members + 1
    assert bounds[0] == 0
    assert bounds[-1] == len(tables.row_blocks)
    for (first, last), (start, stop) in zip(ranges, itertools.pairwise(bounds), strict=True):
        found = rebuild_matrix(tables, slice(start, stop), num_vertices)
        assert np.array_equal(found, count_edges(chunks, first, last))
    # row blocks and tiles are contiguous, and every list is used completely
    assert tables.row_blocks[:, 1].tolist() == [*tables.row_blocks[1:, 0], *([len(tables.tiles)] * bool(num_edges))]
    assert sum(tables.row_blocks[:, 4] - tables.row_blocks[:, 3]) == len(tables.runs)
    assert tables.tiles[:, [3, 5]].sum() == tables.positions.size == field["valueStride"]
    rows_of_vertex = np.unique(chunks.rows[np.diff(chunks.indptr) > 0], return_counts=True)[1]
    assert tables.num_parts == rows_of_vertex[rows_of_vertex > 1].sum()
    assert len(tables.splits) == (rows_of_vertex > 1).sum()

    widest = check_panels(tables.plan, field["panelOffset"], heads, columns, groups, panel)
    wide = heads * tiling.up(columns)
    slot = rows * width + width * widest
    assert field == {
        "groups": groups,
        "members": members,
        "tileRows": rows,
        "tileColumns": width,
        "panelColumns": widest,
        "accumulators": 2 if 2 * 4 * rows * widest <= 131072 else 1,
        "entryBatch": 1024,
        "ldx": wide,
        "ldy": wide,
        "ldParts": wide,
        "valueStride": tables.positions.size,
        "slotHalves": slot,
        "rangeOffset": groups + 1,
        "panelOffset": groups + 1 + members + 1,
        "reserved0": 0,
        "reserved1": 0,
    }
    assert tables.num_blocks == groups * members
    assert tables.workspace_bytes == groups * members * 2 * 2 * slot  # two slots of float16


@settings(max_examples=60, deadline=None)
@given(
    case=cases,
    groups=st.integers(1, 5),
    members=st.integers(1, 40),
    columns=st.sampled_from([16, 41, 3000]),
    heads=st.integers(1, 3),
    by_plan=st.booleans(),
)
def test_row_tables_hold_every_entry_once(case, groups, members, columns, heads, by_plan):
    seed, num_vertices, num_edges, num_chunks, most, shuffled = case
    chunks = draw_chunks(seed, num_vertices, num_edges, num_chunks, most_entries=most, shuffled=shuffled)
    ranges = chunks.even_ranges(members) if by_plan else None
    tables = tiling.row_tables(
        chunks.tables, chunk_ranges=ranges, num_members=members, num_groups=groups, num_columns=columns, heads=heads
    )
    target = np.full(num_edges, -1)
    for vertex, begin, end, _ in tables.vertices:
        assert begin < end
        assert (target[begin:end] == -1).all()
        target[begin:end] = vertex
    assert np.array_equal(target, chunks.target)
    assert np.array_equal(tables.columns, chunks.source)
    assert np.array_equal(tables.vertices[1:, 1], tables.vertices[:-1, 2])  # a list continues across vertices
    assert np.unique(tables.vertices[:, 0]).size == len(tables.vertices)
    bounds = tables.plan[tables.range_offset : tables.panel_offset]
    assert bounds.size == members + 1
    assert bounds[0] == 0
    assert bounds[-1] == len(tables.vertices)
    begins = np.append(tables.vertices[:, 1], num_edges)
    if by_plan:  # a vertex belongs to the block of its first entry
        wanted = chunks.indptr[chunks.row_ptr[[start for start, _ in ranges]]]
    else:
        wanted = [num_edges * share // members for share in range(members)]
    assert bounds[:-1].tolist() == [int((begins < edge).sum()) for edge in wanted]

    assert check_panels(tables.plan, tables.panel_offset, heads, columns, groups, 2048) == tables.panel_columns
    assert (tables.num_groups, tables.num_members) == (groups, members)
    wide = heads * tiling.up(columns)
    field = tiling.fields("RowsTiling", tiling.aggregate_vector_tiling(tables, wide, weighted=True))
    assert {name: value for name, value in field.items() if value} == {
        "groups": groups,
        "members": members,
        "rangeOffset": groups + 1,
        "panelOffset": groups + members + 2,
        "panelColumns": tables.panel_columns,
        "ldx": wide,
        "ldy": wide,
        "batch": 1024,
        "atOnce": count_rows_at_once(tables.panel_columns),
        "weighted": 1,
    } | ({"valueStride": num_edges} if num_edges else {})


def test_rows_of_a_vertex_that_lie_apart_are_refused():
    chunks = draw_chunks(0, 20, 200, 4, most_entries=3)
    apart = chunks.rows.copy()
    apart[apart == apart[0]] = apart[-1]
    assert (np.diff(chunks.indptr)[[0, -1]] > 0).all()
    with pytest.raises(ValueError, match="rows of a vertex must lie side by side"):
        tiling.row_tables((apart, *chunks.tables[1:]))


def count_rows_at_once(columns):
    """Return the rows of a group: two float16 groups and one float32 group fit in UB with the buffers of row_sums.h."""
    buffers = 2 * 1024 * 8 + 2 * 2 * columns + tiling.up(4 * columns, 512) + 256
    return max(rows for rows in range(1, 17) if buffers + rows * columns * (2 * 2 + 4) <= 192 * 1024 - 8192)


def test_sizes_that_make_no_tiling_are_refused():
    tables = tiling.row_tables(draw_chunks(0, 20, 50, 2).tables)
    for make, message in (
        (lambda: tiling.update_tiling(1, 0, 1, 16, 16), "m=1, k=0, n=1 and split_k=1 must be at least 1"),
        (lambda: tiling.update_tiling(4, 40, 4, 40, 16), "lda must be a multiple of 16 and at least 40, but is 40"),
        (lambda: tiling.update_tiling(4, 16, 40, 16, 32), "ldb must be a multiple of 16 and at least 40, but is 32"),
        (lambda: tiling.update_tiling(4, 512, 4, 512, 16, relu=True, split_k=2), "bias and ReLU need the whole sum"),
        (lambda: tiling.aggregate_update_tiling(0, 4, 4, 16), "rows=0 and k=4 must be at least 1"),
        (
            lambda: tiling.aggregate_update_tiling(4, 20, 4, 32, own_rows=4, own_offset=32, transpose_b=True),
            "ldb=32 a multiple of 16 and at least 52",
        ),
        (lambda: tiling.products_tiling(tables, 0, 4), "heads=0 and num_columns=4 must be at least 1"),
        (lambda: tiling.gather_tiling(3, 0, 1), "row_bytes must be at least 1"),
        (lambda: tiling.gather_tiling(-1, 4, 1), "must be from 0 to 2^32 - 1"),
        (lambda: tiling.gather_tiling(2**32, 4, 1), "must be from 0 to 2^32 - 1"),
        (lambda: tiling.row_tables(draw_chunks(0, 20, 50, 2).tables, num_members=0), "num_members=0 must be at"),
        (lambda: tiling.cube_tables(draw_chunks(0, 20, 50, 2).tables, [(0, 2)], 0, 16), "num_groups=0 must be at"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((24, 128, 128), "tile_rows must be a positive multiple of 16, but is 24"),
        ((128, 0, 128), "tile_columns must be a positive multiple of 16, but is 0"),
        ((256, 128, 128), "need 131072 bytes of L0A, which has 65536"),
        ((16, 256, 128), "need 131072 bytes of L0B, which has 65536"),
        ((128, 128, 272), "need 139264 bytes of L0C, which has 131072"),
        ((64, 128, 512), "bytes of UB, which has 188416"),
    ],
)
def test_a_tile_that_cannot_fit_is_an_error_with_the_limit(sizes, message):
    chunks = draw_chunks(0, 20, 50, 2)
    rows, columns, panel = sizes
    with pytest.raises(ValueError, match=re.escape(message)):
        tiling.cube_tables(chunks.tables, [(0, 2)], 1, 16, tile_rows=rows, tile_columns=columns, panel=panel)


def test_ranges_that_leave_chunks_out_are_an_error():
    chunks = draw_chunks(0, 20, 50, 4)
    for ranges in ([(0, 3)], [(0, 2), (3, 4)], [(1, 4)], []):
        with pytest.raises(ValueError, match="from 0 to 4"):
            tiling.cube_tables(chunks.tables, ranges, 1, 16)
        with pytest.raises(ValueError, match="from 0 to 4"):
            tiling.row_tables(chunks.tables, chunk_ranges=ranges)


@pytest.mark.medium
def test_the_host_tiling_compiles_without_a_warning():
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["g++", *flags, *map(str, sorted(build.CSRC.glob("host_*.cpp")))], check=True)
