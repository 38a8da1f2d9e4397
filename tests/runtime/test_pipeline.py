import gc
import subprocess
import sys
import threading
import time
import traceback
import weakref

import pytest

from lightning_gnn.loading.prefetch import ThreadPrefetcher
from lightning_gnn.runtime.thread_pipeline import Item, StagePipeline, join_abandoned
from tests.patience import PATIENCE
from tests.refusals import refuses


def list_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("lightning-gnn-batch")]


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_items_come_in_order(num_threads):
    def prepare(task):
        time.sleep(0.01 if task % 3 == 0 else 0)
        return task * task

    assert list(ThreadPrefetcher(prepare, range(30), num_threads)) == [task * task for task in range(30)]
    assert not list_threads()


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_an_error_comes_at_its_item_with_its_traceback(num_threads):
    def prepare(task):
        if task == 4:
            raise RuntimeError("task four is bad")
        return task

    pipeline = ThreadPrefetcher(prepare, range(30), num_threads, ahead=8)
    assert [next(pipeline) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="task four is bad") as error:
        next(pipeline)
    assert "in prepare" in "".join(traceback.format_tb(error.value.__traceback__))
    assert not list_threads()


def test_dropping_the_iterator_ends_the_threads():
    pipeline = ThreadPrefetcher(lambda task: time.sleep(0.001), range(10_000), 2, ahead=4)
    next(pipeline)
    threads = list_threads()
    assert threads
    del pipeline
    gc.collect()
    for thread in threads:  # which are not waited for
        thread.join(PATIENCE)
    assert not list_threads()


def test_an_abandoned_epoch_is_waited_for_by_the_next_one_only():
    gate, started = threading.Event(), threading.Event()

    def prepare(task):
        if task:
            started.set()
            assert gate.wait(PATIENCE)
        return task

    def begin_epoch():
        with ThreadPrefetcher(prepare, range(9), 2) as prefetcher:
            while True:  # `yield from` would close it
                yield next(prefetcher)

    epoch = begin_epoch()
    assert next(epoch) == 0
    assert started.wait(PATIENCE)
    epoch.close()  # as the garbage collector may do, in any thread
    assert list_threads()
    gate.set()
    join_abandoned()
    assert not list_threads()


@pytest.mark.parametrize("ends", [True, False])
def test_threads_keep_nothing_alive_that_the_items_lead_to(ends):
    class Owner:  # like the references from a loader to its Trainer, and from that to the iterator
        def prepare(self, task):
            return task

        def begin(self):
            self.iterator = ThreadPrefetcher(self.prepare, range(5 if ends else 10_000), 2, ahead=4)
            return sum(1 for _ in self.iterator) if ends else next(self.iterator)

    owner = Owner()
    owner.begin()
    seen, threads = weakref.ref(owner), list_threads()
    del owner
    deadline = time.monotonic() + PATIENCE
    while seen() is not None and time.monotonic() < deadline:  # a thread may still be working on an item
        gc.collect()
        time.sleep(0.01)
    assert seen() is None
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_what_follows_an_error_still_comes_through_all_stages():
    def step(value, note):
        if note == 1:
            raise ValueError("odd")
        return value

    pipeline = StagePipeline([[("first", step)], [("second", lambda value, note: value)]], [2, 1])
    for number in range(8):
        pipeline.submit(Item(0, number))
    assert pipeline.take().note == 0
    refuses(ValueError, "odd", pipeline.take)
    assert [pipeline.take().note for _ in range(6)] == list(range(2, 8))
    assert pipeline.close() == []


def test_a_stall_shows_where_the_threads_are():
    gate = threading.Event()

    def waits_for_a_gate(value, note):
        assert gate.wait(PATIENCE)

    pipeline = StagePipeline([[("first", waits_for_a_gate)]], [1], stall_timeout=0.2, name="stalled")
    pipeline.submit(Item(0))
    refuses(TimeoutError, r"(?s)no progress for 0.2 s; thread stalled-first-0:.*in waits_for_a_gate", pipeline.take)
    assert pipeline.close(patience=0.0) == ["stalled-first-0"]
    gate.set()
    assert pipeline.close() == []


@pytest.mark.slow
def test_the_interpreter_ends_with_an_iterator_left():
    code = """
import time
from lightning_gnn.loading.prefetch import ThreadPrefetcher

def prepare(task):
    time.sleep(0.01)
    return task

left = ThreadPrefetcher(prepare, iter(range(10**9)), 3)
print(next(left), next(left))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1\n", "")
