"""Calibration: short measurements for the initial mapping (section III-B) and the initial sampling share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.sampler import SamplerOutput

from lightning_gnn.features.table import FeatureTable
from lightning_gnn.gpu_sampling.pipeline import DevicePipeline
from lightning_gnn.graph.csc import count_edges
from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling, can_sample_on
from lightning_gnn.hyscale.options import PyGLoader, TrainerSet, measurements_decide, replays, validate_shares
from lightning_gnn.hyscale.performance_model.model import PerformanceModel
from lightning_gnn.hyscale.performance_model.workload import BatchSizes, Platform, Processor, Workload
from lightning_gnn.hyscale.resource_manager.decisions import read_decisions
from lightning_gnn.loading.batch import BatchTask
from lightning_gnn.loading.loaders import NodeLoader, PipelineLoader
from lightning_gnn.ops import batch_key
from lightning_gnn.runtime.devices import num_cores
from lightning_gnn.runtime.files import LARGEST_JSON, read_text
from lightning_gnn.runtime.lightning import rank_zero_warn
from lightning_gnn.runtime.memory_info import available_bytes

_PROBE_KEY = batch_key(1)
_DEFAULT_EDGES_PER_S = 5e6
"""Assumed sampling rate per thread if a measurement would consume numbers of the run's random stream."""
_ROWS, _WIDTH = 1 << 15, 128
SAMPLES_ON_GPU = "on ranks with a GPU, the DataModule samples and gathers all mini-batches there already"
"""Reason why options of HyScale's own stages have no effect."""


@dataclass(frozen=True)
class InitialMapping:
    """Initial mapping of a run, saved in checkpoints; a resumed run reuses it instead of measuring again."""

    shares: tuple[float, ...]  # per trainer, CPU trainers first; unlike a TaskMapping's, not rounded to seeds
    cpu_trainers: int
    total: int  # seeds of the node in a full iteration
    threads: tuple[int, int, int]  # CPU threads of Sampling, Feature Loading and the CPU trainers
    accelerator_sampling: float = 0.0  # fraction of the sampling done by accelerators; 0 if unsupported

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping as plain lists and numbers."""
        return {**asdict(self), "shares": list(self.shares), "threads": list(self.threads)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], trainers: TrainerSet, total: int) -> InitialMapping:
        """Restore a mapping from :meth:`to_dict`; raise ValueError if it is for other trainers or seeds."""
        sampling, loading, training = map(int, state["threads"])
        shares = validate_shares(state["shares"])
        saved = (len(shares), int(state["cpu_trainers"]), int(state["total"]))
        if saved != (len(trainers.devices), trainers.num_cpu, total):
            raise ValueError(
                f"it is for {saved[0]} trainers, {saved[1]} on the CPU, and {saved[2]} seeds, but this run has "
                f"{len(trainers.devices)}, {trainers.num_cpu} and {total}"
            )
        share = float(state["accelerator_sampling"])
        return cls(tuple(shares), saved[1], total, (sampling, loading, training), share)

    def threads_of(self, threads: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the saved threads, or ``threads`` if the totals differ because machine or loader changed."""
        least = 2 + self.cpu_trainers
        return self.threads if max(sum(self.threads), least) == max(sum(threads), least) else threads


def restore_mapping(
    state: dict[str, Any], trainers: TrainerSet, total: int
) -> tuple[InitialMapping | None, dict[str, Any]]:
    """Return a checkpoint's initial mapping, None if missing or not applicable, and the still applicable state."""
    if "first" not in state:
        return None, state
    try:
        return InitialMapping.from_dict(state["first"], trainers, total), state
    except (KeyError, TypeError, ValueError) as error:
        rank_zero_warn(f"hyscale rebalances: the saved mapping does not fit ({type(error).__name__}: {error})")
        return None, {}


