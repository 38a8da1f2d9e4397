"""What the Tab key offers: Hydra's groups, options and keys, and what Hydra does not know of, commands and files."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress

COMPOSED = ("export", "plan", "predict", "tune", "warmup")
"""Commands that take what a run takes."""


def offer(line: str, commands: Sequence[str], ask: Callable[[str], None]) -> list[str]:
    """Return what the last word of a line may become. Errors are kept: they would stand in the line that is typed.

    Args:
        line: What was typed, up to the cursor.
        commands: All of them.
        ask: Lets Hydra print what it knows of the command whose name it gets, or of a run, for ``COMP_LINE`` in the
            environment.
    """
    words = line.split()
    last = "" if line.endswith(" ") else words.pop()
    before = words[1:]
    command = before.pop(0) if before and before[0] in commands else ""
    found = [name for name in commands if name.startswith(last)] if not before and not command else []
    if last.startswith("-"):
        return found
    if command and command not in COMPOSED:
        return _files(last)
    kept = [word for word in before if "=" in word or word.startswith("~") or word in ("-m", "--multirun")]
    os.environ["COMP_LINE"] = " ".join(["lgnn", *kept, last])
    printed = io.StringIO()
    with suppress(SystemExit), redirect_stdout(printed), redirect_stderr(io.StringIO()):
        ask(command)
    known = printed.getvalue().split()
    return [*found, *known] if known or "=" not in last else _files(last)


def _files(word: str) -> list[str]:
    """Return what a path in the making may become, behind ``KEY=`` or alone."""
    key, equals, start = word.rpartition("=")
    if not start:
        return []
    found = sorted(glob.glob(f"{glob.escape(start)}*"))
    return [f"{key}{equals}{path}{os.sep if os.path.isdir(path) else ''}" for path in found]
