"""Neighbour sampling on a GPU: the CUDA implementation of the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.ops.library import library

if TYPE_CHECKING:
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

_samplers = WeakIdKeyDictionary()


def triton_sampler(
    indptr: Tensor, indices: Tensor, device: torch.device | None = None, **options: object
) -> TritonNeighborSampler:
    """Return the sampler of a graph; one without options is made once, and lives as long as the graph.

    Args:
        indptr: int64 ``[num_nodes + 1]``, on a GPU or in pinned memory.
        indices: int32 or int64 ``[num_edges]``, likewise.
        device: Where to sample, if the graph is in pinned memory.
        **options: Further arguments of ``TritonNeighborSampler``.

    Raises:
        ValueError: Triton is missing, or the graph is where a GPU cannot read it.
    """
    try:
        from lightning_gnn.triton_kernels.sample import TritonNeighborSampler
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("sampling on a GPU needs the package triton (Linux only): pip install triton") from error
    if options:
        return TritonNeighborSampler(indptr, indices, device=device, **options)
    by_device = _samplers.setdefault(indices, {})
    if device not in by_device:
        # Detached tensors share the memory; holding the key itself would keep the entry alive for ever.
        by_device[device] = TritonNeighborSampler(indptr.detach(), indices.detach(), device=device)
    return by_device[device]


def runs_on(device: torch.device) -> bool:
    """Tell whether Triton kernels run on a device: on a GPU, and on the CPU under Triton's interpreter."""
    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.is_available()
    try:
        from lightning_gnn.triton_kernels.sample import INTERPRETED
    except ModuleNotFoundError:
        return False
    return INTERPRETED


@torch.library.impl(library, "sample_neighbors", "CUDA")
def _sample_cuda(indptr, indices, seeds, fanouts, key, replace, disjoint, first_tree):
    sampler = triton_sampler(indptr, indices, seeds.device)
    node, edge_index, edge, batch, node_counts, edge_counts = sampler.sample(
        seeds, fanouts, key, replace, disjoint, first_tree
    )
    return node, edge_index, edge, edge.new_empty(0) if batch is None else batch, node_counts, edge_counts
