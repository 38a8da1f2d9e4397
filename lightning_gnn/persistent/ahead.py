"""Mini-batches that a GPU prepares ahead of training, on a stream of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lightning_gnn.runtime.devices import current_stream, new_stream, used_on
from lightning_gnn.sampling.deferred_edges import apply_now
from lightning_gnn.sampling.loader import Prepared

SHARE = 0.5
"""Of the GPU, how much sampling may fill beside training."""


class Ahead:
    """Prepares an epoch's mini-batches in order, at most ``depth`` beyond the one that is trained on.

    Some are sampled in one launch, when those before them are about to end, on a stream of its own, and so beside the
    training that has been queued; one at a time is gathered. The host waits for sizes only where nothing is ready, and
    training for a mini-batch on the device alone. So that the host does not run ahead for as long as memory lasts, it
    waits for the step ``depth`` before the last.

    What a sampler cannot begin without waiting is prepared when it is asked for, on the same stream.

    Args:
        loader: Begins mini-batches, and ends them.
        depth: How many; 0 prepares on the stream that trains.
        prepare: Makes each of ``tasks`` when it is asked for; by default the loader begins with them, where it can.
    """

    def __init__(
        self, loader: Any, tasks: Iterator[Any], depth: int, prepare: Callable[[Any], Prepared] | None = None
    ) -> None:
        self._loader, self._tasks, self._depth = loader, tasks, depth
        self._begins = prepare is None and loader.can_begin
        self._prepare = prepare or loader.prepare
        self._bulk = loader.bulk_size if self._begins else 1
        self._stream: Any = new_stream(loader.device) if depth else None
        self._begun: Any = None
        self._sampled: deque[Callable[[], Prepared]] = deque()
        self._ready: deque[tuple[Prepared | BaseException, Any]] = deque()
        self._steps: deque[Any] = deque()
        if self._stream is not None:  # graph and features have been placed there by the stream that is current
            self._stream.wait_event(current_stream(loader.device).record_event())

    def __iter__(self) -> Iterator[Prepared]:
        return self

    def __next__(self) -> Prepared:
        if self._stream is None:
            if (prepared := self._in_turn()) is None:
                raise StopIteration
            return prepared
        consumer = current_stream(self._loader.device)
        self._steps.append(consumer.record_event())
        if len(self._steps) > self._depth:
            self._steps.popleft().synchronize()
        with self._stream:
            self._go_on(waits=True)
        made, arrival = self._ready.popleft()
        if isinstance(made, BaseException):
            self.close()
            raise made
        with self._stream:
            self._go_on()
        consumer.wait_event(arrival)
        # Its memory belongs to the other stream.
        made.batch = apply_now(made.batch, lambda tensor: used_on(tensor, consumer))
        made.left = {name: used_on(ids, consumer) for name, ids in made.left.items()}
        return made

    def close(self) -> None:
        """Drop what is under way."""
        self._tasks, self._begun = iter(()), None
        for held in (self._sampled, self._ready, self._steps):
            held.clear()

    def _in_turn(self) -> Prepared | None:
        """Return what comes next, made now; None at the end."""
        if not self._sampled:
            if not (tasks := list(islice(self._tasks, self._bulk))):
                return None
            if not self._begins:
                return self._prepare(tasks[0])
            self._sampled.extend(self._loader.end(self._loader.begin(tasks)))
        return self._sampled.popleft()()

    def _go_on(self, waits: bool = False) -> None:
        """Gather what has been sampled, and begin with what is next."""
        while True:
            try:
                while self._sampled and len(self._ready) < self._depth:
                    self._put(self._sampled.popleft()())
                if self._begun is not None and (self._begun.is_ready() or (waits and not self._ready)):
                    begun, self._begun = self._begun, None
                    self._sampled.extend(self._loader.end(begun))
                    continue
                few = len(self._sampled) + len(self._ready) < self._depth + self._bulk // 2
                if self._begins and self._begun is None and few and (tasks := list(islice(self._tasks, self._bulk))):
                    self._begun = self._loader.begin(tasks, SHARE)
                    continue
                if self._ready or not waits:
                    return
                if not self._begins and (prepared := self._in_turn()) is not None:
                    self._put(prepared)
                    return
            except BaseException as error:  # comes after those that are ready: of those sampled together, all fail
                self._tasks, self._begun = iter(()), None
                self._sampled.clear()
                self._ready.append((error, None))
                return
            raise StopIteration

    def _put(self, prepared: Prepared) -> None:
        self._ready.append((prepared, self._stream.record_event()))
