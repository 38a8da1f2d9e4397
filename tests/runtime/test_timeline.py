from itertools import count

import torch

from lightning_gnn.runtime.timeline import StepTimer


def test_a_step_timer_reads_what_a_device_is_done_with_and_waits_for_nothing():
    class Event:
        """An event that the device reaches at ``second``; the first two steps are complete."""

        def __init__(self, second):
            self.second = second

        def query(self):
            return self.second < 40

        def elapsed_time(self, other):
            assert other.query(), "it would wait"
            return 1e3 * (other.second - self.second)

    timer, seconds = StepTimer(torch.device("cuda")), count(step=10)
    timer._clock.has_events, timer._clock._event = True, lambda stream=None: Event(next(seconds) + 0.5)
    assert timer.read(3.0) == 3.0  # the thread's own time is the fallback
    timer.stop()  # nothing has been started
    for _ in range(3):
        timer.start()
        timer.stop()
        assert timer.read(3.0) == 10.0
    assert timer.read(7.0) == 10.0
    assert len(timer._steps) == 1


def test_parts_of_a_step_are_timed_from_the_first_to_the_last_and_without_events_by_the_thread():
    timer, seconds = StepTimer(torch.device("meta")), count(step=10)
    for has_events in (False, True):
        timer._clock.has_events, timer._clock.now = has_events, lambda: float(next(seconds))
        for _ in range(1 + has_events):
            timer.start()
            timer.stop()
        assert timer.read(3.0) == (20.0 if has_events else 3.0)
