"""Setup before other imports: Ctrl-C ends the command at once, and help does not import libraries."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_HELP_OPTIONS = {"--help", "-h", "--help-all", "--hydra-help", "--shell-completion", "-sc", "--version"}
_FILE_COMMANDS = {"init", "report", "runs"}
"""Commands that only read and write files, without Lightning."""


def begin() -> None:
    """Make Ctrl-C end the ``lgnn`` process with exit code 130, unless the signal is handled already.

    Some libraries take seconds to import and swallow a KeyboardInterrupt.
    """
    is_own_process = threading.current_thread() is threading.main_thread() and _is_lgnn()
    if is_own_process and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def done() -> None:
    """Restore Python's default handling of Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def asks_for_help() -> bool:
    """Whether this process is ``lgnn`` and prints its help or version, which only needs Hydra."""
    return _is_lgnn() and not _HELP_OPTIONS.isdisjoint(sys.argv[1:])


@contextmanager
def ending_with_the_reader() -> Iterator[None]:
    """Exit silently if the reader closes the pipe, as in `lgnn --help | head`, instead of raising an error."""
    signals = hasattr(signal, "SIGPIPE") and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL) if signals else None
    try:
        yield
    finally:
        sys.stdout.flush()
        if signals:
            signal.signal(signal.SIGPIPE, before)


def needs_no_library() -> bool:
    """Whether this process is ``lgnn`` and does not need Lightning."""
    return asks_for_help() or (_is_lgnn() and not _FILE_COMMANDS.isdisjoint(sys.argv[1:2]))


def _is_lgnn() -> bool:
    path = Path(sys.argv[0])
    if path.stem == "lgnn" or path.parts[-2:] == ("lightning_gnn", "__main__.py"):
        return True
    # With python -m, sys.argv does not contain the module's name yet.
    return sys.argv[0] == "-m" and any(
        (flag, name) == ("-m", "lightning_gnn") for flag, name in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    )


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nInterrupted before training began.\n")
    os._exit(128 + number)


begin()
