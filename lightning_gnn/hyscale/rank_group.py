"""Collectives between ranks on unlike devices: numbers, gradients and whole states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RankGroup:
    """All ranks of a run, some of them on accelerators.

    Messages between ranks on unlike devices pass through the host (gloo). Several accelerators add up among themselves
    first, over their own links (nccl); the first of them then speaks for all.

    Args:
        accelerators: The ranks that are accelerators; a CPU may stand for one.
    """

    def __init__(self, devices: Sequence[torch.device], accelerators: Sequence[int], rank: int) -> None:
        self.size = len(devices)
        self.rank = rank
        self._device = devices[rank]
        self._near: Any = None
        self._bridge: Any = None
        self._leader = 0
        if 1 < len(accelerators) < self.size:
            on_gpu = devices[accelerators[0]].type == "cuda"
            far = [other for other in range(self.size) if other not in accelerators]
            self._leader = accelerators[0]
            near = dist.new_group(list(accelerators), backend="nccl" if on_gpu else "gloo")
            self._bridge = dist.new_group(sorted([self._leader, *far]), backend="gloo")
            self._near = near if rank in accelerators else None

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor, dense or sparse, on this rank's device by the sum over all ranks."""
        if self._near is not None and not tensor.is_sparse:
            dist.all_reduce(tensor, group=self._near)
            if self.rank == self._leader:
                self._on_host(tensor)
            dist.broadcast(tensor, self._leader, group=self._near)
        elif dist.get_backend() == "gloo" and not tensor.is_sparse:
            self._on_host(tensor)
        else:
            dist.all_reduce(tensor)

    def _on_host(self, tensor: Tensor) -> None:
        host = tensor.cpu()
        dist.all_reduce(host, group=self._bridge)
        if host is not tensor:
            tensor.copy_(host)

    def replace(self, tensor: Tensor, source: int) -> None:
        """Replace a dense tensor by that of one rank."""
        host = tensor.cpu()
        dist.broadcast(host, source)
        if host is not tensor and self.rank != source:
            tensor.copy_(host)

    def table(self, row: Sequence[Any]) -> list[list[float]]:
        """Return the rows of all ranks, which have as many numbers each; some may still lie on the device."""
        mine = self._row(row).cpu()
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def written(self, row: Sequence[Any], like: Tensor) -> Tensor:
        """Write a row so that the ranks' sum is :meth:`table`: each byte a number, those of other ranks zero.

        Args:
            like: Of any floating dtype, in which integers up to 255 are exact.
        """
        mine = self._row(row).to(like.device).view(torch.uint8).to(like.dtype)
        page = mine.new_zeros(self.size, len(mine))
        page[self.rank] = mine
        return page.view(-1)

    def read(self, sums: Tensor) -> list[list[float]]:
        """Return the rows of all ranks from the sum of what they have written."""
        return sums.to(torch.uint8).cpu().contiguous().view(torch.float64).view(self.size, -1).tolist()

    def _row(self, row: Sequence[Any]) -> Tensor:
        """Return a row as float64, on the device if a part of it lies there."""
        there = [place for place, value in enumerate(row) if isinstance(value, Tensor)]
        mine = torch.tensor([0.0 if isinstance(value, Tensor) else float(value) for value in row], dtype=torch.float64)
        if there:
            mine = mine.to(self._device)
            mine[there] = torch.stack([row[place].reshape(()).to(self._device, torch.float64) for place in there])
        return mine

    def objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def copy_from_first(self, tensors: Iterable[Tensor]) -> float:
        """Make tensors those of rank 0."""
        drift = 0.0
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.layout == torch.strided:
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            here = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in group])
            first = here.clone()
            dist.broadcast(first, 0)
            if here.equal(first):
                continue
            parts = torch.split(first, [tensor.numel() for tensor in group])
            for tensor, old, new in zip(group, torch.split(here, [part.numel() for part in parts]), parts, strict=True):
                if not old.equal(new):
                    difference = (old.double() - new.double()).abs().max() / new.double().abs().max().clamp_min(1e-300)
                    drift = max(drift, float(difference))
                    with torch.no_grad():
                        tensor.copy_(new.view(tensor.shape))
        return drift
