"""Launches distributed training from a notebook, with objects defined in its cells."""

from __future__ import annotations

import linecache
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from lightning_gnn.distributed.exceptions import is_communication_error
from lightning_gnn.runtime.devices import num_cores
from lightning_gnn.runtime.lightning import PACKAGE, ModelCheckpoint, ParallelStrategy, find_free_network_port, pl
from lightning_gnn.runtime.mapped_files import LEAST, MappedFiles
from lightning_gnn.runtime.shared_arrays import file_in_memory

_EXIT_GRACE_S = 5.0
"""Seconds for the other ranks to exit by themselves after a rank has failed."""
EXIT_POLL_S = 0.5
"""Maximum seconds between checks of the ranks' exit codes."""
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (lambda: torch.backends.cudnn.benchmark, partial(setattr, torch.backends.cudnn, "benchmark")),
)
"""Functions that get and set a process-wide setting."""


class _RankResult(NamedTuple):
    """Outcome of a rank."""

    output: dict[str, Any] | None = None  # results of rank 0
    error: BaseException | None = None
    trace: str = ""
    is_secondary: bool = False  # whether the error only reports another rank's failure


class RankError(RuntimeError):
    """Set as the cause of an exception that is re-raised in the notebook; names the rank and has its traceback."""


class NotebookLauncher:
    """Runs each rank of this node in a spawned process, with the notebook's trainer, module and data."""

    # All ranks map the tensors copy-on-write from one in-memory file. The notebook receives rank 0's weights and
    # buffers (in place), metrics, progress, state of the trainer and of its callbacks, and the method's result. An
    # exception of a rank is raised in the cell, with a RankError as its cause. Ctrl-C is sent to the ranks; the second
    # one kills them.

    is_interactive_compatible = True

    def __init__(self, strategy: ParallelStrategy) -> None:
        if find_spec("cloudpickle") is None:
            raise ModuleNotFoundError(
                "to start several processes from a notebook, install cloudpickle (pip install cloudpickle): it sends "
                "objects defined in cells to the processes",
                name="cloudpickle",
            )
        self._strategy: Any = strategy
        self.procs: list[BaseProcess] = []
        self._removed_callbacks: tuple[pl.Trainer, list[pl.Callback]] | None = None
        self._interrupt_handler: Any = None  # the notebook's, of Ctrl-C

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"procs": [], "_interrupt_handler": None}  # which may not be picklable

    def launch(self, function: Callable[..., Any], *args: object, trainer: pl.Trainer, **kwargs: object) -> Any:
        """Call the public method of the trainer that is running on every rank, and return rank 0's result."""
        for logger in trainer.loggers:
            if hasattr(logger, "_get_next_version"):
                _ = logger.version  # fix the version now, or the notebook would use the next one
        self._removed_callbacks, self._interrupt_handler = None, signal.getsignal(signal.SIGINT)
        self.procs, ranks = [], range(self._strategy.num_processes)
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
        with ExitStack() as files:
            work, *outputs = (files.enter_context(file_in_memory()) for _ in (None, *ranks))
            try:
                _pack((trainer, args, kwargs, _capture_settings()), f"/proc/self/fd/{work.fileno()}")
            except Exception as error:
                raise TypeError(
                    f"trainer, module and data are sent to other processes, but cannot be pickled: {error}"
                ) from error
            interrupted, ended = False, list[int]()
            try:
                for rank, output in enumerate(outputs):
                    variables = {"LOCAL_RANK": str(rank)} | (environment if self._strategy.num_nodes == 1 else {})
                    self._start(os.getpid(), work.fileno(), output.fileno(), variables)
                ended, interrupted = self._wait()
            finally:
                codes = [process.exitcode for process in self.procs]
                self.kill(signal.SIGKILL)
                for process in self.procs:
                    process.join()
            results = [self._read_result(rank, codes[rank], outputs[rank]) for rank in ranks]
        if results[0].output is not None:
            _apply_results(results[0].output, trainer)
        if failed := [results[rank] for rank in dict.fromkeys([*ended, *ranks]) if codes[rank] != 0]:
            self._removed_callbacks = trainer, trainer.callbacks  # type: ignore[attr-defined]
            trainer.callbacks = []  # type: ignore[attr-defined]  # the ranks' callbacks have handled the exception
            if interrupted:
                raise KeyboardInterrupt
            cause = min(failed, key=lambda result: result.is_secondary)
            assert cause.error is not None
            raise cause.error from RankError(cause.trace)
        assert results[0].output is not None
        return results[0].output["results"]

    def restore(self) -> None:
        """Restore the trainer's callbacks, and the handler of Ctrl-C, after an exception has been handled."""
        if self._removed_callbacks is not None:
            trainer, callbacks = self._removed_callbacks
            trainer.callbacks = callbacks  # type: ignore[attr-defined]
            self._removed_callbacks = None
        if self._interrupt_handler not in (None, signal.getsignal(signal.SIGINT)):
            signal.signal(signal.SIGINT, self._interrupt_handler)  # Lightning ignores Ctrl-C after the first one

    def kill(self, signum: int) -> None:
        """Send a signal to all ranks that are alive."""
        for process in self.procs:
            if process.is_alive():
                os.kill(process.pid, signum)  # type: ignore[arg-type]

    def _start(self, *args: object) -> None:
        """Start a rank's process without re-running the notebook's main module."""
        process = multiprocessing.get_context("spawn").Process(target=_run_rank, args=args)
        program, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        given = os.environ.get("LGNN_LIGHTNING")
        os.environ["LGNN_LIGHTNING"] = PACKAGE  # the process does not run the notebook, whose imports decide
        try:
            process.start()
        finally:
            sys.modules["__main__"] = program
            del os.environ["LGNN_LIGHTNING"]
            if given is not None:
                os.environ["LGNN_LIGHTNING"] = given
        self.procs.append(process)

    def _wait(self) -> tuple[list[int], bool]:
        """Wait until all ranks have exited, or until the grace period after a failure; return exit order and Ctrl-C."""
        ended: list[int] = []
        deadline, interrupted = float("inf"), False
        while len(ended) < len(self.procs) and time.monotonic() < deadline:
            try:
                wait([process.sentinel for process in self.procs if process.exitcode is None], EXIT_POLL_S)
                codes = [process.exitcode for process in self.procs]
                ended += [rank for rank, code in enumerate(codes) if code is not None and rank not in ended]
                if any(codes):
                    deadline = min(deadline, time.monotonic() + _EXIT_GRACE_S)
            except KeyboardInterrupt:
                self.kill(signal.SIGINT)
                if interrupted:
                    break
                interrupted = True
        return ended, interrupted

    def _read_result(self, local_rank: int, code: int | None, file: IO[bytes]) -> _RankResult:
        """Return the result that a rank has written, or derive one from its exit code."""
        rank = self._strategy.node_rank * self._strategy.num_processes + local_rank
        name = f"rank {rank} (process {self.procs[local_rank].pid})"
        if code in (0, 1) and os.fstat(file.fileno()).st_size:
            file.seek(0)
            result: _RankResult = torch.load(file, map_location="cpu", weights_only=False)
            return result._replace(trace=f"in {name}:\n\n{result.trace}")
        if code is None:
            message = f"{name} did not exit and was killed"
        elif code < 0:
            message = f"{name} died of {signal.Signals(-code).name} (killed, or out of memory?)"
        else:
            message = f"{name} exited with code {code}; see its output"
        return _RankResult(None, RuntimeError(message), message, code is None or code > 0)


