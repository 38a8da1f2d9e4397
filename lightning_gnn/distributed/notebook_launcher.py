"""Starts the ranks of a notebook on Lightning's launcher, with what its cells define."""

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

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import find_free_network_port
from lightning_fabric.utilities.distributed import _set_num_threads_if_needed
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.loops.progress import _BaseProgress
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.strategies.launchers.multiprocessing import _GlobalStateSnapshot, _MultiProcessingLauncher
from pytorch_lightning.trainer.call import _call_and_handle_interrupt, _call_callbacks_state_dict
from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector
from torch import Tensor
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from typing_extensions import override

from lightning_gnn.distributed.heartbeat import is_communication_error
from lightning_gnn.runtime.mapped_files import LEAST, MappedFiles
from lightning_gnn.runtime.shared_arrays import file_in_memory

_GRACE = 5.0
"""Seconds that the other ranks have to end by themselves, once a rank has failed."""
EXIT_POLL_S = 0.5
"""Seconds between two looks at the ranks, where none ends."""
_STEPPED = "_batches_that_stepped"
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


class _Answer(NamedTuple):
    """What rank 0 brings home, what a rank raised, its traceback, and whether it only noticed another one's failure."""

    output: dict[str, Any] | None = None
    error: BaseException | None = None
    trace: str = ""
    noticed: bool = False


class RankError(RuntimeError):
    """Where an exception comes from: its cause in the notebook, with the rank and its traceback."""


class NotebookLauncher(_MultiProcessingLauncher):
    """Runs each rank of this node in a spawned process, with trainer, module and data as the notebook has them."""

    # All ranks map one file in memory with the tensors, copy-on-write. The notebook gets rank 0's weights and buffers
    # (in place), metrics, progress, state of the trainer and of its callbacks, and what the method returns. What a rank
    # raises is raised in the cell, caused by a RankError. Ctrl-C goes to the ranks; pressed again, it kills them.

    def __init__(self, strategy: ParallelStrategy) -> None:
        if find_spec("cloudpickle") is None:
            raise ModuleNotFoundError(
                "to start several processes from a notebook, install cloudpickle (pip install cloudpickle): it brings "
                "what the cells define to the processes",
                name="cloudpickle",
            )
        super().__init__(strategy)
        self._strategy: Any = strategy
        self._hidden: tuple[pl.Trainer, list[pl.Callback]] | None = None

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(
        self, function: Callable[..., Any], *args: object, trainer: pl.Trainer | None = None, **kwargs: object
    ) -> Any:
        """Call a method of the trainer in every rank, and return what it returns in rank 0."""
        assert trainer is not None
        # After an exception Lightning ignores Ctrl-C until its teardown, which restores these.
        trainer._signal_connector._original_handlers = _SignalConnector._get_current_signal_handlers()
        for logger in trainer.loggers:
            if hasattr(logger, "_get_next_version"):
                _ = logger.version  # now, or the notebook looks for the files in the next one
        self._hidden, ranks = None, range(self._strategy.num_processes)
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
        with ExitStack() as files:
            work, *answers = (files.enter_context(file_in_memory()) for _ in (None, *ranks))
            try:
                _pack((self, trainer, function, args, kwargs, _settings()), f"/proc/self/fd/{work.fileno()}")
            except Exception as error:
                raise TypeError(
                    "trainer, module and data go to processes of their own, but something in them cannot be pickled: "
                    f"{error}"
                ) from error
            self.procs, interrupted = [], False
            ended: list[int] = []
            try:
                for rank, answer in enumerate(answers):
                    here = {"LOCAL_RANK": str(rank)} | (environment if self._strategy.num_nodes == 1 else {})
                    self._start(os.getpid(), work.fileno(), answer.fileno(), here)
                ended, interrupted = self._wait()
            finally:
                codes = [process.exitcode for process in self.procs]
                self.kill(signal.SIGKILL)
                for process in self.procs:
                    process.join()
            found = [self._answer(rank, codes[rank], answers[rank]) for rank in ranks]
        if found[0].output is not None:
            self._recover_results_in_main_process(found[0].output, trainer)
        if failed := [found[rank] for rank in dict.fromkeys([*ended, *ranks]) if codes[rank] != 0]:
            self._hidden = trainer, trainer.callbacks  # type: ignore[attr-defined]
            trainer.callbacks = []  # type: ignore[attr-defined]  # those of the ranks have handled it
            if interrupted:
                raise KeyboardInterrupt
            blamed = min(failed, key=lambda answer: answer.noticed)
            assert blamed.error is not None
            raise blamed.error from RankError(blamed.trace)
        assert found[0].output is not None
        return found[0].output["results"]

    def give_back_callbacks(self) -> None:
        """Let the trainer have its callbacks again, once the exception of a rank has been handled."""
        if self._hidden is not None:
            trainer, callbacks = self._hidden
            trainer.callbacks = callbacks  # type: ignore[attr-defined]
            self._hidden = None

    def _start(self, *given: object) -> None:
        """Start a rank's process, which does not run the program that runs here."""
        process = multiprocessing.get_context("spawn").Process(target=_run_rank, args=given)
        program, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = program
        self.procs.append(process)  # type: ignore[arg-type]

    def _wait(self) -> tuple[list[int], bool]:
        """Wait until all ranks have ended, or too long after one has failed."""
        ended: list[int] = []
        deadline, interrupted = float("inf"), False
        while len(ended) < len(self.procs) and time.monotonic() < deadline:
            try:
                wait([process.sentinel for process in self.procs if process.exitcode is None], EXIT_POLL_S)
                codes = [process.exitcode for process in self.procs]
                ended += [rank for rank, code in enumerate(codes) if code is not None and rank not in ended]
                if any(codes):
                    deadline = min(deadline, time.monotonic() + _GRACE)
            except KeyboardInterrupt:
                self.kill(signal.SIGINT)
                if interrupted:
                    break
                interrupted = True
        return ended, interrupted

    def _answer(self, local_rank: int, code: int | None, file: IO[bytes]) -> _Answer:
        """Return what a rank has written, or what its end says."""
        rank = self._strategy.node_rank * self._strategy.num_processes + local_rank
        name = f"rank {rank} (process {self.procs[local_rank].pid})"
        if code in (0, 1) and os.fstat(file.fileno()).st_size:
            file.seek(0)
            said: _Answer = torch.load(file, map_location="cpu", weights_only=False)
            return said._replace(trace=f"in {name}:\n\n{said.trace}")
        if code is None:
            message = f"{name} did not answer and was ended"
        elif code < 0:
            message = f"{name} died of {signal.Signals(-code).name} (killed, or out of memory?)"
        else:
            message = f"{name} ended with exit code {code}; see what it printed"
        return _Answer(None, RuntimeError(message), message, code is None or code > 0)

    @override
    def _collect_rank_zero_results(  # type: ignore[override]
        self, trainer: pl.Trainer, results: object
    ) -> dict[str, Any] | None:
        """Return what the notebook gets, None in other ranks."""
        module, connector = trainer.lightning_module, trainer._logger_connector
        weights = module.state_dict()  # on all ranks, as their metrics may synchronize
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
                for loop in _loops(trainer.fit_loop)
            ],
            "state": trainer.state,
        }

    @override
    def _recover_results_in_main_process(  # type: ignore[override]
        self, worker_output: dict[str, Any], trainer: pl.Trainer
    ) -> None:
        """Put everything in its place."""
        module, weights = trainer.lightning_module, worker_output["weights"]
        trainer.strategy.connect(module)  # so that the trainer can save it
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in weights and tensor.dtype != weights[name].dtype:
                tensor.data = tensor.data.to(weights[name].dtype)  # as the precision has made it
        for name, buffer in worker_output["buffers"].items():
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, buffer.to(module.device))
        module.load_state_dict(weights)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if state := worker_output["callbacks"].get(callback.state_key):
                if isinstance(callback, ModelCheckpoint):
                    callback.dirpath = state["dirpath"]  # which the rank has chosen
                callback.load_state_dict(state)
        vars(trainer.strategy).update(worker_output["strategy"])
        vars(trainer._logger_connector).update(worker_output["metrics"])
        for loop, progress in zip(_loops(trainer.fit_loop), worker_output["progress"], strict=True):
            vars(loop).update(progress)
        trainer.state = worker_output["state"]


