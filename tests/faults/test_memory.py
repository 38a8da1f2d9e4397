"""Too little memory: one line that says where, what is free, and which settings need less."""

import re
import threading
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn.cli.command_line import UserError, raise_user_errors
from lightning_gnn.cli.commands import partition, train
from lightning_gnn.runtime.thread_pipeline import StagePipeline
from tests.cli.command import lgnn

resource = pytest.importorskip("resource", reason="no limits on address space here")
SIZE = 1 << 36


@contextmanager
def limit_address_space(more=256 << 20):
    """Leave this process only ``more`` bytes of address space."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def sum_blocks():
    try:
        torch.empty(SIZE)
    except RuntimeError as error:
        raise ValueError("the blocks cannot be summed") from error


@pytest.mark.skipif(not psutil.LINUX, reason="only Linux limits the address space")
@pytest.mark.parametrize("allocate", [lambda: np.empty(SIZE), lambda: torch.empty(SIZE), sum_blocks])
def test_what_numpy_and_torch_raise(allocate):
    with pytest.raises(UserError) as raised, limit_address_space(), raise_user_errors(True, ["a=1", "data.b=2", "c=3"]):
        allocate()
    said = (
        r"\(out of memory; \S+ \w+ of memory are free, and \S+ \w+ of the \S+ \w+ of address space \(ulimit -v\)\); "
        "less memory is used with a=1, or c=3$"
    )
    assert re.search(said, str(raised.value)), raised.value


def test_only_settings_of_the_data_while_it_is_loaded():
    error = MemoryError()
    error.__notes__ = ["data"]
    with pytest.raises(UserError) as raised, raise_user_errors(memory_options=["a=1", "data.b=2"]):
        raise error
    said = r"data: MemoryError \(out of memory; \S+ \w+ of memory are free.*\); less memory is used with data\.b=2"
    assert re.fullmatch(said, str(raised.value)), raised.value


class Greedy(pl.Callback):
    def on_train_batch_start(self, *args):
        np.empty(1 << 57)


@pytest.mark.medium
def test_commands(tmp_path, capfd, monkeypatch):
    def load(cfg):
        raise MemoryError("Unable to allocate 3. GiB")

    greedy = "+callbacks.greedy._target_=tests.faults.test_memory.Greedy"
    assert lgnn(tmp_path / "run", greedy, "datamodule.num_workers=2") == 2
    said = capfd.readouterr().err
    assert re.fullmatch(
        r"error: Unable to allocate .* \(out of memory.* are free.*\); less memory is used with "
        r"datamodule.batch_size=32, or datamodule.num_workers=0, or datamodule.memory=1GB .*\n",
        said,
    ), said
    for module in (train, partition):
        monkeypatch.setattr(module, "build_data", load)
    assert lgnn(tmp_path / "run") == 2
    assert partition.main(["parts=2", f"out={tmp_path}/parts"]) == 2
    one, two = capfd.readouterr().err.splitlines()
    assert one.startswith("error: Unable to allocate 3. GiB (out of memory; ")
    assert "less memory is used with method=ldg" in two


def test_a_thread_that_cannot_be_started(monkeypatch):
    start, started = threading.Thread.start, []

    def refuse(thread):
        if thread.name.endswith("-1"):
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match=r"can't start new thread for some-x-1: memory .*; use fewer threads"):
        StagePipeline([[("x", lambda value, note: value)]], [2], name="some")
    monkeypatch.undo()
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()
