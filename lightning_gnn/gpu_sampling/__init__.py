"""PGSampler: all hops of a neighbour sample in one launch on the GPU.

Source: "PGSampler: Accelerating GPU-based Graph Sampling in GNN Systems via Workload Fusion". One kernel samples,
removes duplicates and orders; a persistent queue of (node, hop) tasks is one of its modes. Samples equal the CPU's.

Reading order: ``triton_kernels/sample.py`` (the launch), ``triton_kernels/hops.py`` (hop by hop, fused; order and
edges), ``triton_kernels/queue.py`` (the task queue and its end test), ``triton_kernels/hashing.py`` (the picks);
``triton_kernels/sample_relations.py``, ``relations.py`` and ``relation_picks.py`` there (types, times, weights, LABOR);
``gpu_sampling/sampler.py`` (PyG's sampler interface), ``gpu_sampling/placement.py`` (where graph and features lie), by
``gpu_sampling/budget.py``, one plan for the memory, and ``gpu_sampling/shards.py``, tables dealt out to several GPUs.
"""

from typing import TYPE_CHECKING

from lightning_gnn.gpu_sampling.datamodule import PersistentSamplerDataModule
from lightning_gnn.gpu_sampling.link_datamodule import PersistentLinkDataModule
from lightning_gnn.gpu_sampling.options import PlacementOptions
from lightning_gnn.gpu_sampling.sampler import PersistentNeighborSampler
from lightning_gnn.runtime.moved_names import find_moved

__all__ = [
    "PersistentLinkDataModule",
    "PersistentNeighborSampler",
    "PersistentSamplerDataModule",
    "PlacementOptions",
]

if not TYPE_CHECKING:  # with it, a type checker would take any name for one that is here
    __getattr__ = find_moved(__name__)
