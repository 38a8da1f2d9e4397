"""Heartbeats: abort all ranks promptly, with a clear message, if one rank dies or hangs."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

from lightning_gnn.distributed.exceptions import end_process, is_communication_error

HEARTBEAT_POLL_S = 0.25
"""Seconds between checks of the other ranks."""
_DIAGNOSIS_TIMEOUT_S = 4.0
"""Seconds to wait for the cause of a communication error, which may be noticed before the failed rank is known."""
_EXIT_GRACE_S = 3.0
"""Maximum seconds for the main thread to fail by itself before the process is ended; shorter with a short timeout."""
MIN_RENDEZVOUS = timedelta(minutes=30)
"""Minimum timeout for the initial rendezvous, equal to torch's default: imports, compilation and loading may take much
longer than a collective."""

BLAME_GRACE_S = 5.0
"""Seconds added to the timeout of work that also waits for other ranks, which may name a cause of their own first."""
_MAX_TIMEOUT_S = 1e8
"""Replaces longer timeouts: functions that wait do not accept infinity."""

_STATES = dict.fromkeys((psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD), "gone")
_STATES |= dict.fromkeys((psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP), "stopped")


def state_of(process: psutil.Process | None) -> str:
    """Return ``"gone"``, ``"stopped"``, ``"running"``, or ``"unknown"`` for one that cannot be seen (None)."""
    try:
        if process is None:
            return "unknown"
        return _STATES.get(process.status(), "running") if process.is_running() else "gone"
    except psutil.NoSuchProcess:
        return "gone"


def pid_space() -> str:
    """Return the boot and the PID namespace in which this process's id is valid, or an empty string."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def check_stall_timeout(seconds: object) -> float:
    """Return the option ``stall_timeout`` as a finite number; raise a ValueError unless it is a positive one."""
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"stall_timeout must be a positive number of seconds, but is {seconds!r}")
    return min(seconds, _MAX_TIMEOUT_S)


def waiting_for_ranks() -> AbstractContextManager[None]:
    """Return a context for a collective inside a step, which does not count as a hang of this rank."""
    return nullcontext() if Heartbeats.current is None else Heartbeats.current.waiting()


