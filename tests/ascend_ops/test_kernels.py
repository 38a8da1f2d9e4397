"""The kernels on the CPU twin against float64 references."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lightning_gnn.ascend_ops import tiling
from lightning_gnn.ascend_ops.build import CSRC
from lightning_gnn.ascend_ops.twin import TwinViolation
from tests.ascend_ops import run_kernels as run
from tests.ascend_ops.chunk_arrays import build_chunks, draw_chunks

HALF = 2.0**-11  # relative error of rounding to float16
AGGREGATIONS = ["aggregate_cube", "aggregate_vector"]


def round_to_float16(array):
    return np.asarray(array, np.float16).astype(np.float64)


def aggregate_exactly(chunks, x, num_rows, weights=None, heads=1):
    """Return the aggregation, and the sum of its terms' magnitudes, which bounds the error."""
    x = round_to_float16(x).reshape(x.shape[0], heads, -1)
    weights = np.ones((chunks.source.size, heads)) if weights is None else weights.reshape(-1, heads).astype(float)
    y, size = np.zeros((2, num_rows, *x.shape[1:]))
    with np.errstate(invalid="ignore"):
        np.add.at(y, chunks.target, x[chunks.source] * weights[:, :, None])
        np.add.at(size, chunks.target, abs(x[chunks.source] * weights[:, :, None]))
    return y.reshape(num_rows, -1), size.reshape(num_rows, -1)


def assert_close(y, expected, size, factor=3):
    # Each weight and the result are rounded to float16 once; sums are float32.
    assert (abs(y - expected) <= factor * HALF * size + 1e-6).all(), abs(y - expected).max()


def draw_features(seed, rows, columns):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float16)


def draw_weights(seed, chunks, heads=1):
    return np.random.default_rng(seed).standard_normal((chunks.source.size, heads)).astype(np.float32)


@pytest.mark.parametrize(
    ("columns", "chunk_count", "groups", "members", "most"),
    [
        (16, 3, 1, 1, None),
        (16, 8, 2, 4, 20),
        (41, 5, 3, 2, None),
        (41, 7, 4, 8, 11),
        (100, 1, 1, 3, None),
        (100, 6, 7, 2, 30),
        (256, 4, 1, 2, None),
        (256, 9, 4, 3, 16),
        (602, 3, 1, 1, 40),
        (602, 5, 8, 4, None),
    ],
)
@pytest.mark.parametrize("kernel", AGGREGATIONS)
def test_aggregation_equals_the_reference(kernel, columns, chunk_count, groups, members, most):
    seed = columns + members
    chunks = draw_chunks(seed, 150, 600, chunk_count, num_sources=180, most_entries=most)
    x, weights = draw_features(seed, 180, columns), draw_weights(seed, chunks)
    expected, size = aggregate_exactly(chunks, x, 150, weights)
    function = getattr(run, kernel)
    y = function(chunks, x, 150, chunks.even_ranges(members), groups, weights, seed=members)
    assert_close(y, expected, size)


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 17, 32])
def test_the_number_of_blocks_does_not_change_a_bit(blocks):
    chunks = draw_chunks(9, 300, 900, 12, most_entries=25)
    x, weights = draw_features(3, 300, 48), draw_weights(4, chunks)
    alone = run.aggregate_cube(chunks, x, 300, [(0, 12)], 1, weights)
    groups = 2 if blocks % 2 == 0 else 1
    y = run.aggregate_cube(chunks, x, 300, chunks.even_ranges(blocks // groups), groups, weights, seed=blocks)
    assert np.array_equal(y, alone)
    expected, size = aggregate_exactly(chunks, x, 300, weights)
    assert_close(y, expected, size)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tile_rows": 16, "tile_columns": 16, "panel": 16},
        {"tile_rows": 32, "tile_columns": 112, "panel": 256},
        {"tile_rows": 112, "tile_columns": 48, "panel": 64},
        {"tile_rows": 64, "tile_columns": 64, "panel": 256},
    ],
)
def test_any_tile_size_gives_the_result(sizes):
    chunks = draw_chunks(11, 130, 700, 3)
    x, weights = draw_features(2, 130, 200), draw_weights(1, chunks)
    expected, size = aggregate_exactly(chunks, x, 130, weights)
    assert_close(run.aggregate_cube(chunks, x, 130, [(0, 2), (2, 3)], 1, weights, sizes=sizes), expected, size)


