"""What the stages take, and the plan that follows: how many mini-batches CPU and GPU prepare in turn (MorphGL, 4.2)."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, get_args

import yaml

from lightning_gnn.collective.batch_schedule import BatchSchedule
from lightning_gnn.runtime.files import read_text, read_yaml, write_whole
from lightning_gnn.runtime.messages import aligned, removed

Mode = Literal["collective", "cpu", "gpu"]
_BEGIN = "# Plan of collective batching. It is complete where it ends with the line '...'.\n"
_END = "..."  # the end of a document in YAML
PREPARATION_STAGES = ("cpu_batching", "dma", "gpu_batching", "uva", "model")
_REMOVED = {"cover", "backup", "begin", "machine", "configuration"}  # fields of earlier releases, which are read over


@dataclass(frozen=True)
class Duration:
    """Mean and standard deviation of what was measured, in seconds."""

    mean: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check_number("mean", self.mean)
        _check_number("spread", self.spread)


@dataclass(frozen=True)
class StageTimes:
    """What each stage takes for one mini-batch, measured while the other stages run."""

    cpu_batching: Duration  # a CPU worker prepares a mini-batch, while all the others do (T_CBT)
    dma: Duration  # the transfer of one that the CPU has prepared (T_DMA); 0 where there is nothing to transfer
    gpu_batching: Duration  # the GPU samples one (T_GBT)
    uva: Duration  # the GPU gathers its features (T_UVA)
    model: Duration  # forward, backward and optimizer (T_Model)
    cpu_workers: int = 1  # that prepare mini-batches

    def __post_init__(self) -> None:
        _check_whole("cpu_workers", self.cpu_workers, 1)
        if self.model.mean <= 0:
            raise ValueError("the model must take some time")

    @property
    def cpu(self) -> float:
        """Seconds between two mini-batches of all CPU workers together: ``T_C``."""
        return self.cpu_batching.mean / self.cpu_workers

    @property
    def gpu(self) -> float:
        """Seconds in which GPU and PCIe prepare a mini-batch: ``T_G``, sampling and gathering as one stage."""
        return self.gpu_batching.mean + self.uva.mean


@dataclass(frozen=True)
class CollectivePlan:
    """Who prepares the mini-batches of an epoch, and how many each keeps ready.

    Args:
        mode: ``"collective"``: both; ``"cpu"``: a plain pipeline of what the CPU prepares; ``"gpu"``: the GPU alone.
        gpu_buffer_size: ``gbs``, mini-batches that the GPU prepares in a row, in device memory.
        cpu_buffer_size: ``cbs``, mini-batches in host memory.
        lead: So many mini-batches before its turn comes does the CPU begin one; None: as many as both buffers hold.
        row: So many mini-batches does the CPU take one after the other, and then leaves ``gbs`` out; 0: it leaves none.
        cpu_part: Predicted part of the mini-batches that the CPU prepares, between 0 and 1; None: not known.
        num_batches: Mini-batches of the epoch that it was made for; 0 if it was given by hand.
        ratio: ``x``, mini-batches of the GPU for every one of the CPU, with which planning began.
        times: What the stages take.
        epoch_s: Predicted seconds of an epoch with this plan (``"collective"``, whatever its mode), with the CPU alone
            (``"cpu"``) and with the GPU alone (``"gpu"``).
        rounds: How many plans it was chosen from.

    Raises:
        TypeError, ValueError: An unknown field, which the message names.
    """

    mode: Mode
    gpu_buffer_size: int
    cpu_buffer_size: int
    lead: int | None = field(default=None, kw_only=True)
    row: int = field(default=0, kw_only=True)
    cpu_part: float | None = field(default=None, kw_only=True)
    num_batches: int = 0
    ratio: float | None = None
    times: StageTimes | None = None
    epoch_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    rounds: int = 0

    def __new__(cls, *args: object, **kwargs: object) -> CollectivePlan:
        """Refuse fields of earlier releases."""
        for name in _REMOVED & kwargs.keys():
            raise TypeError(removed(f"CollectivePlan.{name}"))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, but is {reprlib.repr(self.mode)}")
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
        """``gbs`` and ``cbs`` as :class:`~lightning_gnn.collective.BatchSchedule` takes them."""
        if self.mode == "collective":
            return self.gpu_buffer_size, self.cpu_buffer_size
        if self.mode == "gpu":
            return 1, 0
        # A place for each CPU worker, and those brought over ahead: with one, no transfer would run beside training.
        return 0, max(self.cpu_buffer_size, self.times.cpu_workers if self.times else 1, BatchSchedule.AHEAD)

    @property
    def ahead(self) -> int:
        """How far ahead of training the CPU begins, as :class:`~lightning_gnn.collective.BatchSchedule` takes it."""
        if self.mode != "collective":
            return 0
        return self.gpu_buffer_size + self.cpu_buffer_size if self.lead is None else self.lead

    def schedule(self, num_batches: int, cpu_workers: int) -> BatchSchedule:
        """Return what decides by this plan in an epoch."""
        return BatchSchedule(num_batches, *self.buffers, cpu_workers, self.ahead, self.row)

    @property
    def cpu_share(self) -> float:
        """The part of the mini-batches that the CPU prepares, between 0 and 1: as predicted, or of the buffers."""
        on_gpu, on_cpu = self.buffers
        shared = on_cpu / (on_gpu + on_cpu) if self.cpu_part is None else self.cpu_part
        return {"cpu": 1.0, "gpu": 0.0}.get(self.mode, shared)

    def __str__(self) -> str:
        """Return the plan as a table."""
        # The heading says which processors prepare mini-batches.
        on_gpu, on_cpu = self.buffers
        heading = {
            "collective": f"collective batching: the CPU prepares about {self.cpu_share:.0%} of the mini-batches, each "
            f"begun {self.ahead} before its turn; the GPU prepares the others, up to {on_gpu} in a row",
            "cpu": "collective batching: the CPU prepares all mini-batches",
            "gpu": "collective batching: the GPU prepares all mini-batches",
        }
        lines = [heading[self.mode]]
        if self.mode == "collective" and self.row:
            lines.append(f"  row {self.row}: the CPU takes so many one after the other, and leaves {on_gpu} to the GPU")
        # The first table lists the measured stages that the plan rests on.
        if self.times is not None:
            rows = [["stage", "mean", "spread"]]
            for name in PREPARATION_STAGES:
                duration: Duration = getattr(self.times, name)
                rows.append([name, f"{1e3 * duration.mean:.3g} ms", f"{1e3 * duration.spread:.2g} ms"])
            workers = self.times.cpu_workers
            rows.append([f"cpu_batching / {workers} workers", f"{1e3 * self.times.cpu:.3g} ms", ""])
            lines += ["", *aligned(rows)]
        # The second table lists the decisions, and how they were found.
        ratio = "" if self.ratio is None else f"{self.ratio:.3g}"
        columns: dict[str, object] = {"gpu_buffer_size": on_gpu, "cpu_buffer_size": on_cpu, "lead": self.ahead}
        if self.mode == "collective":
            columns["row"] = self.row
        columns |= {"initial ratio x": ratio, "rounds": self.rounds}
        rows = [list(columns), [str(value) for value in columns.values()]]
        lines += ["", *aligned(rows)]
        # The third table compares the predicted epochs of this plan and of each processor alone.
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
        return "\n".join(lines)

    def to_yaml(self) -> str:
        """Return the plan as YAML that people can read and change."""
        return f"{_BEGIN}{yaml.safe_dump(_plain(asdict(self)), sort_keys=False)}{_END}\n"

    @classmethod
    def from_yaml(cls, text: str) -> CollectivePlan:
        """Read a plan from YAML, also of an earlier release; a ValueError says what is wrong with it."""
        if text.startswith(_BEGIN) and text.rstrip().rpartition("\n")[2] != _END:
            raise ValueError(
                f"it is incomplete: the line {_END!r} that ends a plan is missing; write the plan again, or remove its "
                "first line if you wrote it by hand"
            )
        required = {"mode", "gpu_buffer_size", "cpu_buffer_size"}
        state = _fields(read_yaml(text), {item.name for item in fields(cls)} | _REMOVED, required, "a plan")
        state = {name: value for name, value in state.items() if name not in _REMOVED}
        state |= {name: _numbers(state[name]) for name in ("ratio", "cpu_part", "times", "epoch_s") if name in state}
        if state.get("times") is not None:
            state["times"] = _stage_times(state["times"])
        return cls(**state)

    def save(self, path: str | Path) -> None:
        """Write the plan to a YAML file."""
        write_whole(path, self.to_yaml())

    @classmethod
    def load(cls, path: str | Path) -> CollectivePlan:
        """Read a plan from a YAML file, which a ValueError names where it holds none."""
        try:
            return cls.from_yaml(read_text(path))
        except ValueError as error:
            raise ValueError(f"{path} holds no plan of collective batching: {error}") from error


def _plain(value: object) -> object:
    """Return nested values of a dataclass without NumPy's kinds of numbers."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return float(value) if isinstance(value, float) else value


def _stage_times(state: object) -> StageTimes:
    state = _fields(state, {*PREPARATION_STAGES, "cpu_workers"}, set(PREPARATION_STAGES), "times")
    for name in PREPARATION_STAGES:
        numbers = state[name] if isinstance(state[name], dict) else {"mean": state[name]}
        try:
            state[name] = Duration(**_fields(numbers, {"mean", "spread"}, {"mean"}, "a stage"))
        except ValueError as error:
            raise ValueError(f"times: {name}: {error}") from None
    return StageTimes(**state)


def _fields(state: object, known: set[str], required: set[str], what: str) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise ValueError(f"{what} must be a mapping of {', '.join(sorted(known))}, but is {reprlib.repr(state)}")
    unknown = sorted(map(str, set(state) - known))
    if unknown:
        raise ValueError(
            f"{what} has no place for {shorten(', '.join(unknown), 200)}, only for {', '.join(sorted(known))}"
        )
    missing = sorted(required - set(state))
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    return dict(state)


def _numbers(value: object) -> object:
    """Return what was read from YAML, with text that is a number as one: YAML 1.1 reads ``1e-3`` as text."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number of at least 0, but is {reprlib.repr(value)}")


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {reprlib.repr(value)}")
