"""Measure the cost of a training step by parts: a few steps of the user's own module in the user's own Trainer."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from lightning_gnn.runtime.lightning import pl
from lightning_gnn.runtime.machine_rates import torch_threads

WARM_UP, TIMED = 2, 6  # number of warm-up and of timed steps; one more step is profiled
NUM_OVERLAPPED = 16  # steps timed while workers prepare mini-batches
_BUDGET_S = 6.0  # seconds after which fewer steps suffice
PARTS = ("products", "aggregation", "dropout", "elementwise", "optimizer", "Python")
"""Parts of a step; ``"Python"`` is the time outside of torch operators."""
_OPTIMIZER, _BACKWARD = "Optimizer.step", "autograd::engine"
_PART_PATTERNS = {
    "dropout": r"dropout|bernoulli",
    "products": r"^(aten::(addmm|mm|bmm|baddbmm|addmv|mv|dot|linear|matmul|_scaled_mm|mkldnn)|mkldnn)",
    "aggregation": r"^(lightning_gnn|pyg|torch_sparse|torch_scatter)::|^aten::(_?index_|index$|gather|"
    r"scatter|segment|_?sparse|_csr|_spmm|embedding|take|sort|argsort|cumsum|bincount|repeat_interleave|unique)",
    "elementwise": r"^aten::",
}
"""Pattern of the operators of each part; the first match counts."""
_PRODUCT = re.compile(r"aten::(addmm_?|mm|bmm|baddbmm_?|_addmm_activation)$")


@dataclass(frozen=True)
class TimedStep:
    """Average cost of a training step."""

    seconds: float  # from Lightning's on_train_batch_start to on_train_batch_end
    outside_s: float  # from the end of a step to the start of the next, with prepared mini-batches
    threads: int
    parts: dict[str, float] = field(default_factory=dict)  # seconds of each of :data:PARTS, which add up to seconds
    flops: float = 0.0  # operations of dense products in the training thread; a multiply-add counts as two

    @property
    def total(self) -> float:
        """Seconds of the training thread for a mini-batch."""
        return self.seconds + self.outside_s


def time_steps(
    module: pl.LightningModule, make_trainer: Callable[..., pl.Trainer], batches: Sequence[object], threads: int
) -> TimedStep:
    """Time training steps on repeated mini-batches; this trains ``module``."""
    timer = _StepTimer(WARM_UP, 1, TIMED, profiles=True)
    _fit(module, make_trainer, _Replay(batches, timer), timer, 1.0, threads)
    inside = [end - start for start, end in zip(timer.starts, timer.ends, strict=False)]
    outside = [start - end for start, end in zip(timer.starts[1:], timer.ends, strict=False)]
    if not inside:
        raise ValueError("training ended before a step was timed; leave out what ends it, such as trainer.max_time")
    seconds = median(inside)
    profiled = sum(timer.parts.values())
    parts = {name: seconds * value / profiled for name, value in timer.parts.items()} if profiled else {}
    return TimedStep(seconds, median(outside or [0.0]), threads, parts, timer.flops)


def time_together(
    module: pl.LightningModule, make_trainer: Callable[..., pl.Trainer], loader: object, ahead: int, threads: int
) -> float | None:
    """Time steps while the workers of a loader prepare in parallel; this trains ``module``. None: too few steps."""
    least = NUM_OVERLAPPED // 2 + 1
    timer = _StepTimer(ahead + WARM_UP, least, NUM_OVERLAPPED + 1)
    _fit(module, make_trainer, loader, timer, timer.first + NUM_OVERLAPPED + 1, threads)
    count = len(timer.starts)
    return (timer.starts[-1] - timer.starts[0]) / (count - 1) if count >= least else None


def _fit(
    module: pl.LightningModule, make_trainer: Callable[..., pl.Trainer], loader: object, callback: pl.Callback,
    batches: int | float, threads: int,
) -> None:  # fmt: skip
    """Train on a fraction or number of an epoch's ``batches`` without logging or checkpoints."""
    trainer = make_trainer(
        max_epochs=1, max_steps=-1, limit_train_batches=batches, limit_val_batches=0, num_sanity_val_steps=0,
        callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, profiler=None,
    )  # fmt: skip
    with torch_threads(threads):
        warnings.filterwarnings("ignore", ".*but have no `val_dataloader`.*")
        trainer.fit(module, train_dataloaders=loader)