@pytest.mark.parametrize("kernel", AGGREGATIONS)
def test_a_hub_with_more_columns_and_entries_than_any_buffer_holds(kernel):
    draw = np.random.default_rng(0)
    target = np.concatenate([np.zeros(3000, np.int64), draw.integers(0, 20, 50)])
    source = np.concatenate([np.arange(3000) % 2500, draw.integers(0, 2500, 50)])
    x = draw_features(0, 2500, 16)
    for most in (None, 700):
        chunks = build_chunks(target, source, 20, 4, most_entries=most)
        expected, size = aggregate_exactly(chunks, x, 20)
        assert_close(getattr(run, kernel)(chunks, x, 20, chunks.even_ranges(3)), expected, size)


@pytest.mark.parametrize("kernel", AGGREGATIONS)
@pytest.mark.parametrize("num_edges", [0, 1])
def test_graphs_with_hardly_an_edge_and_empty_chunks(kernel, num_edges):
    chunks = draw_chunks(0, 30, num_edges, 6)
    x = draw_features(0, 30, 41)
    expected, size = aggregate_exactly(chunks, x, 30)
    assert_close(getattr(run, kernel)(chunks, x, 30, chunks.even_ranges(9), 2), expected, size)


@pytest.mark.parametrize("kernel", AGGREGATIONS)
@pytest.mark.parametrize(("heads", "columns", "groups"), [(8, 8, 1), (3, 41, 2), (2, 272, 1), (4, 16, 4)])
def test_each_head_has_its_own_weights(kernel, heads, columns, groups):
    chunks = draw_chunks(heads, 80, 500, 4, most_entries=15)
    x, weights = draw_features(heads, 80, heads * columns), draw_weights(heads, chunks, heads)
    expected, size = aggregate_exactly(chunks, x, 80, weights, heads)
    y = getattr(run, kernel)(chunks, x, 80, chunks.even_ranges(2), groups, weights, heads)
    assert_close(y, expected, size)


def test_parallel_edges_add_up():
    chunks = build_chunks(np.zeros(900, np.int64), np.arange(900) % 2, 1, 1)
    x = draw_features(0, 2, 16)
    expected, size = aggregate_exactly(chunks, x, 1)
    assert_close(run.aggregate_cube(chunks, x, 1, [(0, 1)]), expected, size)


@pytest.mark.parametrize("kernel", AGGREGATIONS)
@pytest.mark.parametrize("most", [None, 9])
def test_what_is_not_finite_reaches_its_neighbours_and_no_one_else(kernel, most):
    chunks = draw_chunks(21, 140, 900, 3, most_entries=most)
    x, weights = draw_features(5, 140, 100), draw_weights(6, chunks)
    x[chunks.source[3], 7] = np.nan
    x[chunks.source[11], 40:60] = np.inf
    x[chunks.source[400], 50] = -np.inf
    weights[700] = np.inf
    weights[701] = np.nan
    expected, size = aggregate_exactly(chunks, x, 140, weights)
    for seed in (0, 3):
        y = getattr(run, kernel)(chunks, x, 140, chunks.even_ranges(2), 2, weights, seed=seed, mmad_nan=False)
        finite = np.isfinite(expected)
        assert finite.mean() > 0.7
        assert np.array_equal(np.isnan(y), np.isnan(expected))
        assert np.array_equal(y[np.isinf(expected)], expected[np.isinf(expected)])
        assert_close(y[finite], expected[finite], size[finite])


def compute_softmax(chunks, source, target, slope, num_rows):
    score = source.astype(float)[chunks.source] + target.astype(float)[chunks.target]
    score = np.where(score > 0, score, slope * score)
    top = np.full((num_rows, source.shape[1]), -np.inf)
    np.maximum.at(top, chunks.target, score)
    power = np.exp(score - top[chunks.target])
    total = np.zeros((num_rows, source.shape[1]))
    np.add.at(total, chunks.target, power)
    return power / total[chunks.target]


