"""Collectives between ranks on unlike devices: numbers, gradients and whole states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_T = TypeVar("_T")


class MixedDeviceGroup:
    """All ranks of a run, some of them on accelerators."""

    # Messages between ranks on unlike devices pass through the host (gloo). Several accelerators add up among
    # themselves first, over their own links (nccl); the first of them then takes part for all.

    def __init__(self, devices: Sequence[torch.device], accelerators: Sequence[int], rank: int) -> None:
        self.size = len(devices)
        self.rank = rank
        self._device = devices[rank]
        # A backend of one kind of accelerator alone (nccl, hccl) takes nothing from the host.
        self._message_device = torch.device("cpu") if "cpu" in dist.get_backend_config() else self._device
        self._accelerators: dist.ProcessGroup | None = None
        self._bridge: dist.ProcessGroup | None = None
        self._leader = 0
        if 1 < len(accelerators) < self.size:
            on_gpu = devices[accelerators[0]].type == "cuda"
            others = [other for other in range(self.size) if other not in accelerators]
            self._leader = accelerators[0]
            group = dist.new_group(list(accelerators), backend="nccl" if on_gpu else "gloo")
            self._bridge = dist.new_group(sorted([self._leader, *others]), backend="gloo")
            self._accelerators = group if rank in accelerators else None

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replace a tensor, dense or sparse, on this rank's device by the sum over all ranks."""
        if self._accelerators is not None and not tensor.is_sparse:
            dist.all_reduce(tensor, group=self._accelerators)
            if self.rank == self._leader:
                self._all_reduce_on_host(tensor)
            dist.broadcast(tensor, self._leader, group=self._accelerators)
        elif dist.get_backend() == "gloo" and not tensor.is_sparse:
            self._all_reduce_on_host(tensor)
        else:
            dist.all_reduce(tensor)

    def _all_reduce_on_host(self, tensor: Tensor) -> None:
        """Add up the tensors of the ranks of the bridge, by default of all."""
        host = tensor.cpu()
        dist.all_reduce(host, group=self._bridge)
        if host is not tensor:
            tensor.copy_(host)

    def all_gather_floats(self, row: Sequence[float | Tensor]) -> list[list[float]]:
        """Return the rows of all ranks, which have as many numbers each; some may still lie on the device."""
        mine = self._encode(row).to(self._message_device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return [row.cpu().view(torch.float64).tolist() for row in rows]

    def encode_for_sum(self, row: Sequence[float | Tensor], like: Tensor) -> Tensor:
        """Encode a row so that the ranks' sum is that of `all_gather_floats`: of other ranks all bytes are zero."""
        # Each byte becomes one number: integers up to 255 are exact in any floating dtype.
        mine = self._encode(row).to(like.device, like.dtype)
        page = mine.new_zeros(self.size, len(mine))
        page[self.rank] = mine
        return page.view(-1)

    def decode_from_sum(self, sums: Tensor) -> list[list[float]]:
        """Return the rows of all ranks from the sum of what :meth:`encode_for_sum` returned."""
        return sums.to(torch.uint8).cpu().contiguous().view(torch.float64).view(self.size, -1).tolist()

    def _encode(self, row: Sequence[float | Tensor]) -> Tensor:
        """Return the bytes of a row of float64, on the device if a part of it lies there."""
        # Not every accelerator has float64; those without are waited for.
        if self._device.type not in ("cpu", "cuda"):
            row = [float(value) for value in row]
        on_device = [index for index, value in enumerate(row) if isinstance(value, Tensor)]
        mine = torch.tensor([0.0 if isinstance(value, Tensor) else float(value) for value in row], dtype=torch.float64)
        if on_device:
            mine = mine.to(self._device)
            numbers = [value.reshape(()).to(self._device, torch.float64) for value in row if isinstance(value, Tensor)]
            mine[on_device] = torch.stack(numbers)
        return mine.view(torch.uint8)

    def all_gather_objects(self, value: _T) -> list[_T]:
        """Return the objects of all ranks."""
        values = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast_from_rank0(self, tensors: Iterable[Tensor]) -> float:
        """Make tensors those of rank 0."""
        drift = 0.0
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.layout == torch.strided:
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        # One message per dtype; what is equal already is left alone, so that versions of tensors do not change.
        for group in by_dtype.values():
            here = torch.cat([tensor.detach().reshape(-1).to(self._message_device) for tensor in group])
            first = here.clone()
            dist.broadcast(first, 0)
            if here.equal(first):
                continue
            sizes = [tensor.numel() for tensor in group]
            for tensor, old, new in zip(group, torch.split(here, sizes), torch.split(first, sizes), strict=True):
                if not old.equal(new):
                    old64, new64 = old.cpu().double(), new.cpu().double()
                    difference = (old64 - new64).abs().max() / new64.abs().max().clamp_min(1e-300)
                    drift = max(drift, float(difference))
                    with torch.no_grad():
                        tensor.copy_(new.view(tensor.shape))
        return drift
