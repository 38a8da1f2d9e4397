"""Neighbour sampling by CPU threads: the ground on which the other systems' mini-batches stand.

Reading order, from the definition to the DataModule: ``ops/sample/reference.py``, ``ops/sample/definition.py`` (what a
sample is), ``ops/sample/numba.py`` (how it is drawn), ``sampling/neighbor.py`` (PyG's sampler interface),
``sampling/loader.py`` (the stages of a mini-batch, in threads), ``sampling/datamodule_base.py`` and
``sampling/node_datamodule.py``.
"""

from lightning_gnn.sampling.link_datamodule import LinkDataModule
from lightning_gnn.sampling.loader import PreparationTimes, ThreadedLinkLoader, ThreadedNodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler
from lightning_gnn.sampling.node_datamodule import NeighborDataModule

__all__ = [
    "LinkDataModule",
    "NeighborDataModule",
    "NeighborSampler",
    "PreparationTimes",
    "ThreadedLinkLoader",
    "ThreadedNodeLoader",
]
