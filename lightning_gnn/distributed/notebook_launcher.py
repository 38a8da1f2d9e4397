"""Launches distributed training from a notebook, with objects defined in its cells."""

from __future__ import annotations

import linecache
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from multiprocessing.connection import wait
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from typing_extensions import override

from lightning_gnn.distributed.exceptions import is_communication_error
from lightning_gnn.runtime.lightning import (
    PACKAGE,
    ModelCheckpoint,
    ParallelStrategy,
    _BaseProgress,
    _call_and_handle_interrupt,
    _call_callbacks_state_dict,
    _GlobalStateSnapshot,
    _Loop,
    _MultiProcessingLauncher,
    _set_num_threads_if_needed,
    _SignalConnector,
    find_free_network_port,
    pl,
)
from lightning_gnn.runtime.mapped_files import LEAST, MappedFiles
from lightning_gnn.runtime.shared_arrays import file_in_memory

_EXIT_GRACE_S = 5.0
"""Seconds for the other ranks to exit by themselves after a rank has failed."""
EXIT_POLL_S = 0.5
"""Maximum seconds between checks of the ranks' exit codes."""
_STEPPED = "_batches_that_stepped"
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


class _RankResult(NamedTuple):
    """Outcome of a rank."""

    output: dict[str, Any] | None = None  # results of rank 0
    error: BaseException | None = None
    trace: str = ""
    is_secondary: bool = False  # whether the error only reports another rank's failure


class RankError(RuntimeError):
    """Set as the cause of an exception that is re-raised in the notebook; names the rank and has its traceback."""


