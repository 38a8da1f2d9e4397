"""Stops a run by Ctrl-C, SIGTERM or SLURM's requeue signal such that it can be resumed exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterable
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lightning_gnn.distributed.mixed_device_group import as_message
from lightning_gnn.runtime.checkpoint_io import use_safe_files
from lightning_gnn.runtime.lightning import SIGTERMException, SLURMEnvironment, do_nothing_closure, pl


class StopOnSignal(pl.Callback):
    """On the first SIGINT or SIGTERM, writes a checkpoint after the next optimizer step, then ends the run.

    In distributed training, all processes stop after the same step when one of them receives a signal. The exit code is
    128 plus the signal's number, so that an engine such as Kubernetes starts the run again. Under SLURM, the requeue
    signal (``#SBATCH --signal=SIGUSR1@90``) also requeues the job, and the exit code is 0. Outside training, the run
    ends at once, without a checkpoint. So it does at a second Ctrl-C; further signals of other kinds are ignored.
    Signals are not handled outside the main thread, as in some notebooks.

    This package's DataModules and strategies add it to a Trainer that lacks it; then Ctrl-C keeps its usual effect, and
    a Trainer without a checkpoint callback writes no checkpoint, except before a requeue.

    Args:
        dirpath: Directory of ``last-interrupted.ckpt``; by default that of the first checkpoint callback, otherwise the
            trainer's. There ``ckpt_path="last"`` finds it.
    """

    _is_automatic = False

    def __init__(self, dirpath: str | os.PathLike[str] | None = None) -> None:
        self.dirpath = dirpath
        self.signal: int | None = None  # the signal that stopped the run, or None
        self.checkpoint: str | None = None
        """Checkpoint to resume the interrupted run from; None if it has not been written."""
        self.exchanged: int | None = None
        """Largest signal of all ranks, 0 without one, if the last step has exchanged it with its gradients."""
        self._requeue_signal: int | None = None
        self._is_training = False
        self._previous: dict[int, Any] = {}

    @classmethod
    def add_to(cls, trainer: pl.Trainer) -> StopOnSignal:
        """Return the trainer's callback; add it, during setup, to a trainer that lacks it."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, cls):
                return callback
        callback = cls()
        callback._is_automatic = True
        trainer.callbacks.append(callback)  # type: ignore[attr-defined]
        callback.setup(trainer, trainer.lightning_module, trainer.state.fn or "")
        return callback

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace Lightning's signal handlers, which use collectives although the ranks may be in different ones."""
        # At the end of the callbacks, since the others must process a batch before the checkpoint is written.
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self] + [self]  # type: ignore[attr-defined]
        self.signal = self.checkpoint = None
        self._is_training = stage == "fit"
        use_safe_files(trainer)
        environment = trainer._accelerator_connector.cluster_environment
        is_requeued = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self._requeue_signal = getattr(environment, "requeue_signal", None) if is_requeued else None
        numbers = {signal.SIGTERM, self._requeue_signal or signal.SIGTERM}
        if not self._is_automatic:
            numbers.add(signal.SIGINT)
        connector = trainer._signal_connector
        connector.received_sigterm = False
        connector.register_signal_handlers = partial(self._install_handlers, numbers)  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = do_nothing_closure  # type: ignore[method-assign]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Stop, unless gradients are being accumulated or a validation follows."""
        loop = trainer.fit_loop
        if loop._should_accumulate():
            self.exchanged = None
            return
        if not self._must_stop(trainer):
            return
        if not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):  # type: ignore[arg-type]
            self._end(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop after a validation in the middle of an epoch."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fit_loop._should_accumulate():
            return
        if not self._must_stop(trainer):
            return
        if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self._end(trainer)
        else:  # mid-epoch: a checkpoint written now resumes with the next batch
            raise SIGTERMException

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prevent a run that was stopped at its very end from continuing with its next stage."""
        if self._must_stop(trainer):
            raise SIGTERMException

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the previous signal handlers."""
        self._restore_handlers(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the checkpoint, and requeue the job; Lightning calls no teardown hook after an exception."""
        try:
            if isinstance(exception, SIGTERMException):  # all processes have agreed
                self._save(trainer)
                exception.code = 128 + (self.signal or signal.SIGTERM)
            if isinstance(exception, SystemExit) and self.signal is not None and self.signal == self._requeue_signal:
                self._previous.pop(signal.SIGTERM, None)  # SLURM sends it to a job that is requeued
                if trainer.is_global_zero:
                    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
                exception.code = 0
        finally:
            self._restore_handlers(trainer)

    def _install_handlers(self, numbers: Iterable[int]) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if number != self._requeue_signal or signal.getsignal(number) in (None, signal.SIG_DFL):
                    self._previous[number] = signal.signal(number, self._handle)

    def _restore_handlers(self, trainer: pl.Trainer) -> None:
        vars(trainer._signal_connector).pop("register_signal_handlers", None)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (self.signal is not None or not self._is_training):
            raise KeyboardInterrupt
        if number != signal.SIGINT and callable(previous := self._previous.get(number)):
            previous(number, frame)
        if self.signal is not None:
            return
        self.signal = number
        if not self._is_training:
            raise SystemExit(128 + number)
        # print() is not reentrant: it raises if the signal has interrupted another print().
        name, hint = signal.Signals(number).name, ""
        if number == signal.SIGINT:
            name, hint = "Ctrl-C", " Press Ctrl-C again to stop at once."
        os.write(2, f"\n{name}: stopping after this batch.{hint}\n".encode())

    def _must_stop(self, trainer: pl.Trainer) -> bool:
        """Return whether any process has received a signal. All ranks must call this."""
        number, exchanged, self.exchanged = self.signal or 0, self.exchanged, None
        if exchanged is not None:
            number = exchanged
        elif trainer.world_size > 1:  # not Lightning's reduce, which also waits at a barrier
            mine = as_message(torch.tensor(number, device=trainer.strategy.root_device))
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            number = int(mine)
        self.signal = number or self.signal  # which may have arrived in the meantime
        return number > 0

    def _end(self, trainer: pl.Trainer) -> None:
        """Make Lightning stop once the batch, or the epoch after its last batch, is finished and logged."""
        trainer._signal_connector.received_sigterm = True

    def _save(self, trainer: pl.Trainer) -> None:
        is_requeued = self.signal == self._requeue_signal
        if self._is_automatic and trainer.checkpoint_callback is None and not is_requeued:
            return
        directory = self.dirpath or getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        self.checkpoint = os.path.join(directory, "last-interrupted.ckpt")
        trainer.save_checkpoint(self.checkpoint, weights_only=False)
        if is_requeued:  # where Lightning looks without ckpt_path
            trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
