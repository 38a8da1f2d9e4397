"""The rhythm of training and preparation on the same cores, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.planning.overlap import rhythm

SECONDS = st.floats(1e-6, 1e3)


@pytest.mark.parametrize(
    ("preparing", "workers", "step", "alone", "cores", "seconds", "bound"),
    [
        (3.0, 0, 5.0, 8.0, 4, 8.0, "training"),  # one after the other
        (3.0, 1, 5.0, 5.0, 4, 5.0, "training"),
        (9.0, 1, 5.0, 5.0, 4, 9.0, "preparing"),
        (9.0, 3, 5.0, 5.0, 4, 5.0, "training"),
        (9.0, 3, 2.0, 2.0, 4, 3.0, "preparing"),
        (9.0, 3, 2.0, 2.0, 2, 5.5, "cores"),  # eleven seconds of work for two cores
        (4.0, 2, 5.0, 10.0, 2, 7.0, "cores"),  # both cores train
    ],
)
def test_by_hand(preparing, workers, step, alone, cores, seconds, bound):
    found = rhythm(preparing, workers, step, alone, cores)
    assert found.seconds == pytest.approx(seconds)
    assert found.bound == bound


@given(SECONDS, st.integers(0, 8), SECONDS, SECONDS, st.integers(1, 8))
def test_no_schedule_beats_its_bounds(preparing, workers, step, alone, cores):
    found = rhythm(preparing, workers, step, alone, cores)
    assert found.seconds >= step
    assert found.seconds <= preparing + max(step, alone) + 1e-9
    assert found.seconds == getattr(found, found.bound)
    more = rhythm(preparing, workers + 1, step, alone, cores)
    if workers:
        assert more.seconds <= found.seconds