def model_of(
    trainers: TrainerSet,
    loader: PyGLoader,
    module: nn.Module,
    total: int,
    sampling: AcceleratorSampling | None = None,  # None if accelerators do not sample
    transfer_dtype: str | None = None,  # dtype of features during the transfer; None: unchanged
    gathers: bool = False,  # whether accelerators also gather features
) -> PerformanceModel | None:
    """Return a calibrated performance model of this node and workload, or None if the workload is unknown."""
    workload, sampled_per_s = describe_workload(loader, module, total, transfer_dtype)
    if workload is None:
        return None
    accelerator_rate = 0.0 if sampling is None else measure_accelerator_rate(sampling, loader, total)
    return PerformanceModel(measure_platform(trainers, sampled_per_s, accelerator_rate, gathers), workload)


def describe_workload(
    loader: PyGLoader, module: nn.Module, total: int, transfer_dtype: str | None = None
) -> tuple[Workload | None, float]:
    """Return the workload of an iteration, or None if unknown, and one thread's sampling rate in edges per second."""
    # The model needs integer fanouts and a feature tensor; otherwise the defaults apply.
    data = getattr(loader, "data", None)
    sampler = getattr(loader, "node_sampler", None) or getattr(loader, "link_sampler", None)
    if data is None or sampler is None:
        return None, _DEFAULT_EDGES_PER_S
    fanouts = getattr(sampler, "num_neighbors", None)
    fanouts = list(getattr(fanouts, "values", fanouts) or []) if not isinstance(fanouts, dict) else []
    features = getattr(data, "x", None)
    if not fanouts or not all(isinstance(fanout, int) for fanout in fanouts) or not isinstance(features, torch.Tensor):
        return None, _DEFAULT_EDGES_PER_S
    # Layer widths come from the message-passing layers; the last one is repeated for hops without a layer.
    outputs = [
        layer.out_channels
        for layer in module.modules()
        if isinstance(layer, MessagePassing) and isinstance(getattr(layer, "out_channels", None), int)
    ]
    widths = [features.size(-1), *outputs][: len(fanouts) + 1]
    widths += widths[-1:] * (len(fanouts) + 1 - len(widths))
    # Measure the size of an iteration and the sampling rate if this package's own sampler is used.
    measured, sampled_per_s = None, _DEFAULT_EDGES_PER_S
    if isinstance(loader, PipelineLoader):
        seeds = _take_first_seeds(loader, total)
        out, sampled_per_s = _time_sampling(lambda: loader.pipeline.sample(BatchTask(0, 0, seeds)).out)
        if out.num_sampled_nodes and out.num_sampled_edges:
            # The model counts vertices and edges from the input layer to the seeds, the reverse of the sampler's order.
            vertices = list(accumulate(out.num_sampled_nodes))[::-1]
            edges = list(accumulate(out.num_sampled_edges))[::-1]
            measured = BatchSizes(len(seeds), tuple(map(float, vertices)), tuple(map(float, edges)))
        if isinstance(loader.pipeline, DevicePipeline):
            sampled_per_s = _DEFAULT_EDGES_PER_S  # that was the GPU
    # The transfer dtype applies to floating-point features only.
    workload = Workload(
        num_vertices=int(data.num_nodes),
        num_edges=count_edges(data),
        num_train=len(loader.dataset),
        batch_size=total,
        fanouts=tuple(fanouts),
        widths=tuple(widths),
        feature_bytes=features.element_size(),
        index_bytes=8,
        update_inputs=2,
        measured=measured,
        transfer_dtype=transfer_dtype if features.is_floating_point() else None,
    )
    return workload, sampled_per_s


def measure_sampling_share(
    sampling: AcceleratorSampling, loader: PyGLoader, total: int, threads: int, num_accelerators: int = 1
) -> float:
    """Measure and return the accelerators' share of the sampling with which they and the CPU finish together."""
    seeds = _take_first_seeds(loader, total)
    accelerator_rate = num_accelerators * measure_accelerator_rate(sampling, loader, total)
    cpu_rate = threads * _time_sampling(lambda: loader.pipeline.sample(BatchTask(0, 0, seeds)).out)[1]
    return accelerator_rate / (accelerator_rate + cpu_rate)