class _Replay:
    """Repeats the same mini-batches until the timer has profiled a step."""

    def __init__(self, batches: Sequence[object], timer: _StepTimer) -> None:
        self._batches, self._timer = batches, timer

    def __len__(self) -> int:
        return WARM_UP + TIMED + 1

    def __iter__(self) -> Iterator[object]:
        for number in range(len(self)):
            if self._timer.parts:
                return
            yield self._batches[number % len(self._batches)]


class _StepTimer(pl.Callback):
    """Records starts and ends of steps from step ``first`` on: ``most``, or ``least`` once the time budget is spent.

    Then it profiles a step, or stops training.
    """

    def __init__(self, first: int, least: int, most: int, profiles: bool = False) -> None:
        self.first, self.least, self.most, self.profiles = first, least, most, profiles
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.parts: dict[str, float] = {}
        self.flops = 0.0
        self._created = self._start = time.perf_counter()
        self._profile: Any = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Record the start, or profile if enough steps were timed."""
        start = time.perf_counter()
        over_budget = len(self.starts) >= self.least and start - self._created > _BUDGET_S
        if len(self.starts) < self.most and not over_budget:
            if batch_idx >= self.first:
                self.starts.append(start)
        elif self.profiles:
            self._profile = _profiler()
            self._profile.__enter__()
            self._start = time.perf_counter()
        else:
            trainer.should_stop = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Record the end of the step, or its profile."""
        end = time.perf_counter()
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.parts, self.flops = take_apart(self._profile.function_events, end - self._start)
            self._profile = None
        elif len(self.ends) < len(self.starts):
            self.ends.append(end)


def _profiler() -> Any:
    """Return torch's legacy profiler if it exists: the library of the new one writes to stderr."""
    legacy: Any = getattr(torch.autograd, "profiler_legacy", torch.autograd.profiler)
    return legacy.profile(record_shapes=True)


def take_apart(events: Sequence[FunctionEvent], seconds: float) -> tuple[dict[str, float], float]:
    """Attribute the time of a step to :data:`PARTS`, and count the operations of its matrix products."""
    parts, flops = dict.fromkeys(PARTS, 0.0), 0.0
    # Lightning runs forward and backward inside the optimizer's step; only operators after the backward belong to it.
    backward_end = max((event.time_range.end for event in events if event.name.startswith(_BACKWARD)), default=0.0)
    for event in events:
        is_update = event.time_range.start >= backward_end and _in_optimizer(event.cpu_parent)
        part = "optimizer" if is_update else _part_of(event.name)
        if part is not None:
            parts[part] += event.self_cpu_time_total * 1e-6
        if _PRODUCT.match(event.name):
            flops += product_flops(event.input_shapes)  # type: ignore[arg-type]
    parts["Python"] = max(0.0, seconds - sum(parts.values()))
    return parts, flops


def product_flops(shapes: Sequence[Sequence[int]]) -> float:
    """Return the operations of the product of the last two matrices, or batches of matrices, among input shapes."""
    matrices = [shape for shape in shapes if len(shape) in (2, 3)]
    if len(matrices) < 2:
        return 0.0
    left, right = matrices[-2:]
    return 2.0 * math.prod(left) * right[-1]


def _part_of(name: str) -> str | None:
    return next((part for part, pattern in _PART_PATTERNS.items() if re.search(pattern, name)), None)


def _in_optimizer(event: FunctionEvent | None) -> bool:
    while event is not None:
        if event.name.startswith(_OPTIMIZER):
            return True
        event = event.cpu_parent
    return False
