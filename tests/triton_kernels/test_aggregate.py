import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.ops.aggregate import reference
from lightning_gnn.ops.aggregate import triton as aggregate_triton
from lightning_gnn.ops.aggregate.definition import aggregate
from lightning_gnn.ops.aggregate.edge_softmax import edge_softmax
from lightning_gnn.ops.aggregate.matrix import Matrix, Scores
from lightning_gnn.triton_kernels import row_parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Split rows into many parts, as for a large graph."""
    monkeypatch.setattr(row_parts, "MAX_ENTRIES", 7)


def make_matrix(row, column, num_rows, num_columns, device="cpu"):
    """Make a matrix from the row and column of its entries; entries of a row stay in order."""
    order = row.argsort(stable=True)
    indptr = torch.nn.functional.pad(torch.bincount(row, minlength=num_rows).cumsum(0), (1, 0))
    return Matrix(indptr.to(device), column[order].int().to(device), num_columns)


@st.composite
def matrices(draw, max_vertices=40, max_entries=150):
    """Draw matrices with hubs, duplicates and empty rows, not square."""
    num_rows, num_columns = draw(st.integers(1, max_vertices)), draw(st.integers(1, max_vertices))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = draw(st.integers(0, max_entries))
    row = torch.randint(draw(st.integers(1, num_rows)), (count,), generator=generator)
    column = torch.randint(draw(st.integers(1, num_columns)), (count,), generator=generator)
    return make_matrix(row, column, num_rows, num_columns)


def map_tensors(value, function):
    """Apply a function to each tensor of a matrix, scores or a pair."""
    if isinstance(value, Matrix):
        return replace(value, indptr=function(value.indptr), indices=function(value.indices))
    if isinstance(value, tuple):
        parts = [map_tensors(part, function) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return function(value) if isinstance(value, torch.Tensor) else value


def move_tensors(value, device):
    # Always new tensors, because caches are keyed by them.
    return map_tensors(value, lambda tensor: tensor.to(device, copy=True))


def check(name, *arguments, dtype):
    """Compare an operator with the reference in float64."""
    ours = getattr(aggregate_triton, name)(*(move_tensors(value, DEVICE) for value in arguments))
    wanted = getattr(reference, name)(*(widen(value) for value in arguments))
    for left, right in zip(*((out if isinstance(out, tuple) else (out,)) for out in (ours, wanted)), strict=True):
        assert left.dtype == dtype
        assert left.shape == right.shape
        torch.testing.assert_close(
            left.cpu().double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True
        )


def widen(value):
    return map_tensors(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def draw_normal(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


dtypes = st.sampled_from(list(TOLERANCE))
shapes = st.sampled_from([(1, 1), (1, 7), (1, 130), (3, 5), (8, 8), (2, 40)])


@pytest.mark.medium
@settings(max_examples=25)
@given(matrices(), shapes, dtypes, st.booleans(), st.sampled_from(["sum", "mean"]))
def test_sums_equal_the_reference(matrix, shape, dtype, weighted, reduce):
    x = draw_normal(matrix.num_columns, *shape, dtype=dtype)
    weight = draw_normal(matrix.num_edges, shape[0], dtype=dtype, seed=1) if weighted else None
    check("aggregate", matrix, x, weight, reduce, dtype=dtype)


@pytest.mark.medium
@settings(max_examples=12)
@given(matrices(), shapes, st.sampled_from([torch.float32, torch.float64]), st.booleans(), st.booleans())
def test_maxima_and_their_gradients_equal_the_reference(matrix, shape, dtype, weighted, special):
    num_rows, num_columns = matrix.num_rows, matrix.num_columns
    # Few different values give many ties.
    x = draw_normal(num_columns, *shape, dtype=dtype).round()
    weight = draw_normal(matrix.num_edges, shape[0], dtype=dtype, seed=1).round() if weighted else None
    if special:
        x[0], x[-1] = float("nan"), -float("inf")
    check("aggregate", matrix, x, weight, "max", dtype=dtype)
    best, _ = reference.aggregate(matrix, x, weight, "max")
    grad = draw_normal(num_rows, *shape, dtype=dtype, seed=2)
    if weight is not None:
        check("edge_products", matrix, grad, x, (best, weight), dtype=dtype)
    # The matrix as its own transpose: rows send, columns have received.
    sent = draw_normal(num_rows, *shape, dtype=dtype, seed=3).round()
    received, grad = (draw_normal(num_columns, *shape, dtype=dtype, seed=seed).round() for seed in (4, 5))
    if special:
        sent[0] = received[0] = float("nan")
    check("aggregate_max_backward", matrix, grad, received, sent, weight, dtype=dtype)


@settings(max_examples=25)
@given(matrices(), st.sampled_from([(1, 1), (1, 300), (3, 5), (8, 8), (40, 2)]), dtypes)
def test_products_equal_the_reference(matrix, shape, dtype):
    row_side = draw_normal(matrix.num_rows, *shape, dtype=dtype)
    column_side = draw_normal(matrix.num_columns, *shape, dtype=dtype, seed=1)
    scale = shape[1] ** -0.5  # keeps sums of many terms near 1
    check("edge_products", matrix, row_side * scale, column_side, dtype=dtype)


@pytest.mark.medium
@settings(max_examples=15)
@given(matrices(), st.sampled_from([1, 3, 8, 40]), dtypes, st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([1, 300]))
def test_attention_and_its_gradient_equal_the_reference(matrix, heads, dtype, slope, scale):
    row = draw_normal(matrix.num_rows, heads, dtype=dtype) * scale
    column = draw_normal(matrix.num_columns, heads, dtype=dtype, seed=1)
    scores = Scores(row, column, slope)
    check("edge_softmax", matrix, scores, dtype=dtype)
    weight = reference.edge_softmax(matrix, widen(scores)).to(dtype)
    grad = draw_normal(matrix.num_edges, heads, dtype=dtype, seed=2)
    check("edge_softmax_backward", matrix, scores, weight, grad, dtype=dtype)


@pytest.mark.medium
@settings(max_examples=25)
@given(matrices(), st.sampled_from([1, 3, 40]), dtypes, st.sampled_from([None, torch.int32, torch.int64]))
def test_sums_of_edges_equal_the_reference(matrix, heads, dtype, ids):
    count = matrix.num_edges
    ids = None if ids is None else torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(ids)
    check("edge_sums", matrix, ids, draw_normal(count, heads, dtype=dtype), dtype=dtype)


@given(matrices())
def test_parts_hold_every_entry_once(matrix):
    rows = row_parts.build_parts(matrix.indptr, matrix.indices)
    row = matrix.entry_rows()
    assert torch.equal(rows.degrees.long(), torch.bincount(row, minlength=matrix.num_rows))
    seen, slots, written = torch.zeros(row.numel(), dtype=torch.int64), [], set()
    for start, stop, vertex, place in zip(rows.starts, rows.stops, rows.vertices, rows.places, strict=True):
        assert stop - start <= row_parts.MAX_ENTRIES
        seen[start:stop] += 1
        assert bool((row[start:stop] == vertex).all())
        written.add(int(vertex))
        if place < 0:
            slots.append(-1 - int(place))
            assert rows.slot_vertices[torch.searchsorted(rows.slot_ptr, slots[-1], right=True) - 1] == vertex
        else:
            assert place == vertex
    assert bool((seen == 1).all())
    assert written == set(range(matrix.num_rows))
    assert slots == list(range(rows.num_slots))
    assert torch.equal(torch.nonzero(rows.places < 0).flatten().int(), rows.shared)


def make_square_matrix(num_vertices=70, degree=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    row = torch.arange(num_vertices).repeat_interleave(degree)
    column = torch.randint(num_vertices // 5, (row.numel(),), generator=generator)
    return make_matrix(row, column, num_vertices, num_vertices, DEVICE)


@pytest.mark.medium
def test_feature_slices_are_read_in_place():
    matrix = make_square_matrix()
    table = draw_normal(70, 2, 24, dtype=torch.float32).to(DEVICE)
    part = table[:, :1, 4:20]
    assert aggregate_triton._pack_rows(part) is part
    assert aggregate_triton._pack_rows(table[:, :, 4:20]).is_contiguous()
    ours, _ = aggregate_triton.aggregate(matrix, part, None, "mean")
    wanted, _ = aggregate_triton.aggregate(matrix, part.clone(), None, "mean")
    assert torch.equal(ours, wanted)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter stands in for a device that is there")
def test_a_device_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(aggregate_triton, "runs_triton", lambda device: False)
    x = torch.ones(70, 1, 1)
    with pytest.raises(ValueError, match="backend='triton' needs a CUDA device"):
        aggregate_triton.aggregate(make_square_matrix(), x, None, "sum")


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_gradients_flow_through_a_compressed_graph(reduce):
    generator = torch.Generator().manual_seed(0)
    graph = CompressedGraph.from_edge_index(torch.randint(20, (2, 90), generator=generator), 20)
    graph = graph.to(DEVICE)

    def gradients(backend):
        x = draw_normal(20, 2, 5, dtype=torch.float64).round().to(DEVICE).requires_grad_()
        source, target = (draw_normal(20, 2, dtype=torch.float64, seed=i).to(DEVICE).requires_grad_() for i in (1, 2))
        weight = edge_softmax(graph, source, target, backend=backend)
        out = aggregate(graph, x, weight, reduce, backend=backend)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (x, source, target))

    for ours, wanted in zip(gradients("triton"), gradients("reference"), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_kernels_compile_for_a100_and_h100(compiled):
    rows = compiled("compile_aggregate")
    assert {row["sm"] for row in rows} == {80, 90}
    for row in rows:
        assert row.get("STACK", 0) == row.get("LOCAL", 0) == 0
        assert row.get("REG", 0) <= 128  # 16 warps per multiprocessor
        assert not any("atom" in name for name in row["instructions"])  # deterministic results
        if row["kernel"] == "rows_kernel" and row["kind"] == "fp32":
            assert any("v4" in name for name in row["instructions"])
