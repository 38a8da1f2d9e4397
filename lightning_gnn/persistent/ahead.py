"""Mini-batches that a GPU prepares ahead of training, on a stream of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from lightning_gnn.runtime.devices import current_stream, new_stream, used_on
from lightning_gnn.sampling.loader import Prepared, Task

SHARE = 0.5
"""Of the GPU, how much sampling may fill beside training."""


class Ahead:
    """Prepares an epoch's mini-batches in order, at most ``depth`` beyond the one that is trained on.

    Sampling begins when a mini-batch before it is asked for, on a stream of its own, and so runs beside the training
    that has been queued. What is sampled is gathered once its sizes have come to the host, which does not wait for them
    but where nothing is ready. Training waits for a mini-batch on the device alone. So that the host does not run ahead
    for as long as memory lasts, it waits for the step ``depth`` before the last.

    What a sampler cannot begin without waiting is prepared when it is asked for, on the same stream.

    Args:
        loader: Begins mini-batches and completes them.
        tasks: What to prepare.
        depth: How many; 0 prepares on the stream that trains.
    """

    def __init__(self, loader: Any, tasks: Iterator[Task], depth: int) -> None:
        self._loader, self._tasks, self._depth = loader, tasks, depth
        self._stream: Any = new_stream(loader.device) if depth else None
        self._begun: Any = None
        self._ready: deque[tuple[Prepared | BaseException, Any]] = deque()
        self._steps: deque[Any] = deque()
        if self._stream is not None:  # graph and features have been placed there by the stream that is current
            self._stream.wait_event(current_stream(loader.device).record_event())

    def __iter__(self) -> Iterator[Prepared]:
        return self

    def __next__(self) -> Prepared:
        if self._stream is None:
            return self._loader.prepare(next(self._tasks))  # type: ignore[no-any-return]
        consumer = current_stream(self._loader.device)
        self._steps.append(consumer.record_event())
        if len(self._steps) > self._depth:
            self._steps.popleft().synchronize()
        with self._stream:
            self._go_on()
            if not self._ready:
                self._complete() if self._begun is not None else self._prepare()
        made, arrival = self._ready.popleft()
        if isinstance(made, BaseException):
            self.close()
            raise made
        with self._stream:
            self._go_on()
        consumer.wait_event(arrival)
        # Its memory belongs to the other stream.
        made.batch = made.batch.apply(lambda tensor: used_on(tensor, consumer))
        made.left = {name: used_on(ids, consumer) for name, ids in made.left.items()}
        return made

    def close(self) -> None:
        """Drop what is under way."""
        self._tasks, self._begun = iter(()), None
        self._ready.clear()
        self._steps.clear()

    def _go_on(self) -> None:
        """Complete what has been sampled, and begin with the next, as far as nothing is to be waited for."""
        while True:
            if self._begun is not None:
                if not self._begun.is_ready():
                    return
                self._complete()
            if len(self._ready) >= self._depth or not self._loader.can_begin:
                return
            task = next(self._tasks, None)
            if task is None:
                return
            self._begun = self._loader.begin(task, SHARE)

    def _complete(self) -> None:
        begun, self._begun = self._begun, None
        try:
            self._put(self._loader.complete(begun))
        except BaseException as error:  # belongs to its own mini-batch
            self._ready.append((error, None))

    def _prepare(self) -> None:
        self._put(self._loader.prepare(next(self._tasks)))

    def _put(self, prepared: Prepared) -> None:
        self._ready.append((prepared, self._stream.record_event()))
