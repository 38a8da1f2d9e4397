"""Sampling on a rank's accelerator in parallel with its CPU threads, with identical samples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.sampler import NodeSamplerInput, SamplerOutput

from lightning_gnn.gpu_sampling.pipeline import DevicePipeline
from lightning_gnn.gpu_sampling.sampler import PersistentNeighborSampler, find_gpu
from lightning_gnn.hyscale.costs import should_sample
from lightning_gnn.hyscale.options import PyGLoader, TrainerSet
from lightning_gnn.loading.loaders import NodeLoader
from lightning_gnn.runtime.devices import on_stream
from lightning_gnn.runtime.lightning import rank_zero_warn
from lightning_gnn.sampling.neighbor import NeighborSampler, nonuniform_features

SAMPLES_ON_GPU = "on ranks with a GPU, the DataModule samples and gathers all mini-batches there already"
"""Reason why options of HyScale's own stages have no effect."""
_EXACT_BACKENDS = (None, "numba", "reference")


def can_sample_on(loader: PyGLoader, device: torch.device) -> bool:
    """Whether a device can reproduce the samples that a loader draws on the CPU."""
    if not isinstance(loader, NodeLoader):
        return False
    sampler = loader.node_sampler
    if type(sampler) is not NeighborSampler or sampler.backend not in _EXACT_BACKENDS or nonuniform_features(sampler):
        return False
    return device.type == "cpu" or (device.type == "cuda" and find_gpu(device) is not None)


class AcceleratorSampling:
    """Samples on an accelerator and copies the samples to CPU memory, since the CPU loads the features."""

    def __init__(self, sampler: NeighborSampler, device: torch.device) -> None:
        self.sampler = sampler
        self._device_sampler = sampler if device.type == "cpu" else _copy_to_device(sampler, device)
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    should_sample = staticmethod(should_sample)

    def sample(self, inputs: NodeSamplerInput, key: int) -> SamplerOutput:
        """Sample a mini-batch and return the sample in CPU memory."""
        with on_stream(self._stream):
            out = self._device_sampler.sample_from_nodes(inputs, key=key)
            if self._stream is not None:
                out = _copy_to_host(out)
                self._stream.synchronize()
        return out


def _copy_to_device(sampler: NeighborSampler, device: torch.device) -> NeighborSampler:
    copied = PersistentNeighborSampler(
        sampler.graph, sampler.num_neighbors, sampler.replace, sampler.disjoint, sampler.seed, device=device
    )
    torch.accelerator.synchronize(device)  # the graph was copied on a different stream than the one that samples
    return copied


def _copy_to_host(out: SamplerOutput) -> SamplerOutput:
    """Start copying a sample to pinned memory; synchronize the stream before reading it."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True)

    base = out.row._base
    if base is not None and base is out.col._base and base.dim() == 2:  # keep both rows views of one edge_index
        edge_index = copy(base)
        out.row, out.col = edge_index[0], edge_index[1]
    else:
        out.row, out.col = copy(out.row), copy(out.col)
    out.node = copy(out.node)
    out.edge = None if out.edge is None else copy(out.edge)
    out.batch = None if out.batch is None else copy(out.batch)
    return out


def find_sampling(
    wanted: str | float,
    loader: PyGLoader,
    trainers: TrainerSet,
    present: AcceleratorSampling | None = None,  # existing sampler, reused if it matches this loader
    device: torch.device | None = None,  # the accelerator; by default the first one
) -> AcceleratorSampling | None:
    """Return a sampler on the accelerator, or None if accelerators do not sample."""
    # In automatic mode, CPUs that emulate accelerators do not sample.
    accelerators = trainers.devices[trainers.num_cpu :]
    automatic = wanted == "auto"
    if wanted == 0.0 or not accelerators or (automatic and any(device.type == "cpu" for device in accelerators)):
        return None
    # Accelerators sample only if all of them support the loader's sampler.
    if not all(can_sample_on(loader, device) for device in accelerators):
        if not automatic:
            reason = f"{', '.join(map(str, accelerators))} cannot reproduce this loader's samples"
            if isinstance(getattr(loader, "pipeline", None), DevicePipeline):
                reason = f"{SAMPLES_ON_GPU}; to divide the sampling, use NeighborDataModule"
            rank_zero_warn(f"accelerator_sampling={wanted} has no effect: {reason}")
        return None
    # Reuse an existing sampler, so that the topology is not copied to the device again.
    if present is not None and present.sampler is loader.node_sampler:
        return present
    # A failure, such as out of device memory, is an error only if the user requested a share.
    try:
        return AcceleratorSampling(loader.node_sampler, device or accelerators[0])
    except (RuntimeError, ValueError) as error:
        if not automatic:
            raise
        rank_zero_warn(f"hyscale samples on the CPU only: {error}")
        return None