def measure_accelerator_rate(sampling: AcceleratorSampling, loader: NodeLoader, total: int) -> float:
    """Measure one accelerator's sampling rate in edges per second, over the seeds of one iteration."""
    inputs = loader.pipeline.seeds[_take_first_seeds(loader, total)]
    return _time_sampling(lambda: sampling.sample(inputs, _PROBE_KEY))[1]


def _take_first_seeds(loader: PipelineLoader, total: int) -> list[int]:
    return list(range(min(total, len(loader.dataset))))


def _time_sampling(sample: Callable[[], SamplerOutput]) -> tuple[SamplerOutput, float]:
    """Return a sample and its sampling rate in edges per second."""
    sample()  # warm-up: compiles the kernels
    start = time.perf_counter()
    out = sample()
    return out, max(1, out.row.numel()) / (time.perf_counter() - start)


def measure_platform(
    trainers: TrainerSet, sampled_per_s: float, accelerator_rate: float = 0.0, gathers: bool = False
) -> Platform:
    """Measure this node's compute, memory and PCIe rates, and with ``gathers`` those of gathering on accelerators."""
    cpu = torch.device("cpu")
    accelerators = trainers.devices[trainers.num_cpu :]
    pcie = float("inf")
    if accelerators and accelerators[0].type != "cpu":
        rows = torch.ones(_ROWS, _WIDTH)
        pcie = rows.nbytes / _time_best(lambda: rows.to(accelerators[0])[0, 0].item())
    previous_threads = torch.get_num_threads()
    all_cores = _measure_processor(cpu)
    torch.set_num_threads(1)
    try:
        core_bandwidth = _measure_processor(cpu).memory_bandwidth
    finally:
        torch.set_num_threads(previous_threads)
    accelerator = _measure_processor(accelerators[0]) if accelerators else None
    gather_bandwidth, memory = 0.0, 0
    if gathers and accelerator is not None and accelerators[0].type == "cuda":
        table, index = FeatureTable(torch.ones(_ROWS, _WIDTH)).pin_memory(), _scattered(accelerators[0])
        gather_bandwidth = table.values.nbytes / _time_best(lambda: table.gather(index)[0, 0].item())
        memory = available_bytes(accelerators[0]) or 0
    elif gathers and accelerator is not None and accelerators[0].type == "cpu":  # an emulated accelerator
        gather_bandwidth = accelerator.memory_bandwidth
    return Platform(
        cpu=all_cores,
        cores=num_cores(),
        accelerator=accelerator,
        num_accelerators=len(accelerators),
        pcie_bandwidth=pcie,
        sampling=sampled_per_s,
        accelerator_sampling=accelerator_rate,
        core_bandwidth=min(core_bandwidth, all_cores.memory_bandwidth),
        gather_bandwidth=gather_bandwidth,
        accelerator_memory=memory,
    )


def _scattered(device: torch.device) -> Tensor:
    return torch.arange(_ROWS, device=device) * 7919 % _ROWS


def _measure_processor(device: torch.device) -> Processor:
    """Time a matrix product of a typical layer's size, and a gather of rows in scattered order."""
    x, weight = torch.ones(_ROWS, _WIDTH, device=device), torch.ones(_WIDTH, _WIDTH, device=device)
    index = _scattered(device)
    product = _time_best(lambda: (x @ weight)[0, 0].item())
    gather = _time_best(lambda: x.index_select(0, index)[0, 0].item())
    return Processor(2 * _ROWS * _WIDTH * _WIDTH / product, x.nbytes / gather)


def _time_best(work: Callable[[], object]) -> float:
    """Return the shortest of four runs in seconds; ``work`` must synchronize its device."""
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def wanted_sampling(wanted: str | float, drm: bool | str | Path) -> str | float:
    """Return the accelerators' sampling share: the user's setting, or the largest share in a replayed log."""
    # The result is "auto", a share, or 0 if "auto" cannot be measured.
    if not replays(drm):
        return 0.0 if wanted == "auto" and not measurements_decide() else wanted
    decisions = read_decisions(read_text(drm, LARGEST_JSON).splitlines())
    return max((decision.mapping.accelerator_sampling for decision in decisions), default=0.0)


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
