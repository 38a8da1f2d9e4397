import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.collective.dual_buffer import DualBuffer, overlaps


@st.composite
def cases(draw):
    gpu_buffer_size = draw(st.integers(0, 6))
    cpu_buffer_size = draw(st.integers(0 if gpu_buffer_size else 1, 7))
    num_batches = draw(st.integers(0, 40))
    first = draw(st.integers(0, num_batches) | st.just(0))
    done = draw(st.frozensets(st.integers(0, 40), max_size=5))
    return num_batches, gpu_buffer_size, cpu_buffer_size, draw(st.integers(1, 5)), first, done


def drive(buffer, workers, source):
    """Take all steps while CPU workers claim and finish at random moments; yield every step."""
    under_way = []

    def claim():
        while len(under_way) < workers and (number := buffer.claim()) is not None:
            under_way.append(number)

    def finish():
        buffer.ready(under_way.pop(source.randrange(len(under_way))))

    for _ in range(2000):
        if source.random() < 0.7:
            claim()
        if under_way and source.random() < 0.5:
            finish()
        step = buffer.next()
        yield step
        if step.kind == "end":
            assert not under_way
            assert buffer.next().kind == "end"
            assert buffer.claim() is None
            return
        if step.kind == "wait":
            claim()
            assert under_way, "the training thread waits for CPU workers that have nothing to do"
            finish()
    raise AssertionError("no end")


@settings(max_examples=600)
@given(cases(), st.booleans(), st.randoms(use_true_random=False))
def test_every_mini_batch_once_within_the_buffers(case, deterministic, source):
    num_batches, gpu_buffer_size, cpu_buffer_size, workers, first, done = case
    buffer = DualBuffer(*case, deterministic=deterministic)
    expected = [number for number in range(first, num_batches) if number not in done]
    trained, on_device, in_host = [], {}, set()
    for step in drive(buffer, workers, source):
        if step.kind in ("batch", "transfer"):
            on_device[step.number] = step.route
            assert step.route == ("gpu" if step.kind == "batch" else "cpu")
        elif step.kind == "train":
            assert on_device.pop(step.number) == step.route
            trained.append(step.number)
        assert list(on_device.items()) == list(buffer.gpu_buffer)
        # A mini-batch sets out for the device before the one is trained whose place it takes.
        assert len(on_device) <= (gpu_buffer_size + 1 if gpu_buffer_size else DualBuffer.AHEAD)
        in_host = set(buffer.cpu_buffer)
        assert len(in_host) == len(buffer.cpu_buffer) <= max(0, cpu_buffer_size + workers - 1)
        assert not in_host & set(on_device)
    assert not on_device
    assert not in_host
    assert trained == expected if deterministic else sorted(trained) == expected


@settings(max_examples=200)
@given(cases(), st.randoms(use_true_random=False))
def test_in_order_the_route_of_a_mini_batch_does_not_depend_on_the_clock(case, source):
    num_batches, gpu_buffer_size, cpu_buffer_size, workers, *_ = case
    routes = {
        number: "gpu" if number < overlap.middle else "cpu"
        for overlap in overlaps(num_batches, gpu_buffer_size, cpu_buffer_size)
        for number in range(overlap.first, overlap.stop)
    }
    for step in drive(DualBuffer(*case), workers, source):
        if step.kind == "train":
            assert step.route == routes[step.number]


@given(st.integers(0, 200), st.integers(0, 12), st.integers(0, 12))
def test_overlaps_cut_the_epoch_in_proportion(num_batches, gpu_buffer_size, cpu_buffer_size):
    size = gpu_buffer_size + cpu_buffer_size
    if not size:
        return
    found = overlaps(num_batches, gpu_buffer_size, cpu_buffer_size)
    assert [number for item in found for number in range(item.first, item.stop)] == list(range(num_batches))
    for item in found:
        assert item.first <= item.middle <= item.stop
        whole = item.stop - item.first == size
        wanted = (item.stop - item.first) * gpu_buffer_size / size
        assert item.middle - item.first == gpu_buffer_size if whole else abs(item.middle - item.first - wanted) <= 0.5
    assert all(item.stop - item.first == size for item in found[:-1])


def test_algorithms_2_to_4_by_hand():
    """Two overlaps of 2 + 2; the CPU is as fast as can be."""
    buffer = DualBuffer(8, 2, 2)
    steps = []
    while (step := buffer.next()).kind != "end":
        steps.append((step.kind, step.number, step.phase))
        while (number := buffer.claim()) is not None:
            buffer.ready(number)
    assert steps == [
        ("batch", 0, "filling"),
        ("batch", 1, "blocking"),
        ("transfer", 2, "flushing"),
        ("train", 0, "flushing"),
        ("transfer", 3, "flushing"),
        ("train", 1, "flushing"),
        ("train", 2, "flushing"),
        ("train", 3, "flushing"),
        ("batch", 4, "blocking"),
        ("batch", 5, "blocking"),
        ("transfer", 6, "flushing"),
        ("train", 4, "flushing"),
        ("transfer", 7, "flushing"),
        ("train", 5, "flushing"),
        ("train", 6, "flushing"),
        ("train", 7, "flushing"),
    ]


def test_while_only_the_cpu_lags_one_is_trained_and_replaced():
    """Section 4.2.3, in the text; what the CPU has finished goes first, as soon as it fills its buffer."""
    buffer = DualBuffer(20, 2, 1, deterministic=False)
    assert buffer.claim() == 0
    kinds = [(step.kind, step.number) for step in (buffer.next() for _ in range(5))]
    assert kinds == [("batch", 1), ("batch", 2), ("train", 1), ("batch", 3), ("train", 2)]
    buffer.ready(0)
    kinds = [(step.kind, step.number) for step in (buffer.next() for _ in range(5))]
    assert kinds == [("batch", 4), ("transfer", 0), ("train", 3), ("train", 4), ("train", 0)]


def test_a_plain_pipeline_keeps_two_on_the_device():
    buffer = DualBuffer(5, 0, 4)
    for _ in range(4):
        buffer.ready(buffer.claim())
    steps = [buffer.next() for _ in range(7)]
    assert [(step.kind, step.number) for step in steps] == [
        ("transfer", 0),
        ("transfer", 1),
        ("train", 0),
        ("transfer", 2),
        ("train", 1),
        ("transfer", 3),
        ("train", 2),
    ]


def test_the_cpu_says_when_its_buffer_keeps_it():
    buffer = DualBuffer(6, 1, 1, cpu_workers=2)
    assert not buffer.cpu_blocked
    assert [buffer.claim(), buffer.claim(), buffer.claim()] == [1, 3, None]
    assert buffer.cpu_blocked
    buffer.ready(1)
    assert [buffer.next().kind, buffer.next().kind] == ["batch", "transfer"]
    assert not buffer.cpu_blocked
    assert buffer.claim() == 5
    assert buffer.claim() is None
    assert not buffer.cpu_blocked  # nothing is left for it


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (5, 0, 0), (5, -1, 3), (5, 3, -1)])
def test_impossible_buffers_are_refused(sizes):
    with pytest.raises(ValueError, match="none may be negative, and a buffer needs a place"):
        DualBuffer(*sizes)


def test_there_must_be_a_worker():
    with pytest.raises(ValueError, match="cpu_workers must be at least 1, but is 0"):
        DualBuffer(5, 1, 1, 0)
