"""How long a test waits: a hang is known by its silence, not by a guess at the speed of a machine that is shared."""

import faulthandler
import os
import sys
import threading
import time

import psutil

PATIENCE = 1500.0
"""Seconds that a test waits for what must happen; only a hang that keeps a processor busy takes so long. pyproject's
limit for a whole test is longer still, so that a test tells by itself what did not happen."""
NEVER = 10 * PATIENCE
"""Seconds for a limit of the package's own that no test waits for: what it would end has ended by itself."""
SILENCE = float(os.environ.get("TEST_SILENCE", 180))
"""Seconds in which a test and all processes that it started use no processor, after which it is ended."""
LOOK = SILENCE / 20
_IDLE = 0.01
"""Processors, below which a process only looks whether anything happens."""
_TICK = 0.02
"""Seconds to which the kernel counts."""


class Silence:
    """Watches a process and what it started.

    Args:
        process: The process.
    """

    def __init__(self, process=None):
        self.process = process or psutil.Process()
        self.count = 0
        self._used, self._own = self._read(), time.thread_time()

    def look(self, seconds):
        """Return how many looks in a row, each after so many seconds, have found nobody at work."""
        before, self._used = self._used, self._read()
        own, self._own = self._own, time.thread_time()
        # Who is new has worked, and so has who has ended; but not who looks.
        worked = before.keys() != self._used.keys()
        looking = self._own - own if self.process.pid == os.getpid() else 0.0
        worked = worked or sum(self._used.values()) - sum(before.values()) - looking > _IDLE * seconds + _TICK
        self.count = 0 if worked else self.count + 1
        return self.count

    def children(self):
        """Return all processes that it started, or that these started."""
        try:
            return self.process.children(recursive=True)
        except psutil.Error:
            return []

    def _read(self):
        used = {}
        for process in (self.process, *self.children()):
            try:
                times = process.cpu_times()
                # A process that waits for a disk is at work.
                stuck = process.status() == psutil.STATUS_DISK_SLEEP
                used[process.pid, stuck and os.urandom(4)] = times.user + times.system
            except psutil.Error:
                continue
        return used


class Watch:
    """Ends the processes that a test has started when all are silent, and the test's own if that does not help.

    Args:
        uncover: Called before the test's own process ends, to let its last words through.
    """

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
        if self._over.wait(LOOK):  # as for nearly all tests: a look at all processes of a machine costs milliseconds
            return
        silence, ended = Silence(), False
        while not self._over.wait(LOOK):
            if silence.look(LOOK) * LOOK < SILENCE:
                continue
            children = silence.children()
            if last := ended or not children:
                self._uncover()
            sys.__stderr__.write(f"\nnobody has worked for {SILENCE:.0f} s: {children or 'this process'}\n")
            sys.__stderr__.flush()
            faulthandler.dump_traceback(file=sys.__stderr__)
            if last:
                os._exit(3)
            for child in children:
                child.kill()
            silence.count, ended = 0, True
