"""What hybrid training begins with: short measurements give the first mapping (section III-B), and who samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.sampler import SamplerOutput

from lightning_gnn.graph.csc import count_edges
from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling, can_sample_on
from lightning_gnn.hyscale.options import PyGLoader, TrainerSet, checked_shares, measurements_decide, replays
from lightning_gnn.hyscale.performance_model.model import PerformanceModel
from lightning_gnn.hyscale.performance_model.workload import BatchSizes, Platform, Processor, Workload
from lightning_gnn.hyscale.resource_manager.decisions import read_decisions
from lightning_gnn.loading.batch import BatchTask
from lightning_gnn.loading.loaders import NodeLoader
from lightning_gnn.ops import batch_key
from lightning_gnn.runtime.cores import num_cores
from lightning_gnn.runtime.files import LARGEST_JSON, read_text

_KEY = batch_key(1)
_SAMPLED_PER_S = 5e6
"""Edges that a thread samples per second, where it cannot be measured without drawing from the run's random stream."""
_ROWS, _WIDTH = 1 << 15, 128


@dataclass(frozen=True)
class InitialMapping:
    """What a run begins with, as a checkpoint keeps it: a resumed run goes on with it, and measures nothing."""

    # of each trainer, those on the CPU first; they are not rounded to seeds, as a mapping's are
    shares: tuple[float, ...]
    cpu_trainers: int
    total: int  # seeds of the node in a full iteration
    threads: tuple[int, int, int]  # CPU threads of Sampling, Feature Loading and the CPU trainers
    accelerator_sampling: float = 0.0  # share of the sampling that accelerators do; 0 where they cannot

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain lists and numbers."""
        return {**asdict(self), "shares": list(self.shares), "threads": list(self.threads)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], trainers: TrainerSet, total: int) -> InitialMapping:
        """Take back what :meth:`to_dict` returned."""
        sampling, loading, training = map(int, state["threads"])
        shares = checked_shares(state["shares"])
        found = (len(shares), int(state["cpu_trainers"]), int(state["total"]))
        if found != (len(trainers.devices), trainers.num_cpu, total):
            raise ValueError(
                f"it is for {found[0]} trainers, {found[1]} on the CPU, and {found[2]} seeds, but here are "
                f"{len(trainers.devices)}, {trainers.num_cpu} and {total}"
            )
        there = float(state["accelerator_sampling"])
        return cls(tuple(shares), found[1], total, (sampling, loading, training), there)

    def threads_of(self, threads: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return its threads if they are as many as these, or else these: the machine or the loader is another."""
        least = 2 + self.cpu_trainers
        return self.threads if max(sum(self.threads), least) == max(sum(threads), least) else threads


def resumed_mapping(
    state: dict[str, Any], trainers: TrainerSet, total: int
) -> tuple[InitialMapping | None, dict[str, Any]]:
    """Return what the run began with that wrote a checkpoint, None where it does not fit, and what else fits."""
    if "first" not in state:
        return None, state
    try:
        return InitialMapping.from_dict(state["first"], trainers, total), state
    except (KeyError, TypeError, ValueError) as error:
        rank_zero_warn(f"hyscale balances anew: the saved mapping does not fit ({type(error).__name__}: {error})")
        return None, {}


def model_of(
    trainers: TrainerSet,
    loader: PyGLoader,
    module: nn.Module,
    total: int,
    sampling: AcceleratorSampling | None = None,  # what samples on accelerators; None if nothing does
    transfer_dtype: str | None = None,  # what features are on their way to accelerators; None for what they are
) -> PerformanceModel | None:
    """Return the performance model of this node and workload, as measured; None where the loader says too little."""
    workload, sampled_per_s = describe_workload(loader, module, total, transfer_dtype)
    if workload is None:
        return None
    there = 0.0 if sampling is None else accelerator_rate(sampling, loader, total)
    return PerformanceModel(measure_platform(trainers, sampled_per_s, there), workload)


def describe_workload(
    loader: PyGLoader, module: nn.Module, total: int, transfer_dtype: str | None = None
) -> tuple[Workload | None, float]:
    """Return what an iteration trains on, and the edges per second that one thread samples."""
    # Without known fanouts and a feature tensor there is nothing to model, and the defaults apply.
    data = getattr(loader, "data", None)
    if data is None or not hasattr(loader, "node_sampler"):
        return None, _SAMPLED_PER_S
    fanouts = getattr(loader.node_sampler, "num_neighbors", None)
    fanouts = list(getattr(fanouts, "values", fanouts) or []) if not isinstance(fanouts, dict) else []
    features = getattr(data, "x", None)
    if not fanouts or not all(isinstance(fanout, int) for fanout in fanouts) or not isinstance(features, torch.Tensor):
        return None, _SAMPLED_PER_S
    # Layer widths come from the message-passing layers; the last one is repeated for hops without a layer.
    outputs = [
        layer.out_channels
        for layer in module.modules()
        if isinstance(layer, MessagePassing) and isinstance(getattr(layer, "out_channels", None), int)
    ]
    widths = [features.size(-1), *outputs][: len(fanouts) + 1]
    widths += widths[-1:] * (len(fanouts) + 1 - len(widths))
    # Measure the size of an iteration and the sampling rate where this package's own sampler can be run.
    measured, sampled_per_s = None, _SAMPLED_PER_S
    if isinstance(loader, NodeLoader):
        seeds = _first_seeds(loader, total)
        out, sampled_per_s = _sampled(lambda: loader.pipeline.sample(BatchTask(0, 0, seeds)).out)
        if out.num_sampled_nodes and out.num_sampled_edges:
            # The model counts vertices and edges from the input layer to the seeds, the reverse of the sampler's order.
            vertices = list(accumulate(out.num_sampled_nodes))[::-1]
            edges = list(accumulate(out.num_sampled_edges))[::-1]
            measured = BatchSizes(len(seeds), tuple(map(float, vertices)), tuple(map(float, edges)))
    # Collect the workload; features travel in the transfer dtype only if they are floating-point.
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


