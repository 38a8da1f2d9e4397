import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from lightning_gnn.ops.aggregate_update import reference as aggregate_update_reference
from lightning_gnn.ops.aggregate_update import triton as aggregate_update_triton
from lightning_gnn.ops.aggregate_update.definition import aggregate_update
from lightning_gnn.ops.aggregate_update.edge_order import edges_by_target
from lightning_gnn.ops.aggregate_update.reference import Update
from tests.strategies import edge_indices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
sizes = st.sampled_from([(1, 1), (5, 3), (7, 40), (64, 16), (130, 7), (20, 300)])


def draw(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def widen(value):
    if isinstance(value, list):
        return [widen(part) for part in value]
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@settings(max_examples=25)
@given(
    edge_indices(),
    st.integers(1, 24),
    sizes,
    st.sampled_from(list(TOLERANCE)),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_results_and_gradients_equal_the_reference(drawn, num_targets, size, dtype, flags, wanted):
    num_sources, edge_index = drawn
    mean, weighted, own, biased, first = flags
    num_targets = min(num_targets, num_sources)
    edge_index = torch.stack([edge_index[0], edge_index[1] % num_targets]).to(DEVICE)
    edge_weight = draw(edge_index.size(1), dtype=dtype, seed=0) if weighted else None
    edges = edges_by_target(edge_index, num_sources, num_targets, edge_weight)
    scale = size[0] ** -0.5
    x, weight = draw(num_sources, size[0], dtype=dtype, seed=1), draw(1, *size[::-1], dtype=dtype, seed=2) * scale
    self_weight = draw(1, *size[::-1], dtype=dtype, seed=3) * scale if own else None
    bias = draw(1, size[1], dtype=dtype, seed=4) if biased else None
    call = Update(edges, x, weight, self_weight, bias, [num_targets], [1], [0], mean, first)
    exact_call = Update(*(widen(value) for value in call))
    ours, saved = aggregate_update_triton.aggregate_update(call, first)
    exact, exact_saved = aggregate_update_reference.aggregate_update(exact_call, first)
    wanted = [wanted[0], wanted[1], wanted[2] and own, wanted[3] and biased]
    grad = draw(num_targets, size[1], dtype=dtype, seed=5) * size[1] ** -0.5
    grads = aggregate_update_triton.aggregate_update_backward(call, grad, saved if first else None, None, wanted)
    exact_grads = aggregate_update_reference.aggregate_update_backward(
        exact_call, grad.double(), exact_saved, None, wanted
    )
    saved = saved[:, : size[0]] if first else saved  # without own rows
    for got, want in zip([ours, saved, *grads], [exact, exact_saved, *exact_grads], strict=True):
        assert got.dtype == dtype
        # Rounding grows with the size of the sum: a hub sums a hundred rows.
        size_of_sum = 1 + (float(want.abs().max()) if want.numel() else 0)
        atol = 10 * TOLERANCE[dtype] * size_of_sum
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=atol)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the interpreter stands in")
@pytest.mark.parametrize("shape", [(256, 256), (256, 47), (100, 256), (602, 41)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_mini_batch_on_a_gpu(shape, dtype):
    from torch_geometric.nn import SAGEConv

    torch.manual_seed(0)
    num_sources, num_targets = 60_000, 10_000
    edge_index = torch.stack(
        [torch.randint(num_sources, (150_000,)), torch.arange(num_targets).repeat_interleave(15)]
    ).cuda()
    layer = SAGEConv(*shape).cuda().double()
    x = torch.randn(num_sources, shape[0], dtype=torch.float64, device="cuda", requires_grad=True)
    parameters = [layer.lin_l.weight, layer.lin_r.weight, layer.lin_l.bias]
    wanted = layer((x, x[:num_targets]), edge_index)
    # A sum, because the gradient of a mean over millions of values would underflow in float16.
    exact = torch.autograd.grad(wanted.square().sum(), [x, *parameters])
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, *parameters)]

    def step():
        out = aggregate_update(inputs[0], edge_index, *inputs[1:], num_targets, "mean")
        return out.detach(), *torch.autograd.grad(out.to(torch.float64).square().sum(), inputs)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, want in zip(results, (wanted.detach(), *exact), strict=True):
        error = float((got.double() - want).norm() / want.norm())
        assert error < TOLERANCE[dtype]
