"""Starts the ranks of a notebook, and brings home what becomes of them."""

from __future__ import annotations

import codecs
import io
import json
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TextIO

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import find_free_network_port
from lightning_fabric.utilities.distributed import _set_num_threads_if_needed
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.loops.progress import _BaseProgress
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.strategies.launchers.launcher import _Launcher
from pytorch_lightning.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from pytorch_lightning.trainer.call import _call_and_handle_interrupt
from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector
from pytorch_lightning.trainer.states import TrainerState
from torch import Tensor
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from typing_extensions import override

from lightning_gnn.runtime.heartbeat import is_communication_error
from lightning_gnn.runtime.parcels import Parcel, new_group, pack, share

_LOOK = 0.05
"""Seconds between two looks at the ranks."""
_GRACE = 5.0
"""Seconds that the others have, once a rank has failed, to say what they saw and end by themselves."""
_MAIN = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback, as long as there is nothing to save
sys.path[:], *given = json.loads(sys.argv.pop())
from lightning_gnn.runtime.notebook import run_rank
run_rank(*given)
"""


class RankError(RuntimeError):
    """Where an exception comes from: its cause in the notebook, with the rank and its traceback."""


class NotebookLauncher(_Launcher):
    """Runs each rank of this node in a fresh process, which gets trainer, module and data as the notebook has them.

    A forked process would lack the threads of OpenMP, which it then waits for, and could not use CUDA. A fresh one
    knows nothing of the notebook but what comes with the trainer; classes and functions defined in cells come too.
    What the ranks print appears in the cell.

    Afterwards the notebook has rank 0's parameters and buffers (in place), attributes of callbacks, metrics, progress
    and state of the trainer, and what its method returns. Optimizers, and attributes of the module that are neither
    parameters nor buffers, stay with the ranks. What a rank raises is raised in the cell, caused by a
    :class:`RankError`. Ctrl-C goes to the ranks, which stop as scripts do; pressed again, it kills them.

    Args:
        strategy: Says how many ranks there are.

    Raises:
        ModuleNotFoundError: cloudpickle is not installed.
    """

    def __init__(self, strategy: ParallelStrategy) -> None:
        if find_spec("cloudpickle") is None:
            raise ModuleNotFoundError(
                "to start several processes from a notebook, install cloudpickle (pip install cloudpickle): it brings "
                "what the cells define to the processes",
                name="cloudpickle",
            )
        self._strategy: Any = strategy
        self._ranks: list[_Rank] = []
        self._told: tuple[pl.Trainer, list[pl.Callback]] | None = None

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Call a function in every rank, and return what it returns in rank 0.

        Args:
            function: A method of the trainer.
            *args: For the function.
            trainer: What gets rank 0's results.
            **kwargs: For the function.

        Raises:
            BaseException: What a rank raised.
            RuntimeError: A rank was lost.
            TypeError: Something cannot be sent to the ranks.
        """
        assert trainer is not None
        # After an exception Lightning ignores Ctrl-C until its teardown, which gives these back.
        trainer._signal_connector._original_handlers = _SignalConnector._get_current_signal_handlers()
        for logger in trainer.loggers:
            if hasattr(logger, "_get_next_version"):
                _ = logger.version  # now, lest the notebook looks for the files in the next one
        group, parcel, output = new_group(), Parcel(), _Output()
        try:
            try:
                defined = parcel.pack((trainer, function, args, kwargs, _Settings()))
            except Exception as error:
                raise TypeError(
                    "trainer, module and data go to processes of their own, but something in them cannot be pickled: "
                    f"{error}"
                ) from error
            share(group, [*_common(trainer), *defined])
            for local_rank in range(self._strategy.num_processes):
                rank = self._strategy.node_rank * self._strategy.num_processes + local_rank
                self._ranks.append(_Rank(rank, local_rank, self._environment(), group, parcel, output))
            output.begin()
            answer, failed = self._wait()
            if answer.home is not None:
                answer.home.arrive(trainer)
        finally:
            for rank in self._ranks:
                rank.end()
            self._ranks = []
            output.end()
            parcel.close()
            share(group, None)
        if failed is not None:
            assert failed.error is not None
            self._told = trainer, trainer.callbacks  # type: ignore[attr-defined]
            trainer.callbacks = []  # type: ignore[attr-defined]  # they have been told in the ranks, not here too
            raise failed.error from RankError(failed.trace)
        return answer.result

    def give_back_callbacks(self) -> None:
        """Let the trainer have its callbacks again, once everybody else has been told of a rank's exception."""
        if self._told is not None:
            trainer, callbacks = self._told
            trainer.callbacks = callbacks  # type: ignore[attr-defined]
            self._told = None

    def _environment(self) -> dict[str, str]:
        """Return the variables by which ranks find one another; the notebook's own stay as they are."""
        found = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self._strategy.num_nodes == 1:
            ports = {rank.environment["MASTER_PORT"] for rank in self._ranks}
            found["MASTER_ADDR"] = "127.0.0.1"
            found["MASTER_PORT"] = ports.pop() if ports else str(find_free_network_port())  # a new one for each run
        return found

    def _wait(self) -> tuple[Answer, Answer | None]:
        """Return, once all have ended, rank 0's answer and that of the rank that is to blame for a failure."""
        deadline, interrupt = float("inf"), None
        while running := [rank for rank in self._ranks if rank.exit_code is None]:
            try:
                if any(rank.exit_code for rank in self._ranks):
                    deadline = min(deadline, time.monotonic() + _GRACE)
                if time.monotonic() > deadline:
                    for rank in running:
                        rank.end()
                time.sleep(_LOOK)
            except KeyboardInterrupt:
                if interrupt is None:
                    interrupt = Answer(error=KeyboardInterrupt(), trace="Ctrl-C")
                    self.kill(signal.SIGINT)
                else:
                    for rank in running:
                        rank.end()
        failed = any(rank.exit_code for rank in self._ranks)
        answers = [rank.answer() for rank in self._ranks]
        blamed = interrupt or min(answers, key=lambda answer: (answer.blame, answer.when))
        return answers[0], blamed if failed else None

    @override
    def kill(self, signum: Any) -> None:
        """Send a signal to the ranks."""
        for rank in self._ranks:
            if rank.exit_code is None:
                os.kill(rank.pid, signum)

    def __getstate__(self) -> dict[str, Any]:
        return {"_strategy": self._strategy, "_ranks": [], "_told": None}


