"""Signs of life of the ranks, so that the loss of one ends the others soon, with a message that names it."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # not in its __all__

HEARTBEAT_POLL_S = 0.25
"""Seconds between two looks at the other ranks."""
_PATIENCE = 4.0
"""Seconds to wait for news of who was lost: an error of communication may arrive before them."""
_GRACE = 3.0
"""Seconds that the main thread has to end by an exception of its own before the process is ended, or less where the
timeout is short."""
RENDEZVOUS = timedelta(minutes=30)
"""How long ranks may take to find one another at the start, at least: what a process imports, compiles and loads before
says nothing about how long a collective may take. As long as torch waits by itself."""
_OF_BACKENDS = re.compile(r"\bgloo/|\b(NCCL|HCCL) error|\bProcessGroup(Gloo|NCCL|HCCL)\b|\bHccl[A-Z]", re.ASCII)
"""What only the backends of ``torch.distributed`` write in a plain RuntimeError; gloo writes the path of its file."""


class Process(NamedTuple):
    """Where a rank runs; ``space`` is where its id counts, ``started`` tells it from another process of that id."""

    host: str
    space: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        """Describe this process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            space = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
        except OSError:
            space = ""
        return cls(socket.gethostname(), space, os.getpid(), _state_and_start(os.getpid())[1])

    def state(self, seen_from: Process) -> str:
        """Return ``"gone"``, ``"stopped"``, ``"running"``, or ``"unknown"`` where it cannot be seen from here."""
        if not self.space or self.space != seen_from.space:
            return "unknown"
        state, started = _state_and_start(self.pid)
        return "gone" if state in "ZXx" or started != self.started else "stopped" if state in "Tt" else "running"


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state and when it started, as Linux has them; ``"X"`` where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]


