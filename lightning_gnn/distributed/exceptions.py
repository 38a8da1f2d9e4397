"""Exception handling in distributed runs."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from torch.distributed import DistError, DistNetworkError

from lightning_gnn.runtime.lightning import pl

_FLUSH_S = 10.0
"""Maximum seconds for loggers and callbacks to finish when the process is ended."""


def is_handling_exception() -> bool:
    """Whether an exception is being handled, possibly on this rank only, so that a collective could hang."""
    return isinstance(sys.exc_info()[1], Exception)


def is_communication_error(exception: BaseException) -> bool:
    """Whether an exception reports that another rank could not be reached."""
    if isinstance(exception, DistError):
        return True
    # gloo and HCCL raise a plain RuntimeError, from a call of torch.distributed or from DDP in a backward pass.
    frames = [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    origin = frames[-1].f_globals.get("__name__", "") if frames else ""
    return type(exception) is RuntimeError and origin.startswith(("torch.distributed.", "torch.autograd."))


def end_process(message: str, trainer: pl.Trainer | None = None) -> None:
    """Write a message, let the trainer's loggers and callbacks finish, and end this process."""
    # A thread cannot interrupt another one that waits inside a backend, so the whole process must exit.
    sys.stderr.write(f"\n{message}\n")
    finish = threading.Thread(target=_finish, args=(message, trainer), daemon=True)
    finish.start()
    finish.join(_FLUSH_S)
    os._exit(1)


def _finish(message: str, trainer: pl.Trainer | None) -> None:
    """Do as Lightning after an exception, except for what needs the other ranks."""
    error = DistNetworkError(message)
    calls: list[Callable[[], object]] = [sys.stdout.flush, sys.stderr.flush]
    if trainer is not None:
        calls += [partial(logger.finalize, "failed") for logger in trainer.loggers]
        calls += [partial(each.on_exception, trainer, trainer.lightning_module, error) for each in trainer.callbacks]  # type: ignore[attr-defined]
    for call in calls:
        with suppress(Exception):
            call()
