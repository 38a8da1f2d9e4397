"""Full-size comparison on a GPU: hubs, large offsets, repeated runs, no synchronization."""

import pytest
import torch

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.ops.aggregate import reference as aggregate_reference
from lightning_gnn.ops.aggregate import triton as aggregate_triton
from lightning_gnn.ops.aggregate.definition import aggregate
from lightning_gnn.ops.aggregate.edge_softmax import edge_softmax
from lightning_gnn.ops.aggregate.matrix import Matrix

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the interpreter stands in"),
]
NUM_NODES, NUM_EDGES = 20_000, 1_000_000


@pytest.fixture(scope="module")
def graph():
    """Graph with power-law degrees on both sides, duplicate edges, and isolated vertices."""
    generator = torch.Generator().manual_seed(0)
    degree = (1 - torch.rand(NUM_NODES, generator=generator, dtype=torch.float64)) ** (-1 / 1.2)
    degree[::10] = 0
    ends = [torch.multinomial(degree, NUM_EDGES, replacement=True, generator=generator) for _ in range(2)]
    return CompressedGraph.from_edge_index(torch.stack(ends), NUM_NODES).to("cuda")


def compare(graph, dtype, shape, reduce, weighted, tolerance):
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(graph.num_sources, *shape, generator=generator, device="cuda", dtype=torch.float64).to(dtype)
    weight = None
    if weighted:
        weight = torch.rand(graph.num_edges, shape[0], generator=generator, device="cuda", dtype=torch.float64)
        weight = weight.to(dtype)
    matrix = Matrix(graph.forward.indptr, graph.forward.indices, graph.num_sources)
    ours, ties = aggregate_triton.aggregate(matrix, x, weight, reduce)
    again, _ = aggregate_triton.aggregate(matrix, x, weight, reduce)
    assert torch.equal(ours, again)  # bit for bit
    # The allowed rounding error grows with the sum of the magnitudes.
    wide = None if weight is None else weight.double()
    exact, exact_ties = aggregate_reference.aggregate(matrix, x.double(), wide, reduce)
    if reduce == "max":
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=0)
        assert weighted or torch.equal(ties.double(), exact_ties)
        return
    size, _ = aggregate_reference.aggregate(matrix, x.double().abs(), wide, reduce)
    assert bool(((ours.double() - exact).abs() <= tolerance * size + 1e-30).all())


TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 256), (1, 7), (1, 602), (8, 8), (4, 41)])
def test_sums_equal_the_reference(graph, shape, dtype):
    for reduce, weighted in (("sum", True), ("mean", shape[0] > 1)):
        compare(graph, dtype, shape, reduce, weighted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_maxima_equal_the_reference(graph, weighted, dtype):
    compare(graph, dtype, (2, 40) if weighted else (1, 100), "max", weighted, 0)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_attention_and_all_gradients_equal_the_reference(graph, reduce):
    def gradients(backend):
        generator = torch.Generator(device="cuda").manual_seed(0)
        shapes = ((NUM_NODES, 4, 16), (NUM_NODES, 4), (NUM_NODES, 4))
        x, source, target = (
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64).requires_grad_()
            for shape in shapes
        )
        weight = edge_softmax(graph, source, target, backend=backend)
        out = aggregate(graph, x, weight, reduce, backend=backend)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (x, source, target))

    for ours, wanted in zip(gradients(None), gradients("reference"), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


def test_no_call_waits_for_the_device(graph):
    x = torch.randn(NUM_NODES, 64, device="cuda", requires_grad=True)
    scores = torch.randn(NUM_NODES, 1, device="cuda", requires_grad=True)

    def step():
        weight = edge_softmax(graph, scores, scores)
        for reduce in ("sum", "mean", "max"):
            aggregate(graph, x, weight[:, 0], reduce).sum().backward(retain_graph=True)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_beyond_32_bits():
    num_rows, channels = 2**31 // 256 + 100, 256
    last = num_rows - 1
    # Last column to first row, and first column to last row.
    indptr = torch.ones(num_rows + 1, dtype=torch.int64, device="cuda")
    indptr[0], indptr[-1] = 0, 2
    matrix = Matrix(indptr, torch.tensor([last, 0], dtype=torch.int32, device="cuda"), num_rows)
    x = torch.zeros(num_rows, 1, channels, dtype=torch.float16, device="cuda")
    x[0], x[last] = 1, 2
    out, _ = aggregate_triton.aggregate(matrix, x, None, "sum")
    assert bool((out[0] == 2).all())
    assert bool((out[last] == 1).all())
