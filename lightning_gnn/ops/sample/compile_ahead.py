"""Compiles the sampling kernels of a run side by side before its first mini-batch, also for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver

from lightning_gnn.ops.sample.triton import begin_samples
from lightning_gnn.runtime.kernels import say_when_compiling
from lightning_gnn.triton_kernels import hops
from lightning_gnn.triton_kernels.sample import INTERPRETED, AsyncHostCopy, TritonNeighborSampler

Shape = tuple[Sequence[int], bool, int]
"""Fanouts, whether trees are disjoint, and the number of mini-batches per launch."""


def compile_sampling(sampler: TritonNeighborSampler, shapes: Iterable[Shape]) -> None:
    """Compile all kernels that mini-batches of these shapes need, including single ones at the end of an epoch."""
    if INTERPRETED:
        return
    seed = torch.zeros(1, dtype=torch.int64, device=sampler.device)
    variants: dict[tuple[object, ...], tuple[Sequence[int], bool, int, bool]] = {}
    for fanouts, disjoint, bulk in shapes:
        batch = sampler.batch(seed, fanouts, 0, disjoint=disjoint)
        for number, hashed in {(1, False), (1, batch.hashed), (min(bulk, 2), False)}:
            key = (batch.K, batch.queued, disjoint, number, hashed)
            variants.setdefault(key, (fanouts, disjoint, number, hashed))

    def sample(variant: tuple[Sequence[int], bool, int, bool]) -> None:
        fanouts, disjoint, number, hashed = variant
        twin, seeds = _twin(sampler), seed.expand(number).contiguous()
        if hashed:
            batch = twin.batch(seeds, fanouts, 0)
            batch.hashed = True
            twin.begin(batch).end()
        else:
            begin_samples(twin, seeds, [1] * number, fanouts, [0] * number, False, disjoint, 1.0).end()

    with ThreadPoolExecutor(len(variants)) as pool:  # the passes of LLVM and ptxas run without the GIL
        list(pool.map(sample, variants.values()))


def _twin(sampler: TritonNeighborSampler) -> TritonNeighborSampler:
    """Return a sampler with the same kernels, of a graph with one node and no edges, which needs little memory."""
    names = ("mode", "fetch_size", "num_programs", "num_warps", "programs_per_sm", "every_hop", "device")
    indptr, indices = (torch.zeros(2, dtype=own.dtype, device=sampler.device) for own in sampler.graph[:2])
    twin = type(sampler)(indptr, indices, **{name: getattr(sampler, name) for name in names})
    twin.graph = (indptr, indices, *sampler.graph[2:])
    twin.cached, twin.shards, twin.num_edges = sampler.cached, sampler.shards, sampler.num_edges
    twin._start_capacity = 1
    return twin


def compile_for(capability: int, shapes: Iterable[Shape], **options: Any) -> None:
    """Compile sampling kernels for a GPU that is not there, such as 90 for an H100, into the cache of Triton."""
    if INTERPRETED:
        raise ValueError("TRITON_INTERPRET is set, so that Triton compiles nothing; unset it")
    say_when_compiling()
    triton.runtime.driver.set_active(_AbsentGPU(capability))
    graph = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    compile_sampling(_AbsentSampler(*graph, num_programs=1, device="cpu", **options), shapes)


class _AbsentSampler(TritonNeighborSampler):  # type: ignore[misc]
    """Replaces the sizes that no kernel has computed."""

    def fetch(self, words: Tensor) -> AsyncHostCopy:
        sizes = torch.full_like(words, 2)  # at least the number of seeds
        sizes[hops.NEEDED.value] = 0
        return AsyncHostCopy(sizes, None)


class _AbsentGPU(GPUDriver):  # type: ignore[misc]
    """Triton's driver of a GPU that kernels are compiled for; launches do nothing."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils = SimpleNamespace(
            load_binary=lambda *binary: (0, 0, 0, 0, 1024), unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        )  # fmt: skip
        self.launcher_cls = lambda source, metadata: lambda *launch: None
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device: 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_benchmarker(self) -> None:
        return None
