"""Who does what on several devices: the grouping of the ranks, and who owns which rows.

Between devices there is no shared cache, so communication volume and memory decide on the groups. Of the dense parts,
every rank owns some rows of each split.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn.compressed.hybrid_plan import (
    GroupingCost,
    HybridPlan,
    balance_ranges,
    check_groups,
    check_loads,
    check_sizes,
    divisors,
    slice_columns,
)

_MOST_RANKS = 1024


def plan_devices(
    num_columns: int,
    num_rows: int,
    chunk_loads: npt.ArrayLike,
    num_ranks: int,
    num_groups: int | Literal["auto"] = "auto",
    memory_limit: int | None = None,
    *,
    element_size: int = 4,
    edge_bytes: int = 28,
) -> HybridPlan:
    """Plan one layer on several devices: a rank owns V / N rows for the dense parts, and one slice of one range.

    An aggregation brings rows to slices, multiplies, and brings slices back to rows, both by all-to-all; backward runs
    the adjoints of both, of the same volume. Rank (m, g) needs its D_m columns of the C_g vertices with an edge into
    its chunks (C_g is at most V and at most its edges; that bound is counted) and gives back D_m columns of its
    chunks' V_g rows. One part in N of either is its own. Over all ranks, forward and backward, that makes

        ``2 * (1 - 1/N) * D * (sum over g of C_g + V)`` numbers,

    least for one member per group: M = N, as far as D allows. Memory says otherwise: rank (m, g) holds its edges, in
    both directions, C_g rows and V_g (about V / G) rows of D_m columns, and V / N whole rows twice (input and output),

        ``E_g * edge_bytes + ((C_g + V / G) * D_m + 2 * V / N * D) * element_size`` bytes,

    and at M = N every rank holds all edges. The least volume among those that fit wins, the larger M in a tie.

    Args:
        num_columns: D, columns of the features that are exchanged.
        num_rows: V, vertices.
        chunk_loads: Edges of each chunk, integer ``[num_chunks]``.
        num_ranks: N.
        num_groups: M, which divides N, or ``"auto"``.
        memory_limit: Bytes that a rank may use for all this; None sets no limit.
        element_size: Bytes of a feature.
        edge_bytes: Bytes that a rank keeps per edge: in either direction a column, the one that compiled loops read
            where rows are packed, and a weight; and the place of the edge in the other.

    Raises:
        TypeError: Loads that are no integers.
        ValueError: No grouping fits the memory (says how many ranks would do); no column, no rank, a negative load or
            number of rows; a number of groups that does not divide the ranks or exceeds the columns.
    """
    # Check the arguments, and list the numbers of groups to compare.
    check_sizes(num_columns, num_ranks)
    loads = check_loads(chunk_loads)
    if num_rows < 0:
        raise ValueError(f"num_rows must not be negative, but is {num_rows}")
    if num_groups == "auto":
        considered = [groups for groups in divisors(num_ranks) if groups <= num_columns]
    elif isinstance(num_groups, str):
        raise ValueError(f"num_groups must be a number or 'auto', but is {num_groups!r}")
    else:
        check_groups(num_groups, num_ranks, num_columns)
        considered = [num_groups]
    # Compute the communication volume of each grouping, and the memory of its most loaded rank.
    layer = _LayerSizes(num_columns, num_rows, loads, element_size, edge_bytes)
    candidates = []
    for groups in considered:
        range_loads = layer.range_loads(num_ranks // groups)
        volume, memory = layer.volume(num_ranks, range_loads), layer.memory(num_ranks, groups, max(range_loads))
        note = "too large" if memory_limit is not None and memory > memory_limit else ""
        candidates.append(GroupingCost(groups, volume, {"bytes per rank": memory}, note))
    # Groupings beyond the memory limit remain in the plan, with a note, but cannot be chosen.
    eligible = [candidate for candidate in candidates if not candidate.note]
    if not eligible:
        assert memory_limit is not None
        raise ValueError(_too_large(layer, num_ranks, num_groups, candidates, memory_limit))
    # `min` over the reversed candidates prefers more groups in a tie.
    best = min(reversed(eligible), key=lambda candidate: candidate.cost).num_groups
    return HybridPlan(
        num_workers=num_ranks,
        num_groups=best,
        num_columns=num_columns,
        slices=slice_columns(num_columns, best),
        chunk_ranges=balance_ranges(loads, num_ranks // best),
        loads=tuple(layer.range_loads(num_ranks // best)),
        candidates=tuple(candidates),
        unit="bytes sent by all ranks, forward and backward",
    )


class _LayerSizes:
    """The sizes that volume and memory follow from; the formulas are in :func:`plan_devices`."""

    def __init__(self, num_columns: int, num_rows: int, loads: np.ndarray, element_size: int, edge_bytes: int) -> None:
        self.num_columns = num_columns
        self.num_rows = num_rows
        self.loads = loads
        self.element_size = element_size
        self.edge_bytes = edge_bytes

    def range_loads(self, members: int) -> list[int]:
        """Edges of each chunk range."""
        return [int(self.loads[start:stop].sum()) for start, stop in balance_ranges(self.loads, members)]

    def volume(self, num_ranks: int, range_loads: list[int]) -> float:
        """Bytes that all ranks send, forward and backward."""
        rows = sum(min(self.num_rows, load) for load in range_loads) + self.num_rows
        return 2 * (1 - 1 / num_ranks) * self.num_columns * rows * self.element_size

    def memory(self, num_ranks: int, num_groups: int, load: int) -> float:
        """Bytes of the rank with the widest slice and the heaviest range."""
        width = max(stop - start for start, stop in slice_columns(self.num_columns, num_groups))
        rows = min(self.num_rows, load) + self.num_rows * num_groups / num_ranks
        dense = 2 * self.num_rows / num_ranks * self.num_columns
        return load * self.edge_bytes + (rows * width + dense) * self.element_size

    def ranks_that_fit(self, more_than: int, num_groups: int | Literal["auto"], limit: int) -> int | None:
        """Return the least number of ranks above ``more_than`` with a grouping that fits, up to 1024."""
        total, heaviest = int(self.loads.sum()), int(self.loads.max(initial=0))
        for num_ranks in range(more_than + 1, _MOST_RANKS + 1):
            for groups in divisors(num_ranks):
                if groups > self.num_columns or num_groups not in ("auto", groups):
                    continue
                members = num_ranks // groups
                at_best = max(-(-total // members), heaviest)  # a bound first: exact ranges cost time
                if self.memory(num_ranks, groups, at_best) > limit:
                    continue
                if self.memory(num_ranks, groups, max(self.range_loads(members))) <= limit:
                    return num_ranks
        return None


def _too_large(
    layer: _LayerSizes,
    num_ranks: int,
    num_groups: int | Literal["auto"],
    candidates: list[GroupingCost],
    limit: int,
) -> str:
    least = min(candidate.terms["bytes per rank"] for candidate in candidates)
    enough = layer.ranks_that_fit(num_ranks, num_groups, limit)
    asked = "" if num_groups == "auto" else f" in num_groups={num_groups}"
    if enough is not None:
        advice = f"{enough} ranks would do"
    elif num_groups != "auto":
        advice = "with num_groups='auto' fewer ranks may do"
    else:
        advice = f"not even {_MOST_RANKS} ranks would do: use narrower features"
    return (
        f"{int(layer.loads.sum())} edges, {layer.num_rows} rows and {layer.num_columns} columns on {num_ranks} "
        f"ranks{asked} need {least / 1e9:.4g} GB per rank, but {limit / 1e9:.4g} GB are there; {advice}"
    )


@dataclass(frozen=True, eq=False)
class Ownership:
    """Rows in the order of their owners."""

    order: Tensor  # vertices, those of rank 0 first, ascending for each rank, int64 [V]
    offsets: tuple[int, ...]  # where each rank's begin, N + 1 numbers from 0 to V
    position: Tensor  # where each vertex is in order, int64 [V]

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
        splits: Name and mask, bool ``[V]``, of each split. One that marks nothing does not count.
    """
    # Give each combination of splits a number of its own, so that rows can be sorted by it.
    kind: np.ndarray = np.zeros(num_rows, np.int64)
    for name, mask in splits.items():
        marked = int(mask.sum())
        if 0 < marked < num_ranks:
            raise ValueError(
                f"the {name} split has {marked} nodes, but there are {num_ranks} ranks, and each needs one; "
                f"use at most {marked} devices"
            )
        kind = 2 * kind + (~mask).cpu().numpy()
    # Deal the sorted rows out in turn: every rank gets an even part of each combination.
    dealt = np.argsort(kind, kind="stable")
    owner: np.ndarray = np.empty(num_rows, np.int64)
    owner[dealt] = np.arange(num_rows) % num_ranks
    # Overlapping splits may still leave a rank without a node of one of them.
    for name, mask in splits.items():
        if not bool(mask.any()):
            continue
        held = np.bincount(owner[mask.cpu().numpy()], minlength=num_ranks)
        if not held.all():
            raise ValueError(
                f"the splits overlap, so that rank {int(held.argmin())} of {num_ranks} gets no node of the {name} "
                f"split ({int(mask.sum())} nodes); use fewer devices or splits that do not overlap"
            )
    # Sort rows by owner, in the order of their ids, and invert the permutation.
    order = np.argsort(owner, kind="stable")
    position: np.ndarray = np.empty(num_rows, np.int64)
    position[order] = np.arange(num_rows)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_ranks))])
    return Ownership(torch.from_numpy(order), tuple(int(offset) for offset in offsets), torch.from_numpy(position))
