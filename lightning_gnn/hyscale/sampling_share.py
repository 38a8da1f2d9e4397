"""Whether accelerators sample in a hybrid run, and how much of it to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling, can_sample_on
from lightning_gnn.hyscale.decisions import read_decisions
from lightning_gnn.hyscale.first_mapping import first_share
from lightning_gnn.hyscale.work_share import Trainers
from lightning_gnn.runtime.files import LARGEST_JSON, read_text


def wanted_sampling(wanted: str | float, drm: bool | str | Path) -> str | float:
    """Return which share accelerators are to have: what the user says, or what a replay needs.

    Args:
        wanted: ``"auto"``, or a share.
        drm: As for the strategy; the path of a log to replay.

    Raises:
        FileNotFoundError: There is no such log.
        ValueError: It is none.
    """
    if isinstance(drm, bool):
        return wanted
    decisions = read_decisions(read_text(drm, LARGEST_JSON).splitlines())
    return max((decision.mapping.accelerator_sampling for decision in decisions), default=0.0)


def find_sampling(
    wanted: str | float, loader: Any, trainers: Trainers, present: AcceleratorSampling | None = None
) -> AcceleratorSampling | None:
    """Return what samples on the accelerators, None where nothing does.

    Args:
        wanted: A share; 0 for none. ``"auto"`` leaves out CPUs that stand for accelerators: their sampling would take
            cores that nobody has counted.
        loader: The training loader.
        trainers: Who trains.
        present: What there is, which is kept if it serves this loader too.

    Raises:
        ValueError: Triton is missing, where a share is given.
        RuntimeError: An accelerator has no memory for the topology, where a share is given.
    """
    accelerators = trainers.devices[trainers.num_cpu :]
    automatic = wanted == "auto"
    if wanted == 0.0 or not accelerators or (automatic and any(device.type == "cpu" for device in accelerators)):
        return None
    if not all(can_sample_on(loader, device) for device in accelerators):
        if not automatic:
            rank_zero_warn(
                f"accelerator_sampling={wanted} changes nothing: on {', '.join(map(str, accelerators))}, nothing draws "
                "the samples of this loader"
            )
        return None
    if present is not None and present.sampler is loader.node_sampler:
        return present
    try:
        return AcceleratorSampling(loader.node_sampler, trainers.devices, trainers.num_cpu)
    except (RuntimeError, ValueError) as error:
        if not automatic:
            raise
        rank_zero_warn(f"hyscale samples on the CPU alone: {error}")
        return None


def begin_sampling(
    wanted: str | float,
    sampling: AcceleratorSampling | None,
    loader: Any,
    total: int,
    threads: int,
    modelled: float | None = None,
) -> float:
    """Return the share of the sampling that accelerators do to begin with.

    Args:
        wanted: A share, or ``"auto"``.
        sampling: What samples on them.
        loader: The training loader.
        total: Seeds of an iteration.
        threads: Threads of Sampling on the CPU.
        modelled: What the performance model says, if it has been asked; otherwise it is measured.
    """
    if sampling is None:
        return 0.0
    if not isinstance(wanted, str):
        return wanted
    return first_share(sampling, loader, max(1, total), threads) if modelled is None else modelled
