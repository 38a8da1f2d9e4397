"""``Trainer(accelerator="npu")``: Ascend NPUs through torch_npu, and the single-device strategy."""

import ctypes
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_gnn.runtime.devices import collective_backend, match_device
from lightning_gnn.runtime.lightning import (
    _DEVICE,
    Accelerator,
    CheckpointIO,
    DDPStrategy,
    MisconfigurationException,
    Precision,
    SingleDeviceStrategy,
    Strategy,
    _AcceleratorConnector,
    _AcceleratorRegistry,
    _init_dist_connection,
    _StrategyRegistry,
    device_parser,
    pl,
    reset_seed,
)

_CANN_LIBRARY = "libascendcl.so"  # CANN's runtime library, a dependency of torch_npu


class NPUAccelerator(Accelerator):
    """Accelerator for Ascend NPUs.

    Raises:
        MisconfigurationException: No NPU can be used; the message names the missing package and how to install it.

    Examples:
        On a machine without an NPU:

        >>> from lightning_gnn import NPUAccelerator
        >>> NPUAccelerator.is_available()
        False
    """

    def __init__(self) -> None:
        super().__init__()
        check_available()

    @override
    def setup_device(self, device: torch.device) -> None:
        """Set an NPU as the current device."""
        if device.type != "npu":
            raise MisconfigurationException(
                f"accelerator='npu' was requested, but the strategy trains on {device}; "
                "use strategy='auto', 'hyscale' or 'ascend_hybrid'"
            )
        device_module().set_device(device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Free device memory that an earlier run has cached."""
        device_module().empty_cache()

    @override
    def teardown(self) -> None:
        """Free cached device memory."""
        device_module().empty_cache()

    @override
    def get_device_stats(self, device: _DEVICE) -> dict[str, Any]:
        """Return a device's allocator statistics, and ``memory.free`` and ``memory.total`` in bytes."""
        module = device_module()
        free, total = module.mem_get_info(device)
        return {**module.memory_stats(device), "memory.free": free, "memory.total": total}

    @staticmethod
    @override
    def parse_devices(devices: int | str | Iterable[int]) -> list[int]:
        """Return the device indices of ``Trainer(devices=…)``: ``2``, ``[0, 2]``, ``"0,2"``, or ``-1`` for all."""
        count = NPUAccelerator.auto_device_count()
        device_parser._check_data_type(devices)
        value = devices if isinstance(devices, int | str) else list(devices)
        requested = device_parser._normalize_parse_gpu_string_input(value)
        requested = count if requested == -1 else requested
        indices = list(range(requested)) if isinstance(requested, int) else requested
        device_parser._check_unique(indices)
        if not indices or not set(indices) <= set(range(count)):
            raise MisconfigurationException(
                f"devices={devices!r}, but this machine has {count} NPUs: give their number, or indices from 0"
            )
        return indices

    @staticmethod
    @override
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Return the devices with these indices."""
        return [torch.device("npu", index) for index in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        """Return the number of NPUs, which is the number used by ``devices="auto"``."""
        return 0 if why_unavailable() else int(device_module().device_count())

    @staticmethod
    @override
    def is_available() -> bool:
        """Whether an NPU can be used."""
        return why_unavailable() is None

    @staticmethod
    @override
    def name() -> str:
        """Return ``"npu"``."""
        return "npu"

    @classmethod
    @override
    def register_accelerators(cls, accelerator_registry: _AcceleratorRegistry) -> None:
        """Register ``accelerator="npu"``."""
        accelerator_registry.register(cls.name(), cls, description="Ascend NPUs, through torch_npu")


class SingleNPUStrategy(SingleDeviceStrategy):
    """Trains on one NPU: ``device``, such as ``"npu:1"``, or the device of ``Trainer(devices=…)``."""

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
        self._is_device_set = device is not None
        _check_device(self.root_device)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register ``strategy="single_npu"``."""
        strategy_registry.register(cls.strategy_name, cls, description="Training on one Ascend NPU")

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device; empty until it is known, so that Lightning's connector sets it."""
        return [self.root_device] if self._is_device_set else []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise MisconfigurationException(
                f"strategy='single_npu' trains on one NPU, but the trainer has {len(devices)} devices; use devices=1, "
                "strategy='ddp' or 'hyscale' for mini-batches, or 'ascend_hybrid' for a full graph"
            )
        _check_device(devices[0])
        self._root_device = devices[0]
        self._is_device_set = True

    @override
    def setup_environment(self) -> None:
        """Set the current device, also for mixed precision."""
        match_device(self.precision_plugin, self.root_device)
        super().setup_environment()


class NPUDDPStrategy(DDPStrategy):
    """Lightning's ``"ddp"``, also on NPUs: there collectives through hccl, and no CUDA streams."""

    @override
    def setup_environment(self) -> None:
        """Set the current device, also for mixed precision, and connect the ranks."""
        match_device(self.precision_plugin, self.root_device)
        super().setup_environment()

    @override
    def setup_distributed(self) -> None:
        """Connect the ranks, without binding the NPU to the groups, since torch would refuse groups of gloo."""
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        assert self.cluster_environment is not None
        _init_dist_connection(self.cluster_environment, self._process_group_backend, timeout=self._timeout)

    @override
    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self.root_device.type == "npu":
            return collective_backend([self.root_device])
        return super()._get_process_group_backend()

    @override
    def determine_ddp_device_ids(self) -> list[int] | None:
        """Return None on NPUs: DDP leaves the module on its device, and Lightning creates no CUDA stream."""
        return None if self.root_device.type == "npu" else super().determine_ddp_device_ids()

    @override
    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: dist.ReduceOp | str | None = "mean") -> Tensor:
        """Reduce over the ranks; hccl and gloo compute sums, not means."""
        is_mean = reduce_op in ("mean", "avg") and isinstance(tensor, Tensor)
        total = super().reduce(tensor, group, "sum" if is_mean else reduce_op)
        return total / dist.get_world_size(group) if is_mean else total


