"""Questions that ranks answer each other over a gloo group of their own: none waits until another asks too."""

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError

_FOR_EVER = timedelta(days=365)
"""A rank may have nothing to ask for as long as a step takes; that one is lost, others notice (``heartbeat``)."""
_BYE = -1
_QUESTIONS, _ANSWERS = 0, 2
"""The tags of what announces a question and an answer; those of call c have the tags 2 c + 1 and 2 c + 2, c > 0."""
_CALLS = 1 << 28

Handler = Callable[..., Any]


class RankRPC:
    """Asks other ranks, and answers them; for each there are two threads. All ranks make and close it together."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = dict(handlers)
        grouped = dist.is_available() and dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self.sent = self.received = 0  # bytes of questions and answers, of those that this rank asked
        self._calls = itertools.count()
        self._asked: dict[int, tuple[set[int], SimpleQueue[tuple[int, Tensor | str]]]] = {}
        """For each call the ranks that are to answer, and where their answers, or why there are none, are put."""
        self._asking = threading.Lock()
        self._under_way: list[Any] = []  # what may still be sent of calls that have failed: gloo does not own it
        self._lost: dict[int, str] = {}
        self._aborted: str | None = None
        # A thread per rank, as gloo's receiving from any rank waits for ever when a rank is gone.
        self._threads: list[threading.Thread] = []
        self._open = True
        self._group: Any = None
        if self.ranks > 1:
            self._group = dist.new_group(backend="gloo", timeout=_FOR_EVER)
            for other in range(self.ranks):
                for work, way in ((self._answer, "to"), (self._receive_answers, "of")) if other != self.rank else ():
                    name = f"answers {way} rank {other}"
                    self._threads.append(threading.Thread(target=work, args=(other,), name=name, daemon=True))
                    self._threads[-1].start()

    def gather(self, value: object) -> list[Any]:
        """Return what each rank gives; all must call it."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def ask(self, name: str, questions: Mapping[int, tuple[object, ...]]) -> dict[int, Any]:
        """Ask several ranks at once, oneself without a message; safe in any thread."""
        # After the end of the exchange no rank answers any more.
        if not self._open:
            fix = "read what is needed of a mini-batch (such as e_id) while the Trainer runs"
            raise RuntimeError(f"the ranks have ended their exchange, and no other parts can be read any more; {fix}")
        # Register the call before its questions are sent, since an answer may come at once.
        others = [rank for rank in questions if rank != self.rank]
        call, answers, sent = 1 + next(self._calls) % _CALLS, {}, []
        came: SimpleQueue[tuple[int, Tensor | str]] = SimpleQueue()
        with self._asking:
            self._asked[call] = set(others), came
            for rank in set(others) & self._lost.keys():
                came.put((rank, self._lost[rank]))
            if self._aborted is not None and others:
                raise DistNetworkError(self._aborted)
        # Send all questions before waiting, so that the ranks work at the same time.
        try:
            for rank in others:
                message = _packed((name, questions[rank]))
                self.sent += message.numel()
                announced = torch.tensor([call, message.numel()])
                try:
                    for part, tag in ((announced, _QUESTIONS), (message, 2 * call + 1)):
                        sent.append((part, self._send(part, rank, tag)))
                except RuntimeError as error:
                    raise self._missing(rank, str(error)) from None
            # The rank's own part is answered in the meantime, without a message.
            if self.rank in questions:
                answers[self.rank] = self._handlers[name](*questions[self.rank])
            # Answers are taken in the order of their arrival.
            for _ in others:
                rank, answer = came.get()
                if self._aborted is not None:
                    raise DistNetworkError(self._aborted)
                if isinstance(answer, str):
                    raise self._missing(rank, answer)
                self.received += answer.numel()
                failed, answers[rank] = pickle.loads(answer.numpy().data)
                if failed:
                    raise RuntimeError(f"rank {rank} could not answer: {answers[rank]}")
        except BaseException:
            # Messages of a failed call are kept until they have been sent, as gloo reads their memory until then.
            self._under_way.append(sent)
            raise
        finally:
            with self._asking:
                del self._asked[call]
        # Return the answers in the order of the questions.
        return {rank: answers[rank] for rank in questions}

    def abort(self, why: str) -> None:
        """End all calls under way and to come, of any thread, with an error."""
        with self._asking:
            self._aborted = why
            for _, came in self._asked.values():
                came.put((self.rank, why))

    def close(self) -> None:
        """Tell the others that no more questions come, and answer theirs until they say so too."""
        self._open = False
        if self._aborted is not None:  # the threads wait for a rank that was lost
            self._threads.clear()
            return
        for other in range(self.ranks):
            if other != self.rank:
                with suppress(RuntimeError):  # gone
                    self._send(torch.tensor([_BYE, 0]), other, _QUESTIONS).wait()
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
                    self._send(torch.tensor([_BYE, 0]), asker, _ANSWERS).wait()
                    return
                message = self._receive(size, torch.uint8, asker, 2 * call + 1)
                name, arguments = pickle.loads(message.numpy().data)
                try:
                    answer = _packed((False, self._handlers[name](*arguments)))
                except Exception as error:  # the asker's to raise
                    answer = _packed((True, f"{type(error).__name__}: {error}"))
                self._send(torch.tensor([call, answer.numel()]), asker, _ANSWERS).wait()
                self._send(answer, asker, 2 * call + 2).wait()
            except RuntimeError as error:
                self._lose(asker, str(error))
                return

    def _receive_answers(self, other: int) -> None:
        """Take the answers of a rank, and give them to who has asked."""
        while True:
            try:
                call, size = self._receive(2, torch.int64, other, _ANSWERS).tolist()
                if call == _BYE:
                    return
                answer = self._receive(size, torch.uint8, other, 2 * call + 2)
            except RuntimeError as error:
                self._lose(other, str(error))
                return
            with self._asking:
                if call in self._asked:  # else it has failed of another rank
                    self._asked[call][1].put((other, answer))

    def _lose(self, rank: int, why: str) -> None:
        with self._asking:
            if rank not in self._lost:
                self._lost[rank] = why
                for ranks, came in self._asked.values():
                    if rank in ranks:
                        came.put((rank, why))

    def _send(self, message: Tensor, rank: int, tag: int) -> Any:
        return self._group.send([message], rank, tag)

    def _receive(self, size: int, dtype: torch.dtype, rank: int, tag: int) -> Tensor:
        message = torch.empty(size, dtype=dtype)
        self._group.recv([message], rank, tag).wait()
        return message

    def _missing(self, rank: int, why: str) -> DistNetworkError:
        self._lose(rank, why)
        text = next(iter(why.splitlines()), "")
        return DistNetworkError(f"rank {rank} does not answer, its connection is closed ({text})")


def _packed(value: object) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(pickle.dumps(value, 5)), np.uint8))


def seconds_per_byte(size: int = 1 << 22) -> float:
    """Measure what it takes here to pack a message and to unpack it, in seconds per byte."""
    rows, took = np.zeros(size, np.uint8), []
    for _ in range(5):
        start = time.perf_counter()
        pickle.loads(_packed(rows).numpy().data).copy()  # as rows are copied to their places
        took.append(time.perf_counter() - start)
    return median(took) / size
