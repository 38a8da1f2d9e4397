"""Collectives between ranks on different device types, for numbers, gradients and states."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn.runtime.devices import DEVICE_BACKENDS, all_gather_objects

_T = TypeVar("_T")
MAX_SENT = 4
"""Maximum number of messages by which ranks that only receive may be behind, two of a step at least."""


def as_message(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return a tensor for a collective: copied to the host if the group refuses its device, as gloo refuses NPUs."""
    is_accepted = not dist.is_initialized() or tensor.device.type in dist.get_backend_config(group)
    return tensor if is_accepted else tensor.cpu()


class MixedDeviceGroup:
    """All ranks of a run, with CPUs and accelerators mixed."""

    # Messages between different device types pass through the host (gloo). Several accelerators all-reduce among
    # themselves first, over their own links (nccl, hccl); the leader then all-reduces with the CPU ranks.

    def __init__(self, devices: Sequence[torch.device], accelerators: Sequence[int], rank: int) -> None:
        self.size = len(devices)
        self.rank = rank
        self._device = devices[rank]
        # A backend for accelerators only (nccl, hccl) does not accept host tensors.
        self._message_device = torch.device("cpu") if "cpu" in dist.get_backend_config() else self._device
        self._accelerators: dist.ProcessGroup | None = None
        self._bridge: dist.ProcessGroup | None = None
        self.leader = accelerators[0] if accelerators else 0
        """The accelerator that exchanges tensors with the CPU ranks."""
        self._others = [other for other in range(self.size) if other not in accelerators]
        self.only_accelerators = False
        """Whether only accelerators have gradients: they send the sum to the CPU ranks without waiting for them."""
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()
        if 1 < len(accelerators) < self.size:
            backend = DEVICE_BACKENDS.get(devices[accelerators[0]].type, "gloo")
            group = dist.new_group(list(accelerators), backend=backend)
            self._bridge = dist.new_group(sorted([self.leader, *self._others]), backend="gloo")
            self._accelerators = group if rank in accelerators else None

    @property
    def has_one_sender(self) -> bool:
        """Whether only one rank has gradients."""
        return self.only_accelerators and len(self._others) == self.size - 1

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """All-reduce a dense or sparse tensor in place. All ranks must call this."""
        if self.only_accelerators and not tensor.is_sparse:
            if self._accelerators is not None:
                dist.all_reduce(tensor, group=self._accelerators)
            self.send_to_cpus(tensor)  # which must not have contributed
        elif self._accelerators is not None and not tensor.is_sparse:
            dist.all_reduce(tensor, group=self._accelerators)
            if self.rank == self.leader:
                self._all_reduce_on_host(tensor)
            dist.broadcast(tensor, self.leader, group=self._accelerators)
        elif dist.get_backend() == "gloo" and not tensor.is_sparse:
            self._all_reduce_on_host(tensor)
        else:
            dist.all_reduce(tensor)

    def send_to_cpus(self, tensor: Tensor) -> None:
        """Replace the tensor on the CPU ranks by the leader's, which does not wait for them unless they are behind."""
        if self.rank == self.leader:
            host = tensor.cpu()  # which the caller must not change afterwards
            self._sent.extend((dist.isend(host, other), host) for other in self._others)
            while len(self._sent) > MAX_SENT * len(self._others):
                work, _ = self._sent.popleft()
                if work is not None:
                    work.wait()
        elif self.rank in self._others:
            host = tensor.cpu()
            dist.recv(host, self.leader)
            if host is not tensor:
                tensor.copy_(host)

    def _all_reduce_on_host(self, tensor: Tensor) -> None:
        """All-reduce over the bridge group (leader and CPU ranks), or over all ranks if it does not exist."""
        host = tensor.cpu()
        dist.all_reduce(host, group=self._bridge)
        if host is not tensor:
            tensor.copy_(host)

    def all_gather_floats(self, row: Sequence[float | Tensor]) -> list[list[float]]:
        """Return the equally long rows of all ranks. All ranks must call this."""
        encoded = self._encode(row).to(self._message_device)
        rows = [torch.empty_like(encoded) for _ in range(self.size)]
        dist.all_gather(rows, encoded)
        return [row.cpu().view(torch.float64).tolist() for row in rows]

    def encode_for_sum(self, row: Sequence[float | Tensor], like: Tensor) -> Tensor:
        """Encode a row so that the sum over the ranks contains all rows; see :meth:`decode_from_sum`."""
        # Each byte becomes one number, since integers up to 255 are exact in every floating-point dtype. Other ranks'
        # rows are zero.
        encoded = self._encode(row).to(like.device, like.dtype)
        rows = encoded.new_zeros(self.size, len(encoded))
        rows[self.rank] = encoded
        return rows.view(-1)

    def decode_from_sum(self, sums: Tensor) -> list[list[float]]:
        """Return the rows of all ranks, given the sum of their :meth:`encode_for_sum`."""
        return sums.to(torch.uint8).cpu().contiguous().view(torch.float64).view(self.size, -1).tolist()

    def _encode(self, row: Sequence[float | Tensor]) -> Tensor:
        """Return the bytes of a row as float64, on the GPU if the row contains a tensor."""
        # Accelerators other than CUDA may not support float64, so convert on the host, which synchronizes.
        if self._device.type != "cuda":
            row = [float(value) for value in row]
        on_device = [index for index, value in enumerate(row) if isinstance(value, Tensor)]
        data = torch.tensor([0.0 if isinstance(value, Tensor) else float(value) for value in row], dtype=torch.float64)
        if on_device:
            data = data.to(self._device)
            numbers = [value.reshape(()).to(self._device, torch.float64) for value in row if isinstance(value, Tensor)]
            data[on_device] = torch.stack(numbers)
        return data.view(torch.uint8)

    def all_gather_objects(self, value: _T) -> list[_T]:
        """Return the objects of all ranks. All ranks must call this."""
        return all_gather_objects(value)

    def broadcast_from_rank0(self, tensors: Iterable[Tensor]) -> float:
        """Broadcast rank 0's tensors; return this rank's drift. All ranks must call this."""
        drift = 0.0
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.layout == torch.strided:
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        # One message per dtype. Equal tensors are not written, so that their version counters do not change.
        for group in by_dtype.values():
            own = torch.cat([tensor.detach().reshape(-1).to(self._message_device) for tensor in group])
            reference = own.clone()
            dist.broadcast(reference, 0)
            if own.equal(reference):
                continue
            sizes = [tensor.numel() for tensor in group]
            for tensor, old, new in zip(group, torch.split(own, sizes), torch.split(reference, sizes), strict=True):
                if not old.equal(new):
                    old64, new64 = old.cpu().double(), new.cpu().double()
                    difference = (old64 - new64).abs().max() / new64.abs().max().clamp_min(1e-300)
                    drift = max(drift, float(difference))
                    with torch.no_grad():
                        tensor.copy_(new.view(tensor.shape))
        return drift
