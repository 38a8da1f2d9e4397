"""Lightning's names, all from one of its two packages: ``pytorch_lightning`` or ``lightning.pytorch``.

Both are built from the same sources, but their classes are different ones: a ``Trainer`` of one refuses a module of the
other. This module decides once per process, and every other module imports Lightning's names from here. The first that
applies decides:

1. the package whose names the script, or a module that is importing this package, has imported,
2. the environment variable ``LGNN_LIGHTNING``: ``lightning`` or ``pytorch_lightning``,
3. the package that is imported already, where it is the only one,
4. ``pytorch_lightning``.
"""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

_PACKAGES = ("pytorch_lightning", "lightning.pytorch")
_IMPORTS = {"pytorch_lightning": "import pytorch_lightning as pl", "lightning.pytorch": "import lightning as L"}


def _package_of(value: object) -> str | None:
    """Return the imported package of a module, class or function of Lightning, else None."""
    if not isinstance(value, ModuleType | type | FunctionType):
        return None
    top = str(value.__name__ if isinstance(value, ModuleType) else value.__module__).split(".")[0]
    name = "lightning.pytorch" if top == "lightning" else top
    return name if name in _PACKAGES and name in sys.modules else None


def _globals_of_callers() -> Iterator[dict[str, Any]]:
    """Yield the global names of the calling modules, innermost first, and of the script, not Lightning's or ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.split(".")[0] not in (
            "lightning_gnn",
            "lightning",
            "lightning_fabric",
            "pytorch_lightning",
            "importlib",
        ):
            yield frame.f_globals
        frame = frame.f_back
    yield vars(sys.modules["__main__"])


def _packages_of_callers() -> set[str]:
    """Return the packages of the innermost caller that has imported names of Lightning."""
    for names in _globals_of_callers():
        # A class that inherits from one of Lightning's belongs to the module that defines it, and does not count.
        if packages := {package for value in list(names.values()) if (package := _package_of(value))}:
            return packages
    return set()


def _choose_package() -> str:
    """Return ``pytorch_lightning`` or ``lightning.pytorch``, as the module's docstring says."""
    used = _packages_of_callers()
    if len(used) == 1:
        return used.pop()
    if wanted := os.environ.get("LGNN_LIGHTNING"):
        name = "lightning.pytorch" if wanted == "lightning" else wanted
        if name not in _PACKAGES:
            raise ValueError(
                f"LGNN_LIGHTNING={wanted} is not a package of Lightning; use lightning or pytorch_lightning"
            )
        if find_spec(name.partition(".")[0]) is None:
            raise ModuleNotFoundError(f"LGNN_LIGHTNING={wanted} is not installed: pip install {wanted}", name=name)
        return name
    imported = [name for name in _PACKAGES if name in sys.modules]
    return imported[0] if imported else "pytorch_lightning"


PACKAGE = _choose_package()
"""The package that this process uses: ``pytorch_lightning`` or ``lightning.pytorch``."""
FABRIC = {"pytorch_lightning": "lightning_fabric", "lightning.pytorch": "lightning.fabric"}[PACKAGE]
"""The package of Fabric beside it."""


def check_script() -> None:
    """Check that the script uses the package that this one uses.

    Raises:
        TypeError: if it has imported names of the other one only.
    """
    if all(name in sys.modules for name in _PACKAGES) and (used := _packages_of_callers()) and PACKAGE not in used:
        raise TypeError(_describe_mismatch(f"this script uses {(other := used.pop())}", other))


def check_package(value: object) -> None:
    """Check that an object's class is, or inherits from, one of the package that this one uses.

    Raises:
        TypeError: if it is one of the other package.
    """
    packages = {package for kind in type(value).__mro__ if (package := _package_of(kind))}
    if packages and PACKAGE not in packages:
        other = packages.pop()
        raise TypeError(_describe_mismatch(f"{type(value).__name__} is a class of {other}", other))


