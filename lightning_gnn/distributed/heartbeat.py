"""Heartbeats: abort all ranks promptly, with a clear message, if one rank dies or hangs."""

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
"""Seconds between checks of the other ranks."""
_DIAGNOSIS_TIMEOUT_S = 4.0
"""Seconds to wait for the cause of a communication error, which may be noticed before the failed rank is known."""
_EXIT_GRACE_S = 3.0
"""Maximum seconds for the main thread to fail by itself before the process is ended; shorter with a short timeout."""
MIN_RENDEZVOUS = timedelta(minutes=30)
"""Minimum timeout for the initial rendezvous, equal to torch's default: imports, compilation and loading may take much
longer than a collective."""
_BACKEND_ERROR = re.compile(r"\bgloo/|\b(NCCL|HCCL) error|\bProcessGroup(Gloo|NCCL|HCCL)\b|\bHccl[A-Z]", re.ASCII)
"""Matches the RuntimeErrors of ``torch.distributed`` backends; gloo's contain the path of its source file."""


class Process(NamedTuple):
    """Identifies the process of a rank."""

    host: str
    space: str  # boot id and PID namespace in which ``pid`` is valid
    pid: int
    started: str  # start time, which distinguishes it from a later process with the same pid

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
        """Return ``"gone"``, ``"stopped"``, ``"running"``, or ``"unknown"`` if another PID namespace hides it."""
        if not self.space or self.space != seen_from.space:
            return "unknown"
        state, started = _state_and_start(self.pid)
        return "gone" if state in "ZXx" or started != self.started else "stopped" if state in "Tt" else "running"


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state and start time from Linux's ``/proc``; ``"X"`` if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]


