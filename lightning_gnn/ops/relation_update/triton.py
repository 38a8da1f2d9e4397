"""Aggregation by relation on a GPU: a kernel adds up rows; the products, one per type, are those of the GPU's BLAS."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.ops.aggregate_update.triton import sums
from lightning_gnn.ops.library import library, triton_installed
from lightning_gnn.ops.relation_update import reference

relation_update = partial(reference.update, sums)
relation_update_backward = partial(reference.update_backward, sums)


@torch.library.impl(library, "relation_update", "CUDA")
def _update_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    return (relation_update if triton_installed() else reference.relation_update)(*arguments)


@torch.library.impl(library, "relation_update_backward", "CUDA")
def _backward_cuda(*arguments: Any) -> list[Tensor]:
    return (relation_update_backward if triton_installed() else reference.relation_update_backward)(*arguments)
