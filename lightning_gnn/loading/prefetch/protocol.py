"""Base class of all prefetchers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from typing_extensions import Self

from lightning_gnn.loading.batch import PreparedBatch


class Prefetcher(ABC):
    """Iterator over an epoch's prepared mini-batches in order, and a context manager that closes itself."""

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> PreparedBatch:
        """Return the next mini-batch; raise ``StopIteration`` at the end of the epoch."""

    @abstractmethod
    def close(self) -> None:
        """Cancel pending tasks and stop all threads. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # An abandoned generator gets GeneratorExit, perhaps from the garbage collector, which may call at any line, so
        # that waiting could last forever. What this object holds stops its threads by itself.
        if kind is not GeneratorExit:
            self.close()
