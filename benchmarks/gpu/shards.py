"""Topology and features sharded across the GPUs of a machine, against copies on each GPU and host memory.

One process per GPU prepares mini-batches of its own seeds, all at the same time; the figure is that of the slowest.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.device_clock import failure
from benchmarks.gpu.one_graph import OneGraph, figures

PLACES = {
    "all on each GPU": {"topology": "device", "features": "device"},
    "features dealt out": {"topology": "device", "features": "shard"},
    "both dealt out": {"topology": "shard", "features": "shard"},
    "all pinned": {"topology": "pinned", "features": "pinned"},
}
LIMIT_S = 600


def measure(graph: OneGraph, ranks: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the ms per mini-batch in each round and their median for each contestant, or its error."""
    sizes = {
        name: getattr(graph, name)
        for name in ("nodes", "edges", "features", "fanouts", "batch_size", "batches", "warm", "runs", "bulks")
    }
    with tempfile.TemporaryDirectory() as folder:
        job = (folder, ranks, graph.device.type, sizes, options or {})
        processes = mp.start_processes(_rank, job, ranks, join=False, start_method="spawn")
        deadline = time.monotonic() + LIMIT_S
        while not processes.join(timeout=5):
            if time.monotonic() > deadline:
                for process in processes.processes:
                    process.kill()
                raise RuntimeError(f"{ranks} processes did not end in {LIMIT_S} s")
        return dict(json.loads(Path(folder, "found.json").read_text()))


def _rank(rank: int, folder: str, ranks: int, kind: str, sizes: dict[str, Any], options: dict[str, Any]) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", ranks)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    graph = OneGraph(device, **sizes)
    found: dict[str, Any] = {}
    for name, places in PLACES.items():
        seen = _everywhere(partial(_loader, graph, ranks, places | options))
        values: list[float] = []
        for turn in range(graph.runs + 1):
            if isinstance(seen, str):
                break
            took = _everywhere(partial(graph.iterate, lambda loader=seen: loader, turn))
            seen, values = (took, values) if isinstance(took, str) else (seen, [*values, _most(took)])
        found[name] = seen if isinstance(seen, str) else values
        del seen
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(figures(found)))
    dist.barrier()
    dist.destroy_process_group()


def _loader(graph: OneGraph, ranks: int, options: dict[str, Any]) -> Any:
    from lightning_gnn import PersistentSamplerDataModule

    shared = {"num_neighbors": list(graph.fanouts), "batch_size": graph.batch_size, "seed": 0, "device": graph.device}
    seeds = graph.train_nodes.repeat(ranks)  # each rank takes its shard
    return PersistentSamplerDataModule(graph.data, seeds, **shared, **options).train_dataloader()


def _everywhere(call: Callable[[], Any]) -> Any:
    """Call on all ranks at the same time; return the result, or the error of any rank on all of them."""
    dist.barrier()
    result, error = None, None
    try:
        result = call()
    except Exception as caught:
        error = failure(caught)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((one for one in errors if one is not None), result)


def _most(value: float) -> float:
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)
