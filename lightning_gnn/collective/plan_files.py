"""What a plan of collective batching holds for, and where it is kept."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data

from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.runtime.store import checksum, find, keep


def cores_of_process(trainer: pl.Trainer | None) -> int:
    """Return how many cores this process may use, if it shares them with others of the run on this machine.

    Args:
        trainer: Tells how many processes there are; without one, the environment does.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if trainer is not None and trainer.world_size > 1:
        processes = trainer.num_devices
    return max(1, available // max(1, min(processes, available)))


def machine_name(device: torch.device, cores: int) -> str:
    """Return what tells machines apart on which the stages take other times: processor, cores, accelerator.

    Args:
        device: Where the model trains.
        cores: How many this process may use.
    """
    processor = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    accelerator = device.type
    if device.type == "cuda":
        accelerator = torch.cuda.get_device_name(device)
    return f"{processor}, {cores} cores, {accelerator}"


def configuration_name(data: Data, sampler: Any, model: pl.LightningModule | None, settings: Sequence[Any]) -> str:
    """Return 32 hexadecimal digits that change with what the stages' times depend on.

    Args:
        data: The graph; shapes count, content does not.
        sampler: Its fanouts and options.
        model: Its class and the sizes of its parameters.
        settings: Anything else, by its ``repr``.
    """
    tensors = {key: value for key, value in data.to_dict().items() if isinstance(value, Tensor)}
    shapes = [(key, str(value.dtype), tuple(value.shape)) for key, value in tensors.items()]
    sampling = [getattr(sampler, name, None) for name in ("num_neighbors", "replace", "disjoint", "backend")]
    parameters = [] if model is None else [None if is_lazy(p) else tuple(p.shape) for p in model.parameters()]
    kind = None if model is None else f"{type(model).__module__}.{type(model).__qualname__}"
    graph = (data.num_nodes, shapes, type(sampler).__name__, sampling)
    return checksum(graph, kind, parameters, list(settings), torch.__version__)


def kept_plan(machine: str, configuration: str) -> CollectivePlan | None:
    """Return the plan that was kept, or None."""
    return find("plans", _key(machine, configuration), lambda folder, check: CollectivePlan.load(folder / "plan.yaml"))


def keep_plan(plan: CollectivePlan) -> None:
    """Keep a plan for the next run on its machine and of its configuration, where that is possible."""
    key = _key(plan.machine, plan.configuration)
    keep("plans", key, lambda folder: plan.save(folder / "plan.yaml"), title=f"plan for {plan.machine}")


def _key(machine: str, configuration: str) -> str:
    return checksum("plan 1", machine, configuration)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
