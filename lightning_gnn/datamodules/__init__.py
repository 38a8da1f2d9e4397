"""DataModules of sampled mini-batches: configurations of the pipeline in ``loading``, with PyG's keywords.

Reading order: ``base.py`` (options, seeds per stage, keys, ranks), ``node.py`` and ``link.py``, ``disk.py`` (features
that stay on disk), ``resumable.py`` (what a resumed run needs).
"""

from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.datamodules.options import SamplingOptions, StorageOptions

__all__ = [
    "LinkDataModule",
    "NeighborDataModule",
    "SamplingOptions",
    "StorageOptions",
]