class _Rank:
    """A process, with all that it starts itself.

    Args:
        rank: Its rank.
        local_rank: Its rank on this node.
        environment: Variables.
        group: The name of the run.
        parcel: What it is to do.
        output: Where it prints.
    """

    def __init__(
        self, rank: int, local_rank: int, environment: dict[str, str], group: str, parcel: Parcel, output: _Output
    ) -> None:
        self.rank = rank
        self.environment = {**environment, "LOCAL_RANK": str(local_rank)}
        self._parcel = Parcel()
        paths = [path for path in sys.path if isinstance(path, str)]
        given = json.dumps([paths, rank, group, parcel.descriptor, self._parcel.descriptor, os.getpid()])
        self._process = subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", _MAIN, given],  # type: ignore[attr-defined]
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output.stdout,
            stderr=output.stderr,
            pass_fds=(parcel.descriptor, self._parcel.descriptor),
            start_new_session=True,  # Ctrl-C comes from the launcher alone, and what the rank starts ends with it
        )
        self.pid = self._process.pid
        self._ended_here = False

    @property
    def exit_code(self) -> int | None:
        """None while it runs; the number of the signal, negative, that has ended it."""
        if self._process.returncode is not None:
            return self._process.returncode
        # Not waited for: as long as it is there, nothing else can have its number.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def end(self) -> None:
        """Kill it, if it still runs, and what it has left."""
        if self._process.returncode is None:
            self._ended_here |= self.exit_code is None
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._found = self._read()
            self._parcel.close()

    def answer(self) -> Answer:
        """Return what it has said, or what can be said about its end."""
        self.end()
        if self._found is not None:
            return self._found
        name = f"rank {self.rank} (process {self.pid})"
        code = self._process.returncode
        if self._ended_here:
            message, blame = f"{name} did not answer and was ended", _ENDED
        elif code < 0:
            message, blame = f"{name} died of {signal.Signals(-code).name} (killed, or out of memory?)", _DIED
        else:
            message, blame = f"{name} ended with exit code {code}; see what it printed", _FOLLOWED
        return Answer(error=RuntimeError(message), trace=message, blame=blame)

    def _read(self) -> Answer | None:
        if self._process.returncode < 0:
            return None  # it may have been writing
        content = self._parcel.unpack("cpu")
        return None if content is None else content[0]


