"""From PyG's ``SamplerOutput`` to ready mini-batches."""

from lightning_gnn.batching.loader import PreparationTimes, ThreadedLinkLoader, ThreadedNodeLoader

__all__ = ["PreparationTimes", "ThreadedLinkLoader", "ThreadedNodeLoader"]
