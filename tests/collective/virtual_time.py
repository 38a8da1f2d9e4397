"""A virtual clock that advances when every thread sleeps or waits, for exact and fast thread schedules."""

import heapq
import threading

from tests.patience import PATIENCE


class VirtualTime:
    """Lets threads sleep in virtual time; ``num_threads`` run at the beginning, including the test's own."""

    def __init__(self, num_threads):
        self.now = 0.0
        self._running = num_threads
        self._lock = threading.Lock()
        self._sleepers = []

    def sleep(self, seconds):
        woken = threading.Event()
        with self._lock:
            heapq.heappush(self._sleepers, (self.now + seconds, id(woken), woken))
            self._running -= 1
            self._advance()
        assert woken.wait(PATIENCE), "all threads wait for one another"

    def stop_running(self):
        with self._lock:
            self._running -= 1
            self._advance()

    def run(self, num_threads):
        with self._lock:
            self._running += num_threads

    def _advance(self):
        if self._running == 0 and self._sleepers:
            self.now, _, woken = heapq.heappop(self._sleepers)
            self._running += 1
            woken.set()

    def condition(self, lock):
        """Return a condition whose waiters do not stop the clock."""
        return _Condition(self, lock)

    def threading(self):
        """Return a replacement for the module ``threading``."""

        class Thread(threading.Thread):
            def run(thread):
                super().run()
                self.stop_running()

            def join(thread, timeout=None):
                if thread.is_alive():
                    self.stop_running()
                    super().join(timeout)
                    self.run(1)

        class Module:
            Condition = staticmethod(self.condition)
            RLock = staticmethod(threading.RLock)
            current_thread = staticmethod(threading.current_thread)
            get_ident = staticmethod(threading.get_ident)

        Module.Thread = Thread
        return Module


class _Condition(threading.Condition):
    def __init__(self, time, lock):
        super().__init__(lock)
        self.time = time
        self.waiters = 0

    def wait(self, timeout=None):
        self.waiters += 1
        self.time.stop_running()
        return super().wait(timeout)

    def notify_all(self):
        self.time.run(self.waiters)  # woken threads run from now on
        self.waiters = 0
        super().notify_all()
