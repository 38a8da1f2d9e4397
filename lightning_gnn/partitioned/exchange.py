"""One-sided remote procedure calls between ranks over Arrow Flight, without pickle."""

import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch.distributed as dist
from torch.distributed import DistNetworkError

from lightning_gnn.distributed.heartbeat import MIN_RENDEZVOUS

log = logging.getLogger(__name__)

Handler = Callable[..., Any]


class RankRPC:
    """Calls handlers on other ranks, and serves their calls. All ranks must create and close it.

    Arguments and results are nested lists and dicts of numbers, texts and arrays; remote calls turn tuples into lists.
    A rank has ``timeout`` seconds to answer. ``tls`` has the paths ``certificate``, ``key`` and ``root`` of PEM files.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], timeout: float = 300.0, tls: Mapping[str, str | Path] | None = None
    ) -> None:
        self._handlers: dict[str, Handler] = {**handlers, "gathered": self._gathered}
        grouped = dist.is_available() and dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self.sent = self.received = 0  # bytes of requests and responses of this rank's calls
        self._lock = threading.Lock()
        self._timeout, self._open = timeout, True
        self._server: Any = None
        self._values: list[Any] = []  # of this rank, for each all-gather
        self._new_value = threading.Condition()
        if self.ranks > 1:
            log.debug(f"{type(self).__name__}: connecting {self.ranks} ranks")
            self._connect(tls or {})

    def _connect(self, tls: Mapping[str, str | Path]) -> None:
        """Start a server, and exchange the addresses and the secret of the job through torch's store."""
        try:
            from lightning_gnn.partitioned.flight import Client, Server
        except ImportError as error:
            fix = f"needs a package ({error}): pip install 'lightning-gnn[partition]'"
            raise ModuleNotFoundError(f"a partitioned graph on {self.ranks} ranks {fix}") from None
        # A separate connection, since a waiting call blocks all others on the same connection.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(MIN_RENDEZVOUS)
        prefix = f"rank RPC {store.add(f'rank RPCs of {self.rank}', 1)} "
        if self.rank == 0:
            store.set(f"{prefix}secret", secrets.token_hex())
        secret, host = store.get(f"{prefix}secret").decode(), _host_address()
        self._server = Server(host, secret, self._respond, tls)
        store.set(f"{prefix}{self.rank}", json.dumps([socket.gethostname(), host, self._server.port]))
        places = [json.loads(store.get(f"{prefix}{rank}")) for rank in range(self.ranks)]
        self._clients = [Client(rank, place, secret, self._timeout, tls) for rank, place in enumerate(places)]
        self._threads = ThreadPoolExecutor(8 * self.ranks, "lightning-gnn-call")

    def all_gather(self, value: object) -> list[Any]:
        """Return the values of all ranks. All ranks must call this."""
        with self._new_value:
            self._values.append(value)
            self._new_value.notify_all()
        found: dict[int, Any] = {}
        while missing := set(range(self.ranks)) - found.keys():  # a slow rank answers that it has no value yet
            answers = self.call("gathered", dict.fromkeys(missing, (len(self._values) - 1,)))
            found.update({rank: values[0] for rank, values in answers.items() if values})
        return [found[rank] for rank in range(self.ranks)]

    def _gathered(self, index: int) -> list[Any]:
        """Return this rank's value for an all-gather in a list, which is empty after half of the timeout."""
        with self._new_value:
            self._new_value.wait_for(lambda: len(self._values) > index, self._timeout / 2)
            return self._values[index : index + 1]

    def call(self, name: str, arguments: Mapping[int, tuple[object, ...]]) -> dict[int, Any]:
        """Call a handler on several ranks in parallel, on this rank directly; return the results. Thread-safe."""
        # After close, the other ranks do not respond.
        if not self._open:
            fix = "read lazy attributes of a mini-batch (such as e_id) while the Trainer runs"
            raise RuntimeError(f"the connection between the ranks is closed, so other parts cannot be read; {fix}")
        others = [rank for rank in arguments if rank != self.rank]
        calls = {self._threads.submit(self._request, rank, name, arguments[rank]): rank for rank in others}
        # Meanwhile, compute this rank's own result without a message.
        results = {self.rank: self._handlers[name](*arguments[self.rank])} if self.rank in arguments else {}
        results.update((calls[call], call.result()) for call in as_completed(calls))
        return {rank: results[rank] for rank in arguments}

    def _request(self, rank: int, name: str, arguments: tuple[object, ...]) -> Any:
        """Call a handler of another rank."""
        header, body = _pack((name, arguments))
        request = b"".join((header.encode(), b"\n", body.data))
        answer = self._clients[rank].get(request)
        with self._lock:
            self.sent += len(request)
            self.received += sum(map(len, answer))
        failed, result = _unpack(*answer)
        if failed:
            raise RuntimeError(f"rank {rank} could not answer: {result}")
        return result

    def _respond(self, request: bytes) -> tuple[str, np.ndarray]:
        """Answer the call of another rank."""
        try:
            end = request.index(b"\n")
            # A copy, since Numba would compile its functions again for arrays that are read-only or not aligned.
            name, arguments = _unpack(request[:end], memoryview(bytearray(request[end + 1 :])))
            return _pack((False, self._handlers[name](*arguments)))
        except Exception as error:  # raised by the caller
            return _pack((True, f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """Close the connection once all other ranks close it too. All ranks must call this."""
        if self._server is not None and self._open:
            shutdown = threading.Thread(target=self._server.shutdown, name="shutdown of the server", daemon=True)
            with suppress(DistNetworkError):  # a rank died, or has passed the second barrier and shut down
                self.all_gather(None)  # no rank calls a handler from here on
                self.all_gather(None)  # no rank waits for the first barrier from here on
            shutdown.start()
            shutdown.join(10)  # longer only if a rank died, to which an answer cannot be sent
        self._open = False


def _host_address() -> str:
    """Return this machine's address as gloo chooses it: of an interface, of the host name, or loopback."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        return str(min(psutil.net_if_addrs()[name.split(",")[0]]).address)
    with suppress(OSError):
        return str(min(socket.getaddrinfo(socket.gethostname(), None))[4][0])
    return "127.0.0.1"


def _pack(value: object) -> tuple[str, np.ndarray]:
    """Return a value as JSON, in which dtype and shape stand for each array, and the bytes of the arrays."""
    arrays = []

    def describe(item: Any) -> Any:
        if isinstance(item, np.generic):
            return item.item()
        array = np.ascontiguousarray(item)
        if array.dtype.hasobject:
            raise TypeError(f"{type(item).__name__} cannot be sent to another rank")
        arrays.append(array.reshape(-1).view(np.uint8))
        return {"dtype": array.dtype.str, "shape": np.shape(item)}

    header = json.dumps(value, default=describe, separators=(",", ":"))
    return header, arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.empty(0, np.uint8)])


def _unpack(header: bytes, body: memoryview) -> Any:
    """Return the value of a header and the bytes of its arrays, which are read-only."""
    offset = 0

    def read(array: dict[str, Any]) -> Any:
        nonlocal offset
        if array.keys() != {"dtype", "shape"}:
            return array
        dtype, count = np.dtype(array["dtype"]), math.prod(array["shape"])
        values = np.frombuffer(body, dtype, count, offset) if count else np.empty(0, dtype)
        offset += values.nbytes
        return np.require(values.reshape(array["shape"]), requirements="A")

    return json.loads(header, object_hook=read)


def seconds_per_byte(size: int = 1 << 22) -> float:
    """Measure the seconds per byte to pack and unpack a message on this machine."""
    rows, times = np.zeros((2, size // 2), np.uint8), []
    for _ in range(5):
        start = time.perf_counter()
        header, body = _pack([*rows])
        np.concatenate(_unpack(header.encode(), body.data))  # received rows are copied to the output as well
        times.append(time.perf_counter() - start)
    return median(times) / size
