"""What the nodes of a hybrid run agree on, in one collective each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


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