def device_module() -> ModuleType:
    """Return ``torch.npu``, registered by torch_npu."""
    module: ModuleType = torch.npu  # type: ignore[attr-defined]
    return module


def check_available() -> None:
    """Raise MisconfigurationException if no NPU can be used."""
    if reason := why_unavailable():
        raise MisconfigurationException(f"accelerator='npu' cannot be used: {reason}")


def why_unavailable() -> str | None:
    """Return what is missing to use an NPU and how to install it, or None if an NPU can be used."""
    # Import torch_npu only if CANN's runtime can be loaded: a failed import may leave torch partially patched. (torch
    # imports an installed torch_npu itself, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.)
    if not hasattr(torch, "npu"):
        missing = []
        if importlib.util.find_spec("torch_npu") is None:
            release = torch.__version__.split("+")[0]
            missing.append(
                f"torch_npu is not installed (pip install 'lightning-gnn[npu]', in the release for torch {release})"
            )
        if problem := _find_cann_problem():
            missing.append(
                f"CANN is not installed, or its environment is not set ({problem}; install the CANN toolkit and "
                "kernels from https://www.hiascend.com/software/cann, then source ascend-toolkit/set_env.sh)"
            )
        if missing:
            return " and ".join(missing)
        if problem := _find_import_problem():
            version = torch.__version__
            return f"torch_npu and CANN are installed, but incompatible with each other or torch {version}: {problem}"
    if not device_module().device_count():
        return "torch_npu finds no NPU; check the output of npu-smi info and ASCEND_RT_VISIBLE_DEVICES"
    return None


def _find_cann_problem() -> str:
    try:
        ctypes.CDLL(_CANN_LIBRARY)
    except OSError as error:
        return str(error)
    return ""


@cache  # a failed import leaves modules behind, so a second attempt would fail differently
def _find_import_problem() -> str:
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if hasattr(torch, "npu") else "torch_npu did not register the device"


def patch_connector(connector: type[_AcceleratorConnector]) -> None:
    """Patch Lightning's connector, which has no hook, to support NPUs with ``strategy="auto"`` and ``"ddp"``."""
    # For one device of an unknown accelerator, the connector would silently select a single-device strategy on the CPU.
    # If a later Lightning version removes the first method, NPUAccelerator raises an error for the CPU.
    original: Callable[[_AcceleratorConnector], Strategy | str] | None = getattr(connector, "_choose_strategy", None)
    if original is None or getattr(original, "supports_npus", False):
        return

    @wraps(original)
    def choose(self: _AcceleratorConnector) -> Strategy | str:
        if not isinstance(self.accelerator, NPUAccelerator):
            return original(self)
        is_single = len(self._parallel_devices) == 1 and self._num_nodes_flag == 1
        return SingleNPUStrategy(self._parallel_devices[0]) if is_single else "ddp"

    complete = connector._lazy_init_strategy

    @wraps(complete)
    def complete_on_npus(self: _AcceleratorConnector) -> None:
        if isinstance(self.accelerator, NPUAccelerator) and type(self.strategy) is DDPStrategy:
            self.strategy.__class__ = NPUDDPStrategy  # the user's options stay
        complete(self)

    choose.supports_npus = True  # type: ignore[attr-defined]
    connector._choose_strategy = choose  # type: ignore[method-assign]
    connector._lazy_init_strategy = complete_on_npus  # type: ignore[method-assign]


def _check_device(device: torch.device) -> None:
    if device.type != "npu":
        raise MisconfigurationException(f"strategy='single_npu' trains on an NPU, but the device is {device}")
