import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.ops.aggregate import reference as aggregate_reference
from lightning_gnn.ops.aggregate import triton as aggregate_triton
from lightning_gnn.ops.aggregate.definition import aggregate
from lightning_gnn.ops.edge_softmax.definition import edge_softmax
from lightning_gnn.ops.library import references
from lightning_gnn.triton_kernels import aggregate_plan, aggregate_tiles
from lightning_gnn.triton_kernels.aggregate import block_shape
from lightning_gnn.triton_kernels.aggregate_plan import HEIGHT, NOWHERE, TILE_COLUMNS, Matrix
from tests.triton_kernels.chunk_cases import made_chunks, matrices, tensors_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PLAN = ([0, 1], [0, 1])  # slices and chunk ranges, which a GPU does not look at


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Rows and windows in many parts, as those of a large graph are."""
    monkeypatch.setattr(aggregate_plan, "MAX_ENTRIES", 7)
    monkeypatch.setattr(aggregate_plan, "MAX_TILES", 1)
    monkeypatch.setattr(aggregate_plan, "_BATCH", 50)


def moved(value, device):
    if isinstance(value, list):
        return [moved(part, device) for part in value]
    # New tensors, always: what is kept of a graph is kept by them.
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def check(name, *arguments, dtype):
    """Compare an operator with the reference in float64."""
    ours = getattr(aggregate_triton, name)(*(moved(value, DEVICE) for value in arguments))
    wanted = getattr(references, name)(*(wide(value) for value in arguments))
    for left, right in zip(*((out if isinstance(out, tuple) else (out,)) for out in (ours, wanted)), strict=True):
        assert left.dtype == dtype
        assert left.shape == right.shape
        torch.testing.assert_close(
            left.cpu().double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True
        )


def wide(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def normal(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


dtypes = st.sampled_from(list(TOLERANCE))
shapes = st.sampled_from([(1, 1), (1, 7), (1, 130), (3, 5), (8, 8), (2, 40)])


@settings(max_examples=25)
@given(matrices(), shapes, dtypes, st.booleans(), st.sampled_from(["sum", "mean"]), st.sampled_from([0, 0.01, 0.05, 2]))
def test_sums_equal_the_reference(matrix, shape, dtype, weighted, reduce, threshold):
    chunks, num_rows, num_columns = matrix
    x = normal(num_columns, *shape, dtype=dtype)
    weight = normal(chunks[3].numel(), shape[0], dtype=dtype, seed=1) if weighted else None
    with aggregate_triton.use_tiles("auto", threshold):
        check("aggregate_chunks", chunks, num_rows, x, weight, reduce, *PLAN, dtype=dtype)


@settings(max_examples=12)
@given(matrices(), shapes, st.sampled_from([torch.float32, torch.float64]), st.booleans(), st.booleans())
def test_maxima_and_their_gradients_equal_the_reference(matrix, shape, dtype, weighted, special):
    chunks, num_rows, num_columns = matrix
    # Few different values: many ties.
    x = normal(num_columns, *shape, dtype=dtype).round()
    weight = normal(chunks[3].numel(), shape[0], dtype=dtype, seed=1).round() if weighted else None
    if special:
        x[0], x[-1] = float("nan"), -float("inf")
    check("aggregate_chunks", chunks, num_rows, x, weight, "max", *PLAN, dtype=dtype)
    best, _ = aggregate_reference.aggregate_chunks(chunks, num_rows, x, weight, "max", *PLAN)
    grad = normal(num_rows, *shape, dtype=dtype, seed=2)
    if weight is not None:
        check("edge_products", chunks, grad, x, best, weight, *PLAN, dtype=dtype)
    # The matrix as its own transpose: rows send, columns have received.
    sent = normal(num_rows, *shape, dtype=dtype, seed=3).round()
    received, grad = (normal(num_columns, *shape, dtype=dtype, seed=seed).round() for seed in (4, 5))
    if special:
        sent[0] = received[0] = float("nan")
    check("aggregate_max_backward", chunks, num_rows, grad, received, sent, weight, *PLAN, dtype=dtype)


@settings(max_examples=25)
@given(matrices(), st.sampled_from([(1, 1), (1, 300), (3, 5), (8, 8), (40, 2)]), dtypes)
def test_products_equal_the_reference(matrix, shape, dtype):
    chunks, num_rows, num_columns = matrix
    row_side, column_side = normal(num_rows, *shape, dtype=dtype), normal(num_columns, *shape, dtype=dtype, seed=1)
    scale = shape[1] ** -0.5  # sums of many terms, but of about 1
    check("edge_products", chunks, row_side * scale, column_side, None, None, *PLAN, dtype=dtype)


@settings(max_examples=15)
@given(matrices(), st.sampled_from([1, 3, 8, 40]), dtypes, st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([1, 300]))
def test_attention_and_its_gradient_equal_the_reference(matrix, heads, dtype, slope, scale):
    chunks, num_rows, num_columns = matrix
    row, column = normal(num_rows, heads, dtype=dtype) * scale, normal(num_columns, heads, dtype=dtype, seed=1)
    check("edge_softmax", chunks, row, column, slope, PLAN[1], dtype=dtype)
    weight = references.edge_softmax(chunks, row.double(), column.double(), slope, PLAN[1]).to(dtype)
    grad = normal(chunks[3].numel(), heads, dtype=dtype, seed=2)
    check("edge_softmax_backward", chunks, row, column, slope, weight, grad, PLAN[1], dtype=dtype)


@settings(max_examples=25)
@given(matrices(), st.sampled_from([1, 3, 40]), dtypes, st.sampled_from([None, torch.int32, torch.int64]))
def test_sums_of_edges_equal_the_reference(matrix, heads, dtype, ids):
    chunks, num_rows, _ = matrix
    count = chunks[3].numel()
    ids = None if ids is None else torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(ids)
    check("edge_sums", chunks, num_rows, ids, normal(count, heads, dtype=dtype), PLAN[1], dtype=dtype)


@given(matrices(), st.sampled_from([0.0, 0.02, 0.06]))
def test_plans_hold_every_entry_once(matrix, threshold):
    chunks, num_rows, num_columns = matrix
    given = Matrix(*chunks, num_rows, num_columns)
    base = aggregate_plan.build_base(given)
    row, column = aggregate_reference.entry_rows(chunks), aggregate_reference.entry_columns(chunks)
    assert torch.equal(base.indices, column.int())
    assert torch.equal(base.degrees.long(), torch.bincount(row, minlength=num_rows))
    density = aggregate_plan.densities(given, base)
    dense = density >= threshold
    plan = aggregate_plan.build_plan(given, base, dense)
    seen = torch.zeros(row.numel(), dtype=torch.int64)
    slots = []

    def vertex_at(place):
        if place < 0:
            slots.append(-1 - place)
            return int(plan.slots.vertices[torch.searchsorted(plan.slots.ptr, -1 - place, right=True) - 1])
        return place

    parts = plan.parts
    for start, stop, vertex, place in zip(parts.starts, parts.stops, parts.vertices, parts.places, strict=True):
        assert stop - start <= aggregate_plan.MAX_ENTRIES
        seen[start:stop] += 1
        assert bool((row[start:stop] == vertex).all())
        assert vertex_at(int(place)) == vertex
    if plan.tiles is not None:
        tiles, written = plan.tiles, {}
        for window in range(tiles.num_windows):
            assert tiles.ptr[window + 1] - tiles.ptr[window] <= aggregate_plan.MAX_TILES
            for i, place in enumerate(tiles.places[window * HEIGHT : (window + 1) * HEIGHT].tolist()):
                if place != NOWHERE:
                    written[window, i] = vertex_at(place)
        for cell, first, last in zip(tiles.cells, tiles.cell_ptr[:-1], tiles.cell_ptr[1:], strict=True):
            tile, within = int(cell) // (HEIGHT * TILE_COLUMNS), int(cell) % (HEIGHT * TILE_COLUMNS)
            window = int(torch.searchsorted(tiles.ptr, tile, right=True)) - 1
            for entry in tiles.entries[first:last].tolist():
                seen[entry] += 1
                assert row[entry] == written[window, within // TILE_COLUMNS]
                assert column[entry] == tiles.columns[tile * TILE_COLUMNS + within % TILE_COLUMNS]
        in_dense = dense.repeat_interleave(chunks[2][chunks[1]].diff())
        assert tiles.entries.sort().values.tolist() == torch.nonzero(in_dense).flatten().tolist()
    assert bool((seen == 1).all())
    assert sorted(slots) == list(range(plan.slots.count))


def test_density_is_entries_over_cells(monkeypatch):
    """40 rows: a full window of 32 rows and 33 columns in two tiles, and one of 8 rows and 1 column."""
    monkeypatch.setattr(aggregate_plan, "_BATCH", 10**6)
    row = torch.cat([torch.arange(32).repeat_interleave(33), torch.arange(32, 40)])
    column = torch.cat([torch.arange(33).repeat(32), torch.zeros(8, dtype=torch.int64)])
    order = torch.arange(40)
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: order)
    chunks, _ = made_chunks(row, column, 40, 33, 1, 1000)
    matrix = Matrix(*tensors_of(chunks), 40, 33)
    wanted = (32 * 33 + 8) / (3 * HEIGHT * TILE_COLUMNS)
    assert aggregate_plan.densities(matrix, aggregate_plan.build_base(matrix)).tolist() == [pytest.approx(wanted)]


def test_tiles_pay_sooner_with_faster_units_and_wider_features():
    threshold = aggregate_plan.density_threshold
    assert threshold(torch.float16, 256) < threshold(torch.float32, 256, tf32=True) * 1.01
    assert threshold(torch.float32, 256, tf32=True) < threshold(torch.float32, 256)
    assert threshold(torch.bfloat16, 256) < threshold(torch.bfloat16, 16) < threshold(torch.bfloat16, 1)
    assert 0.03 < threshold(torch.float16, 256) < 0.1


def square(num_vertices=70, degree=12, seed=0):
    """Make two communities, of which the first is dense."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.arange(num_vertices).repeat_interleave(degree)
    column = torch.randint(num_vertices // 5, (row.numel(),), generator=generator)
    sparse = row >= num_vertices // 2
    row, column = (
        row[~sparse | (torch.arange(row.numel()) % degree == 0)],
        column[~sparse | (torch.arange(row.numel()) % degree == 0)],
    )
    chunks, _ = made_chunks(row, column, num_vertices, num_vertices, 3, 1000)
    return tensors_of(chunks, DEVICE)


def test_the_switch_decides_what_runs_as_tiles(monkeypatch):
    calls = []
    real = aggregate_tiles.multiply_tiles
    monkeypatch.setattr(aggregate_tiles, "multiply_tiles", lambda *a: calls.append(a[3].num_windows) or real(*a))
    chunks = square()
    x = normal(70, 1, 64, dtype=torch.float16).to(DEVICE)
    wanted = aggregate_reference.aggregate_chunks(moved(chunks, "cpu"), 70, x.cpu(), None, "sum", *PLAN)[0]

    def run(x=x, reduce="sum"):
        calls.clear()
        out, _ = aggregate_triton.aggregate_chunks(chunks, 70, x, None, reduce, *PLAN)
        if reduce == "sum":
            torch.testing.assert_close(out.cpu().float(), wanted.float(), rtol=4e-3, atol=4e-3)
        return len(calls)

    kept = aggregate_triton.prepare(chunks, 70)
    with aggregate_triton.use_tiles("never"):
        assert run() == 0
        assert kept.densities is None  # not even measured
    with aggregate_triton.use_tiles("always"):
        assert run() == 1
        assert run(x.float(), "max") == 0
        assert run(x.double()) == 0
        with aggregate_triton.use_tiles("auto", 2.0):
            assert run() == 0
        assert run() == 1
    with aggregate_triton.use_tiles("auto", float(kept.densities.max())):
        assert run() == 1
        assert 1 <= sum(aggregate_triton.plan_for(chunks, 70, 64, torch.float16).dense) < 3
    assert aggregate_triton.prepare(chunks, 70) is kept
    with pytest.raises(ValueError, match="'sometimes' is unknown"), aggregate_triton.use_tiles("sometimes"):
        pass


def test_what_is_kept_of_a_graph_goes_with_it():
    chunks = square()
    before = len(aggregate_triton._prepared)
    aggregate_triton.prepare(chunks, 70)
    assert len(aggregate_triton._prepared) == before + 1
    del chunks
    assert len(aggregate_triton._prepared) == before


def test_infinite_features_do_not_reach_beyond_their_window():
    """A column that pads a tile is no column: its features, whatever they are, are not multiplied by 0."""
    chunks = tensors_of(made_chunks(torch.tensor([0, 1]), torch.tensor([1, 2]), 2, 3, 1, 10)[0], DEVICE)
    x = torch.tensor([float("inf"), 1.0, 2.0], dtype=torch.float16, device=DEVICE).view(3, 1, 1)
    with aggregate_triton.use_tiles("always"):
        out, _ = aggregate_triton.aggregate_chunks(chunks, 2, x, None, "sum", *PLAN)
    assert out.flatten().tolist() == [1, 2]


def test_feature_slices_are_read_in_place():
    chunks = square()
    table = normal(70, 2, 24, dtype=torch.float32).to(DEVICE)
    part = table[:, :1, 4:20]
    assert aggregate_triton._rows(part) is part
    assert aggregate_triton._rows(table[:, :, 4:20]).is_contiguous()
    for mode in ("always", "never"):
        with aggregate_triton.use_tiles(mode):
            ours, _ = aggregate_triton.aggregate_chunks(chunks, 70, part, None, "mean", *PLAN)
            wanted, _ = aggregate_triton.aggregate_chunks(chunks, 70, part.clone(), None, "mean", *PLAN)
        assert torch.equal(ours, wanted)


def test_vertices_without_a_row_get_zeros():
    chunks, _ = made_chunks(torch.tensor([0, 0]), torch.tensor([0, 1]), 1, 2, 1, 10)
    x = torch.ones(2, 1, 3, device=DEVICE)
    for reduce in ("sum", "mean", "max"):
        out, _ = aggregate_triton.aggregate_chunks(tensors_of(chunks, DEVICE), 4, x, None, reduce, *PLAN)
        assert out[0].max() > 0
        assert out[1:].abs().max() == 0


def test_blocks_cover_the_columns_in_slices_that_fit_the_cache():
    for channels in range(1, 700):
        for heads in (1, 3, 8):
            for dtype in (torch.float16, torch.float64):
                block = block_shape(1000, heads, channels, dtype, 2**25)
                assert all(size & (size - 1) == 0 for size in block)
                assert block.entries * block.heads * block.width <= (1024 if dtype == torch.float16 else 256)
                assert block.grid(heads, channels) * block.heads * block.width >= heads * channels
    megabyte = 2**20
    assert block_shape(233_000, 1, 256, torch.float32, 50 * megabyte).width == 32
    assert block_shape(100_000, 1, 256, torch.float32, 50 * megabyte).width == 64
    assert block_shape(10_000, 1, 256, torch.float32, 50 * megabyte).width == 128
    assert block_shape(10**7, 1, 256, torch.float32, 50 * megabyte).width == 128  # no slice fits


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter stands in for a device that is there")
def test_a_device_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(aggregate_triton, "runs_on", lambda device: False)
    x = torch.ones(70, 1, 1)
    with pytest.raises(ValueError, match="backend='triton' needs a CUDA device"):
        aggregate_triton.aggregate_chunks(square(), 70, x, None, "sum", *PLAN)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_gradients_flow_through_a_compressed_graph(reduce):
    generator = torch.Generator().manual_seed(0)
    graph = CompressedGraph.from_edge_index(torch.randint(20, (2, 90), generator=generator), 20, num_chunks=2)
    graph = graph.to(DEVICE)

    def gradients(backend):
        x = normal(20, 2, 5, dtype=torch.float64).round().to(DEVICE).requires_grad_()
        source, target = (normal(20, 2, dtype=torch.float64, seed=i).to(DEVICE).requires_grad_() for i in (1, 2))
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
        assert row.get("REG", 0) <= 128  # 16 warps on each multiprocessor
        assert not any("atom" in name for name in row["instructions"])  # the same bits in every run
        if row["kernel"] == "tiles_kernel":
            assert any("mma" in name for name in row["instructions"]) == (row["kind"] != "fp32" or row["tf32"])
            assert any("cp.async.cg" in name for name in row["instructions"])  # 16 bytes at a time, ahead of the dot
            assert row["shared"] <= 48 * 1024
        if row["kernel"] == "rows_kernel" and row["kind"] == "fp32":
            assert any("v4" in name for name in row["instructions"])
