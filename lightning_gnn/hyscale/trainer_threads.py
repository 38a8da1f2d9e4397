"""The threads that train: one per trainer, given a function to run at a time, with random numbers of its own."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_gnn.hyscale.pipeline import GLOBAL_RANDOM

_PATIENCE = 3.0
"""Seconds for which a trainer may end what it does."""
Serve = Callable[[str, Any, dict[int, Any]], Mapping[int, Any] | Any]
"""Called in the main thread when all trainers at work have met: what for, its tag, and what each brings."""


class Aborted(BaseException):
    """Ends what a trainer does after another one has failed; no ``except Exception`` of a model may hold it up."""


class PerTrainer(dict[int, Any]):
    """The answer to a meeting, where each trainer gets its own."""


class _Trainer(threading.Thread):
    def __init__(self, number: int, name: str, inbox: queue.SimpleQueue[Any]) -> None:
        super().__init__(name=name, daemon=True)
        self.number = number
        self.inbox = inbox
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.num_threads: int | None = None
        self.seconds = 0.0
        self.alive = time.monotonic()

    def run(self) -> None:
        torch.get_num_threads()  # torch takes a number over only where it has been asked for before
        now = None
        while True:
            job, counts = self.jobs.get()
            if job is None:
                return
            if self.num_threads is not None and now != self.num_threads:
                now = self.num_threads
                torch.set_num_threads(now)
            try:
                message = ("done", self.number, None, self.work(job) if counts else job())
            except BaseException as error:
                message = ("error", self.number, None, error)
            job = None
            self.inbox.put(message)
            del message

    def work(self, job: Callable[[], Any]) -> Any:
        """Run a function and add to the seconds of work; its begin and its end are signs of life."""
        self.alive = time.monotonic()
        start = time.perf_counter()
        try:
            return job()
        finally:
            self.seconds += time.perf_counter() - start
            self.alive = time.monotonic()


class TrainerThreads:
    """Runs functions in the trainers' threads while the main thread waits, and acts for them where they meet.

    Args:
        names: Of the trainers, for messages.
        stall_timeout: Seconds for which a trainer may be silent.
    """

    def __init__(self, names: Sequence[str], stall_timeout: float) -> None:
        self.names = list(names)
        self.stall_timeout = stall_timeout
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [_Trainer(i, f"hyscale-trainer-{i}", self._inbox) for i in range(len(self.names))]
        for thread in self._threads:
            thread.start()

    def resize(self, trainer: int, num_threads: int | None) -> None:
        """Change how many threads torch's operators have in a trainer, from its next function on."""
        self._threads[trainer].num_threads = num_threads

    def current(self) -> int | None:
        """Return the trainer whose thread calls this, None for another thread."""
        thread = threading.current_thread()
        return thread.number if isinstance(thread, _Trainer) and thread in self._threads else None

    def take_seconds(self) -> list[float]:
        """Return how long each trainer has worked since this was last asked."""
        seconds = [thread.seconds for thread in self._threads]
        for thread in self._threads:
            thread.seconds = 0.0
        return seconds

    def run(self, jobs: Mapping[int, Callable[[], Any]], serve: Serve | None = None) -> dict[int, Any]:
        """Run a function in each of some trainers and return their results.

        A function that was :meth:`lent <lend>` to a trainer may use this for that trainer, whose thread it is in.

        Raises:
            BaseException: What a trainer raised, with its traceback; the others are told to stop.
            TimeoutError: A trainer was silent for too long; shows where it is.
            RuntimeError: Trainers do not do the same.
        """
        if (here := self.current()) is not None:
            return {here: self._threads[here].work(jobs[here])}
        for trainer, job in jobs.items():
            self._threads[trainer].jobs.put((job, True))
        return self._gather(set(jobs), "done", serve)

    def lend(self, trainer: int, job: Callable[[], Any]) -> Any:
        """Run what the main thread would do in the thread of a trainer; only what it does by :meth:`run` is work.

        A ``KeyboardInterrupt`` waits until it is done, if that does not take long.

        Raises:
            BaseException: As :meth:`run`.
        """
        self._threads[trainer].jobs.put((job, False))
        try:
            return self._gather({trainer}, "done", None)[trainer]
        except KeyboardInterrupt:
            with suppress(queue.Empty):
                self._inbox.get(timeout=_PATIENCE)
            raise

    def meet(self, kind: str, tag: Any = None, value: Any = None, routine: Callable[[], Any] | None = None) -> Any:
        """Called in a trainer: wait for the others, let the main thread act, return its answer.

        Args:
            kind: What for.
            tag: Must be the same in all trainers.
            value: What this one brings.
            routine: Run in the trainer each time that the main thread asks for it meanwhile.
        """
        thread = threading.current_thread()
        assert isinstance(thread, _Trainer)
        self._inbox.put((kind, thread.number, tag, value))
        while True:
            what, answer = thread.answers.get()
            if what == "answer":
                return answer
            if what == "abort" or routine is None:
                raise Aborted
            self._inbox.put(("returned", thread.number, None, routine()))

    def run_routines(self, trainers: Collection[int], serve: Serve | None) -> dict[int, Any]:
        """Called while serving a meeting: let the trainers run the routines that they brought."""
        for trainer in trainers:
            self._threads[trainer].answers.put(("routine", None))
        return self._gather(set(trainers), "returned", serve)

    def close(self, patience: float = _PATIENCE) -> list[str]:
        """End the threads; return the names of those that hang, which Python cannot end."""
        self._abort()
        for thread in self._threads:
            thread.jobs.put((None, False))
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [self.names[thread.number] for thread in self._threads if thread.is_alive()]

    def _gather(self, wanted: set[int], last: str, serve: Serve | None) -> dict[int, Any]:
        results: dict[int, Any] = {}
        waiting: dict[int, tuple[str, Any, Any]] = {}
        patience = self.stall_timeout
        while len(results) < len(wanted):
            try:
                kind, trainer, tag, value = self._inbox.get(timeout=patience)
            except queue.Empty:
                late = sorted(wanted - results.keys() - waiting.keys())
                patience = max(self._threads[i].alive for i in late) + self.stall_timeout - time.monotonic()
                if patience > 0:  # one that was lent something has shown signs of life meanwhile
                    continue
                self._abort()
                raise self._stalled(late) from None
            patience = self.stall_timeout
            if kind == "error":
                self._abort()
                if isinstance(value, Aborted):
                    continue
                if hasattr(value, "add_note"):
                    value.add_note(f"(raised in the hyscale trainer {self.names[trainer]})")
                raise value
            if kind == last:
                results[trainer] = value
            else:
                waiting[trainer] = (kind, tag, value)
            if waiting and len(waiting) + len(results) == len(wanted):
                self._check(results, waiting)
                assert serve is not None
                answers = serve(kind, tag, {i: waiting[i][2] for i in sorted(waiting)})
                waiting.clear()
                for i in wanted:
                    self._threads[i].answers.put(("answer", answers[i] if isinstance(answers, PerTrainer) else answers))
        return {trainer: results[trainer] for trainer in sorted(results)}

    def _check(self, results: dict[int, Any], waiting: dict[int, tuple[str, Any, Any]]) -> None:
        calls = {(kind, tag) for kind, tag, _ in waiting.values()}
        if results or len(calls) > 1:
            self._abort()
            where = {
                self.names[i]: f"{waiting[i][0]} {waiting[i][1] if waiting[i][1] is not None else ''}" for i in waiting
            }
            done = [self.names[i] for i in results]
            raise RuntimeError(
                f"the trainers of hyscale must do the same steps of optimisation in the same order, but {where} wait"
                + (f" while {done} have finished" if done else "")
            )

    def _abort(self) -> None:
        for thread in self._threads:
            thread.answers.put(("abort", None))

    def _stalled(self, late: list[int]) -> TimeoutError:
        frames = sys._current_frames()
        stacks = []
        for trainer in late:
            frame = frames.get(self._threads[trainer].ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else "(the thread has ended)"
            stacks.append(f"trainer {self.names[trainer]}:\n{stack}")
        return TimeoutError(f"no sign of life for {self.stall_timeout:g} s from\n" + "\n".join(stacks))


_TAKE_GENERATOR = {
    function
    for owner, names in (
        (torch, ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "poisson")),
        (
            Tensor,
            (
                "bernoulli",
                "bernoulli_",
                "cauchy_",
                "exponential_",
                "geometric_",
                "log_normal_",
                "multinomial",
                "normal_",
                "random_",
                "uniform_",
            ),
        ),
    )
    for name in names
    if (function := getattr(owner, name, None)) is not None
}
_LIKE: dict[Any, Callable[..., Tensor]] = {
    torch.rand_like: lambda out, generator: out.uniform_(generator=generator),
    torch.randn_like: lambda out, generator: out.normal_(generator=generator),
}
_DROPOUTS = {F.dropout, torch.dropout, torch.dropout_}
# These draw inside, where no generator can be given to them.
_DRAW_INSIDE = {
    function
    for owner, names in (
        (
            F,
            (
                "alpha_dropout",
                "dropout1d",
                "dropout2d",
                "dropout3d",
                "feature_alpha_dropout",
                "fractional_max_pool2d",
                "fractional_max_pool3d",
                "gumbel_softmax",
                "multi_head_attention_forward",
                "rrelu",
                "scaled_dot_product_attention",
            ),
        ),
        (
            torch,
            (
                "alpha_dropout",
                "feature_dropout",
                "feature_alpha_dropout",
                "gru",
                "lstm",
                "randint_like",
                "rnn_relu",
                "rnn_tanh",
                "rrelu",
                "binomial",
            ),
        ),
    )
    for name in names
    if (function := getattr(owner, name, None)) is not None
}
_DRAW = {*_TAKE_GENERATOR, *_LIKE, *_DROPOUTS, *_DRAW_INSIDE}


