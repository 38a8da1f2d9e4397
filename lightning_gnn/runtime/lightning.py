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
_NOT_CALLERS = ("lightning_gnn", "lightning", "lightning_fabric", "pytorch_lightning", "importlib")
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
        if str(frame.f_globals.get("__name__", "")).split(".")[0] not in _NOT_CALLERS:
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


# A type checker reads the first package.
if TYPE_CHECKING or PACKAGE == "pytorch_lightning":
    import lightning_fabric as fabric
    import pytorch_lightning as pl
    from pytorch_lightning.overrides import distributed
    from pytorch_lightning.trainer.connectors import accelerator_connector
    from pytorch_lightning.trainer.connectors.logger_connector import result
else:
    import lightning.fabric as fabric
    import lightning.pytorch as pl
    from lightning.pytorch.overrides import distributed
    from lightning.pytorch.trainer.connectors import accelerator_connector
    from lightning.pytorch.trainer.connectors.logger_connector import result

_AcceleratorRegistry = fabric.accelerators.registry._AcceleratorRegistry
CheckpointIO = fabric.plugins.CheckpointIO
ClusterEnvironment = fabric.plugins.ClusterEnvironment
TorchCheckpointIO = fabric.plugins.TorchCheckpointIO
find_free_network_port = fabric.plugins.environments.lightning.find_free_network_port
SLURMEnvironment = fabric.plugins.environments.slurm.SLURMEnvironment
_StrategyRegistry = fabric.strategies.registry._StrategyRegistry
device_parser = fabric.utilities.device_parser
move_data_to_device = fabric.utilities.apply_func.move_data_to_device
_is_local_file_protocol = fabric.utilities.cloud_io._is_local_file_protocol
DistributedSamplerWrapper = fabric.utilities.distributed.DistributedSamplerWrapper
_init_dist_connection = fabric.utilities.distributed._init_dist_connection
_sync_ddp_if_available = fabric.utilities.distributed._sync_ddp_if_available
MisconfigurationException = fabric.utilities.exceptions.MisconfigurationException
_IS_INTERACTIVE = fabric.utilities.imports._IS_INTERACTIVE
reset_seed = fabric.utilities.seed.reset_seed
_DEVICE = fabric.utilities.types._DEVICE
Accelerator = pl.accelerators.Accelerator
AcceleratorRegistry = pl.accelerators.AcceleratorRegistry
CPUAccelerator = pl.accelerators.CPUAccelerator
Checkpoint = pl.callbacks.Checkpoint
ModelCheckpoint = pl.callbacks.ModelCheckpoint
WeightAveraging = pl.callbacks.WeightAveraging
do_nothing_closure = pl.core.optimizer.do_nothing_closure
UnrepeatedDistributedSampler = distributed.UnrepeatedDistributedSampler
UnrepeatedDistributedSamplerWrapper = distributed.UnrepeatedDistributedSamplerWrapper
DoublePrecision = pl.plugins.DoublePrecision
HalfPrecision = pl.plugins.HalfPrecision
MixedPrecision = pl.plugins.MixedPrecision
Precision = pl.plugins.Precision
DDPStrategy = pl.strategies.DDPStrategy
ParallelStrategy = pl.strategies.ParallelStrategy
SingleDeviceStrategy = pl.strategies.SingleDeviceStrategy
Strategy = pl.strategies.Strategy
StrategyRegistry = pl.strategies.StrategyRegistry
_SubprocessScriptLauncher = pl.strategies.launchers._SubprocessScriptLauncher
_AcceleratorConnector = accelerator_connector._AcceleratorConnector
_Metadata = result._Metadata
_ResultMetric = result._ResultMetric
_Sync = result._Sync
RunningStage = pl.trainer.states.RunningStage
TrainerFn = pl.trainer.states.TrainerFn
TrainerStatus = pl.trainer.states.TrainerStatus
CombinedLoader = pl.utilities.CombinedLoader
rank_zero_info = pl.utilities.rank_zero_info
rank_zero_only = pl.utilities.rank_zero_only
rank_zero_warn = pl.utilities.rank_zero_warn
SIGTERMException = pl.utilities.exceptions.SIGTERMException
is_overridden = pl.utilities.model_helpers.is_overridden
isolate_rng = pl.utilities.seed.isolate_rng
is_param_in_hook_signature = pl.utilities.signature_utils.is_param_in_hook_signature
STEP_OUTPUT = pl.utilities.types.STEP_OUTPUT
