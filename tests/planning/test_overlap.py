"""The steady state of training and preparation on the same cores, against computed values."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.planning.overlap import rhythm

SECONDS = st.floats(1e-6, 1e3)


@given(SECONDS, st.integers(0, 8), SECONDS, SECONDS, st.integers(1, 8))
def test_no_schedule_beats_its_bounds(preparing, workers, step, alone, cores):
    found = rhythm(preparing, workers, step, alone, cores)
    assert found.seconds >= step
    assert found.seconds <= preparing + max(step, alone) + 1e-9
    assert found.seconds == getattr(found, found.bound)
    more = rhythm(preparing, workers + 1, step, alone, cores)
    if workers:
        assert more.seconds <= found.seconds
