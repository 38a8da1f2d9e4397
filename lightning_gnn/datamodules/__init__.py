"""DataModules for sampled mini-batches, which configure the pipeline in ``loading`` with PyG's keywords.

Reading order: ``options.py``, ``base.py`` (loaders per stage, exact evaluation, position of a run), ``node.py`` and
``link.py``, ``disk.py`` (features on disk), ``resumable.py`` (mid-epoch checkpoints).
"""

from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.datamodules.node import NeighborDataModule, as_ids, seeds_in
from lightning_gnn.datamodules.options import SamplingOptions, StorageOptions

__all__ = ["LinkDataModule", "NeighborDataModule", "SamplingOptions", "StorageOptions", "as_ids", "seeds_in"]
