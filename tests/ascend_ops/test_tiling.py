import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.ascend_ops import structs, tiling
from tests.ascend_ops.chunk_arrays import random_chunks

CSRC = Path(tiling.__file__).parent / "csrc"
SOURCES = ["host_tiling.cpp", "host_structs.cpp", "host_tiling_c.cpp"]
DTYPES = {"tiling": np.uint32, "positions": np.uint16, "sizes": np.uint64}


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    target = tmp_path_factory.mktemp("host") / "libtiling.so"
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(target)]
    subprocess.run(command + [str(CSRC / name) for name in SOURCES], check=True)
    library = ctypes.CDLL(str(target))
    for name in ("lgnn_cube_tables", "lgnn_row_tables", "lgnn_struct", "lgnn_tables_get"):
        getattr(library, name).restype = ctypes.c_void_p
    return library


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def call(host, name, *arguments):
    error = ctypes.create_string_buffer(1024)
    handle = getattr(host, name)(*arguments, error, ctypes.c_uint64(1024))
    if not handle:
        raise ValueError(error.value.decode())
    return ctypes.c_void_p(handle)


def take(host, handle, *names):
    arrays = {}
    for name in names:
        size = ctypes.c_uint64()
        address = host.lgnn_tables_get(handle, name.encode(), ctypes.byref(size))
        arrays[name] = np.frombuffer(ctypes.string_at(address, size.value), DTYPES.get(name, np.int32))
    host.lgnn_tables_free(handle)
    return arrays


def chunk_arguments(chunks):
    return [*map(pointer, chunks.tables), ctypes.c_int64(chunks.num_chunks)]


def cpp_cube(host, chunks, ranges, groups, columns, heads=1, tile_rows=128, tile_columns=128, panel=256):
    bounds = np.array(ranges, np.int64)
    sizes = [ctypes.c_uint32(value) for value in (groups, columns, heads, tile_rows, tile_columns, panel)]
    handle = call(
        host, "lgnn_cube_tables", *chunk_arguments(chunks), pointer(bounds), ctypes.c_int64(len(ranges)), *sizes
    )
    names = ["tiling", "plan", "row_blocks", "tiles", "columns", "positions", "slots", "runs", "splits", "sizes"]
    return take(host, handle, *names)


