"""``Trainer(accelerator="npu")``: Huawei's Ascend processors, through torch_npu, and the strategy for one of them."""

import ctypes
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import CheckpointIO
from lightning_fabric.utilities import device_parser
from lightning_fabric.utilities.exceptions import MisconfigurationException
from lightning_fabric.utilities.types import _DEVICE
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.plugins import Precision
from pytorch_lightning.strategies import SingleDeviceStrategy, Strategy
from pytorch_lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector
from typing_extensions import override

from lightning_gnn.runtime.devices import match_device

_RUNTIME = "libascendcl.so"  # CANN's runtime library, which torch_npu is linked to


class NPUAccelerator(Accelerator):
    """Accelerator for Ascend NPUs.

    Raises:
        MisconfigurationException: There is no NPU to use; says what is missing and how to get it.

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
        """Make a device, which must be an NPU, the current one."""
        if device.type != "npu":
            raise MisconfigurationException(
                f"accelerator='npu' was asked for, but the strategy trains on {device}; "
                "use strategy='single_npu' or strategy='ascend_hybrid'"
            )
        device_module().set_device(device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Give memory that an earlier run cached back to the device."""
        device_module().empty_cache()

    @override
    def teardown(self) -> None:
        """Give cached memory back to the device."""
        device_module().empty_cache()

    @override
    def get_device_stats(self, device: _DEVICE) -> dict[str, Any]:
        """Return the allocator's statistics, and ``memory.free`` and ``memory.total`` in bytes, of a device."""
        module = device_module()
        free, total = module.mem_get_info(device)
        return {**module.memory_stats(device), "memory.free": free, "memory.total": total}

    @staticmethod
    @override
    def parse_devices(devices: int | str | Iterable[int]) -> list[int]:
        """Return the indices that ``Trainer(devices=…)`` asks for: ``2``, ``[0, 2]``, ``"0,2"``, or ``-1`` for all."""
        count = NPUAccelerator.auto_device_count()
        device_parser._check_data_type(devices)
        given = devices if isinstance(devices, int | str) else list(devices)
        asked = device_parser._normalize_parse_gpu_string_input(given)
        asked = count if asked == -1 else asked
        chosen = list(range(asked)) if isinstance(asked, int) else asked
        device_parser._check_unique(chosen)
        if not chosen or not set(chosen) <= set(range(count)):
            raise MisconfigurationException(
                f"devices={devices!r}, but this machine has {count} NPUs: give how many, or some numbers from 0"
            )
        return chosen

    @staticmethod
    @override
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Return the devices of the indices."""
        return [torch.device("npu", index) for index in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        """Return the number of NPUs, all of which ``devices="auto"`` takes."""
        return 0 if why_unavailable() else int(device_module().device_count())

    @staticmethod
    @override
    def is_available() -> bool:
        """Say whether there is an NPU to use."""
        return why_unavailable() is None

    @staticmethod
    @override
    def name() -> str:
        """Return ``"npu"``."""
        return "npu"


class SingleNPUStrategy(SingleDeviceStrategy):
    """Trains on one NPU: ``device``, e.g. ``"npu:1"``, or the one that ``Trainer(devices=…)`` names."""

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


def device_module() -> ModuleType:
    """Return ``torch.npu``, which torch_npu registers."""
    module: ModuleType = torch.npu  # type: ignore[attr-defined]
    return module


def check_available() -> None:
    """Check that there is an NPU to use."""
    if reason := why_unavailable():
        raise MisconfigurationException(f"accelerator='npu' cannot be used: {reason}")


def why_unavailable() -> str | None:
    """Say what is missing for the use of an NPU, and how to get it; None where nothing is."""
    # torch_npu is imported only where CANN's runtime loads: without it, the import fails and may leave torch half
    # changed. (torch imports an installed torch_npu by itself, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.)
    if not hasattr(torch, "npu"):
        missing = []
        if importlib.util.find_spec("torch_npu") is None:
            release = torch.__version__.split("+")[0]
            missing.append(
                f"torch_npu is not installed (pip install 'lightning-gnn[npu]', in the release for torch {release})"
            )
        if problem := _problem_of_cann():
            missing.append(
                f"CANN is not installed, or its environment is not set ({problem}; install the CANN toolkit and "
                "kernels from https://www.hiascend.com/software/cann, then source ascend-toolkit/set_env.sh)"
            )
        if missing:
            return " and ".join(missing)
        if problem := _problem_of_import():
            return f"torch_npu and CANN are installed, but do not fit together or torch {torch.__version__}: {problem}"
    if not device_module().device_count():
        return "torch_npu finds no NPU; see what npu-smi info lists, and whether ASCEND_RT_VISIBLE_DEVICES hides it"
    return None


def _problem_of_cann() -> str:
    try:
        ctypes.CDLL(_RUNTIME)
    except OSError as error:
        return str(error)
    return ""


@cache  # a second attempt at a failed import meets what the first left behind
def _problem_of_import() -> str:
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if hasattr(torch, "npu") else "torch_npu did not register the device"


def choose_npus(connector: type[_AcceleratorConnector]) -> None:
    """Wrap the method of Lightning's connector, which has no hook, that chooses for ``strategy="auto"``."""
    # Left alone, it answers a single-device strategy on the CPU for one device of an accelerator that it does not know,
    # and trains there without a word. Should a later Lightning lose the method, NPUAccelerator refuses the CPU.
    original: Callable[[_AcceleratorConnector], Strategy | str] | None = getattr(connector, "_choose_strategy", None)
    if original is None or getattr(original, "chooses_npus", False):
        return

    @wraps(original)
    def choose(self: _AcceleratorConnector) -> Strategy | str:
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
    connector._choose_strategy = choose  # type: ignore[method-assign]


def _check_device(device: torch.device) -> None:
    if device.type != "npu":
        raise MisconfigurationException(f"strategy='single_npu' trains on an NPU, but the device is {device}")
