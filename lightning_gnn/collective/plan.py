"""Measured stage times, and the resulting plan of which mini-batches CPU and GPU prepare (MorphGL, section 4.2)."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from math import inf, isfinite
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, get_args

import yaml

from lightning_gnn.collective.batch_schedule import BatchSchedule
from lightning_gnn.collective.dual_buffer import DualBuffer
from lightning_gnn.runtime.files import read_text, read_yaml, write_whole
from lightning_gnn.runtime.messages import aligned
from lightning_gnn.runtime.urls import cached_path, local_path

Mode = Literal["collective", "cpu", "gpu"]
ScheduleName = Literal["in_order", "paper"]
"""``"in_order"``: trained in the order of the epoch; ``"paper"``: as published, as soon as they are ready."""
_FIRST_LINE = "# Plan of collective batching. It is complete where it ends with the line '...'.\n"
_LAST_LINE = "..."  # end of a YAML document
PREPARATION_STAGES = ("cpu_batching", "dma", "gpu_batching", "uva", "model")


@dataclass(frozen=True)
class Duration:
    """Mean and standard deviation of a measured duration, in seconds."""

    mean: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check_number("mean", self.mean)
        _check_number("spread", self.spread)


@dataclass(frozen=True)
class StageTimes:
    """Duration of each stage per mini-batch, measured while the other stages run."""

    cpu_batching: Duration  # preparation by one CPU worker while all others work (T_CBT)
    dma: Duration  # transfer of a mini-batch prepared on the CPU (T_DMA); 0 without a transfer
    gpu_batching: Duration  # sampling on the GPU (T_GBT)
    uva: Duration  # feature gathering on the GPU (T_UVA)
    model: Duration  # forward, backward and optimizer step (T_Model)
    cpu_workers: int = 1  # number of CPU workers

    def __post_init__(self) -> None:
        _check_whole("cpu_workers", self.cpu_workers, 1)
        if self.model.mean <= 0:
            raise ValueError("the mean time of the model must be positive")

    @property
    def cpu(self) -> float:
        """Seconds per mini-batch of all CPU workers together: ``T_C``."""
        return self.cpu_batching.mean / self.cpu_workers

    @property
    def gpu(self) -> float:
        """Seconds per mini-batch of the GPU and PCIe: ``T_G``, sampling and gathering as one stage."""
        return self.gpu_batching.mean + self.uva.mean


def relaxed_time(x: float, times: StageTimes) -> float:
    """Return C'(x) / n, seconds per mini-batch with unlimited buffers and divisible work (equation 6, repaired).

    This is the maximum of the times of PCIe, GPU and CPU if the GPU prepares x mini-batches for each one of the CPU
    (all for infinite x).
    """
    on_gpu = 1.0 if x == inf else x / (1 + x)
    on_cpu = 0.0 if x == inf else 1 / (1 + x)
    pcie = on_gpu * times.gpu + on_cpu * times.dma.mean
    gpu = on_gpu * times.gpu + times.model.mean
    return max(pcie, gpu, on_cpu * times.cpu)


def initial_ratio(times: StageTimes) -> float:
    """Return the smallest x that minimizes :func:`relaxed_time`: 0, or an intersection of two of its three terms."""
    cpu, gpu, dma, model = times.cpu, times.gpu, times.dma.mean, times.model.mean
    candidates = [0.0, (cpu - model) / (gpu + model), dma / model - 1]
    if gpu > 0:
        candidates.append((cpu - dma) / gpu)
    possible = sorted(x for x in candidates if x >= 0 and isfinite(x))
    return min(possible, key=lambda x: relaxed_time(x, times))


@dataclass(frozen=True)
class CollectivePlan:
    """Assignment of an epoch's mini-batches to CPU and GPU, and the sizes of their buffers.

    Args:
        mode: ``"collective"``: both; ``"cpu"``: the CPU prepares all; ``"gpu"``: the GPU prepares all.
        gpu_buffer_size: ``gbs``, mini-batches that the GPU prepares in a row, in device memory.
        cpu_buffer_size: ``cbs``, mini-batches in host memory.
        lead: Number of mini-batches before its turn at which the CPU starts one; None: the sum of both buffer sizes.
        row: Length of the CPU's runs of mini-batches, each followed by ``gbs`` for the GPU; 0: no alternation.
        schedule: ``"in_order"``, or ``"paper"``, which ignores ``lead`` and ``row``.
        cpu_part: Predicted fraction of mini-batches prepared by the CPU, in [0, 1]; None: unknown.
        num_batches: Number of mini-batches in the planned epoch; 0 for a manual plan.
        ratio: ``x``, initial ratio of mini-batches of the GPU to those of the CPU.
        times: Measured stage times.
        epoch_s: Predicted seconds of an epoch with this plan (key ``"collective"`` in every mode), with the CPU alone
            (``"cpu"``) and with the GPU alone (``"gpu"``).
        rounds: Number of plans that were compared.

    Raises:
        TypeError, ValueError: A field is unknown or invalid.
    """

    mode: Mode
    gpu_buffer_size: int
    cpu_buffer_size: int
    lead: int | None = field(default=None, kw_only=True)
    row: int = field(default=0, kw_only=True)
    schedule: ScheduleName = field(default="in_order", kw_only=True)
    cpu_part: float | None = field(default=None, kw_only=True)
    num_batches: int = 0
    ratio: float | None = None
    times: StageTimes | None = None
    epoch_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    rounds: int = 0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, but is {reprlib.repr(self.mode)}")
        if self.schedule not in get_args(ScheduleName):
            raise ValueError(f"schedule must be in_order or paper, but is {reprlib.repr(self.schedule)}")
        least = {"gpu_buffer_size": 1, "cpu_buffer_size": int(self.mode == "collective"), "row": 0}
        least |= {"num_batches": 0, "rounds": 0} | ({} if self.lead is None else {"lead": 0})
        for name, minimum in least.items():
            _check_whole(name, getattr(self, name), minimum)
        if not isinstance(self.epoch_s, Mapping) or not self.epoch_s.keys() <= set(get_args(Mode)):
            raise ValueError(
                f"epoch_s must map collective, cpu and gpu to seconds, but is {reprlib.repr(self.epoch_s)}"
            )
        given = {name: number for name in ("ratio", "cpu_part") if (number := getattr(self, name)) is not None}
        for name, number in (given | {f"epoch_s[{name!r}]": seconds for name, seconds in self.epoch_s.items()}).items():
            _check_number(name, number)

    @property
    def buffers(self) -> tuple[int, int]:
        """``gbs`` and ``cbs``, as arguments of :class:`~lightning_gnn.collective.BatchSchedule`."""
        if self.mode == "collective":
            return self.gpu_buffer_size, self.cpu_buffer_size
        if self.mode == "gpu":
            return 1, 0
        # One slot per CPU worker, and at least AHEAD: with a single slot, no transfer would overlap with training.
        return 0, max(self.cpu_buffer_size, self.times.cpu_workers if self.times else 1, BatchSchedule.AHEAD)

    @property
    def ahead(self) -> int:
        """The CPU's ``lead``, as argument of :class:`~lightning_gnn.collective.BatchSchedule`."""
        if self.mode != "collective":
            return 0
        return self.gpu_buffer_size + self.cpu_buffer_size if self.lead is None else self.lead

    def create_schedule(self, num_batches: int, cpu_workers: int) -> BatchSchedule | DualBuffer:
        """Return the schedule of an epoch under this plan."""
        if self.schedule == "paper":
            return DualBuffer(range(num_batches), *self.buffers, cpu_workers)
        return BatchSchedule(num_batches, *self.buffers, cpu_workers, self.ahead, self.row)

    @property
    def optimality_gap(self) -> float | None:
        """How much longer than the lower bound of equation 6, which holds for any schedule, the predicted epoch is.

        None without stage times or a predicted epoch.
        """
        if self.times is None or not self.num_batches or "collective" not in self.epoch_s:
            return None
        bound = self.num_batches * relaxed_time(initial_ratio(self.times), self.times)
        return max(0.0, self.epoch_s["collective"] / bound - 1)

    @property
    def cpu_share(self) -> float:
        """Fraction of mini-batches that the CPU prepares: as predicted, else estimated from the buffer sizes."""
        on_gpu, on_cpu = self.buffers
        collective = on_cpu / (on_gpu + on_cpu) if self.cpu_part is None else self.cpu_part
        return {"cpu": 1.0, "gpu": 0.0}.get(self.mode, collective)

    def __str__(self) -> str:
        """Return the plan as a table."""
        on_gpu, on_cpu = self.buffers
        heading = {
            "collective": f"collective batching: the CPU prepares about {self.cpu_share:.0%} of the mini-batches, each "
            f"{self.ahead} ahead of training; the GPU prepares the others, up to {on_gpu} in a row",
            "cpu": "collective batching: the CPU prepares all mini-batches",
            "gpu": "collective batching: the GPU prepares all mini-batches",
        }
        lines, published = [heading[self.mode]], self.schedule == "paper"
        if published and self.mode == "collective":
            lines = [
                f"collective batching as published: the CPU prepares about {self.cpu_share:.0%} of the mini-batches; "
                f"{on_cpu} of it and {on_gpu} of the GPU are collected, then trained as they became ready"
            ]
        elif self.mode == "collective" and self.row:
            lines.append(
                f"  row {self.row}: after {self.row} consecutive mini-batches, the CPU leaves {on_gpu} to the GPU"
            )
        # First table: measured stage times.
        if self.times is not None:
            rows = [["stage", "mean", "spread"]]
            for name in PREPARATION_STAGES:
                duration: Duration = getattr(self.times, name)
                rows.append([name, f"{1e3 * duration.mean:.3g} ms", f"{1e3 * duration.spread:.2g} ms"])
            workers = self.times.cpu_workers
            rows.append([f"cpu_batching / {workers} workers", f"{1e3 * self.times.cpu:.3g} ms", ""])
            lines += ["", *aligned(rows)]
        # Second table: parameters of the plan.
        ratio = "" if self.ratio is None else f"{self.ratio:.3g}"
        columns: dict[str, object] = {"gpu_buffer_size": on_gpu, "cpu_buffer_size": on_cpu}
        if not published:
            columns |= {"lead": self.ahead} | ({"row": self.row} if self.mode == "collective" else {})
        columns |= {"initial ratio x": ratio, "rounds": self.rounds}
        rows = [list(columns), [str(value) for value in columns.values()]]
        lines += ["", *aligned(rows)]
        # Third table: predicted epochs of this plan and of each processor alone.
        if self.epoch_s:
            names = {"collective": "this plan", "cpu": "CPU only", "gpu": "GPU only"}
            own = self.epoch_s.get("collective")
            rows = [["predicted epoch", "seconds", "against this plan"]]
            for name, label in names.items():
                if name in self.epoch_s:
                    seconds = self.epoch_s[name]
                    rows.append([label, f"{seconds:.4g}", f"{seconds / own:.2f}x" if own else ""])
            lines += ["", *aligned(rows)]
            if self.num_batches:
                lines.append(f"an epoch of {self.num_batches} mini-batches")
            if (gap := self.optimality_gap) is not None:
                lines.append(f"at most {gap:.1%} above any schedule with these stage times (equation 6)")
        return "\n".join(lines)

    def to_yaml(self) -> str:
        """Return the plan as human-readable YAML."""
        return f"{_FIRST_LINE}{yaml.safe_dump(_without_numpy(asdict(self)), sort_keys=False)}{_LAST_LINE}\n"

    @classmethod
    def from_yaml(cls, text: str) -> CollectivePlan:
        """Read a plan from YAML; raise a ValueError if it is invalid."""
        if text.startswith(_FIRST_LINE) and text.rstrip().rpartition("\n")[2] != _LAST_LINE:
            raise ValueError(
                f"it is incomplete: the last line {_LAST_LINE!r} is missing; write the plan again, or remove its first "
                "line if it was written manually"
            )
        required = {"mode", "gpu_buffer_size", "cpu_buffer_size"}
        state = _validate_mapping(read_yaml(text), {item.name for item in fields(cls)}, required, "a plan")
        state |= {
            name: _parse_numbers(state[name]) for name in ("ratio", "cpu_part", "times", "epoch_s") if name in state
        }
        if state.get("times") is not None:
            state["times"] = _parse_stage_times(state["times"])
        return cls(**state)

    def save(self, path: str | Path) -> None:
        """Write the plan to a YAML file."""
        write_whole(local_path(path), self.to_yaml())

    @classmethod
    def load(cls, path: str | Path) -> CollectivePlan:
        """Read a plan from a YAML file; raise a ValueError with its path if it is invalid."""
        try:
            return cls.from_yaml(read_text(cached_path(path)))
        except ValueError as error:
            raise ValueError(f"{path} is not a valid plan of collective batching: {error}") from error


