"""Run a function or a script in several processes as torchrun would start them, with a time limit."""

import multiprocessing
import os
import pickle
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from tests.patience import PATIENCE

# The server imports everything once and forks before any OpenMP thread runs, so a rank starts in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.full_graph.preload"])


class Outcome:
    """Result, traceback as text, exit code and end time of each rank."""

    def __init__(self, processes, folder, ended):
        self.exit_codes = [process.exitcode for process in processes]
        self.ended = ended
        self.results, self.errors = [], []
        for rank in range(len(processes)):
            path = Path(folder) / f"{rank}.pickle"
            kind, value = pickle.loads(path.read_bytes()) if path.exists() else ("error", "no result")
            self.results.append(value if kind == "result" else None)
            self.errors.append(value if kind == "error" else "")


def run(function, num_ranks, *args, limit=PATIENCE, during=None, nodes=1):
    """Call ``function(rank, *args)`` in each of ``num_ranks`` processes and return the results; raise if one fails."""
    outcome = observe(function, num_ranks, *args, limit=limit, during=during, nodes=nodes, stops_at_failure=True)
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(outcome.errors) if error]
    assert not failed, "\n".join(failed)
    return outcome.results


def observe(function, num_ranks, *args, limit=PATIENCE, during=None, lost=(), nodes=1, stops_at_failure=False):
    """Run a function as :func:`run` does, but return an :class:`Outcome`.

    Kills processes that run longer than ``limit`` seconds and fails. ``during`` is called with the processes and their
    folder once all have started. Does not wait for ``lost`` ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [
            CONTEXT.Process(target=_main, args=(function, rank, num_ranks, nodes, port, folder, args))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            began = time.monotonic()
            if during is not None:
                during(processes, Path(folder))
            ended = [None] * num_ranks
            while any(end is None for rank, end in enumerate(ended) if rank not in lost):
                for rank, process in enumerate(processes):
                    if ended[rank] is None and not process.is_alive():
                        ended[rank] = time.monotonic()
                if stops_at_failure and any(process.exitcode for process in processes):
                    time.sleep(1.0)  # the others may write why
                    break
                assert time.monotonic() - began < limit, f"still running after {limit} s: {processes}"
                time.sleep(0.02)
            outcome = Outcome(processes, folder, ended)
            if any("pip install 'lightning-gnn[partition]'" in error for error in outcome.errors):
                pytest.skip("several ranks on a partitioned graph need pyarrow")
            return outcome
        finally:
            for process in processes:
                process.kill()
                process.join(PATIENCE)


def _main(function, rank, num_ranks, nodes, port, folder, args):
    on_node = num_ranks // nodes
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank % on_node),
        GROUP_RANK=str(rank // on_node),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(on_node),
        TORCHELASTIC_RUN_ID="test",
        RANK_FOLDER=folder,
    )
    import tests.full_graph.preload  # noqa: F401  the server hides failed imports

    try:
        outcome = ("result", function(rank, *args))
    except BaseException:
        outcome = ("error", traceback.format_exc())
    path = Path(folder) / f"{rank}.part"
    path.write_bytes(pickle.dumps(outcome))
    path.rename(path.with_suffix(".pickle"))


def run_script(path, *arguments):
    """Run ``python path arguments`` in a process with warm imports; return the result of ``subprocess.run``."""
    with tempfile.TemporaryDirectory() as folder:
        shown = [Path(folder) / name for name in ("stdout", "stderr")]
        process = CONTEXT.Process(target=_script, args=(str(path), arguments, shown))
        process.start()
        process.join(PATIENCE)
        process.kill()
        process.join()
        return subprocess.CompletedProcess([str(path), *arguments], process.exitcode, *(p.read_text() for p in shown))


def _script(path, arguments, shown):
    import tests.full_graph.preload  # noqa: F401

    for number, to in enumerate(shown, start=1):
        file = os.open(to, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def free_port():
    """Return an unused port below the range from which connections get theirs."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