def _loops(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for part in vars(loop).values():
        if isinstance(part, _Loop):
            yield from _loops(part)


def _settings() -> tuple[object, ...]:
    """Return what was set in the notebook for all of a process, and the cells' text, which no file has."""
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    precision = torch.get_float32_matmul_precision()
    return _GlobalStateSnapshot.capture(), torch.get_default_dtype(), precision, list(warnings.filters), cells


def _restore(settings: tuple[Any, ...]) -> None:
    snapshot, dtype, precision, warnings.filters[:], cells = settings  # type: ignore[index]
    snapshot.restore()
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    linecache.cache.update(cells)


def _pack(content: object, to: str) -> None:
    """Write an object with what cells define; tensors that show a file are mapped from it by who reads it."""
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


def _run_rank(notebook: int, work: int, answer: int, environment: dict[str, str]) -> None:
    """Do a rank's work."""
    os.setsid()  # Ctrl-C comes from the launcher alone
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    if os.getppid() != notebook:
        os._exit(1)  # it has ended already
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(environment)
    path = f"/proc/{notebook}/fd/{answer}"
    try:
        said = _work(*torch.load(f"/proc/{notebook}/fd/{work}", mmap=True, weights_only=False))
        _pack(said, path)
    except BaseException as error:
        said = _failure(error)
        _pack(said, path)
    sys.exit(said.error is not None)


def _work(
    launcher: NotebookLauncher,
    trainer: pl.Trainer,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    settings: tuple[Any, ...],
) -> _Answer:
    _restore(settings)
    _set_num_threads_if_needed(num_processes=launcher._strategy.num_processes)
    trainer.strategy._launcher = None  # all ranks are there
    said, results = _Answer(), None
    try:
        results = _call_and_handle_interrupt(trainer, function, *args, **kwargs)
    except SystemExit as ended:
        if not isinstance(ended.__context__, KeyboardInterrupt):  # which Lightning makes it of
            raise
        said = _failure(ended.__context__)
    return said._replace(output=launcher._collect_rank_zero_results(trainer, results))


def _failure(error: BaseException) -> _Answer:
    """Return the answer of a rank that raised an exception."""
    import cloudpickle

    text = "".join(traceback.format_exception(error))
    noticed = is_communication_error(error)
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # it needs more arguments than it keeps, for example
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return _Answer(None, error, text, noticed)