def _without_numpy(value: object) -> object:
    """Convert NumPy numbers in nested mappings to Python numbers."""
    if isinstance(value, Mapping):
        return {key: _without_numpy(item) for key, item in value.items()}
    return float(value) if isinstance(value, float) else value


def _parse_stage_times(state: object) -> StageTimes:
    state = _validate_mapping(state, {*PREPARATION_STAGES, "cpu_workers"}, set(PREPARATION_STAGES), "times")
    for name in PREPARATION_STAGES:
        numbers = state[name] if isinstance(state[name], dict) else {"mean": state[name]}
        try:
            state[name] = Duration(**_validate_mapping(numbers, {"mean", "spread"}, {"mean"}, "a stage"))
        except ValueError as error:
            raise ValueError(f"times: {name}: {error}") from None
    return StageTimes(**state)


def _validate_mapping(state: object, known: set[str], required: set[str], what: str) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise ValueError(f"{what} must be a mapping of {', '.join(sorted(known))}, but is {reprlib.repr(state)}")
    unknown = sorted(map(str, set(state) - known))
    if unknown:
        raise ValueError(
            f"{what} has unknown fields {shorten(', '.join(unknown), 200)}; use {', '.join(sorted(known))}"
        )
    missing = sorted(required - set(state))
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    return dict(state)


def _parse_numbers(value: object) -> object:
    """Convert strings that are numbers, as YAML 1.1 reads ``1e-3`` as a string."""
    if isinstance(value, dict):
        return {key: _parse_numbers(item) for key, item in value.items()}
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number of at least 0, but is {reprlib.repr(value)}")


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {reprlib.repr(value)}")
