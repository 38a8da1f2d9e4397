"""Mini-batches of processes that need each other to make them, also where some have more of them than others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from lightning_gnn.persistent.exchange import Exchange


class InStep:
    """Prepares mini-batches while all processes do, and those that only some have together with the last common one.

    So nobody waits for a process that is through: how many each takes afterwards is its own affair. A process holds as
    many mini-batches as it has more than the one that has fewest; the orders of this package differ by one at most.

    In each round some are sampled together, as many as the process that would take fewest, and gathered one by one. A
    process that has none left in a round, or fewer, takes part in as many exchanges as the others.

    Args:
        pipeline: Prepares them, each when it is asked for, after it is told how many to ``sample_together``.
        exchange: By which the processes get what they need.
        length: How many this one has.
        bulk: How many of them may be sampled together.
        sampling: Exchanges of a round.
        gathering: Exchanges of each mini-batch of it.
    """

    def __init__(
        self, pipeline: Any, exchange: Exchange, length: int, bulk: int, sampling: int, gathering: int
    ) -> None:
        self._pipeline, self._exchange = pipeline, exchange
        self._length, self._bulk = length, bulk
        self._sampling, self._gathering = sampling, gathering
        self._made = 0
        self._common: int | None = None
        self._held: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._common is None:
            lengths, bulks = zip(*self._exchange.begin(self._length, self._bulk), strict=True)
            self._common, self._most, self._bulk = min(lengths), max(lengths), min(bulks)
            self._pipeline.sample_together(self._bulk)
            if not self._common:
                self._make_the_rest()
        if self._made < self._common:
            made = self._make()
            if self._made == self._common:
                self._make_the_rest()
            return made
        if not self._held:
            raise StopIteration
        return self._held.popleft()

    def _make(self) -> Any:
        self._exchange.go_on(self._made)
        try:
            made = next(self._pipeline)
        except StopIteration:
            raise RuntimeError(
                f"the sampler of seeds gave {self._made} mini-batches, but its length is {self._length}; the other "
                "ranks wait for the rest: correct its __len__"
            ) from None
        self._made += 1
        return made

    def _make_the_rest(self) -> None:
        for number in range(self._made, self._most):
            if number < self._length:
                self._held.append(self._make())
            else:
                self._exchange.go_on(number)
                begins = number % self._bulk == 0
                for _ in range(self._gathering + (self._sampling if begins else 0)):
                    self._exchange.answer()

    def close(self) -> None:
        """Drop what is under way."""
        self._held.clear()
        self._pipeline.close()
