"""Plugins for a PyTorch Lightning ``Trainer`` that train GNNs on the hardware people really have."""

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_gnn import startup
from lightning_gnn.systems import PACKAGES

if level := os.environ.get("LGNN_LOG"):
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
    try:
        logging.getLogger(__name__).setLevel(level.upper())
    except ValueError:
        raise ValueError(f"LGNN_LOG={level} is not a level of logging; use debug, info, warning or error") from None
if not startup.needs_no_library():
    import lightning_gnn.registration  # noqa: F401

if TYPE_CHECKING:
    from lightning_gnn.accelerators import NPUAccelerator as NPUAccelerator
    from lightning_gnn.collective import CollectiveDataModule as CollectiveDataModule
    from lightning_gnn.collective import CollectiveLinkDataModule as CollectiveLinkDataModule
    from lightning_gnn.compressed import CompressedGraph as CompressedGraph
    from lightning_gnn.datamodules import LinkDataModule as LinkDataModule
    from lightning_gnn.datamodules import NeighborDataModule as NeighborDataModule
    from lightning_gnn.distributed import MonitoredDDPStrategy as MonitoredDDPStrategy
    from lightning_gnn.features import FeatureTable as FeatureTable
    from lightning_gnn.full_graph import AscendHybridParallelStrategy as AscendHybridParallelStrategy
    from lightning_gnn.full_graph import FullGraphDataModule as FullGraphDataModule
    from lightning_gnn.gpu_sampling import PersistentLinkDataModule as PersistentLinkDataModule
    from lightning_gnn.gpu_sampling import PersistentNeighborSampler as PersistentNeighborSampler
    from lightning_gnn.gpu_sampling import PersistentSamplerDataModule as PersistentSamplerDataModule
    from lightning_gnn.graph import CSCGraph as CSCGraph
    from lightning_gnn.graph import HeteroCSCGraph as HeteroCSCGraph
    from lightning_gnn.hyscale import HyScaleStrategy as HyScaleStrategy
    from lightning_gnn.nn import FullInference as FullInference
    from lightning_gnn.ops import aggregate as aggregate
    from lightning_gnn.ops import edge_softmax as edge_softmax
    from lightning_gnn.ops import gather_rows as gather_rows
    from lightning_gnn.ops import sample_hetero_neighbors as sample_hetero_neighbors
    from lightning_gnn.ops import sample_neighbors as sample_neighbors
    from lightning_gnn.partitioned import PartitionedDataModule as PartitionedDataModule
    from lightning_gnn.partitioned import PartitionedLinkDataModule as PartitionedLinkDataModule
    from lightning_gnn.pyg import enable_pyg_sampling as enable_pyg_sampling
    from lightning_gnn.sampling import NeighborSampler as NeighborSampler

__version__ = "0.1.0"

_NAMES = {package.package: package.public_names for package in PACKAGES}
"""Subpackages with their public names, which are imported lazily on first access."""

__all__ = sorted(name for names in _NAMES.values() for name in names)

if not TYPE_CHECKING:  # otherwise a type checker would accept any attribute

    def __getattr__(name: str) -> Any:
        if name in _NAMES:
            return import_module(f"lightning_gnn.{name}")
        for package, names in _NAMES.items():
            if name in names:
                globals()[name] = value = getattr(import_module(f"lightning_gnn.{package}"), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_NAMES})
