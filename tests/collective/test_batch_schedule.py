import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.collective.batch_schedule import BatchSchedule


@st.composite
def cases(draw):
    gpu_buffer_size = draw(st.integers(0, 6))
    cpu_buffer_size = draw(st.integers(0 if gpu_buffer_size else 1, 7))
    num_batches = draw(st.integers(0, 40))
    sizes = gpu_buffer_size, cpu_buffer_size, draw(st.integers(1, 5)), draw(st.integers(0, 20)), draw(st.integers(0, 6))
    return num_batches, *sizes, draw(st.integers(0, num_batches) | st.just(0))


def make_buffer(case, most_ahead=sys.maxsize):
    return BatchSchedule(*case[:6], first=case[6], most_ahead=most_ahead)


def drive(buffer, workers, source, between=lambda: None):
    """Take all steps while CPU workers claim and finish at random moments; yield every step."""
    under_way = []

    def claim():
        while len(under_way) < workers and (number := buffer.claim()) is not None:
            under_way.append(number)

    def finish():
        buffer.ready(under_way.pop(source.randrange(len(under_way))))

    for _ in range(3000):
        between()
        if source.random() < 0.7:
            claim()
        if under_way and source.random() < 0.5:
            finish()
        step = buffer.next()
        yield step
        if step.kind == "end":
            assert not under_way, "a worker still prepares an untrained mini-batch"
            assert buffer.next().kind == "end"
            assert buffer.claim() is None
            return
        if step.kind == "wait":
            claim()
            assert under_way, "the training thread waits for CPU workers that have nothing to do"
            finish()
    raise AssertionError("no end")


@settings(max_examples=200)
@given(cases(), st.randoms(use_true_random=False), st.integers(1, 12) | st.just(sys.maxsize))
def test_every_mini_batch_once_in_order_within_the_buffers(case, source, most_ahead):
    num_batches, gpu_buffer_size, cpu_buffer_size, workers, *_, first = case
    buffer = make_buffer(case, most_ahead)
    trained, on_device = [], {}
    for step in drive(buffer, workers, source):
        if step.kind in ("batch", "transfer"):
            assert step.number not in on_device
            on_device[step.number] = step.route
            assert step.route == ("gpu" if step.kind == "batch" else "cpu")
        elif step.kind == "train":
            assert on_device.pop(step.number) == step.route
            trained.append(step.number)
        assert on_device == buffer.gpu_buffer
        assert max(buffer._assigned, default=0) < buffer.head + most_ahead
        assert len(on_device) <= gpu_buffer_size + BatchSchedule.AHEAD
        assert buffer.cpu_buffer == sorted(set(buffer.cpu_buffer))
        assert len(buffer.cpu_buffer) + len(buffer._in_progress) <= max(0, cpu_buffer_size + workers - 1)
        assert not set(buffer.cpu_buffer) & set(on_device)
    assert not on_device
    assert not buffer.cpu_buffer
    assert trained == list(range(first, num_batches))


@settings(max_examples=100)
@given(cases(), cases(), st.randoms(use_true_random=False))
def test_sizes_may_change_at_any_time(case, other, source):
    """Every mini-batch is still trained once and in order."""
    num_batches, _, _, workers, *_, first = case
    buffer = make_buffer(case)
    sizes = [each[1:6] for each in (case, other)]

    def between():
        if source.random() < 0.1:
            buffer.resize(*source.choice(sizes))

    trained = [step.number for step in drive(buffer, workers, source, between) if step.kind == "train"]
    assert trained == list(range(first, num_batches))


def test_by_hand():
    """One CPU buffer, begun three ahead: the GPU prepares two in a row, then what is left."""
    buffer = BatchSchedule(7, 2, 1, 1, lead=3)
    steps = []
    while (step := buffer.next()).kind != "end":
        steps.append((step.kind, step.number))
        while (number := buffer.claim()) is not None:
            buffer.ready(number)
    assert steps == [
        ("batch", 0),  # the CPU has 3 ready
        ("batch", 1),
        ("transfer", 3),  # and then 4
        ("train", 0),
        ("transfer", 4),  # and then 5
        ("train", 1),
        ("batch", 2),
        ("transfer", 5),  # only 6 is three ahead of 3
        ("train", 2),
        ("transfer", 6),
        *(("train", number) for number in range(3, 7)),
    ]


@pytest.mark.parametrize("sizes", [(5, 0, 0), (5, -1, 3), (5, 1, 1, 1, -1), (5, 1, 1, 1, 0, -1), (5, 1, 1, 0)])
def test_impossible_buffers_are_refused(sizes):
    with pytest.raises(ValueError, match=r"and at least one buffer size must be positive|cpu_workers=0 not 0"):
        BatchSchedule(*sizes)
