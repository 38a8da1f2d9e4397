"""What a training step costs, part by part: a few real steps of the user's own module, in the user's own Trainer."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
from torch.autograd.profiler_util import FunctionEvent

WARM_UP, TIMED = 2, 6  # steps that do not count, and those that do; one more is taken apart
TOGETHER = 16  # steps that are timed while workers prepare
_BUDGET = 6.0  # seconds after which fewer steps will do
PARTS = ("products", "aggregation", "dropout", "elementwise", "optimizer", "Python")
"""What a step is taken apart into; ``"Python"`` is all that is no operator of torch."""
_OPTIMIZER, _BACKWARD = "Optimizer.step", "autograd::engine"
_NAMES = {
    "dropout": r"dropout|bernoulli",
    "products": r"^(aten::(addmm|mm|bmm|baddbmm|addmv|mv|dot|linear|matmul|_scaled_mm|mkldnn)|mkldnn)",
    "aggregation": r"^(lightning_gnn|pyg|torch_sparse|torch_scatter)::|^aten::(_?index_|index$|gather|"
    r"scatter|segment|_?sparse|_csr|_spmm|embedding|take|sort|argsort|cumsum|bincount|repeat_interleave|unique)",
    "elementwise": r"^aten::",
}
"""Which operators belong to which part, the first that matches."""
_COUNTED = re.compile(r"aten::(addmm_?|mm|bmm|baddbmm_?|_addmm_activation)$")


@dataclass(frozen=True)
class TimedStep:
    """A training step, on the average."""

    seconds: float  # from Lightning's on_train_batch_start to on_train_batch_end
    outside_s: float  # from the end of one to the start of the next, with mini-batches that are there
    threads: int
    parts: dict[str, float] = field(default_factory=dict)  # seconds of each of :data:PARTS, which add up to seconds
    flops: float = 0.0  # operations of dense products in the training thread; a multiply-add is two

    @property
    def total(self) -> float:
        """Seconds of the training thread for a mini-batch."""
        return self.seconds + self.outside_s


def time_steps(
    module: pl.LightningModule, make_trainer: Callable[..., pl.Trainer], batches: Sequence[object], threads: int
) -> TimedStep:
    """Train on some mini-batches again and again; the module is another one afterwards."""
    clock = _Clock()
    _fit(module, make_trainer, _Replay(batches, clock), clock, 1.0, threads)
    if not clock.inside:
        raise ValueError("training ended before a step was timed; leave out what ends it, such as trainer.max_time")
    seconds = median(clock.inside)
    profiled = sum(clock.parts.values())
    parts = {name: seconds * value / profiled for name, value in clock.parts.items()} if profiled else {}
    return TimedStep(seconds, median(clock.outside or [0.0]), threads, parts, clock.flops)


def time_together(
    module: pl.LightningModule, make_trainer: Callable[..., pl.Trainer], loader: object, ahead: int, threads: int
) -> float | None:
    """Train on a loader whose workers prepare at the same time; the module is another one afterwards."""
    first = ahead + WARM_UP
    beat = _Beat(first)
    _fit(module, make_trainer, loader, beat, first + 1 + TOGETHER, threads)
    return beat.seconds


def _fit(
    module: pl.LightningModule, make_trainer: Callable[..., pl.Trainer], loader: object, watch: pl.Callback,
    batches: int | float, threads: int,
) -> None:  # fmt: skip
    """Train for one epoch, or so many mini-batches of it, with so many threads, and leave nothing behind."""
    trainer = make_trainer(
        max_epochs=1, max_steps=-1, limit_train_batches=batches, limit_val_batches=0, num_sanity_val_steps=0,
        callbacks=[watch], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, profiler=None,
    )  # fmt: skip
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        warnings.filterwarnings("ignore", ".*but have no `val_dataloader`.*")
        trainer.fit(module, train_dataloaders=loader)
    finally:
        torch.set_num_threads(before)


class _Beat(pl.Callback):
    """Notes when steps start, from the first that counts."""

    def __init__(self, first: int) -> None:
        self.first, self.starts = first, list[float]()

    @property
    def seconds(self) -> float | None:
        """From one start to the next, on the average; None if there are fewer than half of those wanted."""
        count = len(self.starts) - 1
        return (self.starts[-1] - self.starts[0]) / count if count >= TOGETHER // 2 else None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Look at the clock."""
        if batch_idx >= self.first:
            self.starts.append(time.perf_counter())
            trainer.should_stop = len(self.starts) > TOGETHER // 2 and self.starts[-1] - self.starts[0] > _BUDGET


