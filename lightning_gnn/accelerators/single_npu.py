"""Training on one NPU, and the choice of it for ``Trainer(accelerator="npu", devices=1)``."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from lightning_fabric.plugins import CheckpointIO
from lightning_fabric.strategies.registry import _StrategyRegistry
from lightning_fabric.utilities.exceptions import MisconfigurationException
from lightning_fabric.utilities.types import _DEVICE
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.plugins import Precision
from pytorch_lightning.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_gnn.accelerators.npu import NPUAccelerator, check_available
from lightning_gnn.runtime.devices import match_device


class SingleNPUStrategy(SingleDeviceStrategy):
    """Trains on one NPU.

    Args:
        device: Which, e.g. ``"npu:1"``; None takes the one that ``Trainer(devices=…)`` names.
        accelerator: What the device is; None takes the trainer's.
        checkpoint_io: How checkpoints are written and read; None takes Lightning's.
        precision_plugin: Number formats of the steps; None takes the trainer's.

    Raises:
        MisconfigurationException: There is no NPU to use, or the device is none.
    """

    strategy_name = "single_npu"

    def __init__(
        self,
        device: _DEVICE | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_available()
        super().__init__("npu:0" if device is None else device, accelerator, checkpoint_io, precision_plugin)
        self._chosen = device is not None
        _check_device(self.root_device)

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device, or nothing where the trainer is still to name it: so Lightning's connector hands it over."""
        return [self.root_device] if self._chosen else []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise MisconfigurationException(
                f"strategy='single_npu' trains on one NPU, but the trainer has {len(devices)} devices; "
                "use devices=1, or strategy='ascend_hybrid'"
            )
        _check_device(devices[0])
        self._root_device = devices[0]
        self._chosen = True

    @override
    def setup_environment(self) -> None:
        """Make the device the current one, and that of mixed precision."""
        match_device(self.precision_plugin, self.root_device)
        super().setup_environment()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make ``strategy="single_npu"`` known."""
        strategy_registry.register(cls.strategy_name, cls, description="Training on one Ascend NPU")


def choose_npus(connector: type) -> None:
    """Teach Lightning's connector which strategy ``"auto"`` stands for on NPUs.

    Left alone, it answers a single-device strategy on the CPU for one device of an accelerator that it does not know,
    and trains there without a word. It has no hook for the choice, so the method that makes it is wrapped; every other
    accelerator goes to the original. Should a later Lightning lose the method, :class:`NPUAccelerator` refuses the CPU.

    Args:
        connector: Lightning's ``_AcceleratorConnector``.
    """
    original = getattr(connector, "_choose_strategy", None)
    if original is None or getattr(original, "chooses_npus", False):
        return

    @wraps(original)
    def choose(self: Any) -> Any:
        if not isinstance(self.accelerator, NPUAccelerator):
            return original(self)
        if len(self._parallel_devices) == 1 and self._num_nodes_flag == 1:
            return SingleNPUStrategy(self._parallel_devices[0])
        raise MisconfigurationException(
            "strategy='auto' would be Lightning's DDP, which needs CUDA streams; for full graphs on "
            f"{len(self._parallel_devices)} NPUs on {self._num_nodes_flag} nodes use strategy='ascend_hybrid', "
            "else devices=1"
        )

    choose.chooses_npus = True  # type: ignore[attr-defined]
    connector._choose_strategy = choose  # type: ignore[attr-defined]


def _check_device(device: torch.device) -> None:
    if device.type != "npu":
        raise MisconfigurationException(f"strategy='single_npu' trains on an NPU, but the device is {device}")
