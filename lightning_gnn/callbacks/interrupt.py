"""Callbacks for runs that are stopped by Ctrl-C or SIGTERM and resumed later."""

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_gnn.runtime.checkpoint_io import use_safe_files

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal(pl.Callback):
    """On the first SIGINT or SIGTERM, writes a checkpoint after the next optimizer step, then ends the run.

    A second signal ends the run at once. Signals are not handled outside the main thread, as in some notebooks. In
    distributed training, all processes stop when one of them receives a signal.

    Args:
        dirpath: Directory of ``interrupted.ckpt``; by default that of the first checkpoint callback, otherwise the
            trainer's.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = dirpath
        self.signal: int | None = None  # the signal that stopped the run, or None
        self.checkpoint: Path | None = None
        """Checkpoint to resume the interrupted run from; None if it has not been written."""
        self._previous: dict[int, Any] = {}
        self._is_ending = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Move to the end of the callbacks, since the others must process a batch before the checkpoint is written."""
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self] + [self]  # type: ignore[attr-defined]
        self.signal = self.checkpoint = None
        self._is_ending = False
        use_safe_files(trainer)
        # Lightning replaces SIGTERM's handler after this hook, before a stage starts, and restores it before teardown.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Stop, unless gradients are being accumulated or a validation follows."""
        loop = trainer.fit_loop
        if loop._should_accumulate() or not self._must_stop(trainer):
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
            self._save(trainer)
            raise KeyboardInterrupt

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prevent a run that was stopped at its very end from continuing with its next stage."""
        if self._must_stop(trainer):
            self._save(trainer)
            raise KeyboardInterrupt

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: object, **kwargs: object) -> None:
        """Stop at once outside training, where nothing can be resumed."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            self._stop_if_requested(trainer)

    def on_test_batch_end(self, trainer: pl.Trainer, *args: object, **kwargs: object) -> None:
        """Stop at once, since nothing can be resumed."""
        self._stop_if_requested(trainer)

    on_predict_batch_end = on_test_batch_end

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers; earlier, Lightning would replace SIGTERM's handler."""
        for number in self._previous:
            signal.signal(number, self._handle)

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_sanity_check_start

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the previous signal handlers."""
        self._restore_handlers()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the checkpoint if the run ends as requested; Lightning calls no teardown hook after an exception."""
        try:
            if isinstance(exception, SIGTERMException) and self._is_ending:
                self._save(trainer)
        finally:
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        # print() is not reentrant: it raises if the signal has interrupted another print().
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        os.write(2, f"\n{name}: stopping after this batch. Press Ctrl-C again to stop at once.\n".encode())

    def _must_stop(self, trainer: pl.Trainer) -> bool:
        requested = self.signal is not None
        return trainer.strategy.reduce_boolean_decision(requested, all=False) if trainer.world_size > 1 else requested

    def _stop_if_requested(self, trainer: pl.Trainer) -> None:
        if self._must_stop(trainer):
            raise KeyboardInterrupt

    def _end(self, trainer: pl.Trainer) -> None:
        """Make Lightning stop once the batch, or the epoch after its last batch, is finished and logged."""
        self._is_ending = trainer._signal_connector.received_sigterm = True

    def _save(self, trainer: pl.Trainer) -> None:
        directory = self.dirpath or getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = Path(directory) / "interrupted.ckpt"
        trainer.save_checkpoint(path)
        self.checkpoint = path


class BestCheckpoint(ModelCheckpoint):
    """A ``ModelCheckpoint`` that retains its best score when a run is resumed in another directory.

    Lightning resets the score, so a resumed run could end with a worse checkpoint than an uninterrupted one. Takes the
    same arguments.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score if the best checkpoint's file still exists."""
        if Path(state_dict["best_model_path"]).is_file():
            super().load_state_dict({**state_dict, "dirpath": self.dirpath})
