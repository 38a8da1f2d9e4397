"""Aggregate and update on a GPU: the CUDA implementation of the operators.

A single fused kernel if x is aggregated first and tensor cores may be used; else a kernel for sums and torch's BLAS.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.triton import _current_device
from lightning_gnn.ops.aggregate_update import reference
from lightning_gnn.ops.aggregate_update.reference import Update, register
from lightning_gnn.ops.library import triton_installed


def aggregate_update(call: Update, keep: bool) -> tuple[Tensor, Tensor]:
    """Run :func:`reference.update` on a GPU."""
    x, self_weight, bias = call.x, call.self_weight, call.bias
    is_single = call.relations == [1] and (self_weight is None or call.own == [0])
    if not is_single or not call.aggregate_first or not _supports_fused(x) or call.p is not None:
        return reference.update(sums, call, keep)
    from lightning_gnn.triton_kernels import aggregate_update as kernels

    weight, edges = call.weight[0].contiguous(), call.edges
    out = x.new_empty((edges[0].numel() - 1, weight.size(0)))
    aggregated = x.new_empty((out.size(0), x.size(1))) if keep else None
    own, shift = (None if tensor is None else tensor[0].contiguous() for tensor in (self_weight, bias))
    with _current_device(x.device):
        kernels.aggregate_update(edges, x.contiguous(), weight, own, shift, call.mean, _tf32(), out, aggregated)
    return out, x.new_empty(0) if aggregated is None else aggregated


def sums(edges: list[Tensor], x: Tensor, mean: bool) -> Tensor:
    """Run ``reference.sums`` on a GPU, without autograd."""
    from lightning_gnn.triton_kernels import aggregate_update as kernels

    out = x.new_empty((edges[0].numel() - 1, x.size(1)))
    with _current_device(x.device):
        kernels.sum_rows(edges, x.contiguous(), mean, out)
    return out


aggregate_update_backward = partial(reference.update_backward, sums)


def _supports_fused(x: Tensor) -> bool:
    if x.is_cpu:  # Triton's interpreter, which wrongly multiplies bfloat16 as integers
        return x.dtype in (torch.float32, torch.float16)
    return x.dtype in (torch.float16, torch.bfloat16) or (x.dtype == torch.float32 and _tf32())


def _select_at_call(function: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` if Triton is installed at that time, else ``fallback``."""
    return lambda *given: (function if triton_installed() else fallback)(*given)


register(
    "CUDA",
    _select_at_call(aggregate_update, reference.aggregate_update),
    _select_at_call(aggregate_update_backward, reference.aggregate_update_backward),
)


def _tf32() -> bool:
    """Return whether the user allows TF32 in float32 matrix products."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # reading the old setting fails after the new one was set
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
