"""Runs that are stopped, by Ctrl-C or SIGTERM, and resumed as if they had not been."""

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
    """Answers the first SIGINT or SIGTERM by a checkpoint at the next optimizer step, then ends the run.

    A second signal ends the run at once. Outside the main thread, as in some notebooks, signals are left alone. Where
    several processes train together, all stop as soon as one is to.

    Args:
        dirpath: Where to write ``interrupted.ckpt``; by default the directory of the first checkpoint callback, or
            else the trainer's.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = dirpath
        self.signal: int | None = None  # the signal that stopped the run, None if there was none
        self.checkpoint: Path | None = None
        """Where the interrupted run can be resumed from, None if it was stopped before that was written."""
        self._previous: dict[int, Any] = {}
        self._ending = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Move behind the other callbacks, whose part of a batch must be done before the checkpoint is written."""
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self] + [self]  # type: ignore[attr-defined]
        self.signal = self.checkpoint = None
        self._ending = False
        use_safe_files(trainer)
        # Between here and the start of a stage Lightning replaces SIGTERM's handler; it restores it before teardown.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Stop, unless gradients are still being accumulated or a validation follows."""
        loop = trainer.fit_loop
        if loop._should_accumulate() or not self._must_stop(trainer):
            return
        if not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):  # type: ignore[arg-type]
            self._end(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop after a validation in mid-epoch."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fit_loop._should_accumulate():
            return
        if not self._must_stop(trainer):
            return
        if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self._end(trainer)
        else:  # what Lightning goes on with after it is resumed
            self._save(trainer)
            raise KeyboardInterrupt

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep a run that is stopped in its very last moments from going on to its next stage."""
        if self._must_stop(trainer):
            self._save(trainer)
            raise KeyboardInterrupt

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: object, **kwargs: object) -> None:
        """Stop at once where there is nothing to resume: outside of training."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            self._stop_if_asked(trainer)

    def on_test_batch_end(self, trainer: pl.Trainer, *args: object, **kwargs: object) -> None:
        """Stop at once: there is nothing to resume."""
        self._stop_if_asked(trainer)

    on_predict_batch_end = on_test_batch_end

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen; earlier, Lightning would replace the handler of SIGTERM by its own."""
        for number in self._previous:
            signal.signal(number, self._handle)

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_sanity_check_start

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the signals back to their former handlers."""
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the checkpoint if this ends the run as asked; Lightning calls no teardown hook after an exception."""
        try:
            if isinstance(exception, SIGTERMException) and self._ending:
                self._save(trainer)
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        # print() could be what the signal has just interrupted, and then raises.
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        os.write(2, f"\n{name}: stopping after this batch. Press Ctrl-C again to stop at once.\n".encode())

    def _must_stop(self, trainer: pl.Trainer) -> bool:
        asked = self.signal is not None
        return trainer.strategy.reduce_boolean_decision(asked, all=False) if trainer.world_size > 1 else asked

    def _stop_if_asked(self, trainer: pl.Trainer) -> None:
        if self._must_stop(trainer):
            raise KeyboardInterrupt

    def _end(self, trainer: pl.Trainer) -> None:
        """Let Lightning stop once all of a batch, or of an epoch after its last batch, is done and logged."""
        self._ending = trainer._signal_connector.received_sigterm = True

    def _save(self, trainer: pl.Trainer) -> None:
        directory = self.dirpath or getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = Path(directory) / "interrupted.ckpt"
        trainer.save_checkpoint(path)
        self.checkpoint = path


class BestCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, which keeps its best score when a run is resumed in another directory.

    Lightning starts afresh there, so that a resumed run could end with a worse checkpoint than an uninterrupted one.
    Takes the same arguments.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best score as long as the file that reached it is still there."""
        if Path(state_dict["best_model_path"]).is_file():
            super().load_state_dict({**state_dict, "dirpath": self.dirpath})
