"""Aggregate and update on a GPU: a kernel for the sums, torch's BLAS for the products."""

from functools import partial

from torch import Tensor

from lightning_gnn.ops.aggregate.triton import _current_device
from lightning_gnn.ops.aggregate_update import reference
from lightning_gnn.ops.library import runs_triton


def sums(edges: list[Tensor], x: Tensor, mean: bool) -> Tensor:
    """Run :func:`reference.sums` on a GPU, without autograd."""
    if not runs_triton(x.device):
        return reference.sums(edges, x, mean)
    from lightning_gnn.triton_kernels import aggregate as kernels

    out = x.new_empty((edges[0].numel() - 1, x.size(1)))
    with _current_device(x.device):
        kernels.sum_rows(edges, x.contiguous(), mean, out)
    return out


aggregate_update = partial(reference.update, sums)
aggregate_update_backward = partial(reference.update_backward, sums)
reference.register("CUDA", aggregate_update, aggregate_update_backward)
