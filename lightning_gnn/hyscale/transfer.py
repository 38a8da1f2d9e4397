"""Data Transfer, the third stage of HyScale-GNN's pipeline: mini-batches to a device, in fewer bits if wanted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage

from lightning_gnn.nn.sampled_edges import moved
from lightning_gnn.runtime.devices import record_stream, works

TRANSFER_DTYPES = (None, "float16", "int8")
_FEATURES = "x"


@dataclass
class PackedRows:
    """Feature rows in fewer bits."""

    values: Tensor  # float16 or int8 ``[n, F]``
    scales: Tensor | None  # float32 ``[n, 1]``, the value of 1 in each int8 row; None beside float16
    dtype: torch.dtype

    @classmethod
    def pack(cls, rows: Tensor, dtype: str) -> PackedRows:
        """Round rows to float16, or to int8 with one scale per row: an error of at most scale / 2."""
        if dtype == "float16":
            values = rows.to(torch.float16)
            if not bool(values.isfinite().all()):
                raise ValueError(
                    "transfer_dtype='float16': a feature exceeds 65504 or is not finite; use 'int8' or None"
                )
            return cls(values, None, rows.dtype)
        largest = rows.abs().amax(dim=1, keepdim=True).to(torch.float32)
        if not bool(largest.isfinite().all()):
            raise ValueError("transfer_dtype='int8': a feature is not finite; use None")
        scales = largest / 127.0
        values = (rows / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-127, 127)
        return cls(values.to(torch.int8), scales, rows.dtype)

    def unpack(self) -> Tensor:
        """Return rows of the dtype that they had."""
        if self.scales is None:
            return self.values.to(self.dtype)
        return (self.values.to(torch.float32) * self.scales).to(self.dtype)


class Transfer:
    """The stage Data Transfer (section V-B): copies a batch to a device by pinned memory; returns on its arrival."""

    def __init__(self, device: torch.device, dtype: str | None = None) -> None:
        self.device = device
        self.dtype = dtype
        self._stream: torch.Stream | None = None
        self._pins = self._probed = False

    def __call__(self, batch: BaseData) -> BaseData:
        """Move a batch of PyG, homogeneous or heterogeneous."""
        packed: dict[int, PackedRows] = {}
        for place, store in enumerate(batch.stores):
            if self._packs(store):
                packed[place] = PackedRows.pack(store[_FEATURES], str(self.dtype))
                store[_FEATURES] = packed[place].values
        batch = moved(batch, self._move)
        for place, rows in packed.items():
            store = batch.stores[place]
            scales = None if rows.scales is None else rows.scales.to(self.device)
            store[_FEATURES] = PackedRows(store[_FEATURES], scales, rows.dtype).unpack()
        return batch

    def _packs(self, store: BaseStorage) -> bool:
        if self.dtype is None or _FEATURES not in store:
            return False
        rows = store[_FEATURES]
        return isinstance(rows, Tensor) and rows.is_floating_point() and rows.dim() == 2

    def _move(self, batch: BaseData) -> BaseData:
        if self.device.type == "cpu":
            return batch.to(self.device)
        if not self._probed:
            self._probed = True
            self._pins = works(lambda: torch.empty(1).pin_memory())
            if works(lambda: torch.Stream(self.device).record_event().synchronize()):
                self._stream = torch.Stream(self.device)
        if self._pins:
            batch = batch.apply(_pinned)
        if self._stream is None:
            return batch.to(self.device)
        with self._stream:
            batch = batch.to(self.device, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()
        # Its memory belongs to this stream, but is used on another one.
        consumer = torch.accelerator.current_stream(self.device)
        return batch.apply(lambda tensor: record_stream(tensor, consumer))


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.is_cpu and not tensor.is_pinned() else tensor