class _Output:
    """Prints in the cell what ranks print: they write to pipes, which threads of the notebook read."""

    def __init__(self) -> None:
        self._threads, self._inner = [], []
        for stream in (sys.stdout, sys.stderr):
            outer, inner = os.pipe()
            self._inner.append(inner)
            self._threads.append(threading.Thread(target=_print, args=(outer, stream), daemon=True))
        self.stdout, self.stderr = self._inner

    def begin(self) -> None:
        """Print from now on, as all who write have been started."""
        for thread, inner in zip(self._threads, self._inner, strict=True):
            thread.start()
            os.close(inner)

    def end(self) -> None:
        """Print the rest."""
        if not self._threads[0].ident:
            self.begin()
        for thread in self._threads:
            thread.join(_GRACE)  # unless somebody unknown keeps the pipe open


def _print(outer: int, stream: TextIO) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while chunk := os.read(outer, 1 << 16):
        stream.write(decoder.decode(chunk))
        stream.flush()
    os.close(outer)


_RAISED, _DIED, _NOTICED, _FOLLOWED, _ENDED, _WELL = range(6)
"""Whom to blame first: who raised, or died, before who noticed it, ended because of it, or had to be ended."""


@dataclass
class Answer:
    """What a rank says at its end.

    Args:
        result: What the function returned.
        home: What the notebook is to have afterwards.
        error: What it raised.
        trace: The traceback, with the rank.
        blame: How much it is to blame that the run failed; the least number has done it.
        when: Seconds, of one clock for all processes.
    """

    result: Any = None
    home: Home | None = None
    error: BaseException | None = None
    trace: str = ""
    blame: int = _WELL
    when: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Answer:
        """Describe an exception."""
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]

        try:
            cloudpickle.loads(cloudpickle.dumps(error))
            sent = error
        except Exception:  # it needs more arguments than it keeps, for example
            sent = RuntimeError(f"{type(error).__name__}: {error}")
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        blame = _NOTICED if is_communication_error(error) else _RAISED
        return cls(error=sent, trace=f"in rank {rank} (process {os.getpid()}):\n\n{text}", blame=blame)


@dataclass
class Home:
    """What the notebook is to have of rank 0.

    Args:
        weights: State of the module.
        buffers: Those that are not in it, by name.
        strategy: Those attributes of the strategy that it names in ``brought_home``, packed.
        callbacks: Attributes of each callback that the notebook's trainer has, packed.
        metrics: By the attribute that holds them.
        progress: Of each loop.
        state: Of the trainer.
    """

    weights: dict[str, Any]
    buffers: dict[str, Tensor]
    strategy: list[bytes]
    callbacks: list[list[bytes]]
    metrics: dict[str, Any]
    progress: dict[str, Any]
    state: TrainerState

    @classmethod
    def of(cls, trainer: pl.Trainer, callbacks: list[pl.Callback], group: str, common: list[Any]) -> Home:
        """Collect it.

        Args:
            trainer: Rank 0's.
            callbacks: The trainer's before it ran.
            group: The name of the run.
            common: What the notebook has, and takes itself.
        """
        module, connector = trainer.lightning_module, trainer._logger_connector
        weights = module.state_dict()
        return cls(
            weights,
            {name: buffer for name, buffer in module.named_buffers() if name not in weights},
            list(_packed(_brought_home(trainer.strategy), group, common)),
            [list(_packed(_brought_home(callback), group, common)) for callback in callbacks],
            {f"_{name}": getattr(connector, name) for name in _METRICS},
            {name: _progress(getattr(trainer, name)) for name in _LOOPS},
            trainer.state,
        )

    def arrive(self, trainer: pl.Trainer) -> None:
        """Put everything in its place.

        Raises:
            RuntimeError: The module of rank 0 has got other parameters or buffers than the notebook's.
        """
        owners = [trainer.strategy, *trainer.callbacks]  # type: ignore[attr-defined]
        for owner, attributes in zip(owners, [self.strategy, *self.callbacks], strict=True):
            for packed in attributes:
                vars(owner).update(torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)[0])
        vars(trainer._logger_connector).update(self.metrics)
        for name, progress in self.progress.items():
            _proceed(getattr(trainer, name), progress)
        trainer.state = self.state
        module = trainer.lightning_module
        trainer.strategy.connect(module)  # so that the trainer can save it
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in self.weights and tensor.dtype != self.weights[name].dtype:
                tensor.data = tensor.data.to(self.weights[name].dtype)  # as the precision has made it
        for name, buffer in self.buffers.items():
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, buffer.to(module.device))
        module.load_state_dict(self.weights)