@pytest.mark.parametrize(
    ("heads", "blocks", "most"), [(1, 1, None), (3, 4, 10), (8, 2, None), (9, 32, 5), (70, 3, None)]
)
def test_softmax_and_its_gradients(heads, blocks, most):
    slope = 0.2
    chunks = draw_chunks(heads, 40, 300, 4, num_sources=50, most_entries=most)
    draw = np.random.default_rng(heads)
    source, target = (draw.standard_normal((n, heads)).astype(np.float32) * 3 for n in (50, 40))
    expected = compute_softmax(chunks, source, target, slope, 40)
    alpha = run.edge_softmax(chunks, source, target, slope, blocks, seed=1)
    assert np.allclose(alpha, expected, rtol=1e-4, atol=1e-6)

    grad = draw.standard_normal(alpha.shape).astype(np.float32)
    inner = np.zeros((40, heads))
    np.add.at(inner, chunks.target, expected * grad)
    score = source.astype(float)[chunks.source] + target.astype(float)[chunks.target]
    score_grad = expected * (grad - inner[chunks.target]) * np.where(score > 0, 1, slope)
    target_grad = np.zeros((40, heads))
    np.add.at(target_grad, chunks.target, score_grad)
    mine, of_target = run.edge_softmax_backward(chunks, source, target, slope, alpha, grad, blocks, seed=1)
    assert np.allclose(mine, score_grad, rtol=1e-3, atol=1e-5)
    assert np.allclose(of_target, target_grad, rtol=1e-3, atol=1e-5)

    back = build_chunks(chunks.source, chunks.target, 50, 3)
    edges = np.argsort(chunks.source, kind="stable")
    source_grad = np.zeros((50, heads))
    np.add.at(source_grad, chunks.source, score_grad)
    assert np.allclose(run.edge_sum(back, mine, edges, 50, blocks, seed=1), source_grad, rtol=1e-3, atol=1e-5)


def test_nan_scores_stay_in_their_row_and_head():
    chunks = draw_chunks(2, 20, 120, 2)
    source, target = np.zeros((20, 3), np.float32), np.zeros((20, 3), np.float32)
    target[chunks.target[0], 1] = np.nan
    alpha = run.edge_softmax(chunks, source, target, 0.2, 2)
    expected = np.zeros((120, 3), bool)
    expected[chunks.target == chunks.target[0], 1] = True
    assert np.array_equal(np.isnan(alpha), expected)


@pytest.mark.parametrize(
    ("heads", "columns", "blocks"),
    [(1, 16, 1), (1, 41, 3), (1, 602, 2), (8, 8, 32), (3, 100, 2), (1, 1500, 1), (4, 300, 2)],
)
def test_products_are_the_gradient_of_the_weights(heads, columns, blocks):
    chunks = draw_chunks(columns, 40, 220, 4, num_sources=30, most_entries=12)
    a, b = draw_features(1, 40, heads * columns), draw_features(2, 30, heads * columns)
    shape = (-1, heads, columns)
    terms = round_to_float16(a).reshape(shape)[chunks.target] * round_to_float16(b).reshape(shape)[chunks.source]
    out = run.edge_products(chunks, a, b, heads, blocks, seed=blocks)
    assert (abs(out - terms.sum(2)) <= 1e-5 * abs(terms).sum(2) + 1e-6).all()


@pytest.mark.parametrize(
    ("width", "dtype"), [(16, np.float16), (41, np.float16), (7, np.float32), (5, np.uint8), (20001, np.uint8)]
)
def test_gathered_rows_are_the_rows(width, dtype):
    draw = np.random.default_rng(0)
    table = draw.integers(0, 100, (50, width)).astype(dtype)
    index = draw.integers(0, 50, 75 if width < 1000 else 9)
    assert np.array_equal(run.gather_rows(table, index, 4), table[index])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8])
def test_rows_that_a_table_does_not_have_are_all_ones(dtype):
    table = np.ones((5, 20000 if dtype == np.uint8 else 7), dtype)
    out = run.gather_rows(table, np.array([4, 5, -1, 2**31 - 1, 0]), 2)
    assert np.array_equal(out[[0, 4]], table[:2])
    assert (out[1:4].view(np.uint8) == 0xFF).all()


def multiply(a, b, bias=0):
    """Return the product, and the sum of its terms' magnitudes."""
    a, b = round_to_float16(a), round_to_float16(b)
    return a @ b + bias, abs(a) @ abs(b) + abs(bias)


