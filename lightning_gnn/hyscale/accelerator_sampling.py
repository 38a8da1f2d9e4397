"""Sampling on a rank's accelerator beside its CPU threads, whole mini-batches in turn, with the same samples."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch_geometric.sampler import NodeSamplerInput, SamplerOutput

from lightning_gnn.gpu_sampling.sampler import PersistentNeighborSampler, find_gpu
from lightning_gnn.hyscale.options import PyGLoader
from lightning_gnn.loading.loaders import NodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler, nonuniform_features

_GOLDEN = (5**0.5 - 1) / 2
_EXACT_BACKENDS = (None, "numba", "reference")


def can_sample_on(loader: PyGLoader, device: torch.device) -> bool:
    """Tell whether a device can draw the samples that a loader draws on the CPU."""
    if not isinstance(loader, NodeLoader):
        return False
    sampler = loader.node_sampler
    if type(sampler) is not NeighborSampler or sampler.backend not in _EXACT_BACKENDS or nonuniform_features(sampler):
        return False
    return device.type == "cpu" or (device.type == "cuda" and find_gpu(device) is not None)


class AcceleratorSampling:
    """Draws samples on an accelerator, and brings them back to the memory of the CPU, where features are loaded."""

    def __init__(self, sampler: NeighborSampler, device: torch.device) -> None:
        self.sampler = sampler
        self._device = device
        self._there = sampler if device.type == "cpu" else _copied(sampler, device)
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    @staticmethod
    def takes(number: int, share: float) -> bool:
        """Decide whether a mini-batch is sampled here, so that in the long run a share is met, in an even sequence."""
        # Multiples of the golden ratio take turns.
        return number * _GOLDEN % 1.0 < share

    def sample(self, inputs: NodeSamplerInput, key: int) -> SamplerOutput:
        """Sample a mini-batch; return it in the memory of the CPU."""
        if self._stream is not None:
            torch.accelerator.set_device_index(self._device)
        with self._stream or nullcontext():
            out = self._there.sample_from_nodes(inputs, key=key)
            if self._stream is not None:
                out = _on_host(out)
                self._stream.synchronize()
        return out


def _copied(sampler: NeighborSampler, device: torch.device) -> NeighborSampler:
    copied = PersistentNeighborSampler(
        sampler.graph, sampler.num_neighbors, sampler.replace, sampler.disjoint, sampler.seed, device=device
    )
    torch.accelerator.synchronize(device)  # the copy was made on another stream than that of the samples
    return copied


def _on_host(out: SamplerOutput) -> SamplerOutput:
    """Copy a sample to page-locked memory; the copies are under way when this returns."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True)

    base = out.row._base
    if base is not None and base is out.col._base and base.dim() == 2:  # the rows of one edge_index stay so
        edge_index = moved(base)
        out.row, out.col = edge_index[0], edge_index[1]
    else:
        out.row, out.col = moved(out.row), moved(out.col)
    out.node = moved(out.node)
    out.edge = None if out.edge is None else moved(out.edge)
    out.batch = None if out.batch is None else moved(out.batch)
    return out
