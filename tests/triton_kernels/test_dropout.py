"""Dropout on a GPU, or by Triton's interpreter: the bits of the CPU."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from lightning_gnn.nn import Dropout
from lightning_gnn.ops import dropout
from lightning_gnn.ops.aggregate_update import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"


def equal(found, wanted):
    """Return whether bits are equal; the interpreter truncates to bfloat16, where compiled kernels round."""
    found = found.cpu()
    if found.dtype == torch.bfloat16 and INTERPRETED:
        return torch.equal(found == 0, wanted == 0) and torch.allclose(found, wanted, rtol=2**-7, equal_nan=True)
    return bool(((found == wanted) | (found.isnan() & wanted.isnan())).all())


@settings(max_examples=60)
@given(
    key=st.integers(-(2**63), 2**63 - 1),
    p=st.sampled_from([1e-12, 0.1, 0.5, 0.9, 1 - 2**-40, 1.0]),
    shape=st.sampled_from([(4,), (37, 47), (3, 2, 5), (0, 3), (3, 0), (1, 1), (5, 301), (40, 64)]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    given_rows=st.sampled_from([None, torch.int64, torch.int32]),
    relu=st.booleans(),
)
def test_the_kernel_has_the_bits_of_the_cpu(key, p, shape, dtype, given_rows, relu):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    x.view(-1)[:2] = torch.nan
    rows = None
    if given_rows is not None:
        rows = torch.arange(shape[0], dtype=given_rows).flip(0) * 3 + (2**40 if given_rows == torch.int64 else 7)
    wanted = torch.ops.lightning_gnn.row_dropout(x.relu() if relu else x, p, key, rows)
    if relu and len(shape) == 2 and rows is None:
        found = dropout.relu_dropout_cuda(x.to(DEVICE).clone(), p, key)
    else:
        own = (x.relu() if relu else x).to(DEVICE)
        found = dropout.row_dropout_cuda(own, p, key, None if rows is None else rows.to(DEVICE))
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    assert equal(found, wanted)


def test_strided_input_is_read_as_it_is():
    x = torch.randn(20, 9).t()
    wanted = torch.ops.lightning_gnn.row_dropout(x, 0.3, 5, None)
    assert equal(dropout.row_dropout_cuda(x.to(DEVICE), 0.3, 5, None), wanted)


@pytest.mark.parametrize("p", [0.0, None])
def test_nothing_is_hashed_without_dropout(p, monkeypatch):
    for name in ("row_dropout", "row_dropout_torch"):
        monkeypatch.setattr(reference, name, None)
    x = torch.randn(4, 3)
    then = None if p is None else reference.ReluDropout(p, 3)
    assert torch.equal(reference.activated(x, then), x if p is None else x.relu())
    edges = [torch.arange(5), torch.arange(4, dtype=torch.int32)]
    call = reference.Update(edges, x, torch.eye(3)[None], None, None, [4], [1], [0], False, True, p, 9)
    assert torch.equal(reference.aggregate_update(call, False)[0], x if p is None else x.relu())


@pytest.mark.cuda
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_a_layer_on_a_gpu_draws_the_mask_of_the_cpu():
    x, layer = torch.rand(300, 40) + 1, Dropout(0.4)
    masks = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(3)
        leaf = x.to(device).requires_grad_()
        out = layer(leaf)
        out.sum().backward()
        masks += [out.detach().cpu(), leaf.grad.cpu() * x]
    assert torch.equal(masks[2], masks[0])
    torch.testing.assert_close(masks[3], masks[0])


@pytest.mark.cuda
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_a_graph_draws_another_mask_in_each_replay():
    x, layer = torch.ones(300, 40, device=DEVICE), Dropout(0.4)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(out.clone())
    assert not torch.equal(*drawn)
