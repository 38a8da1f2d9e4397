"""Contestants that are scripts with several ranks, started as by a user, and measured in turns like others."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import Gate, Isolated

ROOT = Path(__file__).parent.parent
_LAST = 2000
"""Maximum number of characters shown of a failed script's output."""


class Script(Isolated):
    """A contestant that runs a module with ``python -m``; Lightning starts its other ranks by running it again.

    With ``is_ahead``, it is started without waiting until it is prepared.
    """

    def __init__(
        self, module: str, spec: dict[str, Any], folder: Path, name: str, python: str | None = None,
        is_ahead: bool = False,
    ) -> None:  # fmt: skip
        file, self._output = folder / f"{name}.json", folder / f"{name}.txt"
        file.write_text(json.dumps(spec))
        self._pipe, theirs = multiprocessing.Pipe()
        handle = theirs.fileno()
        with self._output.open("w") as output:
            self._script = subprocess.Popen(
                [python or sys.executable, "-m", module, str(file), str(handle)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[handle],
                start_new_session=True,  # signals to this process do not reach its ranks, which notice its end
                cwd=ROOT,
            )
        if is_ahead:
            theirs.close()
            self._expect_ready = True
            return
        try:
            self._started(theirs)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Return the process."""
        return self._script.pid

    def finish(self) -> None:
        """Wait until the contestant is prepared for its next turn, or has ended."""
        try:
            self._ready()
        except RuntimeError:
            if self._script.wait(timeout=60):
                raise

    def close(self) -> None:
        """End the process; its ranks end with it."""
        self._pipe.close()
        try:
            self._script.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._script.terminate()
            try:
                self._script.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._script.kill()
                self._script.wait()

    def _last_words(self) -> str:
        code = self._script.wait(timeout=60)
        return f"exit code {code}\n{self._output.read_text(errors='replace')[-_LAST:]}"


def serve(train: Callable[[dict[str, Any], Gate | None], None], arguments: list[str]) -> None:
    """Run one rank of a :class:`Script`; only rank 0 has the gate, and it relays turns to the others."""
    spec = json.loads(Path(arguments[0]).read_text())
    gate = None if os.environ.get("LOCAL_RANK", "0") != "0" else Gate(Connection(int(arguments[1])), 0)
    try:
        train(spec, gate)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the benchmark has ended: ranks must not wait for each other
