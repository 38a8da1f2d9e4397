"""Questions that ranks answer each other, whenever they come: no rank waits until another asks too.

So ranks may have different numbers of mini-batches, stop early or go ahead, and none hangs. Messages go through a
process group of their own, of gloo, beside whatever the training uses.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

_FOR_EVER = timedelta(days=365)
"""A rank may have nothing to ask for as long as a step takes; that one is lost, others notice (``heartbeat``)."""
_BYE = -1
_QUESTIONS = 0
"""The tag of what announces a question; those of the questions and answers themselves follow."""
_CALLS = 1 << 28

Handler = Callable[..., Any]


class Exchange:
    """Asks other ranks, and answers them in threads of its own, one for each.

    All ranks must make it, and close it, together.

    Args:
        handlers: What answers, by name.

    Raises:
        RuntimeError: A rank did not come.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = dict(handlers)
        grouped = dist.is_available() and dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self.sent = self.received = 0
        """Bytes of questions and answers, of those that this rank asked."""
        self._calls = itertools.count()
        self._lost: dict[int, str] = {}
        self._threads: list[threading.Thread] = []
        self._open = True
        self._group: Any = None
        if self.ranks > 1:
            self._group = dist.new_group(backend="gloo", timeout=_FOR_EVER)
            for other in range(self.ranks):
                if other != self.rank:
                    name = f"answers to rank {other}"
                    self._threads.append(threading.Thread(target=self._answer, args=(other,), name=name, daemon=True))
                    self._threads[-1].start()

    def gather(self, value: Any) -> list[Any]:
        """Return what each rank gives; all must call it."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def ask(self, name: str, questions: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Ask several ranks at once, oneself without a message; safe in any thread.

        Args:
            name: Of the handler.
            questions: Its arguments, by rank.

        Returns:
            The answers, by rank.

        Raises:
            RuntimeError: A rank is gone, its handler failed, or this exchange is closed.
        """
        if not self._open:
            raise RuntimeError(
                "the ranks have ended their exchange, and what lies in other parts cannot be read any more; read what "
                "is needed of a mini-batch (such as e_id) while the Trainer runs"
            )
        waiting = []
        for rank, arguments in questions.items():
            if rank != self.rank:
                call = next(self._calls) % _CALLS
                message = _packed((name, arguments))
                self.sent += message.numel()
                try:
                    self._send(torch.tensor([call, message.numel()]), rank, _QUESTIONS)
                    self._send(message, rank, 2 * call + 1)
                except RuntimeError as error:
                    raise self._missing(rank, error) from None
                waiting.append((rank, call))
        answers: dict[int, Any] = {}
        if self.rank in questions:
            answers[self.rank] = self._handlers[name](*questions[self.rank])
        for rank, call in waiting:
            try:
                size = self._receive(1, torch.int64, rank, 2 * call + 2)
                message = self._receive(int(size), torch.uint8, rank, 2 * call + 2)
            except RuntimeError as error:
                raise self._missing(rank, error) from None
            self.received += message.numel()
            failed, answers[rank] = pickle.loads(message.numpy().data)
            if failed:
                raise RuntimeError(f"rank {rank} could not answer: {answers[rank]}")
        return {rank: answers[rank] for rank in questions}

    def close(self) -> None:
        """Tell the others that no more questions come, and answer theirs until they say so too."""
        self._open = False
        for other in range(self.ranks):
            if other != self.rank:
                try:
                    self._send(torch.tensor([_BYE, 0]), other, _QUESTIONS)
                except RuntimeError:
                    continue  # gone
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._group is not None and not self._lost:
            dist.destroy_process_group(self._group)
        self._group = None

    def _answer(self, asker: int) -> None:
        while True:
            try:
                call, size = self._receive(2, torch.int64, asker, _QUESTIONS).tolist()
                if call == _BYE:
                    return
                message = self._receive(size, torch.uint8, asker, 2 * call + 1)
                name, arguments = pickle.loads(message.numpy().data)
                try:
                    answer = _packed((False, self._handlers[name](*arguments)))
                except Exception as error:  # the asker's to raise
                    answer = _packed((True, f"{type(error).__name__}: {error}"))
                self._send(torch.tensor([answer.numel()]), asker, 2 * call + 2)
                self._send(answer, asker, 2 * call + 2)
            except RuntimeError as error:
                self._lost[asker] = str(error)
                return

    def _send(self, message: Tensor, rank: int, tag: int) -> None:
        self._group.send([message], rank, tag).wait()

    def _receive(self, size: int, dtype: torch.dtype, rank: int, tag: int) -> Tensor:
        message = torch.empty(size, dtype=dtype)
        self._group.recv([message], rank, tag).wait()
        return message

    def _missing(self, rank: int, error: RuntimeError) -> RuntimeError:
        self._lost[rank] = str(error)
        text = next(iter(str(error).splitlines()), "")
        return RuntimeError(f"rank {rank} does not answer, its connection is closed (gloo: {text})")


def _packed(value: Any) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(pickle.dumps(value, 5)), np.uint8))


def seconds_per_byte(size: int = 1 << 22) -> float:
    """Measure what it takes here to pack a message and to unpack it, in seconds per byte.

    Args:
        size: Bytes of the messages that are tried.
    """
    rows, took = np.zeros(size, np.uint8), []
    for _ in range(5):
        start = time.perf_counter()
        pickle.loads(_packed(rows).numpy().data).copy()  # as rows are copied to their places
        took.append(time.perf_counter() - start)
    return median(took) / size
