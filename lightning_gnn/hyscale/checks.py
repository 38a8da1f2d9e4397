"""Checks before hybrid training starts: unsupported loaders, modules and precisions."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from lightning_gnn.datamodules.full_batch import FullBatch
from lightning_gnn.hyscale.options import TrainerSet
from lightning_gnn.hyscale.sharded_loader import is_shardable
from lightning_gnn.runtime.lightning import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    is_overridden,
    is_param_in_hook_signature,
    pl,
)

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def find_conflict(loader: object) -> str | None:
    """Return why several trainers cannot share a loader of this package, and what to use instead; None if they can."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, list) and any(isinstance(batch, FullBatch) for batch in dataset):
        return (
            "hyscale shards mini-batches, but the DataModule yields the full graph as a single batch; train with "
            "NeighborDataModule, or with strategy='ascend_hybrid', which shards the graph"
        )
    return None


def check_training(loader: object, module: pl.LightningModule) -> None:
    """Raise if the loader cannot be sharded, or if the module reads its loader itself."""
    if (conflict := find_conflict(loader)) is not None:
        raise ValueError(conflict)
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        raise ValueError("the training loader yields single samples (batch_size=None); give it a batch_size")
    if not is_shardable(loader):
        raise TypeError(
            "hyscale shards loaders that batch indices of a map-style dataset, such as PyG's NeighborLoader or those "
            f"of lightning_gnn.NeighborDataModule; it got {type(loader).__name__}"
        )
    try:
        len(loader)  # type: ignore[arg-type]  # raises if it has no length
    except TypeError:
        raise ValueError("the training loader has no length; give its batch_sampler a __len__") from None
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise TypeError("hyscale passes mini-batches to training_step, which must not take a dataloader_iter")


def overrides_transfer(module: pl.LightningModule) -> bool:
    """Whether the user overrides a batch transfer hook; Lightning then transfers the batches."""
    datamodule = module.trainer.datamodule  # type: ignore[attr-defined]
    return any(
        is_overridden(hook, owner) for hook in _TRANSFER_HOOKS for owner in (module, datamodule) if owner is not None
    )


def check_precision(precision: Precision, trainers: TrainerSet) -> None:
    """Raise if a trainer's device does not support the precision."""
    name = str(precision.precision)
    for trainer, device in zip(trainers.names, trainers.devices, strict=True):
        reason = None
        if (
            not isinstance(precision, (MixedPrecision, HalfPrecision, DoublePrecision))
            and type(precision) is not Precision
        ):
            reason = "its modules cannot be copied to another device"
        elif device.type == "cpu" and name in ("16-mixed", "16-true"):
            reason = "CPUs do not train in float16; use 'bf16-mixed' or cpu_trainers=0"
        elif device.type == "mps" and name == "64-true":
            reason = "MPS does not support float64"
        elif device.type == "cuda" and name.startswith("bf16") and not torch.cuda.is_bf16_supported():
            reason = "this GPU does not support bfloat16; use '32-true'"
        if reason is not None:
            raise ValueError(f"hyscale trainer {trainer} does not support precision={name!r}: {reason}")
