"""Builders for one rank's loader, as the strategy creates it."""

from lightning_gnn.hyscale.sharded_loader import ShardedDataLoader
from lightning_gnn.hyscale.staged_prefetcher import PipelineSettings, StagedBatching, _Stages


def make_staged_loader(loader, batches, settings=None, on_batch=lambda share: None, **options):
    """Return a loader whose batches pass through the paper's stages; ``options`` are those of ``StagedBatching``."""
    staging = StagedBatching(batches, settings or PipelineSettings(), **options)
    return ShardedDataLoader(loader, batches, on_batch, staging)


def list_steps(loader, prefetch):
    """Return the step names of each stage."""
    stages = _Stages(loader.loader.pipeline, None, loader.staged.transfer, loader.staged.sampling)
    return [[name for name, _ in stage] for stage in stages.steps(prefetch)]
