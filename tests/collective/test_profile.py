import pytest
import torch

from lightning_gnn.collective.plan import PREPARATION_STAGES
from lightning_gnn.collective.profile import Profiler
from lightning_gnn.runtime.timeline import Clock, Recorder


class PendingEvent:
    """An event that completes when the test says so."""

    def __init__(self, seconds):
        self.at = seconds
        self.come = False

    def query(self):
        return self.come

    def elapsed_time(self, other):
        assert self.come
        assert other.come
        return 1e3 * (other.at - self.at)


def fill_profiler(count, **profiler):
    found = Profiler(**profiler)
    for stage in PREPARATION_STAGES:
        for _ in range(count):
            found.add(stage, 0.0, 1.0)
    return found


def test_means_and_spreads_are_those_of_what_was_measured():
    profiler = Profiler(4, cpu_workers=3, warm_up=0)
    for place, stage in enumerate(PREPARATION_STAGES):
        for seconds in [9.0] * 3 * (stage == "cpu_batching") + [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]:
            profiler.add(stage, 5.0, 5.0 + seconds + place)
    times = profiler.stage_times()
    assert times.cpu_workers == 3
    for place, stage in enumerate(PREPARATION_STAGES):
        duration = getattr(times, stage)
        assert duration.mean == pytest.approx(10 / 6 + place)
        assert duration.spread == pytest.approx((2 / 9) ** 0.5)


def test_warming_up_and_what_else_happened_do_not_count():
    profiler = Profiler(5, warm_up=2)
    for seconds in (50.0, 20.0, 1.0, 1.1, 0.9, 30.0, 1.2):  # compilation, then a validation
        profiler.add("model", 0.0, seconds)
    assert profiler.seconds("model") == pytest.approx([1.0, 1.1, 0.9, 1.2])
    profiler.add("dma", 0.0, 7.0)
    assert profiler.seconds("dma") == [7.0]  # at most half of a few measurements are dropped
    assert profiler.seconds("uva") == []


def test_when_to_plan():
    assert not fill_profiler(7, num_measurements=5).enough()
    assert fill_profiler(8, num_measurements=5).enough()
    late = fill_profiler(6, num_measurements=20)
    late.epochs = 1
    assert not late.enough()
    late.epochs = 2
    assert late.enough()
    partial = Profiler()
    partial.add("model", 0.0, 1.0)
    assert partial.stage_times() is None


def test_what_a_device_has_not_reached_is_not_waited_for():
    profiler = Profiler(1, warm_up=0)
    moments = [PendingEvent(1.0), PendingEvent(3.0)]
    profiler.add("uva", *moments)
    assert profiler.seconds("uva") == []
    moments[0].come = moments[1].come = True
    assert profiler.seconds("uva") == [2.0]


def test_too_few_measurements_are_named():
    with pytest.raises(ValueError, match="profile_batches must be at least 1, but is 0"):
        Profiler(0)


def test_a_profiler_that_is_taken_away_in_mid_call_is_no_error():
    class Fleeting(Recorder):
        """Has a profiler at the first access only."""

        @property
        def on_stage(self):
            found, self._found = self._found, None
            return found

        @on_stage.setter
        def on_stage(self, value):
            self._found = value

    recorder, profiler = Fleeting(Clock(torch.device("cpu"))), Profiler(warm_up=0)
    recorder.on_stage = profiler.add
    recorder.add("CPU", "cpu_batching", 0, 1.0, 3.0)
    assert profiler.seconds("cpu_batching") == [2.0]