def _collect_results(trainer: pl.Trainer, results: object) -> dict[str, Any] | None:
    """Return the results for the notebook on rank 0, None on other ranks."""
    module = trainer.lightning_module
    weights = module.state_dict()  # on all ranks, since metrics may synchronize
    if trainer.strategy.local_rank:  # type: ignore[attr-defined]
        return None
    return {
        "results": results,
        "weights": weights,
        "buffers": {name: buffer for name, buffer in module.named_buffers() if name not in weights},
        "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},  # type: ignore[attr-defined]
        "strategy": {name: getattr(trainer.strategy, name) for name in trainer.strategy.synced_attributes},  # type: ignore[attr-defined]
        "metrics": {name: getattr(trainer, name) for name in _METRICS},
        "progress": trainer.fit_loop.state_dict() | {"state_dict": {}},  # without the state of the data loaders
        "state": trainer.state,
    }


def _apply_results(output: dict[str, Any], trainer: pl.Trainer) -> None:
    """Copy rank 0's results to the notebook's trainer and module."""
    module, weights = trainer.lightning_module, output["weights"]
    trainer.strategy.connect(module)  # enables the trainer to save it
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in weights and tensor.dtype != weights[name].dtype:
            tensor.data = tensor.data.to(weights[name].dtype)  # the precision plugin has converted it
    for name, buffer in output["buffers"].items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, buffer.to(module.device))
    module.load_state_dict(weights)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if state := output["callbacks"].get(callback.state_key):
            if isinstance(callback, ModelCheckpoint):
                callback.dirpath = state["dirpath"]  # chosen by the rank
            callback.load_state_dict(state)
    vars(trainer.strategy).update(output["strategy"])
    for name, values in output["metrics"].items():
        metrics = getattr(trainer, name)
        metrics.clear()
        metrics.update(values)
    trainer.fit_loop.load_state_dict(output["progress"])
    # A further fit() continues this run: it does not resume from a checkpoint.
    trainer.fit_loop.on_iteration_done()
    trainer.fit_loop.restarting = False  # also of the loops within
    trainer.state = output["state"]


