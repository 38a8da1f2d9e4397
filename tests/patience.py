"""Time limits of tests: a hang is detected by idle processes, not by a limit that depends on the machine's speed."""

import faulthandler
import os
import sys
import threading
import time

import psutil

PATIENCE = 1500.0
"""Timeout in seconds for expected events, reached only by a hang that keeps a processor busy. pyproject's limit for a
whole test is longer, so that a test itself reports what did not happen."""
NEVER = 10 * PATIENCE
"""Seconds for timeouts of the package that a test never reaches."""
SILENCE = float(os.environ.get("TEST_SILENCE", 180))
"""Seconds after which a test is ended if neither it nor any process it started used a processor."""
LOOK = SILENCE / 20
_IDLE = 0.01
"""CPU usage below which a process counts as idle."""
_TICK = 0.02
"""Resolution of the kernel's CPU times in seconds."""


class Silence:
    """Counts how often a process and its descendants have been idle in consecutive checks."""

    def __init__(self, process=None):
        self.process = process or psutil.Process()
        self.count = 0
        self._used, self._own = self._read(), time.thread_time()

    def look(self, seconds):
        """Return the number of consecutive idle checks, each after ``seconds``."""
        before, self._used = self._used, self._read()
        own, self._own = self._own, time.thread_time()
        # Processes that started or ended count as work; the time of this thread's own checks does not.
        worked = before.keys() != self._used.keys()
        looking = self._own - own if self.process.pid == os.getpid() else 0.0
        worked = worked or sum(self._used.values()) - sum(before.values()) - looking > _IDLE * seconds + _TICK
        self.count = 0 if worked else self.count + 1
        return self.count

    def children(self):
        """Return all descendants of the process."""
        try:
            return self.process.children(recursive=True)
        except psutil.Error:
            return []

    def _read(self):
        used = {}
        for process in (self.process, *self.children()):
            try:
                times = process.cpu_times()
                # A process that waits for a disk is working.
                stuck = process.status() == psutil.STATUS_DISK_SLEEP
                used[process.pid, stuck and os.urandom(4)] = times.user + times.system
            except psutil.Error:
                continue
        return used


class Watch:
    """Kills idle children of a test; if that does not help, calls ``uncover`` to show output and ends the process."""

    def __init__(self, uncover):
        self._uncover = uncover
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="silence", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()

    def _run(self):
        if self._over.wait(LOOK):  # saves most tests a check of all processes, which takes milliseconds
            return
        silence, ended = Silence(), False
        while not self._over.wait(LOOK):
            if silence.look(LOOK) * LOOK < SILENCE:
                continue
            children = silence.children()
            if last := ended or not children:
                self._uncover()
            sys.__stderr__.write(f"\nno process has worked for {SILENCE:.0f} s: {children or 'this process'}\n")
            sys.__stderr__.flush()
            faulthandler.dump_traceback(file=sys.__stderr__)
            if last:
                os._exit(3)
            for child in children:
                child.kill()
            silence.count, ended = 0, True
