"""Options of GPU DataModules: placement of graph and features, and sampling."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lightning_gnn.features.memory_pool import check_place
from lightning_gnn.gpu_sampling.sampler import check_launch
from lightning_gnn.runtime.messages import memory_bytes, true_or_false, whole_number


@dataclass
class PlacementOptions:
    """Placement of graph and features for a GPU, and options of its sampling.

    One plan divides three quarters of the device's free memory among topology, features, caches and mini-batches; the
    rest is for the model. The plan is printed when the first loader is created.

    Args:
        topology: ``"device"``, ``"shard"``, ``"pinned"`` (page-locked host memory, read over PCIe) or ``"auto"``.
            ``"shard"`` distributes the edges of a homogeneous graph, without times and weights, across the GPUs of a
            machine, one per process, which read each other's memory. Without peer access, ``"shard"`` raises an error
            and ``"auto"`` plans for one GPU.
        features: The same for the features of any graph; all other node and edge attributes are stored on the device.
            With ``memory=``, features are read from disk through the host.
        cache_bytes: Maximum bytes (``4 << 30``, ``"4GB"``) on the device for hot rows of pinned features and, for
            uniform sampling of homogeneous graphs, hot adjacency lists; ``"auto"`` uses all remaining memory.
            Pre-sampled mini-batches determine which entries save most per byte (DUCATI's dual cache).
        quantize: Store ``x`` as int8 with one scale per row, a quarter of float32, dequantized when gathered.
        mode: ``"fused"`` (hop by hop with grid barriers) or ``"persistent"`` (a task queue, for uniform sampling of
            homogeneous graphs; all else runs hop by hop). The samples are equal.
        fetch_size: Number of tasks that a program of the persistent queue claims at a time.
        num_warps, programs_per_sm: Warps of 32 threads per program, and the most programs per multiprocessor.
        prefetch: Number of mini-batches prefetched on a separate stream; 0 prepares each one when it is needed.
        bulk: Number of mini-batches per launch, at most 32, for uniform sampling of homogeneous graphs with
            ``mode="fused"``; reduced if they would take too much memory.
        device: Device for sampling; by default the trainer's device, or the current GPU.
        device_memory: Free bytes of the device (``"80GB"``); by default they are queried. If given,
            ``plan_placement`` does not need a GPU.
        gpus: Number of GPUs of the machine for ``plan_placement``; a run uses one per local process.

    Raises:
        ValueError: An option is out of range, or two options exclude each other.
    """

    topology: str = "auto"
    features: str = "auto"
    cache_bytes: int | str = 0
    quantize: bool = False
    mode: str = "fused"
    fetch_size: int = 128
    num_warps: int = 8
    programs_per_sm: int = 4
    prefetch: int = 2
    bulk: int = 16
    device: torch.device | str | None = None
    device_memory: int | str | None = None
    gpus: int | None = None
    cache_budget: int | None = field(init=False)
    """``cache_bytes`` as a number; None for ``"auto"``."""
    memory_budget: int | None = field(init=False, default=None)
    """``device_memory`` as a number; None if the device is queried."""

    def __post_init__(self) -> None:
        check_place(self.topology, "topology")
        check_place(self.features, "features")
        for name, value in check_launch(self.mode, self.fetch_size, self.num_warps, self.programs_per_sm).items():
            setattr(self, name, value)
        for name, least in (("prefetch", 0), ("bulk", 1)):
            setattr(self, name, whole_number(getattr(self, name), name, least))
        true_or_false(self.quantize, "quantize")
        self.cache_budget = None if self.cache_bytes == "auto" else memory_bytes(self.cache_bytes, "cache_bytes")
        if self.device_memory is not None:
            self.memory_budget = memory_bytes(self.device_memory, "device_memory")
        if self.gpus is not None:
            self.gpus = whole_number(self.gpus, "gpus", 1)
        try:
            self.device = None if self.device is None else torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"invalid device {self.device!r}: {error}") from None
