"""Equality at full size, on a GPU: hubs, tiles on tensor cores, large offsets, repeated runs, and no waiting."""

import pytest
import torch

from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.ops.aggregate import reference as aggregate_reference
from lightning_gnn.ops.aggregate import triton as aggregate_triton
from lightning_gnn.ops.aggregate.backends import chunk_tensors
from lightning_gnn.ops.aggregate.definition import aggregate
from lightning_gnn.ops.edge_softmax.definition import edge_softmax
from tests.triton_kernels.chunk_cases import made_chunks, tensors_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the interpreter stands in"),
]
NUM_NODES, NUM_EDGES = 20_000, 1_000_000
PLAN = ([0, 1], [0, 1])


@pytest.fixture(scope="module")
def graph():
    """A graph with power-law degrees on both sides, duplicate edges, and isolated vertices."""
    generator = torch.Generator().manual_seed(0)
    degree = (1 - torch.rand(NUM_NODES, generator=generator, dtype=torch.float64)) ** (-1 / 1.2)
    degree[::10] = 0
    ends = [torch.multinomial(degree, NUM_EDGES, replacement=True, generator=generator) for _ in range(2)]
    return CompressedGraph.from_edge_index(torch.stack(ends), NUM_NODES).to("cuda")


@pytest.fixture(scope="module")
def dense_graph():
    """Communities of 64 vertices in which a third of all edges is there."""
    generator = torch.Generator().manual_seed(0)
    present = torch.rand(50, 64, 64, generator=generator) < 1 / 3
    block, row, column = torch.nonzero(present).T
    edge_index = torch.stack([block * 64 + row, block * 64 + column])
    return CompressedGraph.from_edge_index(edge_index, 50 * 64).to("cuda")


def compare(graph, dtype, shape, reduce, weighted, tolerance):
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(graph.num_sources, *shape, generator=generator, device="cuda", dtype=torch.float64).to(dtype)
    weight = None
    if weighted:
        weight = torch.rand(graph.num_edges, shape[0], generator=generator, device="cuda", dtype=torch.float64)
        weight = weight.to(dtype)
    chunks = chunk_tensors(graph.forward)
    ours, ties = aggregate_triton.aggregate_chunks(chunks, graph.num_targets, x, weight, reduce, *PLAN)
    again, _ = aggregate_triton.aggregate_chunks(chunks, graph.num_targets, x, weight, reduce, *PLAN)
    assert torch.equal(ours, again)  # to the last bit
    # What rounding may do grows with the sum of the magnitudes.
    exact, exact_ties = aggregate_reference.aggregate_chunks(
        chunks, graph.num_targets, x.double(), None if weight is None else weight.double(), reduce, *PLAN
    )
    if reduce == "max":
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=0)
        assert weighted or torch.equal(ties.double(), exact_ties)
        return
    size, _ = aggregate_reference.aggregate_chunks(
        chunks, graph.num_targets, x.double().abs(), None if weight is None else weight.double(), reduce, *PLAN
    )
    assert bool(((ours.double() - exact).abs() <= tolerance * size + 1e-30).all())


TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("tiles", ["never", "always", "auto"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 256), (1, 7), (1, 602), (8, 8), (4, 41)])
def test_sums_equal_the_reference(graph, dense_graph, shape, dtype, tiles):
    with aggregate_triton.use_tiles(tiles):
        for which in (graph, dense_graph):
            if tiles == "always" and which is graph and shape[0] > 1:
                continue  # a sparse graph as dense tiles, once per head, would take gigabytes
            for reduce, weighted in (("sum", True), ("mean", shape[0] > 1)):
                compare(which, dtype, shape, reduce, weighted, TOLERANCE[dtype])


def test_tf32_is_used_where_it_is_allowed(dense_graph):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with aggregate_triton.use_tiles("always"):
            compare(dense_graph, torch.float32, (1, 128), "sum", True, 2e-3)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_dense_chunks_are_found(dense_graph):
    chunks = chunk_tensors(dense_graph.forward)
    plan = aggregate_triton.plan_for(chunks, dense_graph.num_targets, 256, torch.float16)
    assert bool(plan.dense.any())
    assert plan.tiles is not None


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
    # The last column to the last row, in a part of its own and in a tile.
    chunks, _ = made_chunks(torch.tensor([0, 1]), torch.tensor([1, 0]), 2, 2, 1, 10)
    chunks = tensors_of(chunks, "cuda")
    last = num_rows - 1
    chunks[0], chunks[4] = (torch.where(index == 1, last, index).int() for index in (chunks[0], chunks[4]))
    x = torch.zeros(num_rows, 1, channels, dtype=torch.float16, device="cuda")
    x[0], x[last] = 1, 2
    for tiles in ("never", "always"):
        with aggregate_triton.use_tiles(tiles):
            out, _ = aggregate_triton.aggregate_chunks(chunks, num_rows, x, None, "sum", *PLAN)
        assert bool((out[0] == 2).all())
        assert bool((out[last] == 1).all())