def dense_of(tables, num_rows, num_columns):
    """The matrix that the tables describe with unit weights, rebuilt from tiles, positions and runs."""
    matrix = np.zeros((num_rows, num_columns))
    parts = np.zeros((tables.num_parts, num_columns))
    ones = np.zeros(tables.positions.size)
    np.add.at(ones, tables.slots, 1)
    for first, last, rows, run_first, run_last, *_ in tables.row_blocks:
        block = np.zeros((structs.up(rows), num_columns))
        for column_first, width, *halves in tables.tiles[first:last]:
            k = structs.up(width)
            used = tables.columns[column_first : column_first + k]
            assert (used[width:] == -1).all()
            assert (np.diff(used[:width]) > 0).all()
            for half, (begin, count) in enumerate([halves[:2], halves[2:4]]):
                cells = structs.up(rows) // 2 * k
                assert count % 16 == 0
                place = tables.positions[begin : begin + count].astype(int)
                real = place < cells
                assert (place[~real] == cells).all()
                assert (np.diff(place[real]) > 0).all()
                row, column = np.divmod(place[real], k)
                assert (column < width).all()
                block[row + half * structs.up(rows) // 2, used[column]] += ones[begin : begin + count][real]
        covered = np.zeros(rows, bool)
        for row, count, target, _ in tables.runs[run_first:run_last]:
            assert not covered[row : row + count].any()
            covered[row : row + count] = True
            where = target if target >= 0 else -1 - target
            (matrix if target >= 0 else parts)[where : where + count] += block[row : row + count]
        assert covered.all()
        assert not block[rows:].any()
    for vertex, first, last, _ in tables.splits:
        assert last - first > 1
        matrix[vertex] += parts[first:last].sum(0)
    return matrix


def edges_of(chunks, num_rows, num_columns):
    matrix = np.zeros((num_rows, num_columns))
    np.add.at(matrix, (chunks.target, chunks.source), 1)
    return matrix


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
def test_cube_tables_describe_the_graph_and_equal_those_of_the_host(host, case, sizes, groups, members, columns, heads):
    seed, num_vertices, num_edges, num_chunks, most, shuffled = case
    chunks = random_chunks(seed, num_vertices, num_edges, num_chunks, most_entries=most, shuffled=shuffled)
    ranges = chunks.even_ranges(members)
    rows, width, panel = sizes
    kwargs = {"heads": heads, "tile_rows": rows, "tile_columns": width, "panel": panel}
    tables = tiling.cube_tables(*chunks.tables, ranges, groups, columns, **kwargs)
    assert np.array_equal(dense_of(tables, num_vertices, num_vertices), edges_of(chunks, num_vertices, num_vertices))
    other = cpp_cube(host, chunks, ranges, groups, columns, **kwargs)
    sizes_of = [tables.num_parts, tables.num_blocks, tables.workspace_bytes]
    assert other.pop("sizes").tolist() == sizes_of
    for name, theirs in other.items():
        assert np.array_equal(theirs, getattr(tables, name).reshape(-1)), name


@settings(max_examples=60, deadline=None)
@given(
    case=cases,
    groups=st.integers(1, 5),
    members=st.integers(1, 40),
    columns=st.sampled_from([16, 41, 3000]),
    by_plan=st.booleans(),
)
def test_row_tables_hold_every_entry_once_and_equal_those_of_the_host(host, case, groups, members, columns, by_plan):
    seed, num_vertices, num_edges, num_chunks, most, shuffled = case
    chunks = random_chunks(seed, num_vertices, num_edges, num_chunks, most_entries=most, shuffled=shuffled)
    ranges = chunks.even_ranges(members) if by_plan else None
    tables = tiling.row_tables(
        *chunks.tables, chunk_ranges=ranges, num_members=members, num_groups=groups, num_columns=columns
    )
    target = np.full(num_edges, -1)
    for vertex, begin, end, _ in tables.vertices:
        assert begin < end
        assert (target[begin:end] == -1).all()
        target[begin:end] = vertex
    assert np.array_equal(target, chunks.target)
    assert np.array_equal(tables.columns, chunks.source)
    bounds = tables.plan[tables.range_offset : tables.panel_offset]
    assert bounds[0] == 0
    assert bounds[-1] == len(tables.vertices)
    assert (np.diff(bounds) >= 0).all()

    pairs = np.array(ranges, np.int64) if by_plan else None
    sizes = [members, groups, columns, 1, structs.up(columns), 1]
    handle = call(
        host,
        "lgnn_row_tables",
        *chunk_arguments(chunks),
        pointer(pairs) if by_plan else None,
        ctypes.c_int64(members if by_plan else 0),
        *[ctypes.c_uint32(value) for value in sizes],
    )
    other = take(host, handle, "plan", "vertices", "columns", "tiling")
    for name in ("plan", "vertices", "columns"):
        assert np.array_equal(other[name], getattr(tables, name).reshape(-1)), name
    packed = structs.aggregate_vector_tiling(
        groups,
        members,
        tables.range_offset,
        tables.panel_offset,
        tables.panel_columns,
        structs.up(columns),
        num_edges=num_edges,
        weighted=True,
    )
    assert np.array_equal(other["tiling"], packed)


@pytest.mark.parametrize("heads", [1, 3, 8, 64, 70])
@pytest.mark.parametrize("columns", [1, 8, 41, 128, 602, 5000])
def test_the_structs_of_host_and_mirror_are_equal(host, heads, columns):
    slope = int(np.float32(0.2).view(np.uint32))
    wide = structs.up(columns)
    pairs = {
        "softmax": ([3, 2, heads, slope], structs.softmax_tiling(3, 2, heads, 0.2)),
        "products": ([3, 2, heads, columns], structs.products_tiling(3, 2, heads, columns)),
        "combine": ([5, wide, 3, 1], structs.combine_tiling(5, wide, parts_per_row=3, float_out=True)),
        "gather": ([7, columns, wide], structs.gather_tiling(7, columns, wide)),
        "update": (
            [heads, columns, 33, wide, wide, 0, 1, 0, 0, 0, 4],
            structs.update_tiling(heads, columns, 33, wide, wide, transpose_b=True, split_k=4),
        ),
    }
    for name, (numbers, expected) in pairs.items():
        given_numbers = np.array(numbers, np.uint32)
        handle = call(host, "lgnn_struct", name.encode(), pointer(given_numbers))
        assert np.array_equal(take(host, handle, "tiling")["tiling"], expected), name


def test_the_mirror_has_the_fields_of_the_header():
    text = (CSRC / "tiling.h").read_text()
    found = {
        name: " ".join(re.findall(r"^    uint32_t (\w+);", body, re.MULTILINE))
        for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    }
    assert found == structs.STRUCTS


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
def test_a_tile_that_cannot_fit_is_an_error_with_the_limit(host, sizes, message):
    chunks = random_chunks(0, 20, 50, 2)
    rows, columns, panel = sizes
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        tiling.cube_tables(*chunks.tables, [(0, 2)], 1, 16, tile_rows=rows, tile_columns=columns, panel=panel)
    with pytest.raises(ValueError, match=re.escape(message)) as theirs:
        cpp_cube(host, chunks, [(0, 2)], 1, 16, 1, rows, columns, panel)
    assert str(theirs.value) == str(caught.value)


def test_ranges_that_leave_chunks_out_are_an_error(host):
    chunks = random_chunks(0, 20, 50, 4)
    for ranges in ([(0, 3)], [(0, 2), (3, 4)], [(1, 4)]):
        with pytest.raises(ValueError, match="from 0 to 4"):
            tiling.cube_tables(*chunks.tables, ranges, 1, 16)
        with pytest.raises(ValueError, match="from 0 to 4"):
            cpp_cube(host, chunks, ranges, 1, 16)


@pytest.mark.parametrize(("columns", "groups"), [(602, 8), (256, 4), (41, 2), (100, 7), (16, 4), (1024, 2)])
def test_slices_are_those_of_the_plan(columns, groups):
    from lightning_gnn.graph.hybrid_plan import slice_columns

    first, panels = tiling.cut_panels(1, structs.up(columns), groups, 256)
    if structs.up(columns) // 16 >= groups:
        for group, (start, stop) in enumerate(slice_columns(columns, groups)):
            mine = panels[first[group] : first[group + 1]]
            assert mine[0, 0] == start
            assert mine[-1, :2].sum() == structs.up(stop)
    else:
        assert (np.diff(first) <= 1).all()
    assert panels[:, 1].sum() == structs.up(columns)
    assert (panels[:, 1] <= 256).all()
    assert (panels[1:, 0] == panels[:-1, 0] + panels[:-1, 1]).all()


def test_parallel_edges_add_up_and_fillers_are_zero():
    chunks = random_chunks(3, 10, 400, 2)
    tables = tiling.cube_tables(*chunks.tables, [(0, 2)], 1, 16, heads=2)
    weights = np.random.default_rng(0).random((400, 2)).astype(np.float32)
    values = tables.values(weights, 2)
    assert tables.positions.size < 400
    assert np.allclose(values.astype(float).sum(1), weights.sum(0), rtol=2e-3)
    assert (values[:, np.setdiff1d(np.arange(values.shape[1]), tables.slots)] == 0).all()
