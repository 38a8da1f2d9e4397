"""The Arrow Flight server of a rank and its connections to others; importing this module needs pyarrow."""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight
from torch.distributed import DistNetworkError

_BATCH_BYTES = 1 << 30  # gRPC limits a message to 2 GB


class Server(flight.FlightServerBase):  # type: ignore[misc,unused-ignore]
    """Answers requests by the header and bytes that ``respond`` returns."""

    def __init__(
        self, host: str, secret: str, respond: Callable[[bytes], tuple[str, np.ndarray]], tls: Mapping[str, str | Path]
    ) -> None:
        self._respond = respond
        pairs = [(Path(tls["certificate"]).read_bytes(), Path(tls["key"]).read_bytes())] if tls else None
        super().__init__(_uri(host, 0, tls), tls_certificates=pairs, middleware={"guard": _Guard(secret)})

    def do_get(self, context: object, ticket: Any) -> Any:
        """Answer a request, in a thread of its own."""
        header, body = self._respond(ticket.ticket)
        table = pa.table([pa.array(body)], pa.schema([("bytes", pa.uint8())], {"header": header}))
        return flight.RecordBatchStream(table.to_reader(_BATCH_BYTES))


class _Guard(flight.ServerMiddlewareFactory):  # type: ignore[misc,unused-ignore]
    """Refuses callers without the secret of the job."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def start_call(self, info: object, headers: Mapping[str, list[str]]) -> None:
        """Check the headers of a call."""
        if not secrets.compare_digest(headers.get("authorization", [""])[0].encode(), self._secret):
            raise flight.FlightUnauthenticatedError("the call lacks the secret of this job")


class Client:
    """Connection to the server of another rank; thread-safe."""

    def __init__(
        self, rank: int, place: tuple[str, str, int], secret: str, timeout: float, tls: Mapping[str, str | Path]
    ) -> None:
        self.rank, self.timeout = rank, timeout
        name, host, port = place
        keepalive = {"grpc.keepalive_time_ms": int(500 * timeout), "grpc.keepalive_timeout_ms": int(1000 * timeout)}
        options = [*keepalive.items(), ("grpc.enable_http_proxy", 0)]
        check = {"tls_root_certs": Path(tls["root"]).read_bytes(), "override_hostname": name} if tls else {}
        self._client = flight.FlightClient(_uri(host, port, tls), generic_options=options, **check)
        self._options = flight.FlightCallOptions(timeout, headers=[(b"authorization", secret.encode())])

    def get(self, request: bytes) -> tuple[bytes, memoryview]:
        """Return the header and bytes of the answer; raise an error that names the rank at the deadline."""
        try:
            table = self._client.do_get(flight.Ticket(request), self._options).read_all()
        except flight.FlightTimedOutError:
            raise DistNetworkError(f"rank {self.rank} does not answer within rpc_timeout={self.timeout:g} s") from None
        except (flight.FlightError, pa.ArrowException) as error:
            text = next(iter(str(error).splitlines()), "")
            raise DistNetworkError(f"rank {self.rank} does not answer, its connection is closed ({text})") from None
        bytes_ = table.column(0)  # combining copies even a single chunk
        body = bytes_.chunk(0) if bytes_.num_chunks == 1 else bytes_.combine_chunks()
        return table.schema.metadata[b"header"], body.to_numpy().data


def _uri(host: str, port: int, tls: Mapping[str, str | Path]) -> str:
    return f"grpc{'+tls' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"
