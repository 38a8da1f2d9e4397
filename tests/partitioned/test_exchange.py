"""Requests between ranks: the first to arrive is answered first, and a lost rank is named."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_gnn.partitioned.exchange import RankRPC
from tests.full_graph.launch import observe, run

SLOW, ASKING = 0, 2


def _wait_for(done):
    until = time.monotonic() + 60
    while not done() and time.monotonic() < until:
        time.sleep(0.01)
    return done()


def _request_from_slow_rank(rank, folder):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=3)
    go = Path(folder) / "go"
    exchange = RankRPC({"slow": lambda: rank != SLOW or _wait_for(go.exists), "double": lambda x: 2 * x})
    seen = []
    if rank == ASKING:
        other = []

        def ask_too():
            other.append(exchange.call("double", {SLOW: (1,), 1: (torch.arange(100_000),), ASKING: (3,)}))

        thread = threading.Thread(target=ask_too)

        def watch():
            seen.append(_wait_for(lambda: exchange.received > 0))
            before = exchange.received
            thread.start()
            seen.append(_wait_for(lambda: exchange.received > before + 100_000))
            go.touch()

        watching = threading.Thread(target=watch)
        watching.start()
        seen.append(exchange.call("slow", {SLOW: (), 1: (), ASKING: ()}))
        watching.join()
        thread.join()
        assert torch.equal(other[0].pop(1), 2 * torch.arange(100_000))
        seen.append(other[0])
    exchange.close()
    torch.distributed.destroy_process_group()
    return seen


@pytest.mark.slow
def test_a_slow_rank_keeps_nobody_elses_answer_back(tmp_path):
    (seen,) = filter(None, run(_request_from_slow_rank, 3, str(tmp_path)))
    answered, another_call_too, slow, double = seen
    assert answered, "the answer of rank 1 is taken while rank 0 is still at its own"
    assert another_call_too, "so is the answer to another thread, although rank 0 has not read its request"
    assert slow == {SLOW: True, 1: True, ASKING: True}
    assert double == {SLOW: 2, ASKING: 6}


def _request_from_lost_rank(rank, folder):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=3)
    exchange = RankRPC({"vanish": lambda: os.kill(os.getpid(), signal.SIGKILL), "fail": lambda: 1 / 0})
    said = []
    if rank == ASKING:
        for name, asked in (("fail", {1: ()}), ("vanish", {SLOW: ()}), ("fail", {SLOW: (), 1: ()})):
            with pytest.raises(RuntimeError) as error:
                exchange.call(name, asked)
            said.append(str(error.value))
        (Path(folder) / "done").touch()
    if rank != ASKING:
        assert _wait_for((Path(folder) / "done").exists)
    return said


@pytest.mark.slow
def test_a_rank_that_fails_or_is_gone_is_named(tmp_path):
    outcome = observe(_request_from_lost_rank, 3, str(tmp_path))
    assert outcome.exit_codes[SLOW] == -signal.SIGKILL
    failed, gone, again = outcome.results[ASKING]
    assert failed == "rank 1 could not answer: ZeroDivisionError: division by zero"
    for said in (gone, again):
        assert said.startswith("rank 0 does not answer, its connection is closed (")