class _Replay:
    """Hands out the same mini-batches again and again, until the clock has seen enough."""

    def __init__(self, batches: Sequence[object], clock: _Clock) -> None:
        self._batches, self._clock = batches, clock

    def __len__(self) -> int:
        return WARM_UP + TIMED + 1

    def __iter__(self) -> Iterator[object]:
        for number in range(len(self)):
            if self._clock.parts:
                return
            yield self._batches[number % len(self._batches)]


class _Clock(pl.Callback):
    """Times steps, and takes the last one apart."""

    def __init__(self) -> None:
        self.inside: list[float] = []
        self.outside: list[float] = []
        self.parts: dict[str, float] = {}
        self.flops = 0.0
        self._begun = time.perf_counter()
        self._start = self._end = 0.0
        self._profile: Any = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Start the clock, or the profile."""
        late = bool(self.inside) and time.perf_counter() - self._begun > _BUDGET
        if late or batch_idx >= WARM_UP + TIMED:
            self._profile = _profiler()
            self._profile.__enter__()
        elif batch_idx > WARM_UP:
            self.outside.append(time.perf_counter() - self._end)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Note what the step took."""
        self._end = time.perf_counter()
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.parts, self.flops = take_apart(self._profile.function_events, self._end - self._start)
            self._profile = None
        elif batch_idx >= WARM_UP:
            self.inside.append(self._end - self._start)


def _profiler() -> Any:
    """Return torch's old profiler while there is one: the new one's library writes to the standard error stream."""
    legacy: Any = getattr(torch.autograd, "profiler_legacy", torch.autograd.profiler)
    return legacy.profile(record_shapes=True)


def take_apart(events: Sequence[FunctionEvent], seconds: float) -> tuple[dict[str, float], float]:
    """Share out the time of a step among :data:`PARTS`, and count the operations of its products."""
    parts, flops = dict.fromkeys(PARTS, 0.0), 0.0
    # Lightning's closure runs forward and backward inside the optimizer's step: what comes after is the optimizer's.
    done = max((event.time_range.end for event in events if event.name.startswith(_BACKWARD)), default=0.0)
    for event in events:
        of_optimizer = event.time_range.start >= done and _in_optimizer(event.cpu_parent)
        part = "optimizer" if of_optimizer else _part_of(event.name)
        if part is not None:
            parts[part] += event.self_cpu_time_total * 1e-6
        if _COUNTED.match(event.name):
            flops += product_flops(event.input_shapes)  # type: ignore[arg-type]
    parts["Python"] = max(0.0, seconds - sum(parts.values()))
    return parts, flops


def product_flops(shapes: Sequence[Sequence[int]]) -> float:
    """Return the operations of a product of the last two matrices (or batches of matrices) among its inputs."""
    matrices = [shape for shape in shapes if len(shape) in (2, 3)]
    if len(matrices) < 2:
        return 0.0
    left, right = matrices[-2:]
    return 2.0 * math.prod(left) * right[-1]


def _part_of(name: str) -> str | None:
    return next((part for part, pattern in _NAMES.items() if re.search(pattern, name)), None)


def _in_optimizer(event: FunctionEvent | None) -> bool:
    while event is not None:
        if event.name.startswith(_OPTIMIZER):
            return True
        event = event.cpu_parent
    return False
