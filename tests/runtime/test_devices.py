"""Streams are entered by any number of threads, and leave each thread's own stream as it was."""

import threading
from types import SimpleNamespace

import torch

from lightning_gnn.runtime.devices import on_stream


def test_threads_and_nested_blocks_may_enter_one_stream(monkeypatch):
    state = threading.local()  # as on a GPU, the current device and stream belong to the thread
    stream = SimpleNamespace(device=torch.device("cuda", 1))
    entered, seen = threading.Barrier(2), []

    def set_stream(stream):
        state.stream, state.index = stream, 1

    for name, function in {
        "current_stream": lambda device: state.stream,
        "current_device_index": lambda: state.index,
        "set_stream": set_stream,
        "set_device_index": lambda index: setattr(state, "index", index),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, function)

    def enter(own):
        state.stream, state.index = own, 0
        with on_stream(stream), on_stream(None), on_stream(stream):
            entered.wait()
            seen.append(state.stream is stream and state.index == 1)
        seen.append((state.stream, state.index) == (own, 0))

    other = threading.Thread(target=enter, args=("b",))
    other.start()
    enter("a")
    other.join()
    assert seen == [True] * 4
