"""What of a graph lies where on a GPU, and how it samples: the options of a DataModule."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lightning_gnn.features.memory_pool import check_place
from lightning_gnn.gpu_sampling.sampler import MODES
from lightning_gnn.runtime.messages import memory_bytes, true_or_false, whole_number


@dataclass
class PlacementOptions:
    """Where a GPU reads graph and features, and how it samples.

    Topology, features, caches and mini-batches share three quarters of the device's free memory by one plan, which is
    printed when the first loader is made; the rest is the model's.

    Args:
        topology: ``"device"``, ``"shard"``, ``"pinned"`` (page-locked host memory, read over PCIe) or ``"auto"``.
            ``"shard"`` deals the edges of a homogeneous graph, without times and weights, out to the GPUs of a machine,
            one per process of the run, which read each other's memory. Where they cannot, ``"shard"`` is refused, and
            ``"auto"`` places as for one GPU.
        features: The same for the features, of any graph; other attributes of nodes and edges always lie on the device.
            With ``memory=``, what is on disk comes by way of the host.
        cache_rows: Feature rows of the nodes with most out-edges that the device holds where features are pinned.
        cache_bytes: Instead, at most so many bytes (``4 << 30``, ``"4GB"``) for hot feature rows and, in uniform
            sampling of homogeneous graphs, hot adjacency lists, or ``"auto"``, whatever the plan leaves. Mini-batches
            that are sampled first tell where each byte saves most (DUCATI's dual cache).
        quantize: Store ``x`` as int8 with one scale per row, a quarter of float32, dequantized when gathered.
        mode: ``"fused"`` (hop by hop with grid barriers) or ``"persistent"`` (a task queue, which samples uniformly in
            homogeneous graphs; all else runs hop by hop); the samples are equal.
        fetch_size: Tasks that a program of the persistent queue claims at a time.
        prefetch: Mini-batches prepared beyond the one that is trained on, on a stream of their own; 0 prepares them in
            turn with training.
        bulk: Mini-batches that are sampled in one launch, in uniform sampling of homogeneous graphs with
            ``mode="fused"``; fewer where they would take much of the memory.
        device: Where to sample; by default the trainer's device, or the current GPU.
        device_memory: Bytes that the device has free (``"80GB"``); by default it is asked. With it
            ``plan_placement`` needs no GPU.
        gpus: GPUs of the machine that ``plan_placement`` plans for; a run has one for each of its processes there.

    Raises:
        ValueError: An option is out of range, or two exclude each other.
    """

    topology: str = "auto"
    features: str = "auto"
    cache_rows: int = 0
    cache_bytes: int | str = 0
    quantize: bool = False
    mode: str = "fused"
    fetch_size: int = 128
    prefetch: int = 2
    bulk: int = 8
    device: torch.device | str | None = None
    device_memory: int | str | None = None
    gpus: int | None = None
    cache_budget: int | None = field(init=False)
    """``cache_bytes`` as a number; None for ``"auto"``."""
    memory_budget: int | None = field(init=False, default=None)
    """``device_memory`` as a number; None where the device is asked."""

    def __post_init__(self) -> None:
        check_place(self.topology, "topology")
        check_place(self.features, "features")
        for name, least in (("cache_rows", 0), ("fetch_size", 1), ("prefetch", 0), ("bulk", 1)):
            setattr(self, name, whole_number(getattr(self, name), name, least))
        true_or_false(self.quantize, "quantize")
        self.cache_budget = None if self.cache_bytes == "auto" else memory_bytes(self.cache_bytes, "cache_bytes")
        if self.device_memory is not None:
            self.memory_budget = memory_bytes(self.device_memory, "device_memory")
        if self.gpus is not None:
            self.gpus = whole_number(self.gpus, "gpus", 1)
        if self.cache_rows and self.cache_budget != 0:
            raise ValueError("give cache_rows or cache_bytes, not both: a budget decides how many rows there are")
        if self.features in ("device", "shard") and self.cache_rows:
            raise ValueError("cache_rows is for features='pinned' or 'auto'; on the device every row is at hand")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is unknown; use one of {', '.join(MODES)}")
        try:
            self.device = None if self.device is None else torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={self.device!r} is none: {error}") from None