_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")


def _brought_home(owner: Any) -> dict[str, Any]:
    """Return the attributes of a strategy or a callback that the notebook's is to have."""
    if isinstance(owner, ProgressBar):
        return {}  # it is of what prints
    names = getattr(owner, "brought_home", vars(owner))
    return {name: value for name, value in vars(owner).items() if name in names}


def _packed(attributes: dict[str, Any], group: str, common: list[Any]) -> Iterator[bytes]:
    """Pack attributes together, or those alone that can be packed."""
    for some in (attributes, *({name: value} for name, value in attributes.items())):
        file = io.BytesIO()
        try:
            pack(some, file, common, group)
        except Exception:  # a thread, an open file: of this process alone
            continue
        yield file.getvalue()
        if some is attributes:
            return


def _progress(loop: _Loop) -> dict[str, Any]:
    return {
        name: _progress(part) if isinstance(part, _Loop) else part
        for name, part in vars(loop).items()
        if isinstance(part, _Loop | _BaseProgress) or name == "_batches_that_stepped"
    }


def _proceed(loop: _Loop, progress: dict[str, Any]) -> None:
    for name, part in progress.items():
        if isinstance(part, dict):
            _proceed(getattr(loop, name), part)
        else:
            setattr(loop, name, part)


def _common(trainer: pl.Trainer) -> list[Any]:
    """Return what the notebook and its ranks both have, in one order."""
    module: Any = trainer.lightning_module
    of_module = [] if module is None else [*module.modules(), *module.parameters()]
    return [trainer, trainer.strategy, *trainer.loggers, *trainer.callbacks, *of_module]  # type: ignore[attr-defined]


class _Settings:
    """What was set in the notebook for all of a process."""

    def __init__(self) -> None:
        self._snapshot = _GlobalStateSnapshot.capture()
        self._dtype = torch.get_default_dtype()
        self._precision = torch.get_float32_matmul_precision()
        self._filters = list(warnings.filters)
        # The cells' text, for tracebacks and compilers: no file has it.
        self._cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}

    def restore(self) -> None:
        """Set it here."""
        self._snapshot.restore()
        torch.set_default_dtype(self._dtype)
        torch.set_float32_matmul_precision(self._precision)
        warnings.filters[:] = self._filters  # type: ignore[index]
        linecache.cache.update(self._cells)


def run_rank(rank: int, group: str, parcel: int, answer: int, notebook: int) -> None:
    """Do a rank's work.

    Args:
        rank: This rank.
        group: The name of the run.
        parcel: Descriptor of the :class:`Parcel` with the work.
        answer: Descriptor of the one for the :class:`Answer`.
        notebook: The notebook's process.
    """
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    if os.getppid() != notebook:
        os._exit(1)  # it has ended already
    signal.signal(signal.SIGINT, signal.default_int_handler)
    common: list[Any] = []
    try:
        (trainer, function, args, kwargs, settings), defined = Parcel(parcel).unpack()
        common += [*_common(trainer), *defined]
        settings.restore()
        _set_num_threads_if_needed(num_processes=trainer.strategy.num_processes)
        said = _work(trainer, function, args, kwargs, group, common)
    except BaseException as error:
        said = Answer.of(error, rank)
    try:
        Parcel(answer).pack(said, common, group)
    except Exception as error:
        said = Answer.of(error, rank)
        Parcel(answer).pack(said, common, group)
    sys.exit(said.error is not None)


def _work(trainer: pl.Trainer, function: Any, args: Any, kwargs: Any, group: str, common: list[Any]) -> Answer:
    said, callbacks = Answer(), [*trainer.callbacks]  # type: ignore[attr-defined]
    trainer.strategy._launcher = None  # all ranks are there
    try:
        said.result = _call_and_handle_interrupt(trainer, function, *args, **kwargs)
    except SystemExit as ended:
        if not isinstance(ended.__context__, KeyboardInterrupt):  # which Lightning makes it of
            raise
        said = Answer.of(ended.__context__, trainer.global_rank)
    home = Home.of(trainer, callbacks, group, common)  # on all ranks, as their metrics may synchronise
    if trainer.local_rank:
        said.result = None
    else:
        said.home = home
    return said
