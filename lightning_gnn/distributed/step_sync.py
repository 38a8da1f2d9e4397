"""What ranks with unequal shares of a mini-batch exchange in a step, in one collective where they can."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_gnn.distributed.buffer_sync import BufferSync, no_side_effects
from lightning_gnn.distributed.gradient_reducer import GradientReducer
from lightning_gnn.distributed.loss_weights import Weight, check_same_kind, check_weight
from lightning_gnn.distributed.metric_sync import MetricSync
from lightning_gnn.distributed.mixed_device_group import MixedDeviceGroup

_NO_LOSS, _BY_SHARE, _BY_NUMBER, _SUMMED = range(4)
"""Kinds of losses: none that counts; without a weight; with a number; with ``"sum"``."""


class BatchWeight(NamedTuple):
    """How many of a mini-batch's seeds, or of a full graph's nodes, this rank has, and how many there are."""

    local: int
    total: int


@dataclass
class StepSummary:
    """One rank's account of a step, sent as a row of numbers, of which some may still lie on the device."""

    share: float  # seeds (or nodes) of the rank
    has_new_metrics: float  # whether it logged a name that the ranks do not know yet
    kind: float = _NO_LOSS
    weight: float | Tensor = 0.0  # weight of the loss: the share where ``training_step`` returned none, 1 for ``"sum"``
    loss: float | Tensor = 0.0
    wrote_buffers: float | Tensor = False
    drift: float = 0.0  # largest relative difference from rank 0's parameters that was found on this rank
    timings: Sequence[float] = ()  # seconds of the stages of the step before; as many on all ranks
    # A value and a weight for each known name (:meth:`MetricSync.row`)
    metrics: Sequence[float | Tensor] = field(default_factory=list)

    def encode(self) -> list[float | Tensor]:
        """Return it as a row of numbers."""
        *numbers, timings, metrics = vars(self).values()
        return [*numbers, *timings, *metrics]

    @classmethod
    def decode(cls, row: Sequence[float], num_timings: int) -> StepSummary:
        """Return what was encoded."""
        share, new, kind, weight, loss, wrote, drift, *rest = row
        return cls(share, new, kind, weight, loss, wrote, drift, rest[:num_timings], rest[num_timings:])


