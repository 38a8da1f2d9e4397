from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.collective.plan import Duration, StageTimes
from lightning_gnn.runtime.timeline import Interval, StepTimer, Timeline
from tests.refusals import refuses


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8), st.integers(0, 3)), max_size=12))
def test_busy_counts_overlapping_lanes_once(spans):
    timeline = Timeline([Interval("CPU", "cpu_batching", 0, a, a + length, lane) for a, length, lane in spans])
    moments = {moment for start, length, _ in spans for moment in range(start, start + length)}
    assert timeline.busy("CPU") == len(moments)
    assert timeline.busy("GPU") == 0
    timeline = Timeline()
    assert (timeline.start, timeline.end, timeline.makespan, timeline.busy("GPU")) == (0, 0, 0, 0)


@pytest.mark.parametrize("numbers", [(-1.0, 0.0), (1.0, -1.0), (float("nan"), 0.0), (1.0, float("inf"))])
def test_durations_are_finite_and_not_negative(numbers):
    refuses(ValueError, "must be a finite number of at least 0, but is", Duration, *numbers)


def test_stage_times_of_all_workers_and_of_the_gpu():
    one = Duration(1.0)
    times = StageTimes(Duration(8.0), one, Duration(2.0), Duration(3.0), one, cpu_workers=4)
    assert (times.cpu, times.gpu) == (2.0, 5.0)
    refuses(
        ValueError, "cpu_workers must be a whole number of at least 1, but is 0", StageTimes, one, one, one, one, one, 0
    )
    refuses(ValueError, "the model must take some time", StageTimes, one, one, one, one, Duration(0.0))


def test_a_step_timer_reads_what_a_device_is_done_with_and_waits_for_nothing():
    class Event:
        """The device reaches it at a second; it is done with the first two steps."""

        def __init__(self, second):
            self.second = second

        def query(self):
            return self.second < 40

        def elapsed_time(self, other):
            assert other.query(), "it would wait"
            return 1e3 * (other.second - self.second)

    timer, seconds = StepTimer(torch.device("cuda")), count(step=10)
    timer._clock.has_events, timer._clock._event = True, lambda stream=None: Event(next(seconds) + 0.5)
    assert timer.read(3.0) == 3.0  # the thread's own time, for want of a better one
    timer.stop()  # nothing has begun
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
