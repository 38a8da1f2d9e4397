"""From PyG's ``SamplerOutput`` to ready mini-batches."""

from lightning_gnn.batching.collective import CollectiveLoader
from lightning_gnn.batching.loader import PreparationTimes, ThreadedLinkLoader, ThreadedNodeLoader

__all__ = ["CollectiveLoader", "PreparationTimes", "ThreadedLinkLoader", "ThreadedNodeLoader"]
