"""What the stages take, and the plan that follows: how many mini-batches CPU and GPU prepare in turn (MorphGL, 4.2)."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, get_args

import yaml

from lightning_gnn.collective.reorder_buffer import ReorderBuffer
from lightning_gnn.runtime.files import read_text, read_yaml, write_whole
from lightning_gnn.runtime.messages import aligned
from lightning_gnn.runtime.store import checksum, find, keep

Mode = Literal["collective", "cpu", "gpu"]
_BEGIN = "# Plan of collective batching. It is complete where it ends with the line '...'.\n"
_END = "..."
STAGES = ("cpu_batching", "dma", "gpu_batching", "uva", "model")


@dataclass(frozen=True)
class Duration:
    """Mean and spread of what was measured.

    Args:
        spread: Standard deviation in seconds.
    """

    mean: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.mean) and isfinite(self.spread) and self.mean >= 0 and self.spread >= 0):
            raise ValueError(f"seconds must be finite and not negative: {self}")


@dataclass(frozen=True)
class StageTimes:
    """What each stage takes for one mini-batch, measured while the other stages run.

    Args:
        cpu_batching: A CPU worker prepares a mini-batch, while all the others do (``T_CBT``).
        dma: The transfer of a mini-batch that the CPU has prepared (``T_DMA``); 0 where there is nothing to transfer.
        gpu_batching: The GPU samples a mini-batch (``T_GBT``).
        uva: The GPU gathers its features (``T_UVA``).
        model: Forward, backward and optimizer (``T_Model``).
        cpu_workers: How many workers prepare mini-batches.
    """

    cpu_batching: Duration
    dma: Duration
    gpu_batching: Duration
    uva: Duration
    model: Duration
    cpu_workers: int = 1

    def __post_init__(self) -> None:
        if self.cpu_workers < 1:
            raise ValueError(f"cpu_workers must be at least 1, but is {self.cpu_workers}")
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
        cover: A mini-batch of the CPU's next row sets out only where training has so many left before the GPU's row;
            1: always.
        backup: The GPU prepares what a late worker still has, rather than wait for it.
        begin: The first mini-batch of an epoch that the CPU takes, where that is later than its lead says.
        cpu_part: Predicted part of the mini-batches that the CPU prepares, between 0 and 1; None: not known.
        num_batches: Mini-batches of the epoch that it was made for; 0 if it was given by hand.
        ratio: ``x``, mini-batches of the GPU for every one of the CPU, with which planning began.
        times: What the stages take.
        epoch_s: Predicted seconds of an epoch with this plan (``"collective"``, whatever its mode), with the CPU alone
            (``"cpu"``) and with the GPU alone (``"gpu"``).
        rounds: How many plans were simulated before this one was chosen.
        machine: Fingerprint of the machine that it was made for.
        configuration: Fingerprint of the data, sampling and model that it was made for.

    Raises:
        ValueError: A field is no plan: the message names it.
    """

    mode: Mode
    gpu_buffer_size: int
    cpu_buffer_size: int
    lead: int | None = field(default=None, kw_only=True)
    row: int = field(default=0, kw_only=True)
    cover: int = field(default=1, kw_only=True)
    backup: bool = field(default=False, kw_only=True)
    begin: int = field(default=0, kw_only=True)
    cpu_part: float | None = field(default=None, kw_only=True)
    num_batches: int = 0
    ratio: float | None = None
    times: StageTimes | None = None
    epoch_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    rounds: int = 0
    machine: str = ""
    configuration: str = ""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, but is {reprlib.repr(self.mode)}")
        least = {"gpu_buffer_size": 1, "cpu_buffer_size": int(self.mode == "collective"), "row": 0, "cover": 1}
        least |= {"begin": 0, "num_batches": 0, "rounds": 0}
        for name, minimum in least.items():
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < minimum:
                raise ValueError(f"{name} must be a whole number of at least {minimum}, but is {reprlib.repr(number)}")
        if not isinstance(self.backup, bool):
            raise ValueError(f"backup must be true or false, but is {reprlib.repr(self.backup)}")
        if self.lead is not None and (not isinstance(self.lead, int) or isinstance(self.lead, bool) or self.lead < 0):
            raise ValueError(f"lead must be a whole number of at least 0, but is {reprlib.repr(self.lead)}")
        for name in ("ratio", "cpu_part"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name))
        if not isinstance(self.epoch_s, Mapping):
            raise ValueError(
                f"epoch_s must map collective, cpu and gpu to seconds, but is {reprlib.repr(self.epoch_s)}"
            )
        for name, seconds in self.epoch_s.items():
            if name not in get_args(Mode):
                raise ValueError(f"epoch_s has no place for {reprlib.repr(name)}, only for {', '.join(get_args(Mode))}")
            _check_number(f"epoch_s[{name!r}]", seconds)
        if self.times is not None and not isinstance(self.times, StageTimes):
            raise ValueError(f"times must be StageTimes, but is {reprlib.repr(self.times)}")
        for name in ("machine", "configuration"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be text, but is {reprlib.repr(getattr(self, name))}")

    @property
    def buffers(self) -> tuple[int, int]:
        """``gbs`` and ``cbs`` as :class:`~lightning_gnn.collective.ReorderBuffer` takes them.

        A plain pipeline has a place for each CPU worker, and as many as are brought to the device ahead of training:
        with one, no transfer would run while the model trains.
        """
        if self.mode == "collective":
            return self.gpu_buffer_size, self.cpu_buffer_size
        if self.mode == "gpu":
            return 1, 0
        return 0, max(self.cpu_buffer_size, self.times.cpu_workers if self.times else 1, ReorderBuffer.AHEAD)

    @property
    def ahead(self) -> int:
        """How far ahead of training the CPU begins, as :class:`~lightning_gnn.collective.ReorderBuffer` takes it."""
        if self.mode != "collective":
            return 0
        return self.gpu_buffer_size + self.cpu_buffer_size if self.lead is None else self.lead

    @property
    def decisions(self) -> CollectivePlan:
        """The plan with nothing but what its schedule depends on."""
        return CollectivePlan(
            self.mode,
            self.gpu_buffer_size,
            self.cpu_buffer_size,
            lead=self.lead,
            row=self.row,
            cover=self.cover,
            backup=self.backup,
            begin=self.begin,
        )

    def schedule(self, num_batches: int, cpu_workers: int) -> ReorderBuffer:
        """Return what decides by this plan in an epoch.

        Args:
            num_batches: Mini-batches of the epoch.
            cpu_workers: That prepare mini-batches.
        """
        on_gpu, on_cpu = self.buffers
        sizes = num_batches, on_gpu, on_cpu, cpu_workers, self.ahead, self.row, self.cover, self.backup
        return ReorderBuffer(*sizes, begin=self.begin)

    @property
    def cpu_share(self) -> float:
        """The part of the mini-batches that the CPU prepares, between 0 and 1: as predicted, or of the buffers."""
        on_gpu, on_cpu = self.buffers
        shared = on_cpu / (on_gpu + on_cpu) if self.cpu_part is None else self.cpu_part
        return {"cpu": 1.0, "gpu": 0.0}.get(self.mode, shared)

    def __str__(self) -> str:
        """Return the plan as a table."""
        on_gpu, on_cpu = self.buffers
        heading = {
            "collective": f"collective batching: the CPU prepares about {self.cpu_share:.0%} of the mini-batches, each "
            f"begun {self.ahead} before its turn; the GPU prepares the others, up to {on_gpu} in a row",
            "cpu": "collective batching: the CPU prepares all mini-batches",
            "gpu": "collective batching: the GPU prepares all mini-batches",
        }
        lines = [heading[self.mode], *self._in_words()]
        if self.times is not None:
            rows = [["stage", "mean", "spread"]]
            for name in STAGES:
                duration: Duration = getattr(self.times, name)
                rows.append([name, f"{1e3 * duration.mean:.3g} ms", f"{1e3 * duration.spread:.2g} ms"])
            workers = self.times.cpu_workers
            rows.append([f"cpu_batching / {workers} workers", f"{1e3 * self.times.cpu:.3g} ms", ""])
            lines += ["", *aligned(rows)]
        ratio = "" if self.ratio is None else f"{self.ratio:.3g}"
        columns: dict[str, object] = {"gpu_buffer_size": on_gpu, "cpu_buffer_size": on_cpu, "lead": self.ahead}
        if self.mode == "collective":
            columns |= {"row": self.row, "cover": self.cover, "backup": self.backup, "begin": self.begin}
        columns |= {"initial ratio x": ratio, "rounds": self.rounds}
        rows = [list(columns), [str(value) for value in columns.values()]]
        lines += ["", *aligned(rows)]
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

    def _in_words(self) -> list[str]:
        """Return what else the schedule goes by, a line each, as far as it does."""
        if self.mode != "collective":
            return []
        said = {
            f"row {self.row}: the CPU takes so many one after the other, and leaves the next "
            f"{self.gpu_buffer_size} to the GPU": self.row,
            f"cover {self.cover}: one of a later row is transferred only while so many are left to train before the "
            "GPU prepares again": self.cover > 1,
            "backup: the GPU prepares itself what a late worker still has, rather than wait": self.backup,
            f"begin {self.begin}: the first of an epoch that the CPU takes": self.begin,
        }
        return [f"  {line}" for line, applies in said.items() if applies]

    def to_yaml(self) -> str:
        """Return the plan as YAML that people can read and change."""
        return f"{_BEGIN}{yaml.safe_dump(_plain(asdict(self)), sort_keys=False)}{_END}\n"

    @classmethod
    def from_yaml(cls, text: str) -> CollectivePlan:
        """Read a plan from YAML; only ``mode`` and the buffer sizes must be there.

        Raises:
            ValueError: It is no YAML, no plan, or one of :meth:`to_yaml` that was cut off.
        """
        if text.startswith(_BEGIN) and text.rstrip().rpartition("\n")[2] != _END:
            raise ValueError(
                f"it is incomplete: the line {_END!r} that ends a plan is missing; write the plan again, or remove its "
                "first line if you wrote it by hand"
            )
        state = read_yaml(text)
        required = {"mode", "gpu_buffer_size", "cpu_buffer_size"}
        state = _fields(state, {item.name for item in fields(cls)}, required, "a plan")
        for name in ("ratio", "cpu_part"):
            if isinstance(state.get(name), str):
                state[name] = _number(name, state[name])
        if state.get("times") is not None:
            state["times"] = _stage_times(state["times"])
        if isinstance(state.get("epoch_s"), dict):
            epochs = state["epoch_s"].items()
            state["epoch_s"] = {name: _number(f"epoch_s[{name!r}]", seconds) for name, seconds in epochs}
        return cls(**state)

    def save(self, path: str | Path) -> None:
        """Write the plan to a YAML file."""
        write_whole(path, self.to_yaml())

    @classmethod
    def load(cls, path: str | Path) -> CollectivePlan:
        """Read a plan from a YAML file.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It holds no plan; the message names the file and what is wrong.
        """
        try:
            return cls.from_yaml(read_text(path))
        except ValueError as error:
            raise ValueError(f"{path} holds no plan of collective batching: {error}") from error


def kept_plan(machine: str, configuration: str) -> CollectivePlan | None:
    """Return the plan that was kept, or None."""
    return find("plans", _key(machine, configuration), lambda folder: CollectivePlan.load(folder / "plan.yaml"))


def keep_plan(plan: CollectivePlan) -> None:
    """Keep a plan for the next run on its machine and of its configuration, where that is possible."""
    key = _key(plan.machine, plan.configuration)
    keep("plans", key, lambda folder: plan.save(folder / "plan.yaml"), title=f"plan for {plan.machine}")


def _key(machine: str, configuration: str) -> str:
    return checksum("plan 4", machine, configuration)


def _plain(value: Any) -> Any:
    """Return nested values of a dataclass without NumPy's kinds of numbers."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return float(value) if isinstance(value, float) else value


def _stage_times(state: Any) -> StageTimes:
    state = _fields(state, {*STAGES, "cpu_workers"}, set(STAGES), "times")
    durations = {}
    for name in STAGES:
        numbers = state[name] if isinstance(state[name], dict) else {"mean": state[name]}
        numbers = _fields(numbers, {"mean", "spread"}, {"mean"}, f"times: {name}")
        durations[name] = Duration(**{key: _number(f"times: {name}: {key}", item) for key, item in numbers.items()})
    workers = state.get("cpu_workers", 1)
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise ValueError(f"times: cpu_workers must be a whole number, but is {reprlib.repr(workers)}")
    return StageTimes(**durations, cpu_workers=workers)


def _fields(state: Any, known: set[str], required: set[str], what: str) -> dict[str, Any]:
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


def _number(name: str, value: Any) -> float:
    """Return a number of a YAML file; YAML 1.1 reads ``1e-3`` as text, so text is tried too."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{name} must be a number, but is {reprlib.repr(value)}") from None
    _check_number(name, value)
    return float(value)


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number of at least 0, but is {reprlib.repr(value)}")
