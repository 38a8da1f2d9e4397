"""Aggregate and update on a GPU: the CUDA implementation of the operators.

The result comes from one fused kernel if x is aggregated before it is multiplied, and if tensor cores may multiply. All
else is a kernel that adds up rows before or after the products of the GPU's BLAS: so are gradients, and so are float64
and the exact float32, whose products in a fused kernel do not fit into registers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate.triton import _on
from lightning_gnn.ops.aggregate_update import reference
from lightning_gnn.ops.library import library, triton_installed


def aggregate_update(
    edges: list[Tensor],
    x: Tensor,
    weight: Tensor,
    self_weight: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    aggregate_first: bool,
    keep: bool,
    p: float | None = None,
    key: int = 0,
) -> tuple[Tensor, Tensor]:
    """Do what the function of this name in ``reference.py`` does."""
    if not aggregate_first or not _fused(x) or p is not None:
        return reference.update(sums, edges, x, weight, self_weight, bias, mean, aggregate_first, keep, p, key)
    from lightning_gnn.triton_kernels import aggregate_update as kernels

    out = x.new_empty((edges[0].numel() - 1, weight.size(0)))
    kept = x.new_empty((out.size(0), x.size(1))) if keep else None
    with _on(x.device):
        kernels.aggregate_update(
            edges,
            x.contiguous(),
            weight.contiguous(),
            None if self_weight is None else self_weight.contiguous(),
            None if bias is None else bias.contiguous(),
            mean,
            _tf32(),
            out,
            kept,
        )
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


@torch.library.impl(library, "aggregate_update", "CUDA")
def _update_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    return (aggregate_update if triton_installed() else reference.aggregate_update)(*arguments)


@torch.library.impl(library, "aggregate_update_backward", "CUDA")
def _backward_cuda(*arguments: Any) -> list[Tensor]:
    return (aggregate_update_backward if triton_installed() else reference.aggregate_update_backward)(*arguments)


def _tf32() -> bool:
    """Tell whether the user lets torch round float32 to TF32 in matrix products."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # reading the older name fails where the newer was written
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