class StepSync:
    """Makes one step of all ranks: losses, gradients, logged values and buffers become the undivided mini-batch's."""

    # A training step costs one collective where its gradients are new: the summary is sent in their message, and the
    # sum of the weights divides them afterwards. Otherwise the ranks gather their summaries first.

    def __init__(
        self,
        module: pl.LightningModule,
        group: MixedDeviceGroup,
        observe: Callable[[list[StepSummary]], None],
        timings: Callable[[], Sequence[float]],  # returns this rank's timings of the step before
        shards_graph: str | None = None,
    ) -> None:
        # State of the module's training, which is known once its parameters and buffers exist.
        self.metrics = MetricSync(module, shards_graph)
        self.buffers: BufferSync | None = None
        self.parameters: list[Tensor] = []
        """Parameters with a size, while the module is trained."""
        self.is_training = False
        # State of the present step.
        self.batch = BatchWeight(1, 1)
        """This rank's share of the present mini-batch."""
        self.has_valid_loss = False
        self.global_loss = 0.0
        """The undivided mini-batch's loss, once the summaries are known."""
        # Collaborators, which live as long as the strategy.
        self._module = module
        self._group = group
        self._observe = observe
        self._timings = timings
        self._shards_graph = shards_graph is not None
        self._reducer = GradientReducer(group.size, group.all_reduce_sum)
        # Intermediate values of the present backward pass.
        self._weight: Weight | Tensor | None = None
        self._loss: Tensor | None = None
        self._gradient_factor = 1.0
        self._drift = 0.0
        self._known_parameters: set[int] = set()

    # -- parameters and buffers

    def start_training(self, parameters: list[Tensor]) -> None:
        """Make parameters those of rank 0, also those that only optimizers have. Collective."""
        self.buffers = None if self._shards_graph else BufferSync(self._module)
        self._group.broadcast_from_rank0(parameters)
        self.parameters, self._known_parameters = parameters, set(map(id, parameters))
        self.is_training = True

    def begin_step(self, parameters: list[Tensor]) -> None:
        """Begin a training step; parameters that are new are made those of rank 0. Collective, if there are any."""
        self.parameters = parameters
        # Drawn at random, new parameters may differ between the ranks.
        if new := [parameter for parameter in parameters if id(parameter) not in self._known_parameters]:
            self._group.broadcast_from_rank0(new)
            self._known_parameters.update(map(id, new))

    def resync_parameters(self, tensors: Iterable[Tensor]) -> None:
        """Make tensors those of rank 0, and note by how much they differed. Collective."""
        self._drift = max(self._drift, self._group.broadcast_from_rank0(tensors))

    # -- one step

    @contextmanager
    def collect(self, step: str, batch: BatchWeight) -> Iterator[None]:
        """Run a step: what it logs is collected; without a share, it leaves no trace."""
        self.batch, self._weight, self._loss = batch, None, None
        self.has_valid_loss = batch.local > 0 or self._shards_graph
        trace = nullcontext() if self.has_valid_loss else no_side_effects(self._module)
        with self.metrics.collect(step, batch.local), trace:
            yield

    def record_loss(self, loss: Tensor | None, weight: Weight | Tensor | None) -> None:
        """Take what ``training_step`` returned, None for no loss; it does not count for a rank without a share."""
        self._loss = None if loss is None else loss.detach()
        self.has_valid_loss = self.has_valid_loss and loss is not None
        self._weight = weight if self.has_valid_loss else None

    @property
    def needs_check(self) -> bool:
        """Whether the loss counts, and came without a weight."""
        return self.has_valid_loss and self._weight is None

    def summarize(self, step: str) -> StepSummary:
        """Return this rank's account of the step."""
        timings = self._timings()
        summary = StepSummary(self.batch.local, self.metrics.is_new, metrics=self.metrics.row())
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
        summary.drift, summary.timings = self._drift, timings
        if self.buffers is not None:
            summary.wrote_buffers = self.buffers.changed()
        return summary

    def all_gather_step(self, step: str) -> None:
        """Exchange the summaries of a step, and apply them. Collective: every rank must call this."""
        rows = self._group.all_gather_floats(self.summarize(step).encode())
        self.apply_step(step, self._decode(rows))

    def apply_step(self, step: str, summaries: list[StepSummary]) -> None:
        """Log what all ranks logged, join their buffers, and weigh their losses. Collective: all ranks call this."""
        metrics = [[float(value) for value in one.metrics] for one in summaries]
        if any(one.has_new_metrics for one in summaries):
            self.metrics.exchange_names()
            metrics = self._group.all_gather_floats(self.metrics.row())
        self.metrics.flush(step, metrics)
        if step != "training_step":
            return
        if self.buffers is not None and any(one.wrote_buffers for one in summaries):
            self.buffers.join([int(one.share) for one in summaries])
        self._observe(summaries)
        if self._module.automatic_optimization:
            self._weigh_losses(summaries)

    def _weigh_losses(self, summaries: list[StepSummary]) -> None:
        """Find the global loss, and the factor of gradients whose losses were weighted by weight over all seeds."""
        none, numbers, sums = (sum(one.kind == kind for one in summaries) for kind in (_BY_SHARE, _BY_NUMBER, _SUMMED))
        check_same_kind(none, numbers, sums)
        weights = [check_weight(float(one.weight)) for one in summaries]
        whole = math.fsum(weights)
        losses = [float(one.loss) * weight for one, weight in zip(summaries, weights, strict=True) if weight]
        self.global_loss = math.fsum(losses) / (whole if whole and not sums else 1.0)
        self._gradient_factor = 1.0
        if numbers:
            self._gradient_factor = self.batch.total / whole if whole else 0.0

    # -- gradients

    def loss_factor(self, piggybacks: bool) -> float | Tensor:
        """Return by what this rank's loss is multiplied, so that the ranks' gradients add up to the whole one's."""
        if not self.has_valid_loss:
            return 0.0
        part: float | Tensor = self.batch.local / self.batch.total
        if not self._module.automatic_optimization:
            return part
        if self._weight is not None:
            part = 1.0 if isinstance(self._weight, str) else self._weight / self.batch.total
        return part if piggybacks else part * self._gradient_factor

    def reduce_gradients(self, piggybacks: bool) -> None:
        """Replace the gradients by their means over the ranks. Collective: every rank must call this."""
        if not piggybacks:
            self._reducer.reduce(self.parameters)
            return
        if self.has_valid_loss and isinstance(self._weight, float | Tensor) and not float(self._weight):
            for parameter in self.parameters:  # a mean over nothing may be NaN, which must not get in
                parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
        self._reducer.reduce(self.parameters, piggyback=self)
        # Ranks of weight 0 may have left out the backward pass.
        if not self._gradient_factor and not self._shards_graph:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def write(self, like: Tensor) -> Tensor:
        """Return this rank's summary of a training step, to be sent in the message of the gradients."""
        return self._group.encode_for_sum(self.summarize("training_step").encode(), like)

    def read(self, sums: Tensor) -> float:
        """Apply the summaries of all ranks; return the factor of the gradients."""
        self.apply_step("training_step", self._decode(self._group.decode_from_sum(sums)))
        return self._gradient_factor

    def _decode(self, rows: list[list[float]]) -> list[StepSummary]:
        """Return the summaries of all ranks."""
        num_timings = len(self._timings())
        return [StepSummary.decode(row, num_timings) for row in rows]
