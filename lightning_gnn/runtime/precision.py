"""Mixed precision on the device that trains: Lightning knows the CPU, MPS and, for everything else, CUDA."""

from __future__ import annotations

import torch
from pytorch_lightning.plugins import MixedPrecision, Precision


def match_device(plugin: Precision, device: torch.device) -> None:
    """Make a precision plugin autocast, and scale losses, on the device that trains.

    Lightning's connector gives ``16-mixed`` and ``bf16-mixed`` the device ``"cuda"`` for every accelerator that it does
    not know by name; autocast would then do nothing on another device. Call it in a strategy's ``setup_environment``.

    Args:
        plugin: The strategy's precision plugin; only Lightning's :class:`MixedPrecision` is changed, in place.
        device: The strategy's ``root_device``.
    """
    if not isinstance(plugin, MixedPrecision) or plugin.device == device.type:
        return
    plugin.device = device.type
    scaler = plugin.scaler
    if type(scaler) is torch.amp.GradScaler and scaler._device != device.type:
        plugin.scaler = torch.amp.GradScaler(device.type)
        if state := scaler.state_dict():  # empty where torch disabled it for want of CUDA
            plugin.scaler.load_state_dict(state)
