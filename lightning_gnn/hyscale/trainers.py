"""One step of several trainers: forward and backward in their threads, gradients into the main module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_gnn.hyscale.manual_steps import join_manual_steps
from lightning_gnn.hyscale.node_strategy import average_statistics
from lightning_gnn.hyscale.outputs import LogRecorder, MetricMerger, joined_entry, replay, weighted_mean
from lightning_gnn.hyscale.pipeline import HybridBatch
from lightning_gnn.hyscale.replicas import Replicas
from lightning_gnn.hyscale.trainer_threads import PerTrainer, ThreadRandom, TrainerThreads
from lightning_gnn.ops.hashing import mix
from lightning_gnn.runtime.gradients import sum_gradients
from lightning_gnn.runtime.losses import (
    LOOKS,
    LossWeights,
    Weight,
    returned_loss,
    returned_weight,
    warning_of,
    weighs_otherwise,
)
from lightning_gnn.runtime.timeline import StepTimer


class HybridTrainers:
    """Trains on :class:`~lightning_gnn.hyscale.pipeline.HybridBatch` with a replica and a thread per trainer.

    The gradient of an iteration is that of the sum of the trainers' losses, each weighted by its share of the seeds, or
    of the weights that ``training_step`` returns.

    Args:
        strategy: Whose module, precision, optimizers and nodes these are.
        devices: Of the trainers.
        names: Of the trainers, for messages.
        stall_timeout: Seconds for which a trainer may be silent.
        seed: Start of the trainers' random streams; None lets a lone trainer draw from torch's own, as without this
            strategy, where nobody else draws from it meanwhile.
    """

    def __init__(
        self,
        strategy: Any,
        devices: Sequence[torch.device],
        names: Sequence[str],
        stall_timeout: float,
        seed: int | None,
    ) -> None:
        self.strategy = strategy
        self.main: pl.LightningModule = strategy.lightning_module
        self.devices = list(devices)
        self.replicas = Replicas(self.main, devices)
        self.merger = MetricMerger(self.main, self.replicas.modules)
        self.recorders = [LogRecorder() for _ in devices]
        for replica, module in enumerate(self.replicas.modules):
            for child in module.modules():
                if isinstance(child, pl.LightningModule):
                    child.__dict__["log"] = self.recorders[replica]
            if not self.main.automatic_optimization:
                join_manual_steps(self, replica, module)
        self.randoms = [] if seed is None else [ThreadRandom(mix(seed + i) >> 2) for i in range(len(devices))]
        self.threads = TrainerThreads(names, stall_timeout)
        self._clocks = [None if device.type == "cpu" else StepTimer(device) for device in devices]
        self._batch: HybridBatch | None = None
        self._done: HybridBatch | None = None
        self._alone: int | None = None
        self._losses: dict[int, Tensor] = {}
        self._leaves: dict[int, Tensor] = {}
        self._loss_weights = LossWeights(strategy.num_nodes, strategy.root_device)
        self._returned: dict[int, Weight | None] = {}
        self._whole: Weight | None = None
        self._here = 0.0
        self._looks = LOOKS if len(devices) > 1 or strategy.num_nodes > 1 else 0
        self._why: str | None = None
        self._through = False
        self._unsynced = False
        self._closure_loss: Tensor | None = None

    # -- state

    def state_dict(self) -> list[Tensor]:
        """Return the state of each trainer's random stream."""
        return [generator.get_state() for generator in self._generators()]

    def load_state_dict(self, states: Sequence[Tensor]) -> None:
        """Take the random streams up again; with another number of trainers they begin anew."""
        generators = self._generators()
        if len(states) == len(generators):
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        return [random.generator for random in self.randoms] or [torch.default_generator]

    def resize(self, num_threads: int) -> None:
        """Share out CPU threads among the trainers that run on the CPU."""
        on_cpu = [trainer for trainer, device in enumerate(self.devices) if device.type == "cpu"]
        for place, trainer in enumerate(on_cpu):
            share = num_threads // len(on_cpu) + (place < num_threads % len(on_cpu))
            self.threads.resize(trainer, max(1, share))

    def take_batch(self) -> HybridBatch | None:
        """Return the batch of the iteration that is done, once."""
        batch, self._done = self._done, None
        return batch

    def take_seconds(self) -> list[float]:
        """Return how long each trainer has worked on the last iteration; accelerators tell with a lag of one or two."""
        seconds = self.threads.take_seconds()
        return [own if clock is None else clock.read(own) for own, clock in zip(seconds, self._clocks, strict=True)]

    def close(self) -> list[str]:
        """End the threads; return the names of those that hang."""
        self._losses, self._leaves, self._batch, self._done = {}, {}, None, None
        return self.threads.close()

    # -- forward

    def training_step(self, batch: HybridBatch, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` in each trainer that has seeds and return one output, as Lightning expects it.

        ``loss`` is the weighted mean, ``weight`` the sum; of other entries, single numbers become means weighted by
        seeds, tensors with rows are joined in the order of the seeds, and anything else is the first trainer's.
        """
        self._batch = self._done = batch
        self._returned, self._whole = {}, None
        active = batch.active
        if len(active) == 1 and self.devices[active[0]] == self.strategy.root_device and self.strategy.num_nodes == 1:
            self._alone = active[0]
            step = partial(self._step_alone, active[0], batch.parts[active[0]], args, kwargs)
            return self.threads.run({active[0]: step})[active[0]]
        self._alone = None
        self.replicas.push(active)
        self._through = self._goes_through() and not batch.is_trained
        jobs = {i: partial(self._forward, i, batch.parts[i], args, kwargs) for i in active}
        if self._through:
            jobs = {i: partial(self._forward_backward, i, job) for i, job in jobs.items()}
        precision = self.strategy.precision_plugin
        # Default dtypes belong to the process, autocast to the thread.
        whole = nullcontext() if isinstance(precision, MixedPrecision) else precision.train_step_context()
        with whole:
            outputs = self.threads.run(jobs, self._serve)
        if self.main.automatic_optimization:
            weights = [self._weight(i) for i, output in outputs.items() if output is not None]
            self._whole = self._loss_weights.total(weights)
            self._here = sum(weight for weight in weights if isinstance(weight, float))
        self._warn()
        self.replicas.pull(active, self._weights(active))
        neutral = batch.batch_size == 0
        self.merger.merge(active, count=not neutral)
        replay(self.main, self.merger, self.recorders, active, batch.seeds, neutral)
        if self.strategy.num_nodes > 1:
            average_statistics(self.main, self._fraction)
        return self._output(outputs)

    def _step_alone(self, trainer: int, part: Any, args: Any, kwargs: Any) -> Any:
        """The one trainer at work is on the main module's device: no replica is needed."""
        with self._device_context(trainer), self.strategy.precision_plugin.train_step_context():
            return self.main.training_step(part, *args, **kwargs)

    def _forward(self, trainer: int, part: Any, args: Any, kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(self._device_context(trainer))
            precision = self.strategy.precision_plugin
            if isinstance(precision, MixedPrecision):
                dtype = torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16
                stack.enter_context(torch.autocast(self.devices[trainer].type, dtype=dtype, cache_enabled=False))
            output = self.replicas.modules[trainer].training_step(part, *args, **kwargs)
        if self.main.automatic_optimization:
            self._returned[trainer] = returned_weight(output)
            loss = returned_loss(output)
            if loss is not None and self._returned[trainer] is None:
                self._look(trainer, loss)
        return output

    def _weight(self, trainer: int) -> Weight | None:
        """Return what a trainer's loss weighs; without seeds of this node's own, nothing."""
        assert self._batch is not None
        weight = self._returned.get(trainer)
        return 0.0 if isinstance(weight, float) and not self._batch.batch_size else weight

    def _look(self, trainer: int, loss: Tensor) -> None:
        """Look, in the first mini-batches, whether a loss needs a weight."""
        assert self._batch is not None
        if self._looks and self._why is None:
            self._why = weighs_otherwise(loss, self._batch.seeds[trainer] or None)

    def _warn(self) -> None:
        """Tell, once, what was seen, and count the mini-batches."""
        if self._looks and self._why is not None:
            rank_zero_warn(warning_of(self._why, "hyscale's trainers", "seeds"))
            self._looks = 0
        self._looks = max(0, self._looks - 1)

    def _goes_through(self) -> bool:
        """Whether trainers need not wait for each other between forward and backward pass.

        The gradient of a trainer's loss is known before, but for what Lightning and the precision may multiply in.
        That comes afterwards, unless it has to be in the half precision of the backward pass, as a loss scale has.
        Parameters that an optimizer has from elsewhere get their gradients from the replicas directly: not too early;
        so do features that are trained.
        """
        own = {id(parameter) for parameter in self.main.parameters()}
        groups = (group for optimizer in self.strategy.optimizers for group in optimizer.param_groups)
        return (
            self.main.automatic_optimization
            and not is_overridden("backward", self.main)
            and getattr(self.strategy.precision_plugin, "scaler", None) is None
            and all(id(parameter) in own for group in groups for parameter in group["params"])
        )

    def _forward_backward(self, trainer: int, forward: Callable[[], Any]) -> Any:
        output = forward()
        loss = returned_loss(output)
        if loss is not None:
            # The sum of the weights is known later, and divides the gradients' sum; until then, the seeds' stands for
            # it, so that numbers stay in the range of the precision.
            assert self._batch is not None
            weight = self._weight(trainer)
            if weight is None:
                factor = self._share(trainer) * self._fraction
            else:
                factor = float(self._batch.batch_size > 0) if weight == "sum" else float(weight) / self._batch.total
            self._backward(trainer, loss, torch.full_like(loss, factor), {}, counts=factor != 0 or weight is None)
        return output

    @contextmanager
    def _device_context(self, trainer: int) -> Iterator[None]:
        clock = self._clocks[trainer]
        if clock is None:
            # A trainer on an accelerator draws there, from its generator, and is spared the look at every operator.
            with self.randoms[trainer] if self.randoms else nullcontext():
                yield
            return
        torch.accelerator.set_device_index(self.devices[trainer])
        clock.start()
        yield

    def _output(self, outputs: dict[int, Any]) -> Any:
        given = {i: out for i, out in outputs.items() if out is not None}
        losses: dict[int, Any] = {i: out.get("loss") if isinstance(out, Mapping) else out for i, out in given.items()}
        if self.main.automatic_optimization:
            for i, loss in losses.items():
                if not isinstance(loss, Tensor):
                    return outputs[i]  # Lightning says what is wrong with it
                if loss.numel() != 1:
                    raise ValueError(
                        f"training_step must return a loss of one number, but that of trainer {i} has the shape "
                        f"{list(loss.shape)}"
                    )
        weights = dict(zip(outputs, self._weights(list(outputs)), strict=True))
        root = self.strategy.root_device
        if not self.main.automatic_optimization:
            losses = {i: loss for i, loss in losses.items() if isinstance(loss, Tensor)}
            total = weighted_mean(list(losses.values()), [weights[i] for i in losses], root) if losses else None
        else:
            total = self._join(losses) if losses else None
        first = next(iter(given.values()), None)
        if not isinstance(first, Mapping):
            return total
        entries = [out for out in given.values() if isinstance(out, Mapping)]
        shares = self._weights([i for i, out in given.items() if isinstance(out, Mapping)])
        names = [name for name in first if name != "loss"]
        joined = {name: joined_entry([out.get(name) for out in entries], shares, root) for name in names}
        if self._whole is not None:
            joined["weight"] = "sum" if self._whole == "sum" else self._here
        return {**joined, "loss": total} if total is not None else joined

    def _weights(self, active: Sequence[int]) -> list[float]:
        """Shares of this node's seeds."""
        assert self._batch is not None
        whole = sum(self._batch.seeds[i] for i in active)
        return [self._batch.seeds[i] / whole if whole else 1 / len(active) for i in active]

    @property
    def _fraction(self) -> float:
        """This node's share of all nodes' seeds."""
        assert self._batch is not None
        return self._batch.batch_size / self._batch.total

    def _join(self, losses: dict[int, Tensor]) -> Tensor:
        """Return the weighted loss as a graph that ends at the trainers' losses."""
        root = self.strategy.root_device
        self._losses = losses
        # What has no share may be NaN, a mean of nothing, which must not get in.
        values = {i: loss.detach() if self._share(i) else torch.zeros_like(loss) for i, loss in losses.items()}
        self._leaves = {i: value.to(root).requires_grad_() for i, value in values.items()}
        # A trainer that returned no loss contributes a gradient of zero, but keeps its share of the seeds.
        return torch.stack([self._share(i) * leaf for i, leaf in self._leaves.items()]).sum(0)

    def _share(self, trainer: int) -> float:
        """A trainer's share of this node's weights, or seeds; where there are no seeds, all count the same."""
        assert self._batch is not None
        if self._whole == "sum":
            return 1.0
        if self._whole is not None:
            weight = self._weight(trainer)
            return weight / self._here if isinstance(weight, float) and self._here else 0.0
        whole = self._batch.batch_size
        return self._batch.seeds[trainer] / whole if whole else 1 / len(self._batch.active)

    @property
    def _loss_fraction(self) -> float:
        """This node's share of what all nodes' losses weigh."""
        assert self._batch is not None
        if self._whole == "sum":
            return float(self._batch.batch_size > 0)
        if self._whole is not None:
            return self._here / self._whole if self._whole else 0.0
        return self._fraction

    def optimizer_step(self, step: Callable[[], Any]) -> Any:
        """Run a step of Lightning's loop: its closure of forward and backward pass, then the optimizer's own.

        A lone trainer does all of it in its thread, whose core has the gradients in its cache.
        """
        if len(self.devices) == 1 and self.strategy.num_nodes == 1 and self.threads.current() is None:
            return self.threads.lend(0, step)
        return step()

    # -- backward

    @property
    def waits_for_backward(self) -> bool:
        """Whether a loss of this class is to be propagated back."""
        return self._alone is not None or bool(self._leaves)

    def backward(self, closure_loss: Tensor, optimizer: Any, plain: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Propagate back in all trainers.

        Args:
            closure_loss: What Lightning made of :meth:`training_step`'s loss.
            optimizer: Lightning's, or None.
            plain: How a strategy without replicas does it.
            *args: Lightning's.
            **kwargs: Lightning's; those of ``Tensor.backward`` reach the trainers.
        """
        if self._alone is not None:
            if not self.main.automatic_optimization:  # in the trainer's thread already
                loss: Tensor = plain(closure_loss, optimizer, *args, **kwargs)
                return loss
            trainer = self._alone
            job = partial(self._backward_alone, trainer, plain, closure_loss, optimizer, args, kwargs)
            loss = self.threads.run({trainer: job})[trainer]
            return loss
        precision = self.strategy.precision_plugin
        self.strategy.pre_backward(closure_loss)
        closure_loss = precision.pre_backward(closure_loss, self.main)
        # On the small graph: what is multiplied in, such as a loss scale, ends up in the leaves.
        precision.backward(closure_loss, self.main, optimizer, *args, **kwargs)
        losses, self._losses = self._losses, {}
        if self._through:
            self._collect(list(losses), factor=self._multiplied())
        else:
            factors = self._factors()
            wanted = {i: loss for i, loss in losses.items() if loss.requires_grad}
            self.threads.run(
                {
                    i: partial(self._backward, i, loss, factors[i], kwargs, self._share(i) > 0)
                    for i, loss in wanted.items()
                }
            )
            self._collect(list(losses))
        closure_loss = precision.post_backward(closure_loss, self.main)
        self.strategy.post_backward(closure_loss)
        return closure_loss

    def _backward_alone(self, trainer: int, plain: Any, loss: Tensor, optimizer: Any, args: Any, kwargs: Any) -> Tensor:
        loss = plain(loss, optimizer, *args, **kwargs)
        self._stop_clock(trainer)
        return loss

    def _backward(
        self, trainer: int, loss: Tensor, factor: Tensor, kwargs: dict[str, Any], counts: bool = True
    ) -> None:
        if counts:
            options = {name: kwargs[name] for name in ("retain_graph", "create_graph") if name in kwargs}
            loss.backward(gradient=factor.to(loss.device, loss.dtype), **options)  # type: ignore[no-untyped-call]
        self._stop_clock(trainer)

    def _stop_clock(self, trainer: int) -> None:
        clock = self._clocks[trainer]
        if clock is not None:
            clock.stop()

    def _factors(self) -> dict[int, Tensor]:
        leaves, self._leaves = self._leaves, {}
        fraction = self._loss_fraction
        return {
            i: (leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)) * fraction for i, leaf in leaves.items()
        }

    def _multiplied(self) -> Tensor | None:
        """Return by what gradients are to be multiplied, None for by nothing.

        That is what the loss was multiplied by after it was joined, and what the weights' sum takes the place of.
        """
        assert self._batch is not None
        leaves, self._leaves = self._leaves, {}
        most = max(leaves, key=self._share)
        gradient, share = leaves[most].grad, self._share(most)
        if gradient is None or not share:
            return torch.zeros_like(leaves[most]).reshape(())
        factor = (gradient / torch.full_like(gradient, share)).reshape(())
        if isinstance(self._whole, float):
            factor = factor * (self._batch.total / self._whole)
        return None if factor.is_cpu and factor.item() == 1.0 else factor

    def _collect(
        self, active: Sequence[int], weights: Sequence[float] | None = None, factor: Tensor | None = None
    ) -> None:
        """Add the replicas' gradients to the main module's.

        Args:
            active: The trainers.
            weights: Of their gradients, 1 by default.
            factor: Of the sum.
        """
        if weights is not None:
            for i, weight in zip(active, weights, strict=True):
                for parameter in self.replicas.modules[i].parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(weight)
        parameters = list(self.main.parameters())
        more = self.replicas.take_gradients(active)
        if factor is not None:
            more = [None if gradient is None else gradient * factor for gradient in more]
        if self._whole == 0:  # as where all labels of an undivided mini-batch are ignored
            more = [torch.zeros_like(parameter) if parameter.requires_grad else None for parameter in parameters]
        if self.strategy.num_nodes > 1:
            if not self.strategy.sync_gradients:
                self._unsynced = True
            else:
                if self._unsynced:  # accumulated without synchronisation
                    for place, parameter in enumerate(parameters):
                        held, parameter.grad = parameter.grad, None
                        new = more[place]
                        more[place] = held if new is None else new if held is None else new + held
                self._unsynced = False
                more = sum_gradients(more, parameters)
        for parameter, gradient in zip(parameters, more, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient.layout == torch.strided and parameter.grad.layout == torch.strided:
                parameter.grad.add_(gradient)
            else:
                parameter.grad = parameter.grad + gradient

    # -- manual optimisation: acts of the main thread while the trainers wait

    def _serve(self, kind: str, tag: Any, values: dict[int, Any]) -> Any:
        strategy, active = self.strategy, list(values)
        precision = strategy.precision_plugin
        if kind == "manual_backward":
            for trainer, own in values.items():
                self._look(trainer, own)
            loss = precision.pre_backward(self._join(values), self.main)
            precision.backward(loss, self.main, None)
            self._closure_loss, self._losses = loss, {}
            return PerTrainer(self._factors())
        if kind == "end of manual_backward":
            self._collect(active)
            assert self._closure_loss is not None
            precision.post_backward(self._closure_loss, self.main)
            self._closure_loss = None
            return None
        if kind == "scheduler":
            return strategy.lr_scheduler_configs[tag].scheduler.step(*values[active[0]])
        # Gradients that lie in the replicas come from loss.backward() without manual_backward.
        self._collect_stray(active)
        optimizer = strategy._lightning_optimizers[tag]
        if kind == "zero_grad":
            return optimizer.zero_grad(**values[active[0]])
        if kind == "clip_gradients":
            return self.main.clip_gradients(optimizer, *values[active[0]])
        if kind == "step with closure":
            closure = partial(self._run_closures, active)
            result = optimizer.step(closure=closure, **values[active[0]])
        else:
            result = optimizer.step(**values[active[0]])
        self.replicas.push_parameters(active)
        return result

    def _run_closures(self, active: Sequence[int]) -> Any:
        results = self.threads.run_routines(active, self._serve)
        self._collect_stray(active)
        return results[active[0]]

    def _collect_stray(self, active: Sequence[int]) -> None:
        stray = any(p.grad is not None for i in active for p in self.replicas.modules[i].parameters())
        if self.strategy.num_nodes > 1:
            if stray:
                raise RuntimeError(
                    "with hyscale on several nodes, call self.manual_backward(loss), not loss.backward()"
                )
        elif stray:
            self._collect(active, self._weights(active))
