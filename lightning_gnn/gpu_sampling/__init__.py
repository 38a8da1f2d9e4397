"""PGSampler: all hops of a neighbor sample in one launch on the GPU.

Source: "PGSampler: Accelerating GPU-based Graph Sampling in GNN Systems via Workload Fusion". One kernel samples,
removes duplicates and orders; a persistent queue of (node, hop) tasks is one of its modes. Samples equal the CPU's.

Reading order: in ``triton_kernels/``, ``sample.py`` (the launch), ``hops.py``, ``queue.py`` and ``relations.py`` (edge
types, times, weights, LABOR); then ``sampler.py``, ``placement.py`` (the plan of the memory), ``shards.py``.
"""

from lightning_gnn.gpu_sampling.datamodule import PersistentSamplerDataModule
from lightning_gnn.gpu_sampling.link_datamodule import PersistentLinkDataModule
from lightning_gnn.gpu_sampling.options import PlacementOptions
from lightning_gnn.gpu_sampling.sampler import PersistentNeighborSampler

__all__ = [
    "PersistentLinkDataModule",
    "PersistentNeighborSampler",
    "PersistentSamplerDataModule",
    "PlacementOptions",
]
