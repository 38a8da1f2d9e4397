"""Data Transfer, the third stage of HyScale-GNN's pipeline: copies mini-batches to a device, optionally quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage

from lightning_gnn.nn.sampled_edges import moved
from lightning_gnn.runtime.any_batch import copy_to, map_tensors
from lightning_gnn.runtime.devices import new_stream, on_stream, record_stream, works

TRANSFER_DTYPES = (None, "float16", "int8")
_FEATURES = "x"


@dataclass
class PackedRows:
    """Feature rows quantized to fewer bits."""

    values: Tensor  # float16 or int8 ``[n, F]``
    scales: Tensor | None  # float32 ``[n, 1]``, one step of each int8 row; None for float16
    dtype: torch.dtype  # original dtype

    @classmethod
    def pack(cls, rows: Tensor, dtype: str) -> PackedRows:
        """Round rows to float16, or to int8 with one scale per row and an error of at most scale / 2."""
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
        """Return the rows in their original dtype."""
        if self.scales is None:
            return self.values.to(self.dtype)
        return (self.values.to(torch.float32) * self.scales).to(self.dtype)


class Transfer:
    """Data Transfer stage (section V-B): copies a batch to a device via pinned memory and waits for the copy."""

    def __init__(self, device: torch.device, dtype: str | None = None) -> None:
        self.device = device
        self.dtype = dtype
        self._stream: torch.Stream | None = None
        self._can_pin = self._is_probed = False

    def __call__(self, batch: Any) -> Any:
        """Return a batch on the device; only PyG graphs are quantized."""
        packed: dict[int, PackedRows] = {}
        for index, store in enumerate(batch.stores if isinstance(batch, BaseData) else ()):
            if self._should_pack(store):
                packed[index] = PackedRows.pack(store[_FEATURES], str(self.dtype))
                store[_FEATURES] = packed[index].values
        batch = moved(batch, self._copy_to_device)
        for index, rows in packed.items():
            store = batch.stores[index]
            scales = None if rows.scales is None else rows.scales.to(self.device)
            store[_FEATURES] = PackedRows(store[_FEATURES], scales, rows.dtype).unpack()
        return batch

    def _should_pack(self, store: BaseStorage) -> bool:
        if self.dtype is None or _FEATURES not in store:
            return False
        rows = store[_FEATURES]
        return isinstance(rows, Tensor) and rows.is_floating_point() and rows.dim() == 2

    def _copy_to_device(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return copy_to(batch, self.device)
        if not self._is_probed:
            self._is_probed = True
            self._can_pin = works(lambda: torch.empty(1).pin_memory())
            self._stream = new_stream(self.device)
        if self._can_pin:
            batch = map_tensors(batch, _pin)
        if self._stream is None:
            return copy_to(batch, self.device)
        with on_stream(self._stream):
            batch = copy_to(batch, self.device, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()
        # The memory was allocated on this stream, but the consumer's stream uses it.
        consumer = torch.accelerator.current_stream(self.device)
        return map_tensors(batch, lambda tensor: record_stream(tensor, consumer))


def _pin(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.is_cpu and not tensor.is_pinned() else tensor