def of_package(path: str) -> str:
    """Return the dotted path of a class of Lightning, in either package, within the package that this process uses."""
    for fabric, pytorch in (("lightning_fabric.", "pytorch_lightning."), ("lightning.fabric.", "lightning.pytorch.")):
        for prefix, chosen in ((fabric, FABRIC), (pytorch, PACKAGE)):
            if path.startswith(prefix):
                return f"{chosen}.{path.removeprefix(prefix)}"
    return path


def _describe_mismatch(what: str, other: str) -> str:
    """Return the message on a use of the other package, with the lines that cure it."""
    return (
        f"{what}, but lightning_gnn uses {PACKAGE}: their classes have the same names, but do not work together. Write "
        f"`{_IMPORTS[other]}` above the first `import lightning_gnn`, or set LGNN_LIGHTNING={other.split('.')[0]} in "
        f"the environment; or write `{_IMPORTS[PACKAGE]}` and take Trainer and LightningModule from there"
    )


# The names of both lists are the same; a type checker reads the first one.
if TYPE_CHECKING or PACKAGE == "pytorch_lightning":
    import pytorch_lightning as pl
    from lightning_fabric.accelerators.registry import _AcceleratorRegistry
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning_fabric.plugins.environments.lightning import find_free_network_port
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning_fabric.strategies.registry import _StrategyRegistry
    from lightning_fabric.utilities import device_parser
    from lightning_fabric.utilities.apply_func import move_data_to_device
    from lightning_fabric.utilities.cloud_io import _is_local_file_protocol
    from lightning_fabric.utilities.distributed import (
        DistributedSamplerWrapper,
        _init_dist_connection,
        _sync_ddp_if_available,
    )
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from lightning_fabric.utilities.imports import _IS_INTERACTIVE
    from lightning_fabric.utilities.seed import reset_seed
    from lightning_fabric.utilities.types import _DEVICE
    from pytorch_lightning.accelerators import Accelerator, AcceleratorRegistry, CPUAccelerator
    from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint, WeightAveraging
    from pytorch_lightning.core.optimizer import do_nothing_closure
    from pytorch_lightning.overrides.distributed import (
        UnrepeatedDistributedSampler,
        UnrepeatedDistributedSamplerWrapper,
    )
    from pytorch_lightning.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from pytorch_lightning.strategies import (
        DDPStrategy,
        ParallelStrategy,
        SingleDeviceStrategy,
        Strategy,
        StrategyRegistry,
    )
    from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from pytorch_lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
    from pytorch_lightning.trainer.states import RunningStage, TrainerFn, TrainerStatus
    from pytorch_lightning.utilities import CombinedLoader, rank_zero_info, rank_zero_only, rank_zero_warn
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.seed import isolate_rng
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
    from pytorch_lightning.utilities.types import STEP_OUTPUT
else:
    import lightning.pytorch as pl
    from lightning.fabric.accelerators.registry import _AcceleratorRegistry
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.plugins.environments.lightning import find_free_network_port
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.strategies.registry import _StrategyRegistry
    from lightning.fabric.utilities import device_parser
    from lightning.fabric.utilities.apply_func import move_data_to_device
    from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
    from lightning.fabric.utilities.distributed import (
        DistributedSamplerWrapper,
        _init_dist_connection,
        _sync_ddp_if_available,
    )
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.fabric.utilities.types import _DEVICE
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry, CPUAccelerator
    from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, WeightAveraging
    from lightning.pytorch.core.optimizer import do_nothing_closure
    from lightning.pytorch.overrides.distributed import (
        UnrepeatedDistributedSampler,
        UnrepeatedDistributedSamplerWrapper,
    )
    from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import (
        DDPStrategy,
        ParallelStrategy,
        SingleDeviceStrategy,
        Strategy,
        StrategyRegistry,
    )
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
    from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_only, rank_zero_warn
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.seed import isolate_rng
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning.pytorch.utilities.types import STEP_OUTPUT
