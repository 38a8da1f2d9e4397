"""Ctrl-C while the command still imports its libraries: some of them swallow it, so it ends the process at once."""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType


def begin() -> None:
    """Let Ctrl-C end this process with exit code 130, if it is the command and nobody else handles the signal."""
    ours = threading.current_thread() is threading.main_thread() and _is_the_command()
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def done() -> None:
    """Give Ctrl-C its usual meaning again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_the_command() -> bool:
    if Path(sys.argv[0]).stem == "lgnn":
        return True
    # With python -m, sys.argv does not tell yet which module it will be.
    return sys.argv[0] == "-m" and any(
        (flag, name) == ("-m", "lightning_gnn") for flag, name in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    )


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nInterrupted before training began.\n")
    os._exit(128 + number)


begin()
