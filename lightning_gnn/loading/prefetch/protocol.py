"""The protocol of all prefetchers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from typing_extensions import Self

from lightning_gnn.loading.batch import PreparedBatch


class Prefetcher(ABC):
    """An iterator over an epoch's prepared mini-batches, in order, to be closed; a context manager that closes it."""

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> PreparedBatch:
        """Return the next mini-batch, or raise ``StopIteration`` where the epoch is over."""

    @abstractmethod
    def close(self) -> None:
        """Cancel what has not begun, and end all threads; as often as you like."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