class Heartbeats:
    """Sends heartbeats of this rank through a store, and monitors those of the other ranks."""

    # One thread writes and reads the store. A second one monitors the ranks, since a stopped store host may block the
    # first. After a failure, the main thread usually fails in a collective; otherwise the process is ended after 3 s.

    current: ClassVar[Heartbeats | None] = None
    """Those of this process that were started last and not stopped."""

    def __init__(
        self, store: Store, rank: int, num_ranks: int, timeout: float, end: Callable[[str], None] | None = None
    ) -> None:
        self.rank, self.timeout, self.interval = rank, timeout, min(1.0, timeout / 8)
        # A separate connection, since a waiting call blocks all others on the same connection.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(max(MIN_RENDEZVOUS, timedelta(seconds=timeout)))
        self._end = end or end_process
        self._others = [other for other in range(num_ranks) if other != rank]
        self._places: dict[int, str] = {}  # process and host of each rank, for messages
        self._visible: dict[int, psutil.Process] = {}  # the ranks' processes that this one can see
        self._statuses: dict[int, dict[str, object]] = {}  # latest status of each other rank
        self._last_change: dict[int, float] = {}  # time of the latest status of each other rank
        self._gone: dict[int, float] = {}  # time at which each dead process was noticed
        self._last_read = 0.0  # start time of the last successful read of the store
        self._is_store_broken = self._is_handled = False
        self._status: dict[str, object] = {"done": False, "failure": None}
        self._written_status = self._status
        self._first_failure: str | None = None
        # Name, start time, thread and additional seconds of the monitored call.
        self._work: tuple[str, float, int, float] | None = None
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=loop, name=f"heartbeat {loop.__name__}", daemon=True)
            for loop in (self._write_and_read, self._monitor)
        ]

    @contextmanager
    def working(self, what: str | None, grace: float = 0.0) -> Iterator[None]:
        """Monitor the ``with`` block in this thread: the rank counts as hanging if it exceeds the timeout.

        ``grace`` are seconds in addition, for a block that also waits for other ranks.
        """
        work = (what, time.monotonic(), threading.get_ident(), grace) if what else None
        previous, self._work = self._work, work
        try:
            yield
        finally:
            self._work = (previous[0], time.monotonic(), *previous[2:]) if previous else None

    def waiting(self) -> AbstractContextManager[None]:
        """Exclude the ``with`` block from monitoring, since it waits for other ranks."""
        return self.working(None)

    @property
    def lost(self) -> bool:
        """Whether any rank is known to have failed, so that barriers would hang."""
        is_running = bool(self._last_change) and not self._stopped.is_set()
        return self._is_handled or (is_running and self._find_failure(self.timeout) is not None)

    def start(self) -> None:
        """Start the heartbeats, and wait until all ranks have done so. All ranks must call this."""
        self._store.set(f"process/{self.rank}", json.dumps((os.getpid(), socket.gethostname(), pid_space())))
        self._store.set(f"beat/{self.rank}", json.dumps(self._status))
        for other in [self.rank, *self._others]:
            pid, host, space = json.loads(self._store.get(f"process/{other}"))
            self._places[other] = f"process {pid} on {host}"
            if space == pid_space() != "":
                with suppress(psutil.NoSuchProcess):
                    self._visible[other] = psutil.Process(pid)
            self._store.wait([f"beat/{other}"])
        # The timeouts start now that all ranks have sent their first heartbeat.
        self._last_change = dict.fromkeys(self._others, time.monotonic())
        self._last_read = time.monotonic()
        self._store.set_timeout(timedelta(seconds=max(1.0, self.timeout)))
        for thread in self._threads:
            thread.start()
        Heartbeats.current = self
        atexit.register(self._end_threads)

    def stop(self) -> None:
        """Announce that this rank has finished, so that its exit is not a failure."""
        self._stopped.set()
        self._publish(is_final=False, done=True)
        self._end_threads()

    def _end_threads(self) -> None:
        """End the threads, since one that returns from the store at the interpreter's exit would abort the process."""
        if Heartbeats.current is self:
            Heartbeats.current = None
        self._stopped.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(1.0)
        atexit.unregister(self._end_threads)

    def handle_exception(self, exception: BaseException) -> None:
        """Add the failed rank to an exception's message, or notify the other ranks that this one has failed."""
        text, failure = next(iter(str(exception).splitlines()), ""), None
        if is_communication_error(exception):
            self._is_handled = True
            deadline = time.monotonic() + _DIAGNOSIS_TIMEOUT_S
            silence, closed = min(self.timeout / 2, 3 * self.interval), "time" not in text.lower()
            while failure is None and time.monotonic() < deadline:
                time.sleep(HEARTBEAT_POLL_S / 2)
                failure = self._first_failure or self._find_failure(silence, closed)
        if failure is not None:  # this rank exits too, but did not cause the failure
            self._publish(done=True)
            exception.args = (f"{failure} (noticed on rank {self.rank}: {text})",)
        else:
            self._publish(failure=f"{type(exception).__name__}: {text}")

    def _publish(self, is_final: bool = True, **changes: object) -> None:
        """Update this rank's status until it is written; the final one until others know which rank failed first."""
        self._is_handled |= is_final
        self._status = new_status = {**self._status, **changes}
        self._wake.set()
        deadline = time.monotonic() + 1.0
        while self._written_status is not new_status and not self._is_store_broken and time.monotonic() < deadline:
            time.sleep(0.01)
        if is_final:
            time.sleep(self.interval + HEARTBEAT_POLL_S)

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
            work = self._work
            if work is not None and now - work[1] > self.timeout + work[3] and not self._is_handled:
                frame = sys._current_frames().get(work[2])
                stack = "" if frame is None else f":\n{''.join(traceback.format_stack(frame))}"
                reason = f"hangs in {work[0]} for {now - work[1]:.0f} s"
                reason += " (itself, or it waits there for another rank)" if work[3] else ""
                self._publish(failure=reason)
                self._end(f"rank {self.rank} {reason}{stack}")
                return
            failure = self._find_failure(self.timeout)
            # Retain the first failure: other ranks may exit because of it.
            self._first_failure = None if failure is None else self._first_failure or failure
            since = None if failure is None else since or now
            if since is not None and now - since >= min(_EXIT_GRACE_S, self.timeout / 2) and not self._is_handled:
                self._publish(is_final=False, done=True)
                self._end(f"rank {self.rank} exits because {self._first_failure}")
                return

    def _find_failure(self, timeout: float, closed: bool = False) -> str | None:
        """Return a message that names a failed rank, or None; ``closed``: whether a connection was closed."""
        now = time.monotonic()
        for other in self._others:  # including ranks that have stopped since
            if (failure := self._statuses.get(other, {}).get("failure")) is not None:
                return f"{self._describe(other)} failed: {failure}"
        present = [other for other in self._others if not self._statuses.get(other, {}).get("done")]
        states = {other: state_of(self._visible.get(other)) for other in present}
        gone = {other: self._gone.setdefault(other, now) for other in present if states[other] == "gone"}
        if gone:  # name the first ones, since others may have exited because of them
            first = min(gone.values())
            # Blame it only after reading its final status. Without the store, the cause may be a stopped store host.
            if self._last_read > first or (self._is_store_broken and "stopped" not in states.values()):
                # Within one check, the order is unknown: engines such as torchrun end the other ranks at once.
                names = [self._describe(other) for other, since in gone.items() if since == first]
                exited = "its process exited" if len(names) == 1 else "their processes exited"
                return f"{' and '.join(names)} died: {exited} unexpectedly (killed, or out of memory?)"
            self._wake.set()  # read its final status now
        silent = [other for other in present if now - self._last_change[other] > timeout]
        for other in sorted(silent, key=lambda other: states[other] != "stopped"):
            if states[other] == "stopped":
                problem = "is stopped (by SIGSTOP or a debugger)"
            elif self._is_store_broken or now - self._last_read > timeout:
                # Without the store, the heartbeats of all ranks are missing.
                other, problem = 0, "does not answer, and it hosts the store of the ranks"
            else:
                problem = "has closed its connection" if closed else "hangs, or its machine cannot be reached"
            silent_s = now - self._last_change.get(other, now)
            return f"{self._describe(other)} {problem}: no heartbeat for {silent_s:.0f} s"
        return None

    def _describe(self, rank: int) -> str:
        return f"rank {rank} ({self._places[rank]})"
