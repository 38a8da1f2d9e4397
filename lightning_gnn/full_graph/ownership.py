"""Which rank owns which rows of the dense parts: every rank some of each split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ownership:
    """Rows in the order of their owners.

    Args:
        order: Vertices, those of rank 0 first, ascending for each rank, int64 ``[V]``.
        offsets: Where each rank's begin, N + 1 numbers from 0 to V.
        position: Where each vertex is in ``order``, int64 ``[V]``.
    """

    order: Tensor
    offsets: tuple[int, ...]
    position: Tensor

    @property
    def num_ranks(self) -> int:
        """N."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> list[int]:
        """Rows of each rank."""
        return [stop - start for start, stop in pairwise(self.offsets)]

    def rows(self, rank: int) -> Tensor:
        """Return the vertices of a rank, ascending, int64."""
        return self.order[self.offsets[rank] : self.offsets[rank + 1]]


def share_rows(num_rows: int, num_ranks: int, splits: Mapping[str, Tensor]) -> Ownership:
    """Share rows out to ranks, those of each split evenly, as if they were dealt like cards.

    Every rank then has some of each split: a loss over none is no number, and metrics of none are refused.

    Args:
        num_rows: V.
        num_ranks: N.
        splits: Name and mask, bool ``[V]``, of each split. One that marks nothing does not count.

    Raises:
        ValueError: A split has fewer nodes than there are ranks, or splits overlap so that a rank gets none of one.
    """
    kind: np.ndarray = np.zeros(num_rows, np.int64)
    for name, mask in splits.items():
        marked = int(mask.sum())
        if 0 < marked < num_ranks:
            raise ValueError(
                f"the {name} split has {marked} nodes, but there are {num_ranks} ranks, and each needs one; "
                f"use at most {marked} devices"
            )
        kind = 2 * kind + (~mask).cpu().numpy()
    dealt = np.argsort(kind, kind="stable")
    owner: np.ndarray = np.empty(num_rows, np.int64)
    owner[dealt] = np.arange(num_rows) % num_ranks
    for name, mask in splits.items():
        if not bool(mask.any()):
            continue
        held = np.bincount(owner[mask.cpu().numpy()], minlength=num_ranks)
        if not held.all():
            raise ValueError(
                f"the splits overlap, so that rank {int(held.argmin())} of {num_ranks} gets no node of the {name} "
                f"split ({int(mask.sum())} nodes); use fewer devices or splits that do not overlap"
            )
    order = np.argsort(owner, kind="stable")
    position: np.ndarray = np.empty(num_rows, np.int64)
    position[order] = np.arange(num_rows)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_ranks))])
    return Ownership(torch.from_numpy(order), tuple(int(offset) for offset in offsets), torch.from_numpy(position))