def _capture_settings() -> tuple[object, ...]:
    """Return the notebook's process-wide settings, and the source text of its cells for tracebacks."""
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return [get() for get, _ in _SETTINGS], list(warnings.filters), cells


def _restore_settings(settings: tuple[Any, ...]) -> None:
    values, warnings.filters[:], cells = settings  # type: ignore[index]
    for (_, restore), value in zip(_SETTINGS, values, strict=True):
        restore(value)
    linecache.cache.update(cells)


def _pack(content: object, to: str) -> None:
    """Pickle an object including code defined in cells; tensors mapped from a file are stored as references to it."""
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]

    files = MappedFiles()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc,name-defined,unused-ignore]
        def reducer_override(self, one: object) -> Any:
            if type(one) is Tensor and one.device.type == "cpu" and one.layout is torch.strided:
                large = not one.requires_grad and one.untyped_storage().nbytes() >= LEAST
                if large and (part := files.find(one)) is not None:
                    return part.map, (one.dtype, one.shape, one.stride(), one.storage_offset())
            return super().reducer_override(one)

    torch.save(content, to, pickle_module=SimpleNamespace(Pickler=Pickler, __name__="cloudpickle"), pickle_protocol=5)


def _run_rank(notebook: int, work: int, output: int, environment: dict[str, str]) -> None:
    """Entry point of a rank's process."""
    os.setsid()  # only the launcher sends Ctrl-C
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    if os.getppid() != notebook:
        os._exit(1)  # the notebook has exited already
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(environment)
    path = f"/proc/{notebook}/fd/{output}"
    try:
        result = _call_trainer(*torch.load(f"/proc/{notebook}/fd/{work}", mmap=True, weights_only=False))
        _pack(result, path)
    except BaseException as error:
        result = _describe_failure(error)
        _pack(result, path)
    sys.exit(result.error is not None)


def _call_trainer(
    trainer: pl.Trainer, args: tuple[object, ...], kwargs: dict[str, object], settings: tuple[Any, ...]
) -> _RankResult:
    """Call the method that the notebook has called: ``fit``, ``validate``, ``test`` or ``predict``."""
    _restore_settings(settings)
    if "OMP_NUM_THREADS" not in os.environ:  # as Lightning's own launchers do
        threads = max(1, num_cores() // trainer.strategy.num_processes)  # type: ignore[attr-defined]
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    trainer.strategy._launcher = None  # all ranks have been started
    outcome, results = _RankResult(), None
    assert trainer.state.fn is not None
    try:
        results = getattr(trainer, trainer.state.fn.value)(*args, **kwargs)
    except SystemExit as exit_:
        if not isinstance(exit_.__context__, KeyboardInterrupt):  # Lightning converts Ctrl-C to SystemExit
            raise
        outcome = _describe_failure(exit_.__context__)
    return outcome._replace(output=_collect_results(trainer, results))


def _describe_failure(error: BaseException) -> _RankResult:
    """Return the result of a rank that raised an exception."""
    import cloudpickle

    text = "".join(traceback.format_exception(error))
    is_secondary = is_communication_error(error)
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # for example, its constructor needs more arguments than it stores
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return _RankResult(None, error, text, is_secondary)
