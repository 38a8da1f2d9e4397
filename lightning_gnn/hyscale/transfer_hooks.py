"""The user's hooks around the transfer of batches, where a batch is a mini-batch for each trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_gnn.hyscale.pipeline import HybridBatch

_BEFORE = "_on_before_batch_transfer"


class TransferHooks:
    """Calls the hooks of a LightningModule or its DataModule once per mini-batch, as they expect batches of PyG.

    Args:
        module: The module; hooks of a DataModule are called through it too.
        devices: Where each trainer's mini-batch goes.
    """

    def __init__(self, module: pl.LightningModule, devices: Sequence[torch.device]) -> None:
        self._module = module
        self._devices = list(devices)

    def install(self) -> None:
        """Stand in for the module's method that Lightning calls before the transfer."""
        self._module.__dict__[_BEFORE] = self._before

    def remove(self) -> None:
        """Give the module its own method back."""
        self._module.__dict__.pop(_BEFORE, None)

    def move(self, batch: HybridBatch, dataloader_idx: int = 0) -> HybridBatch:
        """Let the hooks move each mini-batch to its trainer."""
        for trainer in batch.active:
            part, device = batch.parts[trainer], self._devices[trainer]
            batch.parts[trainer] = self._module._apply_batch_transfer_handler(part, device, dataloader_idx)
        return batch

    def _before(self, batch: Any, dataloader_idx: int = 0) -> Any:
        original = type(self._module)._on_before_batch_transfer
        if not isinstance(batch, HybridBatch):
            return original(self._module, batch, dataloader_idx)
        for trainer in batch.active:
            batch.parts[trainer] = original(self._module, batch.parts[trainer], dataloader_idx)
        return batch