class Heartbeats:
    """Tells the other ranks through a store that this one is alive, and watches whether they are."""

    # A thread writes and reads the store; another one watches, because the store may be on a rank that has stopped.
    # Once a rank is lost, the main thread usually fails by itself in a collective; if it does not, the process is ended
    # three seconds later.

    def __init__(
        self, store: Store, rank: int, num_ranks: int, timeout: float, end: Callable[[str], None] | None = None
    ) -> None:
        self.rank, self.timeout, self.interval = rank, timeout, min(1.0, timeout / 8)
        # A connection of its own, since a waiting call blocks others.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(max(RENDEZVOUS, timedelta(seconds=timeout)))
        self._end = end or end_process
        self._mine = Process.this()
        self._others = [other for other in range(num_ranks) if other != rank]
        self._processes: dict[int, Process] = {}
        self._words: dict[int, dict[str, object]] = {}  # what each of the others said last
        self._heard: dict[int, float] = {}
        self._gone: dict[int, float] = {}
        self._round = 0.0  # when the last look into the store began that was answered
        self._broken = self._handled = self._running = False
        self._word: dict[str, object] = {"done": False, "failure": None}
        self._written = self._word
        self._first: str | None = None
        self._work: tuple[str, float, int] | None = None
        self._wake, self._stopped = threading.Event(), threading.Event()

    @contextmanager
    def working(self, what: str | None) -> Iterator[None]:
        """Watch what runs within, in this thread: a rank that works on it for longer than the timeout hangs."""
        before, self._work = self._work, (what, time.monotonic(), threading.get_ident()) if what else None
        try:
            yield
        finally:
            self._work = (before[0], time.monotonic(), before[2]) if before else None

    def waiting(self) -> AbstractContextManager[None]:
        """Leave out what runs within: it waits for other ranks."""
        return self.working(None)

    @property
    def lost(self) -> bool:
        """Whether a rank is known to be lost, or this one has failed: barriers would never end."""
        return self._handled or (self._running and self._find(self.timeout) is not None)

    def start(self) -> None:
        """Begin; returns when all ranks have done so."""
        self._store.set(f"process/{self.rank}", json.dumps(self._mine))
        self._store.set(f"beat/{self.rank}", json.dumps(self._word))
        for other in self._others:
            self._processes[other] = Process(*json.loads(self._store.get(f"process/{other}")))
            self._store.wait([f"beat/{other}"])
        # Only now all are there, and can be expected to go on giving signs of life.
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self._round = time.monotonic()
        self._store.set_timeout(timedelta(seconds=max(1.0, self.timeout)))
        self._running = True
        for function in (self._write_and_read, self._watch):
            threading.Thread(target=function, name=f"heartbeat {function.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Say good-bye: this rank may end without being missed."""
        self._stopped.set()
        self._say(done=True)
        self._running = False

    def handle_exception(self, exception: BaseException) -> None:
        """Say in an exception's message which rank was lost; or let the other ranks know that it is this one."""
        text = next(iter(str(exception).splitlines()), "")
        if not is_communication_error(exception):
            self._end_with(failure=f"{type(exception).__name__}: {text}")
            return
        self._handled = True
        deadline = time.monotonic() + _PATIENCE
        silence = min(self.timeout / 2, 3 * self.interval)
        while (found := self._first or self._find(silence)) is None and time.monotonic() < deadline:
            time.sleep(HEARTBEAT_POLL_S / 2)
        self._end_with(done=True)  # this rank ends too, but is not the one to blame
        if found is not None:
            exception.args = (f"{found} (noticed on rank {self.rank}: {text})",)

    def _end_with(self, **word: object) -> None:
        """Say the last word, and wait until the others can have read it, and have seen who was gone first."""
        self._handled = True
        self._say(**word)
        time.sleep(self.interval + HEARTBEAT_POLL_S)

    def _say(self, **more: object) -> None:
        """Let the others know at once, unless the store does not answer."""
        self._word = mine = {**self._word, **more}
        self._wake.set()
        deadline = time.monotonic() + 1.0
        while self._written is not mine and not self._broken and time.monotonic() < deadline:
            time.sleep(0.01)

    def _write_and_read(self) -> None:
        """Beat, and hear the others, until this rank has said good-bye."""
        keys, count = [f"beat/{other}" for other in self._others], 0
        while self._written is not self._word or not self._stopped.is_set():
            self._wake.wait(self.interval)
            self._wake.clear()
            word, count, began = self._word, count + 1, time.monotonic()
            try:
                self._store.set(f"beat/{self.rank}", json.dumps({**word, "count": count}))
                self._written = word
                values = self._store.multi_get(keys)
            except Exception:  # whatever the store raises, its rank is to blame
                self._broken = True
                return
            for other, said in zip(self._others, map(json.loads, values), strict=True):
                if said != self._words.get(other):
                    self._words[other], self._heard[other] = said, time.monotonic()
            self._round = began

    def _watch(self) -> None:
        """End this process where this rank hangs, or where its main thread does not notice that another is lost."""
        before, since = time.monotonic(), None
        while not self._stopped.wait(HEARTBEAT_POLL_S):
            now = time.monotonic()
            if now - before > max(4 * HEARTBEAT_POLL_S, self.timeout / 4):
                # It was this process that did not run: the others had no chance to be heard.
                self._round = now
                self._heard = dict.fromkeys(self._others, now)
            before = now
            if (work := self._work) is not None and now - work[1] > self.timeout and not self._handled:
                frame = sys._current_frames().get(work[2])
                where = "" if frame is None else f":\n{''.join(traceback.format_stack(frame))}"
                why = f"hangs in {work[0]} for {now - work[1]:.0f} s"
                self._end_with(failure=why)
                self._end(f"rank {self.rank} {why}{where}")
                return
            found = self._find(self.timeout)
            # Others may end because of the first that is lost, and are not to blame.
            self._first = None if found is None else self._first or found
            since = None if found is None else since or now
            if since is not None and now - since >= min(_GRACE, self.timeout / 2) and not self._handled:
                self._say(done=True)
                self._end(f"rank {self.rank} ends, because {self._first}")
                return

    def _find(self, timeout: float) -> str | None:
        """Say which rank is lost, if one is."""
        now = time.monotonic()
        for other in self._others:  # also of one that has said good-bye since
            if (failure := self._words.get(other, {}).get("failure")) is not None:
                return f"{self._name(other)} failed: {failure}"
        present = [other for other in self._others if not self._words.get(other, {}).get("done")]
        states = {other: self._processes[other].state(self._mine) for other in present}
        gone = {other: self._gone.setdefault(other, now) for other in present if states[other] == "gone"}
        if gone:  # the first one; others may have ended because of it
            first = min(gone, key=gone.__getitem__)
            # Without the store it may have ended because of one that is stopped, which keeps the store.
            if self._round > gone[first] or (self._broken and "stopped" not in states.values()):
                return f"{self._name(first)} died: its process has ended without a word (killed, or out of memory?)"
            self._wake.set()  # what it said last may be news
        silent = [other for other in present if now - self._heard[other] > timeout]
        for other in sorted(silent, key=lambda other: states[other] != "stopped"):
            if states[other] == "stopped":
                how = "is stopped (by SIGSTOP or a debugger)"
            elif self._broken or now - self._round > timeout:
                # Nobody can be heard any more.
                other, how = 0, "does not answer, and it keeps the store of the ranks"
            else:
                how = "hangs, or its machine cannot be reached"
            return f"{self._name(other)} {how}: no sign of life for {now - self._heard.get(other, now):.0f} s"
        return None

    def _name(self, rank: int) -> str:
        process = self._processes.get(rank, self._mine)
        return f"rank {rank} (process {process.pid} on {process.host})"


def is_communication_error(exception: BaseException) -> bool:
    """Whether an exception says that a rank could not be reached, which is not the fault of the one that says so."""
    if isinstance(exception, DistError):
        return True
    text = next(iter(str(exception).splitlines()), "")
    return type(exception) is RuntimeError and _OF_BACKENDS.search(text) is not None


def end_process(message: str) -> None:
    """Write a message and end this process at once."""
    # A thread cannot raise in another one that waits inside a backend; only the end of the process ends that.
    sys.stderr.write(f"\n{message}\n")
    sys.stderr.flush()
    os._exit(1)
