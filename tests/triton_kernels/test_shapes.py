"""Compilers are told the shapes, dtypes and strides of what a GPU's operators return."""

import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton exists on Linux only")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from lightning_gnn.ops.aggregate_update import edge_order, reference, triton
from lightning_gnn.ops.aggregate_update.reference import Update
from lightning_gnn.ops.attention import definition
from lightning_gnn.ops.attention import triton as attention_triton
from lightning_gnn.ops.attention.reference import Attend, Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPERATORS = torch.ops.lightning_gnn


def as_on_a_gpu(given):
    """Replace tensors by fakes on a GPU."""
    if isinstance(given, torch.Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cuda")
    return [as_on_a_gpu(part) for part in given] if isinstance(given, list) else given


def describe(tensors):
    return [(tuple(tensor.shape), tensor.dtype, tensor.stride()) for tensor in tensors]


def check(operator, arguments, results):
    with FakeTensorMode():
        fakes = operator(*map(as_on_a_gpu, arguments))
    assert describe(fakes) == describe(results)


@pytest.fixture
def edges(monkeypatch):
    monkeypatch.setattr(reference, "runs_triton", lambda device: True)
    monkeypatch.setattr(definition, "_backend", lambda device: attention_triton)
    some = torch.Generator().manual_seed(0)
    edge_index = torch.stack([torch.randint(9, (40,), generator=some), torch.randint(5, (40,), generator=some)])
    return edge_order.edges_by_target(edge_index.to(DEVICE), 9, 5, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_aggregate_and_update(edges, dtype, first, own):
    x, weight = torch.rand(9, 6, dtype=dtype, device=DEVICE), torch.rand(1, 4, 6, dtype=dtype, device=DEVICE)
    call = Update(edges, x, weight, weight if own else None, weight[:, :, 0], [5], [1], [0], True, first)
    results = triton.aggregate_update(call, first)
    check(OPERATORS.aggregate_update.default, (*call, first), results)
    rest = results[0], results[1] if first else None, None, [True, True, own, True]
    grads = triton.aggregate_update_backward(call, *rest)
    check(OPERATORS.aggregate_update_backward.default, (*call, *rest), grads)


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_rows(edges, reduce):
    x = torch.rand(9, 6, device=DEVICE)
    out, ties = triton.aggregate_rows(edges, x, reduce)
    check(OPERATORS.aggregate_rows.default, (edges, x, reduce), [out, ties])
    rest = (out, ties) if reduce == "max" else (None, None)
    grad = triton.aggregate_rows_backward(edges, out, x, *rest, reduce)
    with FakeTensorMode():
        fake = OPERATORS.aggregate_rows_backward.default(*map(as_on_a_gpu, (edges, out, x, *rest, reduce)))
    assert describe([fake]) == describe([grad])


@pytest.mark.parametrize("form", ["values", "weight", "dynamic", "keys", "across"])
def test_attention(edges, form):
    def rand(*shape):
        return torch.rand(shape, device=DEVICE)

    heads, across = 2, form in ("keys", "across")
    layout = Layout([5], [1], across)
    call = Attend(edges, rand(9, 6), rand(5 if across else 1, heads, 3), rand(5, heads), None, None, layout, 0.2)
    if form == "weight":
        call = call._replace(side=rand(1, heads, 6), weight=rand(1, heads, 4, 6))
    elif form == "dynamic":
        call = call._replace(shift=rand(5, 6), dynamic=True)
    elif form == "keys":
        call = call._replace(keys=rand(9, 6))
    elif form == "across":
        call = call._replace(side=rand(5, heads, 6), weight=rand(1, heads, 4, 6))
    arguments, keep = definition._to_arguments(call), form == "weight"
    mass = form == "across"
    out, total, *saved = results = definition._attend_by_device(call, keep, mass)
    check(OPERATORS.attend.default, (*arguments, keep, mass), results)
    saved = [out if call.weight is None else saved[0], total, saved[2]]
    rest = out, total, saved, [True, True, True, call.weight is not None, call.keys is not None]
    grads = definition._differentiate_by_device(call, *rest)
    check(OPERATORS.attend_backward.default, (*arguments, *rest), grads)
