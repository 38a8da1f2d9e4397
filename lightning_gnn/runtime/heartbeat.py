"""Signs of life of the ranks, so that the loss of one ends the others soon, with a message that names it."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.rendezvous import rendezvous

_LOOK = 0.25
"""Seconds between two looks at the other ranks."""
_GRACE = 3.0
"""Seconds that the main thread has to end by an exception of its own before the process is ended, or less where the
timeout is short."""
RENDEZVOUS = timedelta(minutes=30)
"""How long ranks may take to find one another at the start, at least: what a process imports, compiles and loads before
says nothing about how long a collective may take. As long as torch waits by itself."""
_MEETINGS = itertools.count()
"""Of this process, which may join its ranks again after it has left them."""
_OF_BACKENDS = re.compile(r"\bgloo/|\b(NCCL|HCCL) error|\bProcessGroup(Gloo|NCCL|HCCL)\b|\bHccl[A-Z]", re.ASCII)
"""What only the backends of ``torch.distributed`` write in a plain RuntimeError; gloo writes the path of its file."""


@dataclass(frozen=True)
class Process:
    """Where a rank runs.

    Args:
        host: Name of the machine.
        space: What tells apart the spaces in which process ids count: the boot and the namespace; empty if unknown.
        started: When it started, so that another process of the same id is not taken for it.
    """

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
        stat = _stat(os.getpid())
        return cls(socket.gethostname(), space, os.getpid(), stat[19] if stat else "")

    def state(self, seen_from: Process) -> str:
        """Return ``"gone"``, ``"stopped"``, ``"running"``, or ``"unknown"`` where it cannot be seen from here."""
        if not self.space or self.space != seen_from.space:
            return "unknown"
        stat = _stat(self.pid)
        if stat is None or stat[0] in "ZXx" or stat[19] != self.started:
            return "gone"
        return "stopped" if stat[0] in "Tt" else "running"


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/<pid>/stat`` from the state on, None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def meet(rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """Return a store that all ranks have come to, at ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        timeout: What a call of the store may take afterwards. The meeting may take ``RENDEZVOUS``, if that is longer.
    """
    limit = max(RENDEZVOUS, timeout)
    store: Store
    store, _, _ = next(rendezvous("env://", rank, num_ranks, timeout=limit))
    store.set_timeout(limit)
    # torchrun's own store outlives a restart (pytorch/pytorch#135712). Its number tells the starts apart where there is
    # one agent; several count each for itself.
    if os.environ.get("GROUP_WORLD_SIZE") == "1" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    if store.add(f"lightning_gnn/came/{next(_MEETINGS)}/{rank}", 1) > 1:
        raise RuntimeError(
            f"rank {rank} was given the store of the ranks before it, and would look for the others where those were: "
            "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment, so that each start has a "
            "store of its own"
        )
    # Of torchrun's store nobody waits for the others.
    store.set(f"lightning_gnn/met/{rank}", "")
    store.wait([f"lightning_gnn/met/{other}" for other in range(num_ranks)])
    store.set_timeout(timeout)
    return store


class Heartbeats:
    """Tells the other ranks through a store that this one is alive, and watches whether they are.

    A thread writes and reads the store; another one watches, because the store may itself be on a rank that has
    stopped. Once a rank is lost, the main thread usually fails by itself, in a collective, and asks :meth:`explain`
    whose fault it is. A backend that would wait on is not waited for: three seconds later the process is ended.

    Args:
        store: Where all ranks write; a connection of its own is made, since a waiting call blocks others.
        timeout: Seconds without a sign of life after which a rank counts as lost. One whose process has gone, or that
            has failed, is noticed within a second if it is on the same machine.
        end: Called with a message to end the process; by default the message goes to stderr, and the exit code is 1.
    """

    def __init__(
        self, store: Store, rank: int, num_ranks: int, timeout: float, end: Callable[[str], None] | None = None
    ) -> None:
        self.rank = rank
        self.timeout = timeout
        self.interval = min(1.0, timeout / 8)
        self._store: Any = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(max(RENDEZVOUS, timedelta(seconds=timeout)))
        self._end = end or end_process
        self._mine = Process.this()
        self._others = [other for other in range(num_ranks) if other != rank]
        self._processes: dict[int, Process] = {}
        self._beats: dict[int, dict[str, Any]] = {}
        self._changed: dict[int, float] = {}
        self._round = time.monotonic()
        self._gone: dict[int, float] = {}
        self._first: str | None = None
        self._broken = False
        self._count = 0
        self._failure: str | None = None
        self._handled = False
        self._lock = threading.Lock()
        self._work: tuple[str, float, int] | None = None
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Watch what runs within, in this thread: a rank that works on it for longer than the timeout hangs."""
        before, self._work = self._work, (what, time.monotonic(), threading.get_ident())
        try:
            yield
        finally:
            self._work = before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out what runs within: it waits for other ranks."""
        before, self._work = self._work, None
        try:
            yield
        finally:
            self._work = before and (before[0], time.monotonic(), before[2])

    @property
    def lost(self) -> bool:
        """Whether a rank is known to be lost, or this one has failed: barriers would never end."""
        return self._handled or (bool(self._threads) and self._find(self.timeout) is not None)

    def start(self) -> None:
        """Begin; returns when all ranks have done so."""
        self._store.set(f"process/{self.rank}", json.dumps(asdict(self._mine)))
        self._beat()
        for other in self._others:
            self._processes[other] = Process(**json.loads(self._store.get(f"process/{other}")))
            self._store.wait([f"beat/{other}"])
        # Only now all are there, and can be expected to go on giving signs of life.
        self._changed = dict.fromkeys(self._others, time.monotonic())
        self._round = time.monotonic()
        self._store.set_timeout(timedelta(seconds=max(1.0, self.timeout)))
        for function in (self._write_and_read, self._watch):
            thread = threading.Thread(target=function, name=f"heartbeat {function.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Say good-bye: this rank may end without being missed."""
        self._stopped.set()
        self._say(done=True)
        self._threads.clear()

    def answer(self, exception: BaseException) -> None:
        """Say in an exception's message which rank was lost; or tell the other ranks that it is this one."""
        text = next(iter(str(exception).splitlines()), "")
        if not is_communication_error(exception):
            self.fail(f"{type(exception).__name__}: {text}")
        elif (found := self.explain()) is not None:
            exception.args = (f"{found} (noticed on rank {self.rank}: {text})",)

    def fail(self, message: str) -> None:
        """Tell the others that this rank ends by an error of its own, and wait until they can have read it."""
        self._handled = True
        self._failure = message
        self._say()
        time.sleep(self.interval + _LOOK)

    def explain(self, patience: float = 4.0) -> str | None:
        """Say which rank is lost and how, or None if none is; the main thread now ends by an exception.

        Args:
            patience: Seconds to wait for news, as an error of communication may arrive before them. The process of
                another machine cannot be seen: there, a few beats that do not come must do.
        """
        self._handled = True
        deadline = time.monotonic() + patience
        silence = min(self.timeout / 2, 3 * self.interval)
        while (found := self._first or self._find(silence)) is None and time.monotonic() < deadline:
            time.sleep(_LOOK / 2)
        # This rank ends too, but is not the one to blame. The others have time to see who was gone first.
        self._say(done=True)
        time.sleep(self.interval + _LOOK)
        return found

    def _say(self, done: bool = False) -> None:
        """Write at once, unless the store does not answer."""
        if not self._broken and self._lock.acquire(timeout=1.0):
            try:
                self._beat(done)
            except Exception:  # the store is gone, and with it those who would read
                self._broken = True
            finally:
                self._lock.release()

    def _beat(self, done: bool = False) -> None:
        self._count += 1
        beat = {"count": self._count, "done": done and self._failure is None, "failure": self._failure}
        self._store.set(f"beat/{self.rank}", json.dumps(beat))

    def _hear(self, other: int) -> None:
        """Read what a rank said last."""
        if not self._broken and self._lock.acquire(timeout=1.0):
            try:
                self._beats[other] = json.loads(self._store.get(f"beat/{other}"))
            except Exception:  # as in _say
                self._broken = True
            finally:
                self._lock.release()

    def _write_and_read(self) -> None:
        keys = [f"beat/{other}" for other in self._others]
        while not self._stopped.wait(self.interval):
            try:
                with self._lock:
                    if not self._handled:  # else the last word has been said
                        self._beat()
                    values = self._store.multi_get(keys)
            except Exception:  # whatever the store raises, its rank is to blame
                self._broken = True
                return
            now = self._round = time.monotonic()
            for other, value in zip(self._others, values, strict=True):
                beat = json.loads(value)
                if beat != self._beats.get(other):
                    self._beats[other] = beat
                    self._changed[other] = now

    def _watch(self) -> None:
        before, since = time.monotonic(), None
        while not self._stopped.wait(_LOOK):
            now = time.monotonic()
            if now - before > max(4 * _LOOK, self.timeout / 4):
                # It was this process that did not run: the others had no chance to be heard.
                self._round = now
                self._changed = dict.fromkeys(self._others, now)
            before = now
            if (work := self._work) is not None and now - work[1] > self.timeout and not self._handled:
                frame = sys._current_frames().get(work[2])
                where = "" if frame is None else f":\n{''.join(traceback.format_stack(frame))}"
                why = f"hangs in {work[0]} for {now - work[1]:.0f} s"
                self.fail(why)
                self._end(f"rank {self.rank} {why}{where}")
                return
            found = self._find(self.timeout)
            # Others may end because of the first that is lost, and are not to blame.
            self._first = None if found is None else self._first or found
            since = None if found is None else since or now
            patient = since is None or now - since < min(_GRACE, self.timeout / 2)
            if found is not None and not patient and not self._handled:
                self._say(done=True)
                self._end(f"rank {self.rank} ends, because {self._first}")
                return

    def _find(self, timeout: float) -> str | None:
        """Say which rank is lost, if one is."""
        now = time.monotonic()
        states = {other: self._processes[other].state(self._mine) for other in self._others}
        for other in self._others:
            if states[other] == "gone" and self._gone.setdefault(other, now) == now:
                self._hear(other)  # what it said last may be news
        present = [other for other in self._others if not self._beats.get(other, {}).get("done")]
        for other in present:
            if (failure := self._beats.get(other, {}).get("failure")) is not None:
                return f"{self._name(other)} failed: {failure}"
        gone = [other for other in present if states[other] == "gone"]
        if gone:  # the first one; others may have ended because of it
            first = min(gone, key=self._gone.__getitem__)
            return f"{self._name(first)} died: its process has ended without a word (killed, or out of memory?)"
        silent = [other for other in present if now - self._changed[other] > timeout]
        for other in sorted(silent, key=lambda other: states[other] != "stopped"):
            if states[other] == "stopped":
                how = "is stopped (by SIGSTOP or a debugger)"
            elif self._broken or now - self._round > timeout:
                # Nobody can be heard any more.
                other, how = 0, "does not answer, and it keeps the store of the ranks"
            else:
                how = "hangs, or its machine cannot be reached"
            return f"{self._name(other)} {how}: no sign of life for {now - self._changed.get(other, now):.0f} s"
        return None

    def _name(self, rank: int) -> str:
        process = self._processes.get(rank, self._mine)
        return f"rank {rank} (process {process.pid} on {process.host})"


def fails_alone() -> bool:
    """Whether an error is being handled, on this rank maybe alone: whoever now waits for others would wait for ever.

    An interruption reaches all ranks.
    """
    return isinstance(sys.exc_info()[1], Exception)


def is_communication_error(exception: BaseException) -> bool:
    """Tell whether an exception says that a rank could not be reached, which is not the fault of
    the one that says so.
    """
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
