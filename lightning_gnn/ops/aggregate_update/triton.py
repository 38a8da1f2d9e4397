"""Aggregate and update on a GPU: the CUDA implementation of the operators.

One fused kernel if x is aggregated first and tensor cores may multiply; else sums beside products by its BLAS.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.triton import _on
from lightning_gnn.ops.aggregate_update import reference
from lightning_gnn.ops.aggregate_update.reference import Update, register
from lightning_gnn.ops.library import triton_installed


def aggregate_update(call: Update, keep: bool) -> tuple[Tensor, Tensor]:
    """Do what :func:`reference.update` does."""
    x, self_weight, bias = call.x, call.self_weight, call.bias
    one = call.relations == [1] and (self_weight is None or call.own == [0])
    if not one or not call.aggregate_first or not _fused(x) or call.p is not None:
        return reference.update(sums, call, keep)
    from lightning_gnn.triton_kernels import aggregate_update as kernels

    weight, edges = call.weight[0].contiguous(), call.edges
    out = x.new_empty((edges[0].numel() - 1, weight.size(0)))
    kept = x.new_empty((out.size(0), x.size(1))) if keep else None
    own, shift = (None if tensor is None else tensor[0].contiguous() for tensor in (self_weight, bias))
    with _on(x.device):
        kernels.aggregate_update(edges, x.contiguous(), weight, own, shift, call.mean, _tf32(), out, kept)
    return out, x.new_empty(0) if kept is None else kept


def sums(edges: list[Tensor], x: Tensor, mean: bool) -> Tensor:
    """Do what the function of this name in ``reference.py`` does, without autograd."""
    from lightning_gnn.triton_kernels import aggregate_update as kernels

    out = x.new_empty((edges[0].numel() - 1, x.size(1)))
    with _on(x.device):
        kernels.sum_rows(edges, x.contiguous(), mean, out)
    return out


aggregate_update_backward = partial(reference.update_backward, sums)


def _fused(x: Tensor) -> bool:
    if x.is_cpu:  # Triton's interpreter, which multiplies the bits of bfloat16 as integers
        return x.dtype in (torch.float32, torch.float16)
    return x.dtype in (torch.float16, torch.bfloat16) or (x.dtype == torch.float32 and _tf32())


def _on_gpu(function: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs, once it is called, by Triton's kernels if Triton is there."""
    return lambda *given: (function if triton_installed() else otherwise)(*given)


register(
    "CUDA",
    _on_gpu(aggregate_update, reference.aggregate_update),
    _on_gpu(aggregate_update_backward, reference.aggregate_update_backward),
)


def _tf32() -> bool:
    """Tell whether the user lets torch round float32 to TF32 in matrix products."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # reading the older name fails where the newer was written
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
