"""Requests between ranks: the first to arrive is answered first, a lost rank is named, a stranger is refused."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_gnn.partitioned import exchange as module
from lightning_gnn.partitioned.exchange import RankRPC, _pack, _unpack
from tests.full_graph.launch import observe, run
from tests.patience import NEVER

flight = pytest.importorskip("pyarrow.flight", reason="several ranks need the extra partition")
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
            other.append(exchange.call("double", {SLOW: (1,), 1: (np.arange(100_000),), ASKING: (3,)}))

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
        assert np.array_equal(other[0].pop(1), 2 * np.arange(100_000))
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
    handlers = {"vanish": lambda: os.kill(os.getpid(), signal.SIGKILL), "fail": lambda: 1 / 0, "rank": lambda: rank}
    exchange = RankRPC(handlers)
    said = []
    if rank == ASKING:
        for name, asked in (("fail", {1: ()}), ("vanish", {SLOW: ()}), ("rank", {SLOW: (), 1: ()})):
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


def _ask_a_stopped_rank(rank):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    exchange = RankRPC({"stop": lambda: os.kill(os.getpid(), signal.SIGSTOP)}, timeout=3.0)
    if rank == SLOW:
        threading.Event().wait()
    said = []
    for request in (lambda: exchange.call("stop", {SLOW: ()}), lambda: exchange.all_gather(None)):
        with pytest.raises(torch.distributed.DistNetworkError) as error:
            request()
        said.append(str(error.value))
    return said


@pytest.mark.slow
def test_a_stopped_rank_is_named_at_the_deadline():
    outcome = observe(_ask_a_stopped_rank, 2, lost=[SLOW])
    assert outcome.results[1] == 2 * ["rank 0 does not answer within rpc_timeout=3 s"], outcome.errors[1]


def test_values_are_the_same_after_the_way():
    arrays = [np.arange(6).reshape(2, 3), np.zeros((0, 4), np.float16), np.array([True]), np.arange(9, dtype="u1")[::2]]
    value = [None, -(2**63), 2**64 - 1, 0.1, "ä\n", [[], arrays], {"key": arrays[0].T}]
    header, body = _pack((np.int64(7), *value))
    seven, *found, last = _unpack(header.encode(), memoryview(bytearray(body)))
    assert (seven, found[:5], found[5][0]) == (7, value[:5], [])
    for before, after in zip([*arrays, arrays[0].T], [*found[5][1], last["key"]], strict=True):
        assert before.dtype == after.dtype
        assert np.array_equal(before, after)
        assert after.flags.aligned
        assert after.flags.writeable  # otherwise Numba compiles its functions for another type of array
    with pytest.raises(TypeError, match="Path cannot be sent to another rank"):
        _pack(Path())


def _serve(tls):
    from lightning_gnn.partitioned.flight import Server

    return Server("127.0.0.1", "of the job", lambda request: _pack(request.decode()), tls)


def _ask(server, secret, tls):
    from lightning_gnn.partitioned.flight import Client

    return _unpack(*Client(1, (socket.gethostname(), "127.0.0.1", server.port), secret, NEVER, tls).get(b"text"))


def test_a_stranger_is_refused():
    with _serve({}) as server:
        assert _ask(server, "of the job", {}) == "text"
        with pytest.raises(torch.distributed.DistNetworkError, match=r"rank 1 .* lacks the secret of this job"):
            _ask(server, "guessed", {})
        stranger = flight.FlightClient(f"grpc://127.0.0.1:{server.port}")
        with pytest.raises(flight.FlightUnauthenticatedError):
            stranger.do_get(flight.Ticket(b"text")).read_all()
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(stranger.list_flights())


@pytest.fixture
def tls(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl makes the certificate")

    def make(name):
        certificate, key = (str(tmp_path / f"{name}.{kind}") for kind in ("crt", "key"))
        host = f"-addext subjectAltName=DNS:{socket.gethostname()}"
        command = f"openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=test {host} -out {certificate} -keyout {key}"
        subprocess.run(command.split(), check=True, capture_output=True)
        return {"certificate": certificate, "key": key, "root": certificate}

    return make


def _double_over_tls(rank, tls):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    exchange = RankRPC({"double": lambda x: 2 * x}, tls=tls)
    doubled = exchange.call("double", {1 - rank: (np.arange(5),)})[1 - rank].tolist()
    exchange.close()
    torch.distributed.destroy_process_group()
    return doubled


@pytest.mark.slow
def test_ranks_call_each_other_over_tls(tls):
    assert run(_double_over_tls, 2, tls("job")) == 2 * [[0, 2, 4, 6, 8]]


@pytest.mark.medium
def test_tls_refuses_plain_text_and_other_certificates(tls):
    paths = tls("job")
    with _serve(paths) as server:
        assert _ask(server, "of the job", paths) == "text"
        for others in ({}, tls("other")):
            with pytest.raises(torch.distributed.DistNetworkError, match="rank 1 does not answer"):
                _ask(server, "of the job", others)


def test_several_ranks_without_pyarrow_name_the_extra(monkeypatch):
    for name, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 2)):
        monkeypatch.setattr(module.dist, name, lambda value=value: value)
    monkeypatch.delitem(sys.modules, "lightning_gnn.partitioned.flight", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"on 2 ranks needs .* pip install 'lightning-gnn\[partition\]'"):
        RankRPC({})
