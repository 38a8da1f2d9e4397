"""Exchange of per-step metadata between ranks with unequal shares, in a single collective if possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn.distributed.buffer_sync import BufferSync, no_side_effects
from lightning_gnn.distributed.gradient_reducer import GradientReducer
from lightning_gnn.distributed.loss_weights import Weight, check_consistent, check_weight
from lightning_gnn.distributed.metric_sync import MetricSync
from lightning_gnn.distributed.mixed_device_group import MixedDeviceGroup
from lightning_gnn.distributed.stop_on_signal import StopOnSignal
from lightning_gnn.runtime.lightning import pl

_NO_LOSS, _BY_SHARE, _BY_NUMBER, _SUMMED = range(4)
"""Weighting of a loss: no valid loss; by the share; by a returned number; returned ``"sum"``."""
SIGNAL_INTERVAL = 8
"""Steps between exchanges of signals with ranks that only receive gradients."""


class BatchWeight(NamedTuple):
    """Local and total number of a mini-batch's seeds, or of a full graph's nodes."""

    local: int
    total: int


@dataclass
class StepSummary:
    """One rank's metadata of a step, sent as a row of numbers; some of them may be tensors on the device."""

    share: float  # seeds (or nodes) of the rank
    has_new_metrics: float  # whether it logged a metric that is not registered yet
    kind: float = _NO_LOSS
    weight: float | Tensor = 0.0  # weight of the loss; the share without a returned weight, 1 for ``"sum"``
    loss: float | Tensor = 0.0
    wrote_buffers: float | Tensor = False
    signal: float = 0.0  # signal that stops the run, or 0
    drift: float = 0.0  # largest relative difference of this rank's parameters from rank 0's
    timings: Sequence[float] = ()  # stage seconds of the previous step; equally long on all ranks
    metrics: Sequence[float | Tensor] = field(default_factory=list)  # see :meth:`MetricSync.row`

    def encode(self) -> list[float | Tensor]:
        """Return the summary as a row of numbers."""
        *numbers, timings, metrics = vars(self).values()
        return [*numbers, *timings, *metrics]

    @classmethod
    def decode(cls, row: Sequence[float], num_timings: int) -> StepSummary:
        """Restore a summary from :meth:`encode`."""
        share, new, kind, weight, loss, wrote, signal, drift, *rest = row
        timings, metrics = rest[:num_timings], rest[num_timings:]
        return cls(share, new, kind, weight, loss, wrote, signal, drift, timings, metrics)


