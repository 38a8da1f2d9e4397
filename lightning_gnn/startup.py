"""What the command does before anything else is imported: Ctrl-C ends it at once, and help needs no libraries."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_HELP = {"--help", "-h", "--help-all", "--hydra-help", "--shell-completion", "-sc", "--version"}
_LIGHT = {"init", "report", "runs"}
"""Commands that only read and write files."""


def begin() -> None:
    """Let Ctrl-C end this process with exit code 130, if it is the command and nothing else handles the signal.

    Some of the libraries that take seconds to import swallow a KeyboardInterrupt.
    """
    ours = threading.current_thread() is threading.main_thread() and _is_the_command()
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def done() -> None:
    """Give Ctrl-C its usual meaning again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def asks_for_help() -> bool:
    """Say whether this process is the command and is to print its help or its version, which needs Hydra alone."""
    return _is_the_command() and not _HELP.isdisjoint(sys.argv[1:])


@contextmanager
def ending_with_the_reader() -> Iterator[None]:
    """End this process in silence when its reader is gone, as in `lgnn --help | head`; Python would raise an error."""
    signals = hasattr(signal, "SIGPIPE") and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL) if signals else None
    try:
        yield
    finally:
        sys.stdout.flush()
        if signals:
            signal.signal(signal.SIGPIPE, before)


def needs_no_library() -> bool:
    """Say whether this process is the command and does without Lightning."""
    return asks_for_help() or (_is_the_command() and not _LIGHT.isdisjoint(sys.argv[1:2]))


def _is_the_command() -> bool:
    path = Path(sys.argv[0])
    if path.stem == "lgnn" or path.parts[-2:] == ("lightning_gnn", "__main__.py"):
        return True
    # With python -m, sys.argv does not tell at first which module it will be.
    return sys.argv[0] == "-m" and any(
        (flag, name) == ("-m", "lightning_gnn") for flag, name in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    )


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nInterrupted before training began.\n")
    os._exit(128 + number)


begin()
