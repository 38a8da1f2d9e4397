"""Neighbour sampling on a GPU: the CUDA implementation of the operator."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gnn.ops.library import library, require_triton, triton_installed

if TYPE_CHECKING:
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

_samplers: MutableMapping[Tensor, dict[torch.device | None, TritonNeighborSampler]] = WeakIdKeyDictionary()


def triton_sampler(
    indptr: Tensor, indices: Tensor, device: torch.device | None = None, **options: Any
) -> TritonNeighborSampler:
    """Return the sampler of a graph; one without options is made once, and lives as long as the graph.

    Args:
        indptr: int64 ``[num_nodes + 1]``, on a GPU or in pinned memory.
        indices: int32 or int64 ``[num_edges]``, on a GPU or in pinned memory.
        device: Where to sample, if the graph is in pinned memory.
        **options: Further arguments of ``TritonNeighborSampler``.

    Raises:
        ValueError: Triton is missing, or the graph is where a GPU cannot read it.
    """
    require_triton("sampling on a GPU")
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

    if options:
        return TritonNeighborSampler(indptr, indices, device=device, **options)
    by_device = _samplers.setdefault(indices, {})
    if device not in by_device:
        # Detached tensors share the memory; holding the key itself would keep the entry alive for ever.
        by_device[device] = TritonNeighborSampler(indptr.detach(), indices.detach(), device=device)
    return by_device[device]


def runs_on(device: torch.device) -> bool:
    """Tell whether Triton kernels run on a device: on a GPU, and on the CPU under Triton's interpreter."""
    if not triton_installed():
        return False
    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.is_available()
    from lightning_gnn.triton_kernels.sample import INTERPRETED

    return bool(INTERPRETED)


@torch.library.impl(library, "sample_neighbors", "CUDA")
def _sample_cuda(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: list[int],
    key: int,
    replace: bool,
    disjoint: bool,
    first_tree: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int], list[int]]:
    sampler = triton_sampler(indptr, indices, seeds.device)
    node, edge_index, edge, batch, node_counts, edge_counts = sampler.sample(
        seeds, fanouts, key, replace, disjoint, first_tree
    )
    return node, edge_index, edge, edge.new_empty(0) if batch is None else batch, node_counts, edge_counts