class ThreadRandom(TorchFunctionMode):
    """Within this context, torch draws CPU random numbers from a generator of the thread's own.

    So what a trainer draws depends on its seed alone, not on the others. A few functions that cannot be given a
    generator run one thread at a time, with the global one in the state of this one. Accelerators have their own.
    Activation checkpointing does not restore this generator: do not combine it with dropout.

    Args:
        seed: Where the generator begins.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass the generator to what draws."""
        kwargs = kwargs or {}
        if func not in _DRAW:  # nearly always: this is called for every operator
            return func(*args, **kwargs)
        if func in _TAKE_GENERATOR:
            if kwargs.get("generator") is None and self._on_cpu(args, kwargs):
                kwargs = {**kwargs, "generator": self.generator}
        elif func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        elif func in _LIKE and self._on_cpu(args, kwargs):
            kwargs.pop("generator", None)
            out = torch.empty_like(*args, **kwargs)
            with torch.no_grad():
                return _LIKE[func](out, self.generator)
        elif func in _DRAW_INSIDE:
            return self._alone(func, args, kwargs)
        return func(*args, **kwargs)

    def _on_cpu(self, args: Any, kwargs: Any) -> bool:
        device = kwargs.get("device")
        if device is not None:
            return torch.device(device).type == "cpu"
        tensors = [value for value in args if isinstance(value, Tensor)]
        return tensors[0].is_cpu if tensors else torch.get_default_device().type == "cpu"

    def _dropout(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool | None = None,
        inplace: bool = False,
        train: bool = True,
    ) -> Tensor:
        inplace = inplace or func is torch.dropout_
        training = train if training is None else training
        if not training or p == 0.0 or not input.is_cpu or not 0.0 <= p < 1.0:
            return F.dropout(input, p, training, inplace)
        mask = torch.empty_like(input).bernoulli_(1.0 - p, generator=self.generator).div_(1.0 - p)
        return input.mul_(mask) if inplace else input * mask

    def _alone(self, func: Any, args: Any, kwargs: Any) -> Any:
        with GLOBAL_RANDOM:
            before = torch.get_rng_state()
            torch.set_rng_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(torch.get_rng_state())
                torch.set_rng_state(before)