class NotebookLauncher(_MultiProcessingLauncher):
    """Runs each rank of this node in a spawned process, with the notebook's trainer, module and data."""

    # All ranks map the tensors copy-on-write from one in-memory file. The notebook receives rank 0's weights and
    # buffers (in place), metrics, progress, state of the trainer and of its callbacks, and the method's result. An
    # exception of a rank is raised in the cell, with a RankError as its cause. Ctrl-C is sent to the ranks; the second
    # one kills them.

    def __init__(self, strategy: ParallelStrategy) -> None:
        if find_spec("cloudpickle") is None:
            raise ModuleNotFoundError(
                "to start several processes from a notebook, install cloudpickle (pip install cloudpickle): it sends "
                "objects defined in cells to the processes",
                name="cloudpickle",
            )
        super().__init__(strategy)
        self._strategy: Any = strategy
        self._removed_callbacks: tuple[pl.Trainer, list[pl.Callback]] | None = None

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(
        self, function: Callable[..., Any], *args: object, trainer: pl.Trainer | None = None, **kwargs: object
    ) -> Any:
        """Call a method of the trainer on every rank, and return rank 0's result."""
        assert trainer is not None
        # After an exception Lightning ignores Ctrl-C until its teardown, which restores these.
        trainer._signal_connector._original_handlers = _SignalConnector._get_current_signal_handlers()
        for logger in trainer.loggers:
            if hasattr(logger, "_get_next_version"):
                _ = logger.version  # fix the version now, or the notebook would use the next one
        self._removed_callbacks, ranks = None, range(self._strategy.num_processes)
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
        with ExitStack() as files:
            work, *outputs = (files.enter_context(file_in_memory()) for _ in (None, *ranks))
            try:
                _pack((self, trainer, function, args, kwargs, _capture_settings()), f"/proc/self/fd/{work.fileno()}")
            except Exception as error:
                raise TypeError(
                    f"trainer, module and data are sent to other processes, but cannot be pickled: {error}"
                ) from error
            self.procs, interrupted = [], False
            ended: list[int] = []
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
            self._recover_results_in_main_process(results[0].output, trainer)
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

    def restore_callbacks(self) -> None:
        """Restore the trainer's callbacks after the exception of a rank has been handled."""
        if self._removed_callbacks is not None:
            trainer, callbacks = self._removed_callbacks
            trainer.callbacks = callbacks  # type: ignore[attr-defined]
            self._removed_callbacks = None

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
        self.procs.append(process)  # type: ignore[arg-type]

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

    @override
    def _collect_rank_zero_results(  # type: ignore[override]
        self, trainer: pl.Trainer, results: object
    ) -> dict[str, Any] | None:
        """Return the results for the notebook on rank 0, None on other ranks."""
        module, connector = trainer.lightning_module, trainer._logger_connector
        weights = module.state_dict()  # on all ranks, since metrics may synchronize
        if trainer.strategy.local_rank:  # type: ignore[attr-defined]
            return None
        return {
            "results": results,
            "weights": weights,
            "buffers": {name: buffer for name, buffer in module.named_buffers() if name not in weights},
            "callbacks": _call_callbacks_state_dict(trainer),
            "strategy": {name: getattr(trainer.strategy, name) for name in trainer.strategy.synced_attributes},  # type: ignore[attr-defined]
            "metrics": {f"_{name}": getattr(connector, name) for name in _METRICS},
            "progress": [
                {name: part for name, part in vars(loop).items() if isinstance(part, _BaseProgress) or name == _STEPPED}
                for loop in _iterate_loops(trainer.fit_loop)
            ],
            "state": trainer.state,
        }

    @override
    def _recover_results_in_main_process(  # type: ignore[override]
        self, worker_output: dict[str, Any], trainer: pl.Trainer
    ) -> None:
        """Copy rank 0's results to the notebook's trainer and module."""
        module, weights = trainer.lightning_module, worker_output["weights"]
        trainer.strategy.connect(module)  # enables the trainer to save it
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in weights and tensor.dtype != weights[name].dtype:
                tensor.data = tensor.data.to(weights[name].dtype)  # the precision plugin has converted it
        for name, buffer in worker_output["buffers"].items():
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, buffer.to(module.device))
        module.load_state_dict(weights)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if state := worker_output["callbacks"].get(callback.state_key):
                if isinstance(callback, ModelCheckpoint):
                    callback.dirpath = state["dirpath"]  # chosen by the rank
                callback.load_state_dict(state)
        vars(trainer.strategy).update(worker_output["strategy"])
        vars(trainer._logger_connector).update(worker_output["metrics"])
        for loop, progress in zip(_iterate_loops(trainer.fit_loop), worker_output["progress"], strict=True):
            vars(loop).update(progress)
        trainer.state = worker_output["state"]


def _iterate_loops(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for part in vars(loop).values():
        if isinstance(part, _Loop):
            yield from _iterate_loops(part)


def _capture_settings() -> tuple[object, ...]:
    """Return the notebook's process-wide settings, and the source text of its cells for tracebacks."""
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    precision = torch.get_float32_matmul_precision()
    return _GlobalStateSnapshot.capture(), torch.get_default_dtype(), precision, list(warnings.filters), cells


def _restore_settings(settings: tuple[Any, ...]) -> None:
    snapshot, dtype, precision, warnings.filters[:], cells = settings  # type: ignore[index]
    snapshot.restore()
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
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
    launcher: NotebookLauncher,
    trainer: pl.Trainer,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    settings: tuple[Any, ...],
) -> _RankResult:
    _restore_settings(settings)
    _set_num_threads_if_needed(num_processes=launcher._strategy.num_processes)
    trainer.strategy._launcher = None  # all ranks have been started
    outcome, results = _RankResult(), None
    try:
        results = _call_and_handle_interrupt(trainer, function, *args, **kwargs)
    except SystemExit as exit_:
        if not isinstance(exit_.__context__, KeyboardInterrupt):  # Lightning converts Ctrl-C to SystemExit
            raise
        outcome = _describe_failure(exit_.__context__)
    return outcome._replace(output=launcher._collect_rank_zero_results(trainer, results))


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
