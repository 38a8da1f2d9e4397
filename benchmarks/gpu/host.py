"""Host time per mini-batch of a sampler on a GPU, alone and in bulks; without a GPU, of launches that do nothing.

The sizes of mini-batches are those of ogbn-products, divided by 100 without a GPU, where outputs are CPU tensors. Times
are of the calling thread, so other processes hardly affect them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver

from benchmarks.harness import machine, measure, parse, publish
from lightning_gnn.ops.sample.triton import begin_samples
from lightning_gnn.triton_kernels import hops
from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

NUM_NODES, NUM_EDGES, FANOUTS = 2_449_029, 61_859_140, [15, 10, 5]
NODES, EDGES = (1024, 13_000, 110_000, 502_000), (15_000, 125_000, 673_000)
BULKS = (1, 2, 8, 16, 32)


def empty_driver() -> GPUDriver:
    """Return a driver of an H100 that compiles kernels, but launches nothing."""
    properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}
    answers = {
        "get_current_target": GPUTarget("cuda", 90, 32), "get_active_torch_device": torch.device("cpu"),
        "get_device_interface": torch.cpu, "is_active": True, "map_python_to_cpp_type": "", "get_benchmarker": None,
        "get_device_capability": (9, 0), "get_current_stream": 0, "get_current_device": 0, "set_current_device": None,
        "__init__": None, "launcher_cls": lambda *args: None,
        "utils": SimpleNamespace(load_binary=lambda *args: (0, 0, 64, 0, 1024),
                                 get_device_properties=lambda device: properties),
    }  # fmt: skip
    plain = {"utils": answers.pop("utils")}
    methods = {name: lambda self, *args, answer=answer: answer for name, answer in answers.items()}
    driver: GPUDriver = type("Driver", (GPUDriver,), {**methods, **plain})()
    return driver


def sizes_of(parts: int) -> torch.Tensor:
    """Return the words that a launch of equal mini-batches would leave, with a hundredth of their nodes and edges."""
    nodes, edges = (np.array(counts)[:, None].repeat(parts, 1) // 100 for counts in (NODES, EDGES))
    levels = [np.full(parts, NODES[0]), *edges]
    words = np.zeros(hops.SIZES_SIZE + 2 * parts * len(nodes), np.int64)
    for at, counts in ((hops.NODES.value, nodes), (hops.EDGES.value, np.array(levels))):
        words[at + 1 : at + 1 + len(counts)] = counts.sum(1).cumsum()
        first = (counts.cumsum() - counts.ravel())[parts if at else 0 :]
        begin = hops.PARTS.value + (nodes.size if at else 0)
        words[begin : begin + first.size] = first
    return torch.from_numpy(words)


def host_time(parts: int, graph: Sequence[torch.Tensor], launches: int) -> Callable[[], float]:
    """Return a contestant that measures the microseconds per mini-batch."""
    real = graph[0].is_cuda
    sampler = TritonNeighborSampler(*graph, device=graph[0].device, num_programs=None if real else 528)
    if not real:
        sampler._buffers["sizes"] = sizes_of(parts)
    seeds = torch.randint(graph[0].numel() - 1, (parts * NODES[0],), device=graph[0].device)
    arguments = sampler, seeds, [NODES[0]] * parts, FANOUTS, list(range(parts)), False, False, 1.0
    wait = torch.cuda.synchronize if real else lambda: None

    def call() -> float:
        total = 0.0
        for _ in range(launches):
            wait()
            at = time.thread_time()
            begun = begin_samples(*arguments)
            total += time.thread_time() - at
            wait()
            at = time.thread_time()
            begun.end()
            total += time.thread_time() - at
        return total / (launches * parts) * 1e6

    return call


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and publish."""
    args = parse("gpu_host_bulks", str(__doc__), {"launches": (400, 3)}, argv)
    described = machine()
    real = torch.cuda.is_available()
    num_nodes, num_edges, device = (NUM_NODES, NUM_EDGES, "cuda") if real else (1000, 1000, "cpu")
    if not real:
        triton.runtime.driver.set_active(empty_driver())
    indptr = torch.linspace(0, num_edges, num_nodes + 1, dtype=torch.float64).long().to(device)
    graph = indptr, torch.randint(num_nodes, (num_edges,), dtype=torch.int32, device=device)
    contestants = {f"bulk of {parts}": host_time(parts, graph, args.launches) for parts in BULKS}
    rows = measure({name: call for name, call in contestants.items() if args.only in name}, args.runs)
    result = {
        "benchmark": "gpu_host_bulks",
        "title": "Host time of sampling" + ("" if real else " with launches that do nothing"),
        "unit": "us per mini-batch",
        "settings": {**args.sizes, "fanouts": FANOUTS, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [],
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()