class StepSync:
    """Synchronizes losses, gradients, logged values and buffers so that they equal the undivided mini-batch's."""

    # A training step with fresh gradients needs one collective: the summaries are sent with the gradients, which are
    # divided by the sum of the weights afterwards. Otherwise the ranks all-gather their summaries first.

    def __init__(
        self,
        module: pl.LightningModule,
        group: MixedDeviceGroup,
        observe: Callable[[list[StepSummary]], None],
        timings: Callable[[], Sequence[float]],  # returns this rank's timings of the previous step
        stop: StopOnSignal,  # shares its signal with all ranks
        shards_graph: str | None = None,  # name of the strategy if it shards a full graph
    ) -> None:
        # Training state; set by start_training
        self.metrics = MetricSync(module, shards_graph)
        self.buffers: BufferSync | None = None
        self.parameters: list[Tensor] = []
        """Parameters to reduce, during training."""
        self.is_training = False
        # State of the current step
        self.batch = BatchWeight(1, 1)
        """This rank's share of the current mini-batch."""
        self.has_valid_loss = False
        self.global_loss = 0.0
        """The undivided mini-batch's loss, available after :meth:`apply_step`."""
        # Collaborators
        self._module = module
        self._group = group
        self._observe = observe
        self._timings = timings
        self._shards_graph = shards_graph is not None
        self._stop = stop
        self._num_steps = 0
        self._reducer = GradientReducer(group.size, group.all_reduce_sum)
        # Intermediate values of the current backward pass
        self._weight: Weight | Tensor | None = None
        self._loss: Tensor | None = None
        self._gradient_factor = 1.0
        self._drift = 0.0
        self._known_parameters: set[int] = set()

    # -- parameters and buffers

    def start_training(self, parameters: list[Tensor]) -> None:
        """Broadcast rank 0's parameters, including those of optimizers only. All ranks must call this."""
        self.buffers = None if self._shards_graph else BufferSync(self._module)
        self._group.broadcast_from_rank0(parameters)
        self.parameters, self._known_parameters = parameters, set(map(id, parameters))
        self.is_training = True

    def begin_step(self, parameters: list[Tensor]) -> None:
        """Start a training step, and broadcast rank 0's new parameters. All ranks must call this."""
        self.parameters = parameters
        # Randomly initialized new parameters may differ between the ranks.
        if new := [parameter for parameter in parameters if id(parameter) not in self._known_parameters]:
            self._group.broadcast_from_rank0(new)
            self._known_parameters.update(map(id, new))

    def resync_parameters(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast rank 0's tensors and record the drift. All ranks must call this."""
        self._drift = max(self._drift, self._group.broadcast_from_rank0(tensors))

    # -- one step

    @contextmanager
    def collect(self, step: str, batch: BatchWeight) -> Iterator[None]:
        """Collect the values that a step logs; discard the step's side effects if this rank has no share."""
        self.batch, self._weight, self._loss = batch, None, None
        self.has_valid_loss = batch.local > 0 or self._shards_graph
        effects = nullcontext() if self.has_valid_loss else no_side_effects(self._module)
        with self.metrics.collect(step, batch.local), effects:
            yield

    def record_loss(self, loss: Tensor | None, weight: Weight | Tensor | None) -> None:
        """Record the loss (None if missing) and weight of ``training_step``; ignored on a rank without a share."""
        self._loss = None if loss is None else loss.detach()
        self.has_valid_loss = self.has_valid_loss and loss is not None
        self._weight = weight if self.has_valid_loss else None

    @property
    def needs_check(self) -> bool:
        """Whether the loss is valid and has no weight."""
        return self.has_valid_loss and self._weight is None

    def summarize(self, step: str) -> StepSummary:
        """Return this rank's summary of the step."""
        timings = self._timings()
        summary = StepSummary(self.batch.local, self.metrics.has_new_names, metrics=self.metrics.row())
        summary.timings = [0.0] * len(timings)
        if step != "training_step":
            return summary
        if self.has_valid_loss:
            weight = self._weight
            summary.kind, summary.weight = (_BY_SHARE, summary.share) if weight is None else (_BY_NUMBER, 1.0)
            if isinstance(weight, str):
                summary.kind = _SUMMED
            elif weight is not None:
                summary.weight = weight
            summary.loss = 0.0 if self._loss is None else self._loss
        summary.signal, summary.drift, summary.timings = self._stop.signal or 0, self._drift, timings
        if self.buffers is not None and self.batch.local:  # writes of the others are ignored
            summary.wrote_buffers = self.buffers.has_changed()
        return summary

    def all_gather_step(self, step: str) -> None:
        """All-gather the summaries of a step and apply them. All ranks must call this."""
        rows = self._group.all_gather_floats(self.summarize(step).encode())
        self.apply_step(step, self._decode(rows))

    def apply_step(self, step: str, summaries: list[StepSummary]) -> None:
        """Log reduced values, synchronize buffers, and weight losses. All ranks must call this."""
        # Ranks without a share have no values; nor have they sent a row if only accelerators reduce.
        metrics = [[float(value) for value in one.metrics] for one in summaries if one.share]
        if any(one.has_new_metrics for one in summaries):
            self.metrics.exchange_names()
            metrics = self._group.all_gather_floats(self.metrics.row())
        self.metrics.flush(step, metrics)
        if step != "training_step":
            return
        if self.buffers is not None and any(one.wrote_buffers for one in summaries):
            self.buffers.synchronize([int(one.share) for one in summaries])
        self._num_steps += 1
        # If only accelerators reduce, they exchange the signals of the CPU ranks in some steps only.
        if self._group.only_accelerators and self._num_steps % SIGNAL_INTERVAL == 0:
            self._stop.exchanged = None
        else:
            self._stop.exchanged = int(max(one.signal for one in summaries))
        self._observe(summaries)
        if self._module.automatic_optimization:
            self._weight_losses(summaries)

    def _weight_losses(self, summaries: list[StepSummary]) -> None:
        """Compute the global loss, and the factor that rescales gradients from the total seeds to the total weight."""
        none, numbers, sums = (sum(one.kind == kind for one in summaries) for kind in (_BY_SHARE, _BY_NUMBER, _SUMMED))
        check_consistent(none, numbers, sums)
        weights = [check_weight(float(one.weight)) for one in summaries]
        total = math.fsum(weights)
        losses = [float(one.loss) * weight for one, weight in zip(summaries, weights, strict=True) if weight]
        self.global_loss = math.fsum(losses) / (total if total and not sums else 1.0)
        self._gradient_factor = 1.0
        if numbers:
            self._gradient_factor = self.batch.total / total if total else 0.0

    # -- gradients

    def loss_factor(self, piggybacks: bool) -> float | Tensor:
        """Return the factor of this rank's loss with which the ranks' gradients sum to the undivided mini-batch's."""
        if not self.has_valid_loss:
            return 0.0
        factor: float | Tensor = self.batch.local / self.batch.total
        if not self._module.automatic_optimization:
            return factor
        if self._weight is not None:
            factor = 1.0 if isinstance(self._weight, str) else self._weight / self.batch.total
        return factor if piggybacks else factor * self._gradient_factor

    def reduce_gradients(self, piggybacks: bool) -> None:
        """Replace the gradients by their means over the ranks. All ranks must call this."""
        if not piggybacks:
            self._reducer.reduce(self.parameters)
            return
        if self.has_valid_loss and isinstance(self._weight, float | Tensor) and not float(self._weight):
            for parameter in self.parameters:  # weight 0: the gradient of an empty mean may be NaN
                parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
        if not (self._group.has_one_sender and self._send_gradients()):
            self._reducer.reduce(self.parameters, piggyback=self)
        # With a total weight of 0, ranks may have skipped the backward pass: give all of them zero gradients.
        if not self._gradient_factor and not self._shards_graph:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def _send_gradients(self) -> bool:
        """Replace the gradients by those of the only rank with seeds; return False if they are sparse or mixed."""
        # The same as a sum over the ranks, in a third of the time. The first message has the summary and says which
        # parameters have gradients.
        parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        summary = self.summarize("training_step").encode()
        sends, row = self._group.rank == self._group.leader, [0.0] * (1 + len(parameters) + len(summary))
        if sends:
            has_gradient = [parameter.grad is not None for parameter in parameters]
            kinds = {(p.dtype, p.device, p.grad is not None and p.grad.is_sparse) for p in parameters}
            is_plain = len(kinds) == 1 and not any(is_sparse for *_, is_sparse in kinds)
            row = [float(value) for value in (is_plain, *has_gradient, *summary)]
        message = torch.tensor(row, dtype=torch.float64)
        self._group.send_to_cpus(message)
        is_plain, *row = message.tolist()
        if not is_plain:
            return False
        found = [parameter for parameter, has in zip(parameters, row, strict=False) if has]
        sizes = [parameter.numel() for parameter in found]
        if sends and found:
            self._group.send_to_cpus(torch.cat([p.grad.reshape(-1) for p in found if p.grad is not None]))
        elif found:
            flat = torch.empty(sum(sizes), dtype=found[0].dtype)
            self._group.send_to_cpus(flat)
            for parameter, gradient in zip(found, torch.split(flat, sizes), strict=True):
                parameter.grad = gradient.view_as(parameter)
        rows = [[0.0] * len(summary) for _ in range(self._group.size)]
        rows[self._group.leader] = row[len(parameters) :]
        self.apply_step("training_step", self._decode(rows))
        gradients = [parameter.grad for parameter in found if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self._gradient_factor / self._group.size)
        return True

    def write(self, like: Tensor) -> Tensor:
        """Return this rank's encoded summary of a training step, to be sent with the gradients."""
        return self._group.encode_for_sum(self.summarize("training_step").encode(), like)

    def read(self, sums: Tensor) -> float:
        """Apply the summaries of all ranks, and return the scale factor of the gradients."""
        self.apply_step("training_step", self._decode(self._group.decode_from_sum(sums)))
        return self._gradient_factor

    def _decode(self, rows: list[list[float]]) -> list[StepSummary]:
        """Return the summaries of all ranks."""
        num_timings = len(self._timings())
        return [StepSummary.decode(row, num_timings) for row in rows]