def first_share(
    sampling: AcceleratorSampling, loader: PyGLoader, total: int, threads: int, num_accelerators: int = 1
) -> float:
    """Return the share of the sampling with which accelerators and CPU are done at the same time, as measured."""
    seeds = _first_seeds(loader, total)
    there = num_accelerators * accelerator_rate(sampling, loader, total)
    return there / (there + threads * _sampled(lambda: loader.pipeline.sample(BatchTask(0, 0, seeds)).out)[1])


def accelerator_rate(sampling: AcceleratorSampling, loader: NodeLoader, total: int) -> float:
    """Return the edges that one accelerator samples per second, those of one iteration together."""
    inputs = loader.pipeline.seeds[_first_seeds(loader, total)]
    return _sampled(lambda: sampling.sample(inputs, _KEY))[1]


def _first_seeds(loader: NodeLoader, total: int) -> list[int]:
    return list(range(min(total, len(loader.dataset))))


def _sampled(sample: Callable[[], SamplerOutput]) -> tuple[SamplerOutput, float]:
    """Return a sample, and the edges per second of drawing it."""
    sample()  # compiles it
    start = time.perf_counter()
    out = sample()
    return out, max(1, out.row.numel()) / (time.perf_counter() - start)


def measure_platform(trainers: TrainerSet, sampled_per_s: float, sampled_there: float = 0.0) -> Platform:
    """Return the numbers of this node, by measurements of some ten milliseconds."""
    cpu = torch.device("cpu")
    accelerators = trainers.devices[trainers.num_cpu :]
    pcie = float("inf")
    if accelerators and accelerators[0].type != "cpu":
        rows = torch.ones(_ROWS, _WIDTH)
        pcie = rows.nbytes / _seconds(lambda: rows.to(accelerators[0])[0, 0].item())
    own_threads = torch.get_num_threads()
    whole = _processor(cpu)
    torch.set_num_threads(1)
    try:
        core = _processor(cpu).memory_bandwidth
    finally:
        torch.set_num_threads(own_threads)
    return Platform(
        cpu=whole,
        cores=num_cores(),
        accelerator=_processor(accelerators[0]) if accelerators else None,
        num_accelerators=len(accelerators),
        pcie_bandwidth=pcie,
        sampling=sampled_per_s,
        accelerator_sampling=sampled_there,
        core_bandwidth=min(core, whole.memory_bandwidth),
    )


def _processor(device: torch.device) -> Processor:
    """Measure a product of the size of a layer's, and a gather of rows in no order."""
    x, weight = torch.ones(_ROWS, _WIDTH, device=device), torch.ones(_WIDTH, _WIDTH, device=device)
    index = torch.arange(_ROWS, device=device) * 7919 % _ROWS
    product = _seconds(lambda: (x @ weight)[0, 0].item())
    gather = _seconds(lambda: x.index_select(0, index)[0, 0].item())
    return Processor(2 * _ROWS * _WIDTH * _WIDTH / product, x.nbytes / gather)


def _seconds(work: Callable[[], object]) -> float:
    """Return the least of a few times; the work must wait for its device."""
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def wanted_sampling(wanted: str | float, drm: bool | str | Path) -> str | float:
    """Return which share accelerators are to have: what the user says, or what a replay needs."""
    # ``wanted`` is "auto", 0 where measurements decide nothing, or a share.
    if not replays(drm):
        return 0.0 if wanted == "auto" and not measurements_decide() else wanted
    decisions = read_decisions(read_text(drm, LARGEST_JSON).splitlines())
    return max((decision.mapping.accelerator_sampling for decision in decisions), default=0.0)


def find_sampling(
    wanted: str | float,
    loader: PyGLoader,
    trainers: TrainerSet,
    present: AcceleratorSampling | None = None,  # what there is, which is kept if it serves this loader too
    device: torch.device | None = None,  # the accelerator; by default the first one
) -> AcceleratorSampling | None:
    """Return what samples on an accelerator, None where nothing does."""
    # In automatic mode CPUs that stand in for accelerators do not sample.
    accelerators = trainers.devices[trainers.num_cpu :]
    automatic = wanted == "auto"
    if wanted == 0.0 or not accelerators or (automatic and any(device.type == "cpu" for device in accelerators)):
        return None
    # Every accelerator must be able to draw the loader's samples, or none samples.
    if not all(can_sample_on(loader, device) for device in accelerators):
        if not automatic:
            rank_zero_warn(
                f"accelerator_sampling={wanted} changes nothing: on {', '.join(map(str, accelerators))}, nothing draws "
                "the samples of this loader"
            )
        return None
    # A present sampler is reused, so that the topology is not copied to the device again.
    if present is not None and present.sampler is loader.node_sampler:
        return present
    # A failure, such as a lack of device memory, is an error only if the user asked for a share.
    try:
        return AcceleratorSampling(loader.node_sampler, device or accelerators[0])
    except (RuntimeError, ValueError) as error:
        if not automatic:
            raise
        rank_zero_warn(f"hyscale samples on the CPU alone: {error}")
        return None
