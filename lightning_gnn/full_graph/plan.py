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

    An aggregation brings rows to slices, multiplies, and brings slices back, both by all-to-all; backward runs the
    adjoints. With C_g the vertices with an edge into group g, forward and backward exchange

        ``2 * (1 - 1/N) * D * (sum over g of C_g + V)`` numbers,

    least at M = N. Rank (m, g) holds its edges in both directions, C_g and V_g rows of D_m columns, and V / N whole
    rows twice: ``E_g * edge_bytes + ((C_g + V / G) * D_m + 2 * V / N * D) * element_size`` bytes, all edges at M = N.
    The least volume among those that fit wins, the larger M in a tie.

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
        ValueError: No grouping fits the memory; no column, no rank, a negative load or number of rows; a number of
            groups that does not divide the ranks or exceeds the columns.
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
    candidates = []
    for groups in considered:
        edges = _range_loads(loads, num_ranks // groups)
        rows = sum(min(num_rows, load) for load in edges) + num_rows
        # The bytes that all ranks send, and those of the rank with the widest slice and the heaviest range.
        volume = 2 * (1 - 1 / num_ranks) * num_columns * rows * element_size
        width = max(stop - start for start, stop in slice_columns(num_columns, groups))
        held = min(num_rows, max(edges)) + num_rows * groups / num_ranks
        dense = 2 * num_rows / num_ranks * num_columns
        memory = max(edges) * edge_bytes + (held * width + dense) * element_size
        note = "too large" if memory_limit is not None and memory > memory_limit else ""
        candidates.append(GroupingCost(groups, volume, {"bytes per rank": memory}, note))
    # Groupings beyond the memory limit remain in the plan, with a note, but cannot be chosen.
    eligible = [candidate for candidate in candidates if not candidate.note]
    if not eligible:
        assert memory_limit is not None
        least = min(candidate.terms["bytes per rank"] for candidate in candidates)
        asked, advice = ("", "") if num_groups == "auto" else (f" in num_groups={num_groups}", " or num_groups='auto'")
        raise ValueError(
            f"{int(loads.sum())} edges, {num_rows} rows and {num_columns} columns on {num_ranks} ranks{asked} need "
            f"{least / 1e9:.4g} GB per rank, but {memory_limit / 1e9:.4g} GB are there; use more ranks, narrower "
            f"features{advice}"
        )
    # `min` over the reversed candidates prefers more groups in a tie.
    best = min(reversed(eligible), key=lambda candidate: candidate.cost).num_groups
    return HybridPlan(
        num_workers=num_ranks,
        num_groups=best,
        num_columns=num_columns,
        slices=slice_columns(num_columns, best),
        chunk_ranges=balance_ranges(loads, num_ranks // best),
        loads=tuple(_range_loads(loads, num_ranks // best)),
        candidates=tuple(candidates),
        unit="bytes sent by all ranks, forward and backward",
    )


def _range_loads(loads: np.ndarray, members: int) -> list[int]:
    """Return the edges of each range of chunks."""
    return [int(loads[start:stop].sum()) for start, stop in balance_ranges(loads, members)]


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
    """Share rows out to ranks, those of each split evenly, as if they were dealt like cards."""
    # Every rank has some of each split: a loss over no nodes is NaN. A mask, bool [V], that marks nothing does not
    # count.
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
