"""Sums over the nodes of a hybrid run, in one collective each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_over_nodes(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Add up the gradients of all nodes; what has none on any node stays None.

    Args:
        gradients: Of this node, one per parameter.
        parameters: The same on all nodes.
    """
    out: list[Tensor | None] = list(gradients)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, parameter in enumerate(parameters):
        if parameter.requires_grad:
            groups.setdefault((parameter.device, parameter.dtype), []).append(place)
    for (device, dtype), places in groups.items():
        present = [gradients[place] is not None for place in places]
        parts = []
        for place in places:
            gradient = gradients[place]
            if gradient is None:
                gradient = torch.zeros_like(parameters[place])
            parts.append((gradient if gradient.layout == torch.strided else gradient.to_dense()).reshape(-1))
        flat = torch.cat([*parts, torch.tensor(present, dtype=dtype, device=device)])
        dist.all_reduce(flat)
        *sums, counts = flat.split([*(part.numel() for part in parts), len(places)])
        for place, total, count in zip(places, sums, counts.tolist(), strict=True):
            out[place] = total.view(parameters[place].shape) if count else None
    return out


def average_statistics(module: nn.Module, weight: float) -> None:
    """Make running statistics the weighted mean of all nodes'.

    Args:
        module: Its buffers named ``running_mean`` and ``running_var`` are averaged.
        weight: Of this node; the nodes' add up to one.
    """
    names = ("running_mean", "running_var")
    buffers = [buffer for name, buffer in module.named_buffers() if name.rpartition(".")[2] in names]
    buffers = [buffer for buffer in buffers if buffer.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([buffer.reshape(-1).to(torch.float64) for buffer in buffers]) * weight
    dist.all_reduce(flat)
    with torch.no_grad():
        for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view(buffer.shape))


def check_same_order(seeds: Sequence[int]) -> None:
    """Make sure that all nodes go through the same seeds.

    Args:
        seeds: The first of an epoch.

    Raises:
        RuntimeError: They do not.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(seeds))
    if any(other != found[0] for other in found):
        raise RuntimeError(
            "the nodes have different orders of seeds, but hyscale shares one out: call seed_everything(...) on all "
            "nodes, or use lightning_gnn.NeighborDataModule(seed=...)"
        )