@pytest.mark.parametrize(
    ("m", "k", "n", "blocks"), [(1, 1, 1, 1), (150, 41, 7, 2), (33, 300, 130, 3), (260, 16, 256, 5)]
)
@pytest.mark.parametrize("transpose_b", [False, True])
def test_update_multiplies_adds_the_bias_and_clips(m, k, n, blocks, transpose_b):
    a, b = draw_features(m, m, k), draw_features(n, k, n)
    bias = np.random.default_rng(k).standard_normal(n).astype(np.float32)
    expected, size = multiply(a, b, bias)
    y = run.update(a, b, bias, blocks=blocks, relu=True, transpose_b=transpose_b, seed=blocks)
    assert_close(y, np.maximum(expected, 0), size)
    exact = run.update(a, b, bias, blocks=blocks, transpose_b=transpose_b, full=True)
    assert (abs(exact - expected) <= 1e-5 * size + 1e-6).all()


@pytest.mark.parametrize(
    ("vertices", "inputs", "outputs", "split"), [(500, 41, 20, 4), (37, 150, 16, 9), (260, 16, 140, 1)]
)
def test_gradients_of_update(vertices, inputs, outputs, split):
    x, grad = draw_features(1, vertices, inputs), draw_features(2, vertices, outputs)
    weight = draw_features(3, outputs, inputs)
    expected, size = multiply(grad.T, x)
    of_weight = run.update(grad.T, x, blocks=4, transpose_a=True, split=split, full=True)
    assert (abs(of_weight - expected) <= 1e-5 * size + 1e-6).all()
    expected, size = multiply(grad, weight)
    assert_close(run.update(grad, weight, blocks=2), expected, size)


def test_nan_rows_of_update_stay_in_their_row():
    a, b = draw_features(0, 40, 20), draw_features(1, 20, 30)
    a[5, 3] = np.nan
    y = run.update(a, b, transpose_b=True)
    assert np.isnan(y[5]).all()
    assert np.isfinite(np.delete(y, 5, axis=0)).all()


def test_counts_that_no_instruction_holds_are_refused():
    """256 rows at once would be 0 in the 8-bit repeat count of an instruction."""
    chunks = draw_chunks(0, 4, 1200, 1)
    tables = tiling.row_tables(chunks.tables, num_members=1)
    scores = draw_features(0, 4, 1).astype(np.float32)
    inputs = (scores, scores, tables.vertices, tables.columns, tables.plan)
    packed = tiling.softmax_tiling(tables, 1)
    packed[list(tiling.fields("RowsTiling", packed)).index("batch")] = 256
    with pytest.raises(TwinViolation, match=r"load_tiling\.h:\d+: assertion: .*value <= .* does not hold"):
        run.launch("edge_softmax", [*map(run.wrap, inputs), np.zeros((1200, 1), np.float32), run.wrap(packed)], 1)


KERNELS = sorted(path for path in CSRC.glob("*.cpp") if "__global__" in path.read_text())


def find_headers():
    for variable in ("CANN_INCLUDE", "ASCEND_HOME_PATH"):
        root = os.environ.get(variable)
        found = [] if root is None else sorted(Path(root).rglob("basic_api/kernel_operator.h"))
        if found:
            ascendc, stubs = found[0].parents[1], sorted(Path(root).rglob("tikicpulib/lib/include"))
            inner = ["basic_api", "basic_api/interface", "basic_api/impl", "highlevel_api", "highlevel_api/tiling"]
            return [ascendc / name for name in inner] + stubs[:1]
    return None


@pytest.mark.skipif(find_headers() is None, reason="CANN_INCLUDE or ASCEND_HOME_PATH does not lead to CANN's headers")
@pytest.mark.parametrize("core", [[], ["-D__DAV_C220_CUBE__"], ["-D__DAV_C220_VEC__"]], ids=["both", "cube", "vector"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.stem)
def test_kernels_compile_against_the_headers_of_cann(kernel, core):
    flags = ["-std=c++17", "-fsyntax-only", "-w", "-D__CCE_AICORE__=220", "-D__DAV_C220__", "-D__CCE_KT_TEST__=1"]
    includes = [f"-I{path}" for path in find_headers()]
    command = ["g++", *flags, "-DASCENDC_CPU_DEBUG=1", *core, *includes, str(kernel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
