"""One-sided remote procedure calls between ranks over a separate gloo process group."""

import itertools
import logging
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

log = logging.getLogger(__name__)
_NO_TIMEOUT = timedelta(days=365)  # a rank may send no request during a step; heartbeats detect dead ranks
_CLOSE = -1
_REQUESTS, _RESPONSES = 0, 2  # tags of headers; the bodies of call c > 0 have the tags 2 c + 1 and 2 c + 2
_NUM_CALL_IDS = 1 << 28

Handler = Callable[..., Any]


class RankRPC:
    """Calls handlers on other ranks, and serves their calls. Collective: every rank must create and close it."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = dict(handlers)
        grouped = dist.is_available() and dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self.sent = self.received = 0  # bytes of requests and responses of this rank's calls
        self._call_ids = itertools.count()
        self._pending: dict[int, tuple[set[int], SimpleQueue[tuple[int, Tensor | str]]]] = {}
        """For each pending call, the ranks that it was sent to, and the queue of their responses or error texts."""
        self._lock = threading.Lock()
        self._unsent: list[Any] = []  # messages of failed calls: gloo may still read their memory
        self._lost: dict[int, str] = {}
        self._aborted: str | None = None
        # One thread per rank: gloo's receive from any rank never returns if a rank died.
        self._threads: list[threading.Thread] = []
        self._open = True
        self._group: Any = None
        if self.ranks > 1:
            log.debug(f"{type(self).__name__}: connecting {self.ranks} ranks")
            self._group = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
            for other in range(self.ranks):
                for work, way in ((self._serve, "to"), (self._receive_responses, "of")) if other != self.rank else ():
                    name = f"responses {way} rank {other}"
                    self._threads.append(threading.Thread(target=work, args=(other,), name=name, daemon=True))
                    self._threads[-1].start()

    def all_gather(self, value: object) -> list[Any]:
        """Return the values of all ranks. Collective: every rank must call this."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def call(self, name: str, arguments: Mapping[int, tuple[object, ...]]) -> dict[int, Any]:
        """Call a handler on several ranks in parallel, on this rank directly; return the results. Thread-safe."""
        # After close, the other ranks do not respond.
        if not self._open:
            fix = "read lazy attributes of a mini-batch (such as e_id) while the Trainer runs"
            raise RuntimeError(f"the connection between the ranks is closed, so other parts cannot be read; {fix}")
        # Register the call before sending requests, since a response may arrive at once.
        others = [rank for rank in arguments if rank != self.rank]
        call_id, results, sent = 1 + next(self._call_ids) % _NUM_CALL_IDS, {}, []
        responses: SimpleQueue[tuple[int, Tensor | str]] = SimpleQueue()
        with self._lock:
            self._pending[call_id] = set(others), responses
            for rank in set(others) & self._lost.keys():
                responses.put((rank, self._lost[rank]))
            if self._aborted is not None and others:
                raise DistNetworkError(self._aborted)
        # Send all requests before waiting, so that the ranks work in parallel.
        try:
            for rank in others:
                message = _pack((name, arguments[rank]))
                self.sent += message.numel()
                header = torch.tensor([call_id, message.numel()])
                try:
                    for tensor, tag in ((header, _REQUESTS), (message, 2 * call_id + 1)):
                        sent.append((tensor, self._send(tensor, rank, tag)))
                except RuntimeError as error:
                    raise self._connection_error(rank, str(error)) from None
            # Meanwhile, compute this rank's own result without a message.
            if self.rank in arguments:
                results[self.rank] = self._handlers[name](*arguments[self.rank])
            # Responses are processed in the order of their arrival.
            for _ in others:
                rank, response = responses.get()
                if self._aborted is not None:
                    raise DistNetworkError(self._aborted)
                if isinstance(response, str):
                    raise self._connection_error(rank, response)
                self.received += response.numel()
                failed, results[rank] = pickle.loads(response.numpy().data)
                if failed:
                    raise RuntimeError(f"rank {rank} could not answer: {results[rank]}")
        except BaseException:
            # Keep the messages of a failed call alive: gloo reads their memory until they have been sent.
            self._unsent.append(sent)
            raise
        finally:
            with self._lock:
                del self._pending[call_id]
        # Return the results in the order of the arguments.
        return {rank: results[rank] for rank in arguments}

    def abort(self, why: str) -> None:
        """Make all pending and future calls, of any thread, raise an error."""
        with self._lock:
            self._aborted = why
            for _, responses in self._pending.values():
                responses.put((self.rank, why))

    def close(self) -> None:
        """Close the connection once all other ranks close it too. Collective: every rank must call this."""
        self._open = False
        if self._aborted is not None:  # the threads wait for a dead rank: do not join them
            self._threads.clear()
            return
        for other in range(self.ranks):
            if other != self.rank:
                with suppress(RuntimeError):  # the rank died
                    self._send(torch.tensor([_CLOSE, 0]), other, _REQUESTS).wait()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._group is not None and not self._lost:
            dist.destroy_process_group(self._group)
        self._group = None

    def _serve(self, caller: int) -> None:
        while True:
            try:
                call_id, size = self._receive(2, torch.int64, caller, _REQUESTS).tolist()
                if call_id == _CLOSE:
                    self._send(torch.tensor([_CLOSE, 0]), caller, _RESPONSES).wait()
                    return
                message = self._receive(size, torch.uint8, caller, 2 * call_id + 1)
                name, arguments = pickle.loads(message.numpy().data)
                try:
                    response = _pack((False, self._handlers[name](*arguments)))
                except Exception as error:  # raised by the caller
                    response = _pack((True, f"{type(error).__name__}: {error}"))
                self._send(torch.tensor([call_id, response.numel()]), caller, _RESPONSES).wait()
                self._send(response, caller, 2 * call_id + 2).wait()
            except RuntimeError as error:
                self._mark_lost(caller, str(error))
                return

    def _receive_responses(self, other: int) -> None:
        """Receive the responses of a rank, and pass them to the pending calls."""
        while True:
            try:
                call_id, size = self._receive(2, torch.int64, other, _RESPONSES).tolist()
                if call_id == _CLOSE:
                    return
                response = self._receive(size, torch.uint8, other, 2 * call_id + 2)
            except RuntimeError as error:
                self._mark_lost(other, str(error))
                return
            with self._lock:
                if call_id in self._pending:  # else the call has failed because of another rank
                    self._pending[call_id][1].put((other, response))

    def _mark_lost(self, rank: int, why: str) -> None:
        with self._lock:
            if rank not in self._lost:
                self._lost[rank] = why
                for ranks, responses in self._pending.values():
                    if rank in ranks:
                        responses.put((rank, why))

    def _send(self, message: Tensor, rank: int, tag: int) -> Any:
        return self._group.send([message], rank, tag)

    def _receive(self, size: int, dtype: torch.dtype, rank: int, tag: int) -> Tensor:
        message = torch.empty(size, dtype=dtype)
        self._group.recv([message], rank, tag).wait()
        return message

    def _connection_error(self, rank: int, why: str) -> DistNetworkError:
        self._mark_lost(rank, why)
        text = next(iter(why.splitlines()), "")
        return DistNetworkError(f"rank {rank} does not answer, its connection is closed ({text})")


def _pack(value: object) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(pickle.dumps(value, 5)), np.uint8))


def seconds_per_byte(size: int = 1 << 22) -> float:
    """Measure the seconds per byte to pack and unpack a message on this machine."""
    rows, times = np.zeros(size, np.uint8), []
    for _ in range(5):
        start = time.perf_counter()
        pickle.loads(_pack(rows).numpy().data).copy()  # received rows are copied to the output as well
        times.append(time.perf_counter() - start)
    return median(times) / size