class Heartbeats:
    """Sends heartbeats of this rank through a store, and monitors those of the other ranks."""

    # One thread writes and reads the store. A second thread monitors the ranks, because the store's host may be stopped
    # and block the first one. After a failure, the main thread usually fails by itself in a collective. Otherwise the
    # process is ended three seconds later.

    def __init__(
        self, store: Store, rank: int, num_ranks: int, timeout: float, end: Callable[[str], None] | None = None
    ) -> None:
        self.rank, self.timeout, self.interval = rank, timeout, min(1.0, timeout / 8)
        # A separate connection, since a waiting call blocks all others on the same connection.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(max(MIN_RENDEZVOUS, timedelta(seconds=timeout)))
        self._end = end or end_process
        self._mine = Process.this()
        self._others = [other for other in range(num_ranks) if other != rank]
        self._processes: dict[int, Process] = {}
        self._statuses: dict[int, dict[str, object]] = {}  # latest status of each other rank
        self._last_change: dict[int, float] = {}  # time of the latest status of each other rank
        self._gone: dict[int, float] = {}  # time at which each dead process was noticed
        self._last_read = 0.0  # start time of the last successful read of the store
        self._is_store_broken = self._is_handled = self._is_running = False
        self._status: dict[str, object] = {"done": False, "failure": None}
        self._written_status = self._status
        self._first_failure: str | None = None
        self._work: tuple[str, float, int] | None = None  # name, start time and thread of the monitored call
        self._wake, self._stopped = threading.Event(), threading.Event()

    @contextmanager
    def working(self, what: str | None) -> Iterator[None]:
        """Monitor the ``with`` block in this thread: the rank counts as hanging if it exceeds the timeout."""
        previous, self._work = self._work, (what, time.monotonic(), threading.get_ident()) if what else None
        try:
            yield
        finally:
            self._work = (previous[0], time.monotonic(), previous[2]) if previous else None

    def waiting(self) -> AbstractContextManager[None]:
        """Exclude the ``with`` block from monitoring, since it waits for other ranks."""
        return self.working(None)

    @property
    def lost(self) -> bool:
        """Whether any rank is known to have failed, so that barriers would hang."""
        return self._is_handled or (self._is_running and self._find_failure(self.timeout) is not None)

    def start(self) -> None:
        """Start the heartbeats, and wait until all ranks have done so. Collective: every rank must call this."""
        self._store.set(f"process/{self.rank}", json.dumps(self._mine))
        self._store.set(f"beat/{self.rank}", json.dumps(self._status))
        for other in self._others:
            self._processes[other] = Process(*json.loads(self._store.get(f"process/{other}")))
            self._store.wait([f"beat/{other}"])
        # The timeouts start now that all ranks have sent their first heartbeat.
        self._last_change = dict.fromkeys(self._others, time.monotonic())
        self._last_read = time.monotonic()
        self._store.set_timeout(timedelta(seconds=max(1.0, self.timeout)))
        self._is_running = True
        for function in (self._write_and_read, self._monitor):
            threading.Thread(target=function, name=f"heartbeat {function.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Announce that this rank has finished, so that its exit is not a failure."""
        self._stopped.set()
        self._publish(done=True)
        self._is_running = False

    def handle_exception(self, exception: BaseException) -> None:
        """Add the failed rank to an exception's message, or notify the other ranks that this one has failed."""
        text = next(iter(str(exception).splitlines()), "")
        if not is_communication_error(exception):
            self._publish_final(failure=f"{type(exception).__name__}: {text}")
            return
        self._is_handled = True
        deadline = time.monotonic() + _DIAGNOSIS_TIMEOUT_S
        silence = min(self.timeout / 2, 3 * self.interval)
        while (failure := self._first_failure or self._find_failure(silence)) is None and time.monotonic() < deadline:
            time.sleep(HEARTBEAT_POLL_S / 2)
        self._publish_final(done=True)  # this rank exits too, but did not cause the failure
        if failure is not None:
            exception.args = (f"{failure} (noticed on rank {self.rank}: {text})",)

    def _publish_final(self, **changes: object) -> None:
        """Publish the final status, and wait until the other ranks have read it and know which rank failed first."""
        self._is_handled = True
        self._publish(**changes)
        time.sleep(self.interval + HEARTBEAT_POLL_S)

    def _publish(self, **changes: object) -> None:
        """Update this rank's status, and wait up to one second until it is written."""
        self._status = new_status = {**self._status, **changes}
        self._wake.set()
        deadline = time.monotonic() + 1.0
        while self._written_status is not new_status and not self._is_store_broken and time.monotonic() < deadline:
            time.sleep(0.01)

    def _write_and_read(self) -> None:
        """Send heartbeats and read those of the others, until this rank has stopped."""
        keys, count = [f"beat/{other}" for other in self._others], 0
        while self._written_status is not self._status or not self._stopped.is_set():
            self._wake.wait(self.interval)
            self._wake.clear()
            current, count, began = self._status, count + 1, time.monotonic()
            try:
                self._store.set(f"beat/{self.rank}", json.dumps({**current, "count": count}))
                self._written_status = current
                values = self._store.multi_get(keys)
            except Exception:  # any error means that the store's host is unreachable
                self._is_store_broken = True
                return
            for other, status in zip(self._others, map(json.loads, values), strict=True):
                if status != self._statuses.get(other):
                    self._statuses[other], self._last_change[other] = status, time.monotonic()
            self._last_read = began

    def _monitor(self) -> None:
        """End this process if this rank hangs, or if its main thread does not notice that another rank failed."""
        last_check, since = time.monotonic(), None
        while not self._stopped.wait(HEARTBEAT_POLL_S):
            now = time.monotonic()
            if now - last_check > max(4 * HEARTBEAT_POLL_S, self.timeout / 4):
                # This process itself was suspended and could not read heartbeats: restart the timeouts.
                self._last_read = now
                self._last_change = dict.fromkeys(self._others, now)
            last_check = now
            if (work := self._work) is not None and now - work[1] > self.timeout and not self._is_handled:
                frame = sys._current_frames().get(work[2])
                stack = "" if frame is None else f":\n{''.join(traceback.format_stack(frame))}"
                reason = f"hangs in {work[0]} for {now - work[1]:.0f} s"
                self._publish_final(failure=reason)
                self._end(f"rank {self.rank} {reason}{stack}")
                return
            failure = self._find_failure(self.timeout)
            # Retain the first failure: other ranks may exit because of it.
            self._first_failure = None if failure is None else self._first_failure or failure
            since = None if failure is None else since or now
            if since is not None and now - since >= min(_EXIT_GRACE_S, self.timeout / 2) and not self._is_handled:
                self._publish(done=True)
                self._end(f"rank {self.rank} exits because {self._first_failure}")
                return

    def _find_failure(self, timeout: float) -> str | None:
        """Return a message that names a failed rank, or None."""
        now = time.monotonic()
        for other in self._others:  # including ranks that have stopped since
            if (failure := self._statuses.get(other, {}).get("failure")) is not None:
                return f"{self._describe(other)} failed: {failure}"
        present = [other for other in self._others if not self._statuses.get(other, {}).get("done")]
        states = {other: self._processes[other].state(self._mine) for other in present}
        gone = {other: self._gone.setdefault(other, now) for other in present if states[other] == "gone"}
        if gone:  # name the first one, since others may have exited because of it
            first = min(gone, key=gone.__getitem__)
            # Blame it only after reading its final status. Without the store, the cause may be a stopped store host.
            if self._last_read > gone[first] or (self._is_store_broken and "stopped" not in states.values()):
                return f"{self._describe(first)} died: its process exited unexpectedly (killed, or out of memory?)"
            self._wake.set()  # read its final status now
        silent = [other for other in present if now - self._last_change[other] > timeout]
        for other in sorted(silent, key=lambda other: states[other] != "stopped"):
            if states[other] == "stopped":
                problem = "is stopped (by SIGSTOP or a debugger)"
            elif self._is_store_broken or now - self._last_read > timeout:
                # Without the store, the heartbeats of all ranks are missing.
                other, problem = 0, "does not answer, and it hosts the store of the ranks"
            else:
                problem = "hangs, or its machine cannot be reached"
            silent_s = now - self._last_change.get(other, now)
            return f"{self._describe(other)} {problem}: no heartbeat for {silent_s:.0f} s"
        return None

    def _describe(self, rank: int) -> str:
        process = self._processes.get(rank, self._mine)
        return f"rank {rank} (process {process.pid} on {process.host})"


def is_communication_error(exception: BaseException) -> bool:
    """Whether an exception reports that another rank could not be reached."""
    if isinstance(exception, DistError):
        return True
    text = next(iter(str(exception).splitlines()), "")
    return type(exception) is RuntimeError and _BACKEND_ERROR.search(text) is not None


def end_process(message: str) -> None:
    """Write a message and end this process at once."""
    # A thread cannot interrupt another one that waits inside a backend, so the whole process must exit.
    sys.stderr.write(f"\n{message}\n")
    sys.stderr.flush()
    os._exit(1)
