"""Sampling on accelerators beside the CPU, whole mini-batches at a time, with the same samples (HyScale-GNN)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import NodeSamplerInput, SamplerOutput

from lightning_gnn.persistent.sampler import PersistentNeighborSampler, find_gpu
from lightning_gnn.sampling.loader import ThreadedNodeLoader
from lightning_gnn.sampling.neighbor import NeighborSampler

_GOLDEN = (5**0.5 - 1) / 2
_EXACT_BACKENDS = (None, "numba", "reference")


def can_sample_on(loader: Any, device: torch.device) -> bool:
    """Tell whether a device can draw the samples that a loader draws on the CPU.

    Args:
        loader: A PyG node loader.
        device: An accelerator; ``cpu`` stands for one.
    """
    if not isinstance(loader, ThreadedNodeLoader):
        return False
    sampler = loader.node_sampler
    if type(sampler) is not NeighborSampler or sampler.backend not in _EXACT_BACKENDS:
        return False
    return device.type == "cpu" or (device.type == "cuda" and find_gpu(device) is not None)


class AcceleratorSampling:
    """Draws samples on accelerators, and brings them back to the memory of the CPU, where features are loaded.

    The mini-batch of one trainer is sampled as a whole: two samples of half the seeds are not one of all. Which ones
    are sampled here follows from the share and the number of the iteration alone.

    Args:
        sampler: The CPU's.
        devices: Of all trainers, those on the CPU first. On each accelerator, the topology lies in device memory, or in
            page-locked host memory where it would take more than half of what is free. ``cpu`` may stand for one.
        num_cpu: How many of them are CPU trainers.

    Raises:
        ValueError: Triton is missing.
        RuntimeError: There is no memory for the topology.

    Source: HyScale-GNN, section III-B (Sampling).
    """

    def __init__(self, sampler: NeighborSampler, devices: Sequence[torch.device], num_cpu: int = 0) -> None:
        self.sampler = sampler
        self.num_cpu = num_cpu
        there: dict[torch.device, NeighborSampler] = {}
        for device in devices[num_cpu:]:
            if device not in there:
                there[device] = sampler if device.type == "cpu" else _copied(sampler, device)
        self._places = [_Place(there[device], device) for device in devices[num_cpu:]]

    def __len__(self) -> int:
        """Return the number of accelerators."""
        return len(self._places)

    def assign(self, seeds: Sequence[int], share: float, number: int) -> list[int | None]:
        """Decide which parts of an iteration are sampled here, and on which accelerator.

        The parts of accelerator trainers come first. Of a part that the share cuts, the iterations take turns, in an
        even sequence (multiples of the golden ratio), so that in the long run the share is met.

        Args:
            seeds: Seeds of each part, those of the CPU trainers first.
            share: Part of all seeds that is to be sampled here, 0 to 1.
            number: Position of the iteration in the epoch.

        Returns:
            The place of each part, None for one that the CPU samples.
        """
        places: list[int | None] = [None] * len(seeds)
        count = len(self)
        load = [0] * count
        left, turn = share * sum(seeds), number * _GOLDEN % 1.0
        for part in (*range(self.num_cpu, len(seeds)), *range(self.num_cpu)):
            if seeds[part] and turn * seeds[part] < left:
                place = min(range(count), key=lambda place: (load[place], (place - number) % count))
                load[place] += seeds[part]
                places[part] = place
            left -= seeds[part]
        return places

    def sample(self, place: int, inputs: NodeSamplerInput, key: int) -> tuple[SamplerOutput, float]:
        """Sample a part; return it in the memory of the CPU, and the seconds that it took.

        Args:
            place: On which accelerator.
            inputs: The seeds, int64 ``[batch_size]``.
            key: The key of the mini-batch.
        """
        return self._places[place].sample(inputs, key)


class _Place:
    """One accelerator, which samples for one caller at a time, on a stream of its own."""

    def __init__(self, sampler: NeighborSampler, device: torch.device) -> None:
        self._sampler = sampler
        self._device = device
        self._lock = threading.Lock()
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def sample(self, inputs: NodeSamplerInput, key: int) -> tuple[SamplerOutput, float]:
        with self._lock:
            start = time.perf_counter()
            if self._stream is not None:
                torch.accelerator.set_device_index(self._device)
            with self._stream or nullcontext():
                out = self._sampler.sample_from_nodes(inputs, key=key)
                if self._stream is not None:
                    out = _on_host(out)
                    self._stream.synchronize()
            return out, time.perf_counter() - start


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
